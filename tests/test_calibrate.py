"""Calibrations: measured on a text, kept in files, refused where they do not fit, made by themselves."""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
import torch
from cache.models import build, tokens
from checkpoint import save_tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from kvretain import RetentionCache, artefacts, data
from kvretain import calibrate as module
from kvretain.cache import support
from kvretain.cache.layer import RetentionLayer
from kvretain.calibrate import Calibration, calibrate, calibration_for, load
from kvretain.commands import app

PUBLISHED = Path(__file__).parents[2] / "shared" / "data" / "triattention_stats"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="TriAttention's published files are not here")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder of its own; what was said is forgotten."""
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(module, "_unsaved", {})
    return tmp_path / "own"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("calibrated"))


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def same(a: Calibration, b: Calibration, **tolerance) -> None:
    assert a.layers == b.layers
    for name in ("mean", "absolute", "length", "frequencies"):
        for layer in a.layers:
            torch.testing.assert_close(getattr(a, name)[layer], getattr(b, name)[layer], **tolerance)


EXACT = {"rtol": 0, "atol": 0}


# Measuring


def test_passes_of_any_length_measure_the_same(llama):
    ids = tokens(0, 61)
    whole = calibrate(llama, ids, chunk=1000)
    same(whole, calibrate(llama, ids, chunk=7), rtol=1e-4, atol=1e-5)
    assert whole.metadata["tokens"] == "61" and whole.mean[0].shape == (4, 4) and whole.layers == [0, 1]
    assert whole.mean[0].dtype == torch.complex64 and whole.absolute[0].dtype == torch.float32


def test_blocks_are_texts_of_their_own(llama):
    """Statistics of two blocks are the mean of each block's."""
    ids = tokens(1, 40)
    both = calibrate(llama, ids, context=20)
    first, second = calibrate(llama, ids[:20]), calibrate(llama, ids[20:])
    for layer in both.layers:
        torch.testing.assert_close(both.mean[layer], (first.mean[layer] + second.mean[layer]) / 2, rtol=1e-4, atol=1e-5)
        average = (first.length[layer] + second.length[layer]) / 2
        torch.testing.assert_close(both.length[layer], average, rtol=1e-4, atol=1e-5)


def test_memory_is_that_of_a_block(llama, monkeypatch):
    """However long the text, no layer ever holds more than ``context`` entries."""
    longest, inner = [0], RetentionLayer.update

    def watch(layer, *args, **kwargs):
        result = inner(layer, *args, **kwargs)
        longest[0] = max(longest[0], layer.kept)
        return result

    monkeypatch.setattr(RetentionLayer, "update", watch)
    calibrate(llama, tokens(2, 300), tokens=300, context=32, chunk=8)
    assert longest == [32]


def test_a_model_in_training_mode_is_measured_in_eval_mode_and_left_as_it_was():
    net = build("llama", attention_dropout=0.5)
    expected = calibrate(net, tokens(0, 30))
    net.train()
    same(calibrate(net, tokens(0, 30)), expected, **EXACT)
    assert net.training and net.model.training
    assert net.config._attn_implementation == "sdpa" and not net.model._forward_hooks


