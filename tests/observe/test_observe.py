"""``kvretain observe`` on tiny models: what is collected, what is written, and every bad input."""

import csv
import json
import re
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoint import save_tiny_checkpoint
from gates import random_gate
from typer.testing import CliRunner

from kvretain import RetentionCache, load_model, models, scorers
from kvretain.calibrate import calibrate
from kvretain.commands import app
from kvretain.data import chapter
from kvretain.observe import FEWEST, SCORERS, measures, plots, tables, write_figures
from kvretain.observe.collect import collect, parse_scorer
from kvretain.observe.tables import RADIUS, SHARES, Table
from kvretain.policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*deprecated")

FIGURES = ("marginal_gain", "autocorrelation", "segment_coverage", "selectivity", "attention", "value_cosines")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory):
    """The folder that a run with default scorers filled, and its result."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("figures") / "new"
    result = run("--model", checkpoint, "--tokens", 300, "--seed", 3, "--out", folder, "--json")
    assert result.exit_code == 0, result.output
    return folder, result


@pytest.fixture(scope="module")
def observed(checkpoint):
    """What that run must have seen, collected without the command."""
    model, tokenizer = load_model(checkpoint)
    ids = tokenizer(chapter(), return_tensors="pt")["input_ids"][:, :300]
    return collect(model, ids, {name: parse_scorer(name) for name in SCORERS})


def run(*arguments, **options):
    return CliRunner().invoke(app, ["observe", *(str(a) for a in arguments)], **options)


def rows(folder, name, **wanted):
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[k] == str(v) for k, v in wanted.items())]


def numbers(found, key):
    return [float(row[key]) for row in found]


# What is collected


def tokens_for(model, count=150):
    return torch.randint(1, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["knorm", "keydiff", "snapkv", 'snapkv(pooling="none")', "h2o"])
def test_scores_are_those_that_the_scorer_gives_at_that_eviction(llama, name, monkeypatch):
    scorer, ids = parse_scorer(name), tokens_for(llama)
    seen = collect(llama, ids, {name: scorer, "other": parse_scorer("random")})
    expected = []
    score = type(scorer).score

    def spy(self, view):
        scores = score(self, view)
        expected.append(self.nonnegative(scores, view.candidates)[0, :, 4:-8])
        return scores

    monkeypatch.setattr(type(scorer), "score", spy)
    cache = RetentionCache.for_model(llama, name, ratio=0.5, sinks=4, recent=8)
    expected.clear()  # a self-test may have come first
    with torch.inference_mode():
        llama.get_decoder()(input_ids=ids, past_key_values=cache)
    assert (seen.sinks, seen.window, seen.candidates, seen.layers) == (4, 8, 138, (0, 1))
    torch.testing.assert_close(seen.scores[name], torch.stack(expected), rtol=0, atol=0)
    assert (seen.scores[name] >= 0).all()


def test_attention_blocks_are_the_models_own_attention(llama):
    ids = tokens_for(llama)
    seen = collect(llama, ids, {"knorm": parse_scorer("knorm")}, blocks=40)
    assert seen.block == 4
    used = llama.config._attn_implementation
    llama.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            attentions = llama(ids, output_attentions=True).attentions
    finally:
        llama.set_attn_implementation(used)
    for layer, weights in enumerate(attentions):
        weights = weights[0].unflatten(0, (2, 2)).mean(1)  # (KV heads, queries, keys)
        keys = torch.stack([part.sum(-1) for part in weights.split(4, -1)], -1)
        expected = torch.stack([part.mean(1) for part in keys.split(4, 1)], 1)
        torch.testing.assert_close(seen.attention[layer], expected, rtol=1e-4, atol=1e-6)
    assert torch.allclose(seen.attention.sum(-1), torch.ones(()))


def test_the_model_is_left_as_it_was(llama):
    before, ids = llama.config._attn_implementation, tokens_for(llama)
    with torch.inference_mode():
        logits = llama(ids).logits
        collect(llama, ids, {"snapkv": parse_scorer("snapkv")})
        assert llama.config._attn_implementation == before
        assert not llama.get_decoder()._forward_hooks and not llama.get_decoder()._forward_pre_hooks
        assert torch.equal(llama(ids).logits, logits)


def test_layers_with_a_sliding_window_are_left_out(gemma3):
    steps = []
    named = {"knorm": parse_scorer("knorm")}
    seen = collect(gemma3, tokens_for(gemma3), named, report=lambda *step: steps.append(step))
    assert seen.layers == (1, 2)
    assert seen.scores["knorm"].shape == (2, 2, 138)
    assert steps == [(2, 3), (3, 3)]


@pytest.mark.parametrize(("window", "count"), [(32, 100), (200, 300)])
def test_too_short_a_text_is_refused(llama, window, count):
    with pytest.raises(ValueError, match=str(count)):
        collect(llama, tokens_for(llama, count), {"s": parse_scorer(f"snapkv(window={window})")})


# What is written


def test_every_figure_is_a_picture_and_its_numbers(written):
    folder, _ = written
    names = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "csv")} | {"summary.csv", "run.json"}
    assert {path.name for path in folder.iterdir()} == names
    for name in FIGURES:
        png = (folder / f"{name}.png").read_bytes()
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", png[16:24])
        assert 500 <= width <= 2500 and 250 <= height <= 1500
        assert 10_000 < len(png) < 400_000


def test_pictures_open_and_are_not_blank(written):
    image = pytest.importorskip("PIL.Image")
    for name in FIGURES:
        with image.open(written[0] / f"{name}.png") as picture:
            picture.load()
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


def test_marginal_gain_is_that_of_the_curve(written, observed):
    step = observed.candidates // 50
    for name in SCORERS:
        curve = measures.coverage_curve(observed.scores[name], RADIUS).flatten(0, 1)
        gains = measures.marginal_gains(curve, step).mean(0).tolist()
        found = rows(written[0], "marginal_gain", scorer=name, order="top-k")
        assert numbers(found, "gain_mean") == pytest.approx(gains, rel=1e-5)
        assert numbers(found, "kept") == [i * step for i in range(len(gains))]
        assert numbers(found, "coverage_mean") == pytest.approx(curve.mean(0)[::step][:-1].tolist(), rel=1e-5)


def test_autocorrelation_is_that_of_the_scores(written, observed):
    for name in SCORERS:
        found = rows(written[0], "autocorrelation", scorer=name)
        expected = measures.autocorrelation(observed.scores[name], 50).flatten(0, 1)
        assert numbers(found, "mean") == pytest.approx(expected.mean(0).tolist(), rel=1e-5)
        band = measures.permutation_band(
            observed.scores[name], 50, permutations=200, generator=torch.Generator().manual_seed(3)
        )
        assert numbers(found, "null_low") == pytest.approx(band[0].tolist(), rel=1e-5)
        assert numbers(found, "null_high") == pytest.approx(band[1].tolist(), rel=1e-5)


def test_segment_coverage_is_that_of_the_kept(written, observed):
    total = observed.candidates
    for name in SCORERS:
        for size in (16, 32):
            for rule in ("top-k", "hard NMS", "SMD"):
                found = rows(written[0], "segment_coverage", scorer=name, segment=size, rule=rule)
                keeps = [max(1, round(share * total)) for share in SHARES]
                kept = [measures.kept_by(rule, observed.scores[name], keep, torch.Generator()) for keep in keeps]
                expected = [measures.segment_coverage(chosen, total, size).mean().item() for chosen in kept]
                assert numbers(found, "kept") == keeps
                assert numbers(found, "mean") == pytest.approx(expected, rel=1e-5)
                for row in found:
                    assert float(row["low"]) <= float(row["mean"]) * 1.00001
                    assert float(row["mean"]) <= float(row["high"]) * 1.00001


def test_selectivity_and_heat_maps_are_those_of_the_heads(written, observed):
    folder, _ = written
    for name in SCORERS:
        expected = measures.selectivity(observed.scores[name])
        found = rows(folder, "selectivity", scorer=name)
        assert numbers(found, "selectivity") == pytest.approx(expected.flatten().tolist(), rel=1e-5)
        assert numbers(found, "weight") == pytest.approx(measures.head_weights(expected).flatten().tolist(), rel=1e-5)
    spread = measures.selectivity(observed.scores[SCORERS[0]])
    for kind, index in (("sharpest", spread.argmax()), ("flattest", spread.argmin())):
        layer, head = divmod(int(index), 2)
        for row in rows(folder, "attention", kind=kind):
            assert (int(row["layer"]), int(row["head"])) == (layer, head)
            cell = observed.attention[layer, head, int(row["query"]) // 3, int(row["key"]) // 3].item()
            assert float(row["share"]) == pytest.approx(cell, rel=1e-5, abs=1e-9)


def test_value_cosines_are_those_of_the_cached_values(checkpoint, written):
    """Signatures from transformers' own cache, in float64; the entries that compete."""
    model, tokenizer = load_model(checkpoint)
    ids = tokenizer(chapter(), return_tensors="pt")["input_ids"][:, :300]
    with torch.inference_mode():
        plain = model(ids, use_cache=True).past_key_values
    values = torch.cat([layer.values[0] for layer in plain.layers]).double()[:, 4:-8]
    unit = torch.nn.functional.normalize(values, dim=-1)
    for name, heads in (("mean of all heads", values), ("mean of unit vectors", unit)):
        for centred in ("no", "yes"):
            mean = heads.mean(0)
            mean = torch.nn.functional.normalize(mean - mean.mean(0) if centred == "yes" else mean, dim=-1)
            table = mean @ mean.T
            pairs = table[~torch.ones_like(table).triu().bool()]
            nearest = (table - 3 * torch.eye(len(table))).amax(-1)
            for kind, sample in (("all pairs", pairs), ("nearest other", nearest)):
                found = rows(written[0], "value_cosines", signature=name, centred=centred, of=kind)
                assert numbers(found, "percentile") == list(range(101))
                assert {row["count"] for row in found} == {str(len(sample))}
                wanted = sample.quantile(torch.linspace(0, 1, 101, dtype=torch.float64)).tolist()
                assert numbers(found, "cosine") == pytest.approx(wanted, abs=1e-5)
                assert numbers(found, "mean")[0] == pytest.approx(sample.mean().item(), abs=1e-5)
                assert numbers(found, "sd")[0] == pytest.approx(sample.std(correction=0).item(), abs=1e-5)


