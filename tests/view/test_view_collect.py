"""What is recorded of a run, against the same run without a recorder and against definitions written out."""

import pytest
import torch
from checkpoint import tiny_tokenizer

from kvretain import RetentionCache, hub_refine
from kvretain.policy import Policy
from kvretain.view import record
from kvretain.view.collect import DISCOUNTED, HUB, PROTECTED, marks, nearest, pieces

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*deprecated")

PROMPT, NEW, EVERY = 60, 30, 8
POLICIES = [
    "snapkv", "snapkv+hub", "keydiff+hub@layer", 'keydiff/diverse(weight=0.5)@model(combine="max")', "adakv", "h2o",
    "kvzip@model-heads", "pyramidkv", "streaming", "full",
]  # fmt: skip


class Words:
    """A tokenizer of numbers, for models without one."""

    pad_token_id = 0

    def decode(self, ids, **options):
        return "".join(f"{number} " for number in ids)


def prompt_for(model, count=PROMPT):
    return torch.randint(1, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(4))


def run_of(model, policy, **limits):
    return record(
        model, Words(), prompt_for(model), policy, new_tokens=NEW, **({"budget": 24, "every": EVERY} | limits)
    )


def plainly(model, policy, ids, **limits):
    """The cache without a recorder, fed the prompt and then each of ``ids``; after each pass, what it holds."""
    cache = RetentionCache.for_model(model, policy, **limits)
    held = []
    with torch.inference_mode():
        for part in (ids[:, :PROMPT], *ids[:, PROMPT:-1].split(1, 1)):
            logits = model(input_ids=part, past_key_values=cache).logits
            assert int(logits[0, -1].argmax()) == int(ids[0, cache.get_seq_length()]), "the text is the cache's own"
            held.append([[set(row[row >= 0].tolist()) for row in layer.positions[0]] for layer in cache.layers])
    return held, cache


@pytest.mark.parametrize("policy", POLICIES)
def test_the_history_is_what_a_cache_without_a_recorder_holds_after_every_pass(llama, policy):
    run = run_of(llama, policy)
    held, cache = plainly(llama, policy, torch.tensor([run.ids]), budget=24, every=EVERY)
    assert run.passes == NEW == len(held)
    for step, layers in enumerate(held):
        kept = run.kept(step)
        found = [[set(row.nonzero()[:, 0].tolist()) for row in layer] for layer in kept]
        assert found == layers, f"pass {step}"
    assert len(run.evictions) == cache.trace.evictions
    assert [eviction.step for eviction in run.evictions] == [s.step for s in cache.trace if any(s.evicted)]
    assert run.nbytes == tuple(sum(step.nbytes) for step in cache.trace)


@pytest.mark.parametrize("policy", ["snapkv+hub", "adakv", "streaming"])
def test_an_eviction_lists_the_entries_that_stood_before_it(llama, policy):
    run = run_of(llama, policy)
    for index, eviction in enumerate(run.evictions):
        before = run.kept(eviction.step - 1) if eviction.step else torch.zeros_like(run.left, dtype=torch.bool)
        before |= run.entered == eviction.step
        present = run.present(index)
        assert torch.equal(present, before)
        for name in ("scores", "cosines", "flags"):
            assert len(getattr(eviction, name)) == int(present.sum()), name