def test_texts_are_tokenized_as_far_as_they_are_read(checkpoint):
    net, tokenizer = loaded(checkpoint)
    text = data.chapter() * 20
    taken = []

    class Counting:
        bos_token_id = None

        def __call__(self, piece, **options):
            taken.append(len(piece))
            return tokenizer(piece, **options)

    found = calibrate(net, text, Counting(), tokens=90)
    assert found.metadata["tokens"] == "90" and sum(taken) < len(text) / 2
    same(found, calibrate(net, tokenizer(text)["input_ids"][:90]), **EXACT)
    assert found.metadata["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert int(calibrate(net, "two words", tokenizer).metadata["tokens"]) == len(tokenizer("two words")["input_ids"])


def test_every_block_begins_as_the_tokenizer_begins_a_text(checkpoint):
    net, tokenizer = loaded(checkpoint)

    class Leading:
        bos_token_id = 1

        def __call__(self, piece, add_special_tokens=True):
            return {"input_ids": [1] * add_special_tokens + tokenizer(piece)["input_ids"]}

    text = data.chapter()[:400]
    ids = tokenizer(text)["input_ids"]
    found = calibrate(net, text, Leading(), context=40)
    blocks = [[1, *ids[start : start + 39]] for start in range(0, len(ids), 39)]
    assert found.metadata["tokens"] == str(sum(map(len, blocks)))
    expected = sum(len(block) * calibrate(net, block).mean[0] for block in blocks) / sum(map(len, blocks))
    torch.testing.assert_close(found.mean[0], expected, rtol=1e-4, atol=1e-5)


def test_progress_is_reported_to_the_end(llama):
    seen = []
    calibrate(llama, tokens(0, 50), tokens=45, chunk=20, report=lambda done, total: seen.append((done, total)))
    assert seen == [(20, 45), (40, 45), (45, 45)]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "the text has no tokens"),
        (("", "a tokenizer"), {}, "the text has no tokens"),
        (("some text",), {}, "a text needs the model's tokenizer"),
        (([1, 96],), {}, "token id 96 is none of the model's 96"),
        (([1, -1],), {}, "token id -1 is none of the model's 96"),
        (([1, 2],), {"tokens": 0}, "tokens is a whole number of at least 1, not 0"),
        (([1, 2],), {"context": 1}, "context is a whole number of at least 2, not 1"),
        (([1, 2],), {"chunk": 2.5}, "chunk is a whole number of at least 1, not 2.5"),
    ],
)
def test_bad_arguments(llama, arguments, options, message, checkpoint):
    if arguments[1:]:
        arguments = arguments[0], loaded(checkpoint)[1]
    with pytest.raises(ValueError, match=message):
        calibrate(llama, *arguments, **options)


def test_queries_that_are_not_finite_are_an_error():
    net = build("llama")
    with torch.no_grad():
        net.model.layers[1].self_attn.q_proj.weight[0] = torch.nan
    with pytest.raises(ValueError, match="the queries of layer 1 are not finite"):
        calibrate(net, tokens(0, 20))


def test_concentration_is_1_where_all_queries_point_one_way(llama):
    found = calibrate(llama, tokens(0, 60))
    assert found.concentration.shape == (2, 4)
    assert bool((found.concentration > 0.05).all()) and bool((found.concentration < 0.9).all())
    # One token, repeated: below the first attention all queries are one.
    once = calibrate(llama, [7] * 20).concentration
    torch.testing.assert_close(once[0], torch.ones(4), rtol=1e-4, atol=1e-4)


# Files


def test_a_file_brings_back_what_was_measured(llama, tmp_path):
    found = calibrate(llama, tokens(0, 40))
    path = found.save(tmp_path / "a" / "c.safetensors")
    again = load(path)
    same(again, found, **EXACT)
    assert again.metadata == found.metadata and str(path) in again.source
    assert load(path) is again  # remembered
    os.utime(path, ns=(1, 1))
    assert load(path) is not again  # until it changes
    for name in (
        "model",
        "fingerprint",
        "tokens",
        "text_sha256",
        "rope_parameters",
        "torch",
        "transformers",
        "kvretain",
    ):
        assert name in again.metadata


def test_files_that_are_none(tmp_path, llama):
    with pytest.raises(FileNotFoundError, match=r"there is no calibration .*none\.pt"):
        load(tmp_path / "none.pt")
    (tmp_path / "text.safetensors").write_text("not at all")
    with pytest.raises(ValueError, match="neither a calibration of"):
        load(tmp_path / "text.safetensors")
    artefacts.write(tmp_path / "other.safetensors", {"a": torch.ones(1)}, {"kind": "gate"})
    with pytest.raises(
        ValueError, match=r"other.safetensors' is not a calibration: make one with `kvretain calibrate`"
    ):
        load(tmp_path / "other.safetensors")
    found = calibrate(llama, tokens(0, 10))
    named = load(found.save(tmp_path / "c.pt"))  # what a file holds decides how it is read, not its name
    assert all(torch.equal(named.of(layer)[0], found.of(layer)[0]) for layer in found.mean)
    found.save(tmp_path / "c.safetensors")
    tensors, metadata = artefacts.read(tmp_path / "c.safetensors")
    del tensors["1.absolute"]
    artefacts.write(tmp_path / "part.safetensors", tensors, metadata)
    with pytest.raises(ValueError, match="is not a calibration"):
        load(tmp_path / "part.safetensors")
    for content in (b"no pickle at all", b""):
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(ValueError, match="neither a calibration of `kvretain calibrate` nor a file of statistics"):
            load(tmp_path / "x.pt")


