"""Coverage: greedy choice of the set that covers the context best, the slow oracle behind HubKV's one-pass discount.

The objective is facility location, ``F(S) = sum_x max_{j in S} w[x, j]`` with ``w >= 0`` and ``F({}) = 0``: every place
``x`` is served by the chosen entry that serves it best. :func:`select_coverage` works on any ``w``; the selectors
:mod:`.local` build a banded ``w`` from scores and never store it.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

METHODS = ("greedy", "lazy", "stochastic")
"""Ways to maximise the coverage; see :func:`greedy_path`."""


def coverage(kernel_matrix: Tensor, chosen: Tensor | Sequence[int]) -> Tensor:
    """``F(S) = sum_x max_{j in S} w[x, j]``, and 0 for the empty set.

    Args:
        kernel_matrix: ``w (X, N)``, finite and >= 0.
        chosen: indices ``(..., K)`` into the N entries, one set per leading index; repetitions change nothing.

    Returns:
        ``(...)`` float64.

    Raises:
        ValueError: a weight is negative or not finite, an index is out of range, or a shape or dtype does not fit.

    Example:
        >>> coverage(torch.tensor([[1.0, 0.5], [0.0, 2.0]]), [0, 1])
        tensor(3., dtype=torch.float64)
    """
    weights = check_weights("coverage", kernel_matrix)
    indices = check_indices("coverage", chosen, len(weights))
    if indices.shape[-1] == 0:
        return torch.zeros(indices.shape[:-1], dtype=torch.float64, device=kernel_matrix.device)
    return total(weights[indices].amax(-2)).to(kernel_matrix.device)


def select_coverage(
    kernel_matrix: Tensor,
    keep: int,
    *,
    method: str = "greedy",
    epsilon: float = 0.1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Indices of ``keep`` entries that together cover much: each step adds the entry that adds most to ``F``.

    :func:`greedy_path` with the same arguments also tells the order, the gains and the number of evaluations.

    Args:
        kernel_matrix: ``w (X, N)``, finite and >= 0: how well entry ``j`` serves place ``x``.
        keep: entries to choose, 1 to N.
        method: ``"greedy"``, ``"lazy"`` (the same set, far fewer evaluations) or ``"stochastic"``.
        epsilon: for ``"stochastic"``, in (0, 1).
        generator: for ``"stochastic"``, on the CPU; default: one seeded with 0.

    Returns:
        ``(keep,)`` int64, ascending.

    Raises:
        ValueError: an argument is out of range or a weight negative or not finite.

    Example:
        Two entries that serve the same place are redundant, so the second best entry alone is not taken:

        >>> select_coverage(torch.tensor([[3.0, 2.9, 0.0], [0.0, 0.0, 1.0]]), 2)
        tensor([0, 2])
    """
    return greedy_path(kernel_matrix, keep, method=method, epsilon=epsilon, generator=generator).order.sort().values


@dataclass(frozen=True)
class GreedyPath:
    """What a greedy run did.

    Attributes:
        order: ``(keep,)`` int64, the entries in the order in which they were chosen.
        gains: ``(keep,)`` float64, what each of them added to ``F``.
        evaluations: marginal gains that were computed.
    """

    order: Tensor
    gains: Tensor
    evaluations: int


def greedy_path(
    kernel_matrix: Tensor,
    keep: int,
    *,
    method: str = "greedy",
    epsilon: float = 0.1,
    generator: torch.Generator | None = None,
) -> GreedyPath:
    """The run behind :func:`select_coverage`, same arguments and errors.

    - ``"greedy"`` (Nemhauser, Wolsey, Fisher 1978) computes every remaining gain at every step; equal gains go to the
      lowest index. ``F(S) >= (1 - 1/e) * optimum``.
    - ``"lazy"`` (Minoux 1978) recomputes a gain only while its old value, an upper bound by submodularity, is the
      largest. The result is the same to the bit, ties included.
    - ``"stochastic"`` (Mirzasoleiman et al. 2015) takes the best of ``ceil(N / keep * ln(1 / epsilon))`` random
      remaining entries at each step. ``E[F(S)] >= (1 - 1/e - epsilon) * optimum``.

    Computed in float64 on the CPU. Sums run in one fixed order, so that a gain is the same number whoever computes it
    and never rises as the set grows: that makes lazy exact in floating point too, and the result independent of the
    device.
    """
    keep = whole("select_coverage", "keep", keep)
    if method not in METHODS:
        raise ValueError(f"select_coverage: unknown method {method!r}; valid: {', '.join(METHODS)}")
    check_epsilon("select_coverage", epsilon)
    weights = check_weights("select_coverage", kernel_matrix)
    if not 1 <= keep <= len(weights):
        raise ValueError(
            f"select_coverage: keep must be a whole number from 1 to the {len(weights)} entries there are, not {keep}"
        )
    if method == "greedy":
        order, gains, evaluations = _exact(weights, keep)
    elif method == "lazy":
        order, gains, evaluations = _lazy(weights, keep)
    else:
        order, gains, evaluations = _stochastic(weights, keep, epsilon, generator)
    device = kernel_matrix.device
    return GreedyPath(
        torch.tensor(order, device=device), torch.tensor(gains, dtype=torch.float64, device=device), evaluations
    )


_Run = tuple[list[int], list[float], int]


