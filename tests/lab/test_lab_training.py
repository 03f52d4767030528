"""Training on tiny recipes: first weights that recall, a loss that falls, and breaks that leave no trace."""

import csv
import dataclasses
import hashlib
import json

import pytest
import torch

from kvretain import RetentionCache, load_model
from kvretain.artefacts import fingerprint, own_path
from kvretain.calibrate import default_text, load
from kvretain.lab.animal import LATER, OFFSETS, build
from kvretain.lab.recipe import Recipe, Stage
from kvretain.lab.train import CHECKPOINT, CURVE, IGNORED, Trainer, batch_of, train
from kvretain.lab.vocabulary import DIGITS, WORDS

TINY = Recipe(width=64, layers=3, inner=64, stages=(Stage(5, 1, 2), Stage(4, 2, 3, 0.5)), tokens=300, warmup=2)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_batch_depends_on_its_number_and_the_seed_alone():
    one, again, other = batch_of(TINY, 3), batch_of(TINY, 3), batch_of(dataclasses.replace(TINY, seed=1), 3)
    assert torch.equal(one.ids, again.ids) and torch.equal(one.targets, again.targets)
    assert not torch.equal(one.ids, other.ids)


@pytest.mark.parametrize("recall", [0.0, 1.0])
def test_only_what_can_be_known_is_asked_for(recall):
    recipe = dataclasses.replace(TINY, stages=(Stage(9, 1, 6, recall),))
    for update in range(9):
        batch = batch_of(recipe, update)
        assert ((batch.targets == batch.ids) | (batch.targets == IGNORED)).all()
        for row, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
            words = [WORDS[i] for i in row]
            for place in batch.recalled:  # the same name and digit stand there before
                pair = words[place - 1 : place + 1]
                assert any(words[at : at + 2] == pair for at in range(place - 1))
            for place in batch.computed:
                assert words[place - 1] == words[place - 13] and words[place - 12] == "=" and row[place] in DIGITS
            if recall:  # the first mention of a value is anybody's guess
                asked = [place for place in range(2, len(row), 3) if targets[place] != IGNORED]
                assert asked == batch.recalled
            else:
                start = words.index(":", words.index("?")) + 1
                assert {*targets[:start]} == {IGNORED} and IGNORED not in targets[start:]
                digits = [p for p in range(start, len(row)) if row[p] in DIGITS and words[p - 1] != "\\boxed{"]
                assert digits == sorted([*batch.recalled, *batch.computed])


def test_the_first_weights_look_back_and_recall():
    model = build(Recipe())
    model.set_attn_implementation("eager")
    batch = batch_of(dataclasses.replace(Recipe(), stages=(Stage(1, 1, 1, recall=1.0),)), 0)
    with torch.no_grad():
        found = model(batch.ids, output_attentions=True)
    first, second = found.attentions[:2]
    for head, offset in enumerate(OFFSETS):
        back = first[:, head].diagonal(-offset, 1, 2)[:, 10:]
        assert back.mean() > 0.6, (head, offset)
    on_match = [
        second[row, 0, place - 1, [at for at in range(1, place) if ids[at - 1] == ids[place - 1]]].sum().item()
        for row, ids in enumerate(batch.ids.tolist())
        for place in batch.recalled
    ]
    assert sum(on_match) / len(on_match) > 0.5
    batch = batch_of(dataclasses.replace(Recipe(), stages=(Stage(1, 12, 12),)), 0)
    with torch.no_grad():
        found = model(batch.ids, output_attentions=True)
    for head, offset in LATER.items():
        back = found.attentions[1][:, head].diagonal(-offset, 1, 2)[:, 10:]
        assert back.mean() > 0.5, (head, offset)
    start = batch.recalled[0] - 7
    on_operand = [
        found.attentions[2][row, 0, place, [at for at in range(start) if ids[at - 4] == ids[place - 3]]].sum().item()
        for row, ids in enumerate(batch.ids.tolist())
        for place in range(start + 3, start + 15 * 12, 15)
    ]
    assert sum(on_operand) / len(on_operand) > 5 / start  # of all words before, a few are that
    plain = build(dataclasses.replace(Recipe(), wired=False))
    assert not same(model, plain) and same(plain, build(dataclasses.replace(Recipe(), wired=False)))


def test_what_cannot_be_wired_is_refused():
    with pytest.raises(ValueError, match="4 query heads, 2 KV heads and a head size divisible by 16"):
        build(dataclasses.replace(TINY, heads=2))
    with pytest.raises(ValueError, match="fill 3 layers, and this model has 2"):
        build(dataclasses.replace(TINY, layers=2))