class _Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, how):
    trap = {"metadata": {}, "stats": _Trap(str(tmp_path / "run"))}
    if how == "torch":
        torch.save(trap, tmp_path / "x.pt")
    else:
        (tmp_path / "x.pt").write_bytes(pickle.dumps(trap))
    with pytest.raises(ValueError, match="it is no file of plain tensors, and nothing else is read"):
        load(tmp_path / "x.pt")
    assert not (tmp_path / "run").exists()


def published(found: Calibration, path: Path, **changes) -> Path:
    """A file as TriAttention writes it."""
    stats = {
        f"layer{layer:02}_head{head:02}": {
            "q_mean_real": found.mean[layer][head].real.clone(),
            "q_mean_imag": found.mean[layer][head].imag.clone(),
            "q_abs_mean": found.absolute[layer][head].clone(),
        }
        for layer in found.layers
        for head in range(len(found.mean[layer]))
    }
    about = {
        "rope_style": "half",
        "head_dim": 2 * found.mean[0].shape[1],
        "sampled_heads": [],
        "model_name": "some/model",
    }
    torch.save({"metadata": about | changes, "stats": stats}, path)
    return path


def test_triattentions_files_are_read(llama, tmp_path):
    found = calibrate(llama, tokens(0, 40))
    again = load(published(found, tmp_path / "x.pt"))
    for layer in found.layers:
        assert torch.equal(again.mean[layer], found.mean[layer])
        assert torch.equal(again.absolute[layer], found.absolute[layer])
    assert bool((again.concentration >= found.concentration - 1e-6).all())
    assert again.metadata["model"] == "some/model" and not again.frequencies


@pytest.mark.parametrize("part", ["mean", "absolute", "length", "frequencies"])
def test_a_file_with_numbers_that_are_not_finite_is_named(llama, tmp_path, part):
    found = calibrate(llama, tokens(0, 10))
    path = found.save(tmp_path / "c.safetensors")
    tensors, metadata = artefacts.read(path)
    tensors[f"1.{part}"][0] = math.nan
    artefacts.write(path, tensors, metadata)
    with pytest.raises(ValueError, match=rf"c\.safetensors' has numbers that are not finite \({part} of layer 1\)"):
        load(path)
    if part in ("mean", "absolute"):
        getattr(found, part)[1][2] = math.inf
        path = published(found, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=rf"x\.pt' has numbers that are not finite \({part} of layer 1\)"):
            load(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.pop("stats"), "other contents"),
        (lambda f: f["metadata"].pop("head_dim"), "other contents"),
        (lambda f: f["metadata"].update(head_dim=6), "head sizes that differ"),
        (lambda f: f["metadata"].update(rope_style="odd"), "the rope_style 'odd'"),
        (lambda f: f["stats"].pop("layer00_head01"), "other contents"),
        (lambda f: f["stats"].pop("layer00_head03"), "layers with other numbers of heads"),
        (lambda f: f["stats"].update(other={}), "the key 'other'"),
        (lambda f: f["stats"]["layer00_head00"].pop("q_abs_mean"), "other contents"),
    ],
)
def test_damaged_files_of_triattention(llama, tmp_path, damage, message):
    path = published(calibrate(llama, tokens(0, 10)), tmp_path / "x.pt")
    content = torch.load(path, weights_only=True)
    damage(content)
    torch.save(content, path)
    with pytest.raises(ValueError, match=f"nor a file of statistics from TriAttention: it has {message}"):
        load(path)


@needs_published
@pytest.mark.parametrize(("name", "layers", "heads"), [("ds_qwen7b", 28, 28), ("ds_llama8b", 32, 32)])
def test_the_published_files(name, layers, heads):
    found = load(PUBLISHED / f"{name}.pt")
    assert found.layers == list(range(layers)) and found.mean[0].shape == (heads, 64)
    assert "DeepSeek-R1-Distill" in found.metadata["model"]
    assert bool((found.mean[3].abs() <= found.absolute[3] * (1 + 1e-5)).all())
    assert 0.5 < float(found.concentration.mean()) <= 1