def test_a_ratio_evicts_too_and_sliding_layers_are_left_out(gemma3):
    run = run_of(gemma3, "keydiff", budget=None, ratio=0.5)
    assert run.layers == (1, 2)
    assert run.kept(0).sum(-1).unique().tolist() == [PROMPT - PROMPT // 2]


def spread(run, index, name):
    """An eviction's numbers as ``(L, H, N)``, NaN where there was no entry."""
    present = run.present(index)
    grid = torch.full(present.shape, torch.nan)
    grid[present] = getattr(run.evictions[index], name).float()
    return grid


def test_scores_stand_beside_their_entries(llama, monkeypatch):
    """Heads of unequal length: the worst case for the order of the list."""
    seen = []
    scorer = Policy.parse("adakv").scorer
    score = type(scorer).score

    def spy(self, view):
        scores = score(self, view)
        seen.append((view.layer, view.positions[0].clone(), view.protected[0].clone(), scores[0].clone()))
        return scores

    run = run_of(llama, "adakv")
    monkeypatch.setattr(type(scorer), "score", spy)
    plainly(llama, "adakv", torch.tensor([run.ids]), budget=24, every=EVERY)
    assert len(seen) == 2 * len(run.evictions) > 4
    for call, (layer, positions, protected, scores) in enumerate(seen):
        grid, flags = (spread(run, call // 2, name)[layer] for name in ("scores", "flags"))
        for head in range(2):
            real = positions[head] >= 0
            where = positions[head][real]
            torch.testing.assert_close(grid[head, where], scores[head][real], rtol=0, atol=0)
            assert grid[head].isfinite().sum() == real.sum()
            assert torch.equal(flags[head, where].int() & PROTECTED > 0, protected[head][real])


def test_hubs_discounts_and_refined_scores_are_those_of_the_definition(llama):
    run = run_of(llama, "snapkv+hub")
    for index, eviction in enumerate(run.evictions):
        scores, refined, flags = (spread(run, index, name) for name in ("scores", "refined", "flags"))
        ratio = 1 - 24 / (PROMPT + eviction.step)
        for layer in range(2):
            where = [scores[layer, head].isfinite().nonzero()[:, 0] for head in range(2)]
            own = torch.stack([scores[layer, head, where[head]] for head in range(2)])
            bits = torch.stack([flags[layer, head, where[head]].int() for head in range(2)])
            protected = bits & PROTECTED > 0
            expected = hub_refine(own, ratio, positions=torch.stack(where), protected=protected)
            found = torch.stack([refined[layer, head, where[head]] for head in range(2)])
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
            for head in range(2):
                values = dict(zip(where[head].tolist(), own[head].tolist(), strict=True))
                open_ = {p: values[p] for p, closed in zip(values, protected[head].tolist(), strict=True) if not closed}
                for p, bit in zip(values, bits[head].tolist(), strict=True):
                    near = {q: s for q, s in open_.items() if abs(q - p) <= 2 and q != p}
                    hub = p in open_ and all(s < values[p] or (s == values[p] and q > p) for q, s in near.items())
                    assert bool(bit & HUB) == hub, (layer, head, p)
                    assert bool(bit & DISCOUNTED) == (p in open_ and not hub)


def test_a_policy_without_hubkv_has_hubs_and_discounts_nothing(llama):
    plain, corrected = run_of(llama, "snapkv"), run_of(llama, "snapkv+hub")
    first = plain.evictions[0].flags
    assert torch.equal(first & HUB, corrected.evictions[0].flags & HUB), "the first eviction sees the same scores"
    assert (first & HUB).any() and not (first & DISCOUNTED).any()
    assert plain.evictions[0].refined is None
    nms = run_of(llama, "snapkv+nms").evictions[0]
    assert torch.equal(nms.refined == 0, (nms.flags & DISCOUNTED > 0) | (nms.scores == 0))


def test_neighbours_by_hub_leave_slopes_alone():
    from kvretain.refine import Hub

    scores = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]]])
    positions, closed = torch.arange(7).expand(1, 1, 7), torch.zeros(1, 1, 7, dtype=torch.bool)
    hubs, wide = marks(Hub(), scores, positions, closed)
    assert hubs[0, 0].nonzero()[:, 0].tolist() == [5]
    assert wide[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]
    _, near = marks(Hub(neighbours="hub"), scores, positions, closed)
    assert near[0, 0].nonzero()[:, 0].tolist() == [3, 4]


@pytest.mark.parametrize("policy", ["keydiff", "keydiff@layer", 'keydiff/diverse(weight=0.5)@model(combine="max")'])
def test_cosines_are_to_the_most_alike_other_entry_kept(llama, policy):
    run = run_of(llama, policy)
    with torch.inference_mode():
        layers = llama(prompt_for(llama)).past_key_values.layers
    values = torch.stack([layer.values[0] for layer in layers])  # (L, H, N, D)
    shared = {"keydiff": (), "keydiff@layer": (1,)}.get(policy, (0, 1))
    if shared:
        values = values.mean(shared, keepdim=True).expand_as(values)
    signatures = torch.nn.functional.normalize(values, dim=-1)
    cosines, kept = signatures @ signatures.transpose(-1, -2), run.kept(0)[..., :PROMPT]
    others = kept[:, :, None] & ~torch.eye(PROMPT, dtype=torch.bool)
    expected = cosines.masked_fill(~others, -torch.inf).amax(-1)
    torch.testing.assert_close(spread(run, 0, "cosines")[..., :PROMPT], expected, rtol=1e-4, atol=1e-5)


def test_nearest_in_blocks_and_alone():
    signatures = torch.nn.functional.normalize(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    chosen = torch.arange(20) % 3 == 0
    torch.testing.assert_close(nearest(signatures, chosen, rows=7), nearest(signatures, chosen))
    alone = nearest(signatures, torch.arange(20) == 5)
    assert alone[5] == 0 and (alone[:5] != 0).all()
    assert not nearest(signatures, torch.zeros(20, dtype=torch.bool)).any()


def test_pieces_join_to_the_text_and_characters_stay_whole():
    tokenizer = tiny_tokenizer()
    text = "Tea – for “two”, 🫖 and 茶道.\n\n  ü</script>" + "x" * 50
    ids = tokenizer(text)["input_ids"]
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids) and "".join(found) == text
    assert "🫖" in found and "" in found, "a character of several tokens stands at its last one"
    broken = ids[: found.index("🫖")]
    assert "".join(pieces(tokenizer, broken)) == tokenizer.decode(broken)


def test_the_model_is_left_as_it_was_and_progress_reaches_the_end(llama):
    done = []
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in llama.modules())
    record(llama, Words(), prompt_for(llama), "snapkv", new_tokens=5, budget=24, report=done.append)
    assert done == sorted(done) and done[-1] == PROMPT + 5 and len([d for d in done if d <= PROMPT]) >= 2
    after = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in llama.modules())
    assert after == hooks


def test_errors_name_the_policys_own_scorer(llama, monkeypatch):
    scorer = type(Policy.parse("knorm").scorer)
    monkeypatch.setattr(scorer, "score", lambda self, view: torch.full(view.positions.shape, torch.nan))
    with pytest.raises(ValueError, match="scorer 'knorm' gave NaN"):
        run_of(llama, "knorm")
