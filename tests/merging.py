"""Random entries of which some stay, and mergers as loops over single entries."""

from __future__ import annotations

import math

import torch

from kvretain.merge import Nearest


def entries(seed: int, *, batch: int = 2, heads: int = 2, size: int = 14, keep: int = 5):
    """Keys, values, index and positions; row 1 has padding in front, of NaN, and keeps one entry less."""
    rng = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, heads, size, 6, generator=rng)
    positions = torch.stack([torch.randperm(2 * size, generator=rng)[:size].sort().values for _ in range(batch)])
    positions = positions[:, None].repeat(1, heads, 1)
    positions[1:, :, :3] = -1
    keys[positions < 0], values[positions < 0] = math.nan, math.nan
    index = torch.full((batch, heads, keep), -1)
    for row in range(batch):
        for head in range(heads):
            real = [i for i in range(size) if positions[row, head, i] >= 0]
            picks = sorted(real[i] for i in torch.randperm(len(real), generator=rng)[: keep - (row == 1)].tolist())
            index[row, head, keep - len(picks) :] = torch.tensor(picks)
    return keys, values, index, positions


def loops(merger, keys, values, index, positions):
    """What every kept entry becomes, one entry after the other in float64: {(row, head, slot): (key, value)}."""
    found = {}
    for row, head in [(r, h) for r in range(keys.shape[0]) for h in range(keys.shape[1])]:
        own, at = index[row, head].tolist(), positions[row, head].tolist()
        joins: dict[int, list[int]] = {slot: [] for slot in range(len(own))}
        for entry in range(keys.shape[2]):
            if at[entry] < 0 or entry in own:
                continue
            best, where = -math.inf, None
            for slot, kept in enumerate(own):
                if kept < 0:
                    continue
                if isinstance(merger, Nearest):
                    cosine = torch.cosine_similarity(keys[row, head, entry], keys[row, head, kept], 0).item()
                    fits = cosine >= merger.threshold
                else:
                    cosine = 0.0
                    last = at[kept] % merger.length == merger.length - 1
                    fits = last and at[kept] // merger.length == at[entry] // merger.length
                if fits and cosine > best:
                    best, where = cosine, slot
            if where is not None:
                joins[where].append(entry)
        for slot, kept in enumerate(own):
            if kept >= 0:
                group = [kept, *joins[slot]]
                key = keys[row, head, kept if isinstance(merger, Nearest) else group].double()
                value = values[row, head, group].double().mean(0)
                found[row, head, slot] = (key if key.ndim == 1 else key.mean(0), value)
    return found