# Which fits


def refused(net, calibration, *words):
    decoder = net.get_decoder()
    ropes = {index: support.rope_of(decoder, index) for index in range(2)}
    with pytest.raises(ValueError, match="does not fit this model: ") as error:
        calibration.check(net, ropes)
    for word in words:
        assert word in str(error.value)
    return str(error.value)


def test_it_fits_its_own_model_in_any_dtype_and_with_or_without_a_head(own_cache, tmp_path):
    net = build("llama")
    path = calibrate(net, tokens(0, 30)).save(tmp_path / "c.safetensors")
    text = f"trig(calibration={str(path)!r})"
    RetentionCache.for_model(net, text, budget=8)
    RetentionCache.for_model(net.model, text, budget=8)
    RetentionCache.for_model(net.to(torch.bfloat16), text, budget=8)


def test_what_differs_is_named(llama, qwen2):
    found = calibrate(llama, tokens(0, 30))
    message = refused(qwen2, found, "model type llama, the model's is qwen2", "fingerprint of the weights")
    assert "heads" not in message
    wider = build("llama", num_attention_heads=8, head_dim=16)
    refused(wider, found, "4 query heads, the model has 8", "head size 8, the model's is 16")
    other = build("llama")
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.add_(0.5)
    message = refused(other, found, f"fingerprint of the weights {found.metadata['fingerprint']}, the model's is ")
    assert ";" not in message
    slower = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    message = refused(slower, found, "rotary frequencies of layer 0, e.g. 0.001 for pair 3, the model's is 0.000299")
    assert "fingerprint" not in message
    layout = dataclasses.replace(found, metadata=dict(found.metadata) | {"layout": "interleaved", "rotated": "4"})
    refused(llama, layout, "rotary layout interleaved, the model's is half", "4 rotated dimensions, the model has 8")


def test_a_file_of_triattention_must_fit_as_far_as_it_can_be_told(llama, tmp_path, capsys):
    found = calibrate(llama, tokens(0, 30))
    good = published(found, tmp_path / "good.pt")
    for _ in range(2):
        RetentionCache.for_model(llama, f"trig(calibration={str(good)!r})", budget=8)
    said = capsys.readouterr().err
    assert said.count("cannot be checked") == 1 and "some/model" in said
    refused(llama, load(published(found, tmp_path / "style.pt", rope_style="interleaved")), "rotary layout interleaved")
    short = dataclasses.replace(load(good), mean={0: found.mean[0]}, absolute={0: found.absolute[0]})
    refused(llama, short, "layers 0, the model's are 0-1")


@needs_published
def test_a_published_file_for_another_model_is_refused(llama):
    text = f"trig(calibration={str(PUBLISHED / 'ds_qwen7b.pt')!r})"
    with pytest.raises(
        ValueError, match="layers 0-27, the model's are 0-1; 28 query heads, the model has 4; head size 128"
    ):
        RetentionCache.for_model(llama, text, budget=8)


# Made by itself


def test_it_is_made_once_kept_and_said(own_cache, checkpoint, capsys):
    net, tokenizer = loaded(checkpoint)
    RetentionCache.for_model(net, "trig", budget=32)
    place = artefacts.own_path("calibration", net)
    assert place.is_file() and place.is_relative_to(own_cache)
    said = capsys.readouterr().err
    assert said.count("calibrating") >= 1 and str(place) in said
    same(load(place), calibrate(net, data.chapter(), tokenizer), **EXACT)
    before = place.stat().st_mtime_ns
    RetentionCache.for_model(net, "trig@layer", budget=32)
    assert place.stat().st_mtime_ns == before and capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_is_said_and_does_not_matter(own_cache, checkpoint, capsys):
    own_cache.mkdir()
    (own_cache / "calibration").write_text("in the way")
    net, _ = loaded(checkpoint)
    for _ in range(2):
        RetentionCache.for_model(net, "trig", budget=32)
    assert capsys.readouterr().err.count("could not be kept") == 1


