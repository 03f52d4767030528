"""Training gates: on a tiny random model the held-out loss falls, and the result is the same every time."""

from __future__ import annotations

import pytest
import torch
from cache.models import model
from checkpoint import tiny_tokenizer

from kvretain import RetentionCache, artefacts, distil, load_model, train_gate
from kvretain.data import chapter
from kvretain.gate import LayerGate


class Letters:
    """A tokenizer for the tiny models' 96 tokens."""

    def __call__(self, text, **options):
        return {"input_ids": torch.tensor([[ord(letter) % 95 + 1 for letter in text]])}


TEXT = chapter()[:3000]
SMALL = {"tokens": 1200, "context": 150, "batch": 256}


@pytest.fixture(scope="module")
def trained():
    return train_gate(model("llama"), Letters(), TEXT, steps=60, **SMALL)


def test_the_held_out_loss_falls(trained):
    untrained = train_gate(model("llama"), Letters(), TEXT, steps=1, rate=0.0, **SMALL)
    before, after = (
        {
            name: float(gate.metadata[name])
            for name in ("held_out_loss", "constant_loss", "least_loss", "rank_correlation")
        }
        for gate in (untrained, trained)
    )
    assert before["constant_loss"] == after["constant_loss"] and before["least_loss"] == after["least_loss"]
    gained = (before["held_out_loss"] - after["held_out_loss"]) / (before["held_out_loss"] - after["least_loss"])
    assert gained > 0.3
    assert after["held_out_loss"] < after["constant_loss"]
    assert abs(before["rank_correlation"]) < 0.2 < 0.5 < after["rank_correlation"]


def test_it_says_how_it_was_made(trained):
    said = trained.metadata
    assert said["fingerprint"] == artefacts.fingerprint(model("llama"))
    assert (said["model_type"], said["layers"], said["KV_heads"], said["steps"]) == ("llama", "0,1", "2", "60")
    # 8 contexts of 150 tokens, one held out, the 4 sinks of each left out
    assert (said["contexts"], said["tokens"], said["held_out_tokens"]) == ("8", str(7 * 146), "146")


def test_the_same_seed_gives_the_same_gate_and_leaves_torch_alone(trained):
    torch.manual_seed(123)
    expected = torch.get_rng_state()
    again = train_gate(model("llama"), Letters(), TEXT, steps=60, **SMALL)
    assert torch.equal(torch.get_rng_state(), expected)
    assert again.metadata == trained.metadata
    for a, b in zip(trained.layers, again.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    other = train_gate(model("llama"), Letters(), TEXT, steps=2, seed=1, **SMALL)
    assert not torch.equal(other.layers[0].k_base, again.layers[0].k_base)


def test_the_model_is_left_as_it_was():
    net = model("llama")

    def state():
        hooks = [(list(module._forward_pre_hooks), list(module._forward_hooks)) for module in net.modules()]
        return hooks, net.config._attn_implementation, net.training

    before = state()
    train_gate(net, Letters(), TEXT, steps=1, **SMALL)
    assert state() == before
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_other_families_and_what_they_keep(name, tmp_path, monkeypatch):
    """A trained gate serves its model, and keeps more of what KVzip keeps than chance does."""
    net = model(name)
    made = train_gate(net, Letters(), [TEXT, chapter()[5000:5600]], steps=40, **SMALL)
    assert float(made.metadata["held_out_loss"]) < float(made.metadata["constant_loss"])
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path))
    made.save(artefacts.own_path("gate", net))
    ids = Letters()(chapter()[4000:4200])["input_ids"]
    kept = {}
    for policy in ("kvzip@head", "fastkvzip@head", "random"):
        cache = RetentionCache.for_model(net, policy, budget=60, recent=0)
        with torch.no_grad():
            net.model(ids, past_key_values=cache)
        kept[policy] = [set(row.tolist()) for layer in cache._retained for row in layer.positions[0]]
    agree, chance = (
        sum(len(a & b) for a, b in zip(kept["kvzip@head"], kept[policy], strict=True))
        for policy in ("fastkvzip@head", "random")
    )
    assert agree > 1.2 * chance