def _exact(weights: Tensor, keep: int) -> _Run:
    cover = weights.new_zeros(weights.shape[1])
    chosen = torch.zeros(len(weights), dtype=torch.bool)
    order: list[int] = []
    gains: list[float] = []
    for _ in range(keep):
        best, index = _gains(weights, cover).masked_fill(chosen, -1.0).max(0)  # the first of equal maxima
        order.append(int(index))
        gains.append(float(best))
        chosen[index] = True
        cover = torch.maximum(cover, weights[index])
    return order, gains, keep * len(weights) - keep * (keep - 1) // 2


def _lazy(weights: Tensor, keep: int) -> _Run:
    cover = weights.new_zeros(weights.shape[1])
    # (-gain, index, step at which it was computed): of equal gains the lowest index is on top, so it is refreshed, and
    # if it holds its gain chosen, first.
    heap = [(-gain, index, 0) for index, gain in enumerate(_gains(weights, cover).tolist())]
    heapq.heapify(heap)
    evaluations = len(weights)
    order: list[int] = []
    gains: list[float] = []
    for step in range(keep):
        while heap[0][2] < step:
            index = heap[0][1]
            heapq.heapreplace(heap, (-float(_gains(weights[index], cover)), index, step))
            evaluations += 1
        gain, index, _ = heapq.heappop(heap)
        order.append(index)
        gains.append(-gain)
        cover = torch.maximum(cover, weights[index])
    return order, gains, evaluations


def _stochastic(weights: Tensor, keep: int, epsilon: float, generator: torch.Generator | None) -> _Run:
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    size = math.ceil(len(weights) / keep * math.log(1 / epsilon))
    cover = weights.new_zeros(weights.shape[1])
    rest = torch.arange(len(weights))
    order: list[int] = []
    gains: list[float] = []
    evaluations = 0
    for _ in range(keep):
        drawn = rest[torch.randperm(len(rest), generator=generator)[:size].sort().values]
        best, at = _gains(weights[drawn], cover).max(0)
        index = int(drawn[at])
        evaluations += len(drawn)
        order.append(index)
        gains.append(float(best))
        rest = rest[rest != index]
        cover = torch.maximum(cover, weights[index])
    return order, gains, evaluations


def _gains(weights: Tensor, cover: Tensor) -> Tensor:
    """What entries with ``weights (..., X)`` add to a set that covers ``cover (X,)``."""
    return total((weights - cover).clamp_min_(0))


def total(values: Tensor) -> Tensor:
    """Sum over the last dimension, by halving: one order whatever the batch and the device. Overwrites ``values``.

    Rounding is monotone, hence so is this sum in each of its terms, which a library reduction does not promise.
    """
    while (size := values.shape[-1]) > 1:
        half = (size + 1) // 2
        values[..., : size - half] += values[..., half:]
        values = values[..., :half]
    return values.sum(-1)


def check_weights(owner: str, kernel_matrix: Tensor) -> Tensor:
    """``kernel_matrix (X, N)`` as ``(N, X)`` float64 on the CPU, contiguous, or a ``ValueError`` from ``owner``."""
    if not isinstance(kernel_matrix, Tensor):
        raise ValueError(f"{owner}: kernel_matrix must be a tensor, not {type(kernel_matrix).__name__}")
    if kernel_matrix.ndim != 2 or kernel_matrix.is_complex() or kernel_matrix.dtype == torch.bool:
        raise ValueError(
            f"{owner}: kernel_matrix must be real of shape (X, N), "
            f"not {kernel_matrix.dtype} {tuple(kernel_matrix.shape)}"
        )
    weights = kernel_matrix.detach().to("cpu", torch.float64).T.contiguous()
    bad = weights[~(weights.isfinite() & (weights >= 0))]
    if len(bad):
        raise ValueError(f"{owner}: weights must be finite and >= 0, but one is {bad[0].item()}")
    return weights


def check_indices(owner: str, chosen: Tensor | Sequence[int], size: int) -> Tensor:
    """``chosen (..., K)`` as int64 on the CPU, or a ``ValueError`` that names ``owner``."""
    try:
        indices = chosen if isinstance(chosen, Tensor) else torch.tensor(chosen)
    except (TypeError, ValueError, RuntimeError):  # no numbers, ragged, or beyond int64
        raise ValueError(f"{owner}: chosen must be integer indices of shape (..., K), not {chosen!r}") from None
    if indices.numel() == 0:
        return indices.to("cpu", torch.int64)
    if indices.ndim < 1 or not integral(indices):
        raise ValueError(
            f"{owner}: chosen must be integer indices of shape (..., K), not {indices.dtype} {tuple(indices.shape)}"
        )
    outside = indices[(indices < 0) | (indices >= size)]
    if len(outside):
        raise ValueError(f"{owner}: chosen must be from 0 to {size - 1}, but one is {outside[0].item()}")
    return indices.to("cpu", torch.int64)


def integral(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds whole numbers; truth values are none."""
    return not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())


def whole(owner: str, field: str, value: SupportsIndex) -> int:
    """``value`` as an ``int``, or a ``ValueError`` that names ``owner`` and ``field``; of any integer type, no bool."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{owner}: {field} must be a whole number, not {value!r}")


def check_epsilon(owner: str, epsilon: object) -> None:
    """Raise ``ValueError`` unless ``epsilon`` is a number between 0 and 1."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise ValueError(f"{owner}: epsilon must be in (0, 1), not {epsilon!r}")