def test_without_a_tokenizer_the_error_says_what_to_do(own_cache, llama, checkpoint, tmp_path):
    words = r"(?s)needs a calibration.*kvretain calibrate --model .*calibrate\(model, text, tok.*trig\(calibration="
    with pytest.raises(ValueError, match=words):
        RetentionCache.for_model(llama, "trig", budget=8)
    bare = tmp_path / "bare"
    loaded(checkpoint)[0].save_pretrained(bare)
    with pytest.raises(ValueError, match=words) as error:
        RetentionCache.for_model(AutoModelForCausalLM.from_pretrained(bare), "trig", budget=8)
    assert str(bare) in str(error.value)
    assert not own_cache.exists()


def test_one_that_no_longer_fits_is_refused_with_the_way_out(own_cache, checkpoint):
    net, tokenizer = loaded(checkpoint)
    found = calibrate(net, "a b c d e", tokenizer)
    changed = dataclasses.replace(found, metadata=dict(found.metadata) | {"fingerprint": "0" * 16})
    changed.save(artefacts.own_path("calibration", net))
    with pytest.raises(ValueError, match=r"fingerprint .*; run `kvretain calibrate` again, or delete that file"):
        RetentionCache.for_model(net, "trig", budget=8)


def _in_another_process(folder: str) -> str:
    net, _ = loaded(folder)
    RetentionCache.for_model(net, "trig", budget=8)
    return str(artefacts.own_path("calibration", net))


@pytest.mark.slow  # two processes load transformers
def test_processes_may_make_it_at_once(own_cache, checkpoint):
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        places = list(pool.map(_in_another_process, [str(checkpoint)] * 2))
    assert len(set(places)) == 1 and load(places[0]).layers == [0, 1]
    assert os.listdir(own_cache / "calibration") == [Path(places[0]).name]  # and nothing half-written


def test_threads_make_it_once(own_cache, checkpoint, monkeypatch):
    made, automatic = [], module._automatic

    def counting(*arguments):
        made.append(1)
        return automatic(*arguments)

    monkeypatch.setattr(module, "_automatic", counting)
    net, _ = loaded(checkpoint)
    ropes = {index: support.rope_of(net.model, index) for index in range(2)}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: calibration_for(net.model, "", ropes), range(4)))
    assert made == [1] and len({id(one) for one in found}) == 1


# The command


def run(*arguments):
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_the_command_measures_keeps_and_draws(own_cache, checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "deep" / "r.png"
    result = run("-m", checkpoint, "--tokens", 200, "--plot", figure)
    assert result.exit_code == 0, result.output
    net, tokenizer = loaded(checkpoint)
    place = artefacts.own_path("calibration", net)
    expected = calibrate(net, data.chapter(), tokenizer, tokens=200)
    same(load(place), expected, **EXACT)
    heads = expected.concentration
    assert f"{float(heads.mean()):.3f} on average" in result.stdout
    assert f"above 0.95 in {int((heads > 0.95).sum())} of them" in result.stdout and str(place) in result.stdout
    with figure.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == [(i, j) for i in range(2) for j in range(4)]
    assert [float(row["concentration"]) for row in rows] == pytest.approx(heads.flatten().tolist(), rel=1e-5)
    assert figure.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    RetentionCache.for_model(net, "trig", budget=8)  # finds it


def test_the_command_in_json_and_to_a_file(own_cache, checkpoint, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("The Walrus keeps the key in Oslo. " * 30)
    result = run("-m", checkpoint, "--text", text, "--context", 64, "--out", tmp_path / "o.safetensors", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["path"] == str(tmp_path / "o.safetensors") and report["heads"] == 8
    assert report["metadata"]["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert report["mean_concentration"] == pytest.approx(float(load(report["path"]).concentration.mean()))
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "nowhere.txt"), "nowhere.txt"),
        (("--plot", "figure.pdf"), "the figure is a .png file, not figure.pdf"),
        (("--out", "."), "--out . is a folder; it must be a file"),
        (("-m", "/nowhere/at/all"), "there is no model"),
    ],
)
def test_the_command_refuses_in_one_line(checkpoint, arguments, message):
    result = run("-m", checkpoint, *arguments)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.output


def test_help_teaches():
    assert "kvretain calibrate --model" in run("--help").stdout