def test_stopping_early_keeps_what_was_learnt():
    seen = []
    made = train_gate(
        model("llama"),
        Letters(),
        TEXT,
        steps=50,
        report=lambda stage, done, total: seen.append((stage, done, total)),
        stop=lambda: seen[-1] == ("training", 4, 50),
        **SMALL,
    )
    assert made.metadata["steps"] == "5"
    assert seen[:2] == [("reading", 0, 8), ("reading", 1, 8)] and ("reading", 8, 8) in seen
    assert [done for stage, done, _ in seen if stage == "training"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": "too short"}, "the text has 9 tokens; training gates needs at least 256"),
        ({"text": []}, "the text has 0 tokens"),
        ({"tokens": 10}, "tokens is a whole number of at least 256, not 10"),
        ({"context": 2}, "context"),
        ({"steps": 0}, "steps"),
        ({"batch": 1.5}, "batch is a whole number of at least 1, not 1.5"),
        ({"rate": -1e-3}, "rate is a finite number of at least 0, not -0.001"),
        ({"rate": float("nan")}, "rate is a finite number of at least 0, not nan"),
        ({"rate": "fast"}, "rate is a finite number of at least 0, not 'fast'"),
        ({"decay": float("inf")}, "decay is a finite number of at least 0, not inf"),
        ({"decay": True}, "decay is a finite number of at least 0, not True"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(ValueError, match=words):
        train_gate(model("llama"), Letters(), **{"text": TEXT, **options})


def test_contexts_are_cut_evenly_and_stop_at_the_limit():
    tokenizer = tiny_tokenizer()
    whole = tokenizer(chapter())["input_ids"]
    contexts = distil._contexts(tokenizer, [chapter(), chapter()], 10**6, 300)
    assert torch.cat(contexts, 1)[0].tolist() == 2 * whole
    assert max(ids.shape[1] for ids in contexts) - min(ids.shape[1] for ids in contexts) <= 1
    short = distil._contexts(tokenizer, [chapter(), chapter()], len(whole) + 10, 300)
    assert sum(ids.shape[1] for ids in short) == len(whole) + 10
    assert len(distil._contexts(tokenizer, [chapter()], 400, 512)) == 2  # one to learn from, one to hold out


def test_rank_correlation_is_spearmans():
    rng = torch.Generator().manual_seed(0)
    a = torch.randint(0, 5, (4, 40), generator=rng).float()
    b = a + 3 * torch.randn(4, 40, generator=rng)
    expected = []
    for x, y in zip(a, b, strict=True):
        # a mean rank counts the smaller values and half of the equal ones
        ranks = [[sum(v < w) + (sum(v == w) - 1) / 2 for w in v] for v in (x, y)]
        expected.append(torch.corrcoef(torch.tensor(ranks, dtype=torch.float64))[0, 1].item())
    assert distil.rank_correlation(a, b).tolist() == pytest.approx(expected)
    assert distil.rank_correlation(torch.ones(1, 5), torch.arange(5.0)[None]).item() == 0


def test_untrained_gates_start_at_the_heads_means():
    scores = torch.tensor([[0.02], [0.3]]).expand(2, 50)
    gate = distil._fresh(32, 2, scores, torch.Generator().manual_seed(0))
    assert isinstance(gate, LayerGate)
    hidden = torch.randn(1, 500, 32, generator=torch.Generator().manual_seed(1))
    ratio = gate(hidden).mean(2)[0] / scores[:, 0]
    assert bool(((ratio > 0.5) & (ratio < 2)).all())


@pytest.mark.slow
def test_on_the_real_model():
    net, tokenizer = load_model(dtype="bfloat16")
    said = train_gate(net, tokenizer, chapter()).metadata
    assert float(said["held_out_loss"]) < 0.9 * float(said["constant_loss"])
    assert float(said["rank_correlation"]) > 0.6