def test_training_lowers_the_loss(tmp_path):
    recipe = dataclasses.replace(TINY, stages=(Stage(60, 1, 2),), tokens=600, warmup=10)
    trainer = Trainer(recipe, tmp_path)
    trainer.EVERY = 10
    while not trainer.done:
        trainer.step()
    losses = [point.loss for point in trainer.curve]
    assert losses[-1] < 0.7 * losses[0] and trainer.curve[-1].update == 60
    assert trainer.curve[-1].recalled > 0.5


def test_a_run_that_is_killed_ends_with_the_same_weights(tmp_path):
    class Killed(Exception):
        pass

    def kill(trainer):
        if trainer.update == 6:
            raise Killed

    whole = train(TINY, tmp_path / "whole")
    with pytest.raises(Killed):
        train(TINY, tmp_path / "killed", report=kill, every=0)
    assert not (tmp_path / "killed" / "config.json").exists()
    updates = []
    resumed = train(TINY, tmp_path / "killed", report=lambda trainer: updates.append(trainer.update))
    assert updates == [6, 7, 8, 9] and same(whole.model, resumed.model)
    timeless = [[dataclasses.replace(point, seconds=0) for point in one.curve] for one in (whole, resumed)]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 1
    again = train(TINY, tmp_path / "killed")
    assert again.update == 9 and same(whole.model, again.model)


def test_it_stops_when_asked_and_goes_on(tmp_path):
    half = train(TINY, tmp_path, stop=lambda: True)
    assert half.update == 1 and not half.done
    assert train(TINY, tmp_path, minutes=0).update == 2
    assert train(TINY, tmp_path).done


def test_the_folder_is_a_model_and_says_what_it_is(tmp_path):
    trainer = train(TINY, tmp_path)
    model, words = load_model(str(tmp_path), device="cpu")
    assert fingerprint(model) == fingerprint(trainer.model) and words.get_vocab()["a"] == WORDS.index("a")
    assert model.config.kvretain_lab.startswith("laboratory animal")
    assert "laboratory animal" in (tmp_path / "README.md").read_text()
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert recipe == json.loads(json.dumps(dataclasses.asdict(TINY)))
    (row,) = csv.DictReader((tmp_path / CURVE).open())
    assert row["update"] == "9" and float(row["loss"]) == trainer.curve[0].loss


def test_it_is_calibrated_on_what_it_can_read(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "cache"))
    train(TINY, tmp_path / "animal")
    model, words = load_model(str(tmp_path / "animal"), device="cpu")
    text, title, context = default_text(model)
    ids = words(text, add_special_tokens=False)["input_ids"]
    assert title == "solved chains" and words.unk_token_id not in ids
    assert WORDS[ids[context - 2]] == "}" and len(ids) == 10 * (context - 1)  # a block ends where its chain does
    RetentionCache.for_model(model, "triattention", budget=16, every=4)
    made = load(own_path("calibration", model))
    assert made.metadata["context"] == str(context)
    assert made.metadata["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    trainer = Trainer(TINY, tmp_path)
    trainer.step()
    trainer.save()
    with pytest.raises(ValueError, match=r"another recipe \(rate, seed differ\): train in another folder"):
        Trainer(dataclasses.replace(TINY, rate=1.0, seed=4), tmp_path)
    path = tmp_path / CHECKPOINT
    state = torch.load(path)
    torch.save(state | {"words": [*WORDS, "more"]}, path)
    with pytest.raises(ValueError, match="another vocabulary than this release"):
        Trainer(TINY, tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"is damaged .* delete it to start again"):
        Trainer(TINY, tmp_path)


def test_a_model_without_a_checkpoint_is_not_overwritten(tmp_path):
    train(TINY, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    assert train(TINY, tmp_path).done  # with its checkpoint it is gone on from
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(ValueError, match=r"holds a model \(model.safetensors\) and no checkpoint.pt .* another folder"):
        train(dataclasses.replace(TINY, seed=1), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before and not (tmp_path / CHECKPOINT).exists()


def test_stages_and_the_learning_rate_follow_the_recipe():
    recipe = Recipe(stages=(Stage(100, 1, 2), Stage(300, 2, 3)), warmup=10)
    assert recipe.updates == 400 and [recipe.stage_of(u) for u in (0, 99, 100, 399)] == [0, 0, 1, 1]
    rates = [recipe.rate_of(update) for update in range(400)]
    assert rates[0] == recipe.rate / 10 and max(rates) == rates[9] < recipe.rate and rates[-1] < 0.03 * recipe.rate
    assert [stage.updates for stage in recipe.stretched(2).stages] == [200, 600] and recipe.stretched(1) == recipe
    with pytest.raises(ValueError, match="by a positive factor, not 0"):
        recipe.stretched(0)
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        Stage(1, 3, 2)