def test_the_record_says_how_to_read_and_repeat_it(written, observed):
    folder, result = written
    printed, record = json.loads(result.stdout), json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert printed | record == printed
    assert record["tokens"] == 300 and record["heads"] == 4 and record["seed"] == 3
    assert set(record["versions"]) == {"kvretain", "torch", "transformers"}
    for name in FIGURES:
        assert "300 tokens in one prefill; 2 layers × 2 KV heads = 4 heads; 288 entries" in record["captions"][name]
    summary = {(row["scorer"], row["quantity"]): row for row in record["summary"]}
    expected = measures.selectivity(observed.scores["keydiff"]).mean().item()
    assert summary["keydiff", "selectivity"]["mean"] == pytest.approx(expected)
    assert len(rows(folder, "summary")) == len(summary)


def test_a_run_repeats_itself_and_tells_what_it_did(checkpoint, written, tmp_path):
    result = run("-m", checkpoint, "--tokens", 300, "--seed", 3, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    for name in FIGURES:
        assert (tmp_path / f"{name}.csv").read_bytes() == (written[0] / f"{name}.csv").read_bytes()
    for word in ("selectivity", "keydiff", "One text", str(tmp_path)):
        assert word in result.stdout.replace("\n", "")


def test_own_text_and_scorers(checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ("-m", checkpoint, "-p", "h2o", "--out", tmp_path, "--json", "--text", "-")
    result = run(*arguments, input="The Walrus keeps the key in Oslo. " * 30)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["scorers"] == ["h2o"]
    assert {row["scorer"] for row in rows(tmp_path, "selectivity")} == {"h2o"}


@pytest.fixture
def few(monkeypatch):
    """Few repetitions and dots, for figures that nobody reads."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    for name in ("CURVES", "PERMUTATIONS", "DRAWS"):
        monkeypatch.setattr(sys.modules["kvretain.observe.tables"], name, 2)
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, path, **options: save(self, path, **options | {"dpi": 20}))


@pytest.mark.parametrize("name", list(scorers))
def test_every_scorer_can_be_drawn(name, llama, few, tmp_path):
    text = name
    if name == "fastkvzip":
        text = f"{name}(gate={str(random_gate(llama).save(tmp_path / 'gate.safetensors'))!r})"
    elif "calibration" in scorers[name].__dataclass_fields__:
        path = calibrate(llama, tokens_for(llama)).save(tmp_path / "calibration.safetensors")
        text = f"{name}(calibration={str(path)!r})"
    seen = collect(llama, tokens_for(llama), {name: parse_scorer(text)})
    made = write_figures(seen, tmp_path / "figures", source="a tiny model on noise")
    assert list(made) == [*FIGURES, "summary"]
    names = {f"{figure}.{kind}" for figure in FIGURES for kind in ("png", "csv")} | {"summary.csv"}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == names


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([0.2, 0.3, 0.9], (0.2, 0.9)),
        ([0.5, 0.5, 0.5], (0, 0.5 * 24 / 23.5)),
        ([0.49, 0.5], (0, 0.5 * 24 / 23.5)),
        ([0.0, 0.0], (0, 24 / 23.5)),
    ],
)
def test_bars_can_be_seen(values, ends):
    assert plots._bars(values) == pytest.approx(ends)


def test_heads_that_rounding_alone_tells_apart_share_a_bar(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: drawn.append(self))
    values = [0.57, 0.57 + 1e-16, 0.57 - 1e-16, 0.57 + 3e-16]
    found = [{"scorer": "ranks", "layer": 0, "head": i, "selectivity": v, "weight": 1.0} for i, v in enumerate(values)]
    plots.draw(Table("selectivity", "Selectivity", "Four heads.", found), tmp_path)
    heights = [bar.get_height() for bar in drawn[0].axes[0].patches]
    assert sorted(heights) == [0] * 23 + [4]


def test_the_attention_map_ends_with_the_text(llama, tmp_path, monkeypatch):
    """150 tokens in blocks of 4: the last has 2."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: drawn.append(self))
    seen = collect(llama, tokens_for(llama), {"knorm": parse_scorer("knorm")}, blocks=40)
    table = next(t for t in tables(seen, "noise", 0, lambda *_: None) if t.name == "attention")
    assert {row["query"]: row["queries"] for row in table.rows} == {at: min(4, 150 - at) for at in range(0, 150, 4)}
    plots.draw(table, tmp_path)
    for axis in drawn[0].axes[:2]:
        assert (axis.get_xlim(), axis.get_ylim()) == ((0, 150), (150, 0))
        assert axis.images[0].get_extent() == [0, 152, 152, 0]  # a cell is as wide as any other, and cut off


def test_the_control_s_caption_says_what_its_band_is(written):
    captions = json.loads((written[0] / "run.json").read_text(encoding="utf-8"))["captions"]
    words = "the same way in all heads (20 permutations); its mean and band are those of all heads of all permutations"
    assert words in captions["marginal_gain"]


def test_a_figure_that_fails_leaves_the_folder_as_it_was(llama, few, tmp_path, monkeypatch):
    (tmp_path / "selectivity.csv").write_text("of another run")

    def broken(rows):
        raise ValueError("no such colour")

    monkeypatch.setitem(plots._DRAWERS, "attention", broken)
    seen = collect(llama, tokens_for(llama), {"knorm": parse_scorer("knorm")})
    with pytest.raises(ValueError, match="no such colour"):
        write_figures(seen, tmp_path, source="noise")
    assert [path.name for path in tmp_path.iterdir()] == ["selectivity.csv"]
    assert (tmp_path / "selectivity.csv").read_text() == "of another run"


# Bad input

BAD = [
    (("-p", "full"), "'full' has no scores to observe"),
    (("-p", "snapkv+hub"), r"'snapkv\+hub' must be a scorer alone, e.g. snapkv"),
    (("-p", "keydiff@layer"), "must be a scorer alone, e.g. keydiff"),
    (("-p", "knorm~nearest"), "must be a scorer alone, e.g. knorm"),
    (("-p", "alpha"), "must be a scorer alone, e.g. trig"),
    (("-p", "nonsense"), "unknown scorer 'nonsense'; valid: "),
    (("-p", "snapkv(widow=3)"), "takes no 'widow'"),
    (("--text", "FOLDER/none.txt"), "No such file"),
    (("--text", "EMPTY"), "is empty"),
    (("--out", "EMPTY"), "is not a folder"),
    (("--out", "EMPTY/sub"), "cannot be written: .*empty is not a folder"),
    (("-m", "./nowhere"), "no model at './nowhere'"),
    (("--dtype", "int8"), "unknown dtype"),
    (("-m", "CHECKPOINT", "--text", "SHORT"), f"observe needs at least {FEWEST}"),
    (("-m", "CHECKPOINT", "--tokens", "128", "-p", "snapkv(window=64)"), "128 tokens are too few beside 4 sinks"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_code_2(arguments, message, tmp_path, checkpoint, monkeypatch):
    pytest.importorskip("matplotlib")
    if "CHECKPOINT" not in arguments:
        monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "short").write_text("The Walrus.")
    places = {"EMPTY": tmp_path / "empty", "SHORT": tmp_path / "short", "CHECKPOINT": checkpoint}
    places |= {"FOLDER/none.txt": tmp_path / "none.txt", "EMPTY/sub": tmp_path / "empty" / "sub"}
    result = run("--out", tmp_path / "out", *(places.get(a, a) for a in arguments))
    assert result.exit_code == 2, result.output
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", result.stderr), result.stderr
    assert result.stdout == "" and not (tmp_path / "out").exists()


def test_without_matplotlib_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setattr("importlib.util.find_spec", _hide("matplotlib"))
    result = run("--out", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr == 'error: matplotlib is not installed; run: pip install "kvretain[figures]"\n'


def _hide(package):
    return lambda name, *more: None if name == package else find_spec(name, *more)


def test_neither_the_command_line_nor_the_measures_load_matplotlib():
    code = "import sys, kvretain.commands, kvretain.observe; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# The real thing


@pytest.mark.slow
def test_the_published_numbers_come_out_again_in_under_five_minutes(tmp_path):
    command = [sys.executable, "-m", "kvretain.cli", "observe", "--threads", "1", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    published = Path(__file__).parents[2] / "docs" / "figures"
    before, after = rows(published, "summary"), rows(tmp_path, "summary")
    assert [(row["scorer"], row["quantity"]) for row in after] == [(row["scorer"], row["quantity"]) for row in before]
    for key in ("mean", "low", "high"):
        assert numbers(after, key) == pytest.approx(numbers(before, key), rel=0.02, abs=0.01)


@pytest.mark.parametrize("text", ["kvzip", "fastkvzip(gate='a/b@c.safetensors')"])
def test_marks_within_arguments_and_the_scope_of_a_preset_are_no_obstacle(text):
    assert parse_scorer(text) == Policy.parse(text).scorer
