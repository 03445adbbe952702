"""What single points say about N: leverage scores, and an interval over resampled points.

Both need Σ itself, not only its eigenvalues, and both use a Cholesky factor of Σ + λI, several
times cheaper than a decomposition: with (Σ + λI)^-1 = L^-T L^-1,

    N(λ) = Σ_j 1 − λ [(Σ + λI)^-1]_jj,   [(Σ + λI)^-1]_jj = squared norm of column j of L^-1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dofsweep.core.spectrum_gram import check_request, scaled_gram
from dofsweep.errors import SpectrumError


def leverage_scores(
    points: Tensor, scale: float, lam: float, *, layer_idx: int = 0, gram_scale: str = "trace"
) -> Tensor:
    """Ridge leverage of each point: the diagonal of Σ(Σ + λI)^-1. They sum to N(λ).

    Args:
        points: queries and keys, shape [H, J, d].
        scale: attention scale s.
        lam: λ > 0 in the units of gram_scale.
        layer_idx: named in messages.
        gram_scale: one of GRAM_SCALES; the kernel is ``exp``.
    Returns:
        float64, shape [H, J]; unit: features, each in [0, 1].
    Raises:
        SpectrumError: bad points, λ not positive or below what float64 resolves.
    """
    check_request(points, scale, 0, layer_idx, gram_scale, "exp")
    how = {"gram_scale": gram_scale, "kernel": "exp"}
    return _leverage(points, scale, lam, n_queries=0, layer_idx=layer_idx, **how)


def bootstrap_dof(
    points: Tensor,
    scale: float,
    lam: float,
    *,
    n_queries: int,
    n_boot: int,
    generator: torch.Generator,
    layer_idx: int = 0,
    gram_scale: str = "trace",
    kernel: str = "exp",
    confidence: float = 0.9,
) -> tuple[Tensor, Tensor]:
    """Interval of N(λ) over the draw of the points, by subsampling halves.

    The usual bootstrap draws J points with replacement: only 63 % of them are then distinct, a
    repeated point adds no dimension, and every replicate is biased low. So each replicate here
    draws half of the queries and half of the keys **without** replacement. For a statistic that
    is smooth in the distribution of the points, m of J drawn this way vary around their mean with
    (J − m)/m times the variance of a full sample: once, for halves (the delete-half jackknife; an
    odd J is corrected by the factor sqrt(m/(J − m))). Half a sample also has a smaller N, so
    deviations are taken relative to the replicates' own mean and laid around the full sample's N:

        low, high = N · (1 + sqrt(m/(J − m)) · quantile(N*/mean(N*) − 1)).

    The interval speaks of which points were drawn, as if independently. It does not say how far N
    at J points is from its limit at many, nor how points of one sequence resemble each other. And
    it is too narrow where a handful of points of huge norm make up the trace (kernel ``exp``): N
    then hangs on whether such a point was drawn at all, which no resampling can show.

    Args:
        points: the first n_queries of the J points are queries, shape [H, J, d].
        scale: attention scale s.
        lam: λ > 0.
        n_queries: queries among the points; at least 2 of each kind that is present.
        n_boot: replicates; 100 or more for a 90 % interval.
        generator: source of randomness.
        layer_idx: named in messages.
        gram_scale: one of GRAM_SCALES.
        kernel: one of KERNELS.
        confidence: share of the replicates between the two ends.
    Returns:
        (low, high): float64, shape [H] each; unit: features.
    Raises:
        SpectrumError: as ``leverage_scores``, or too few points or replicates.
    """
    check_request(points, scale, n_queries, layer_idx, gram_scale, kernel)
    _check_replicates(layer_idx, n_queries, points.shape[1] - n_queries, n_boot, confidence)
    how: Any = {"gram_scale": gram_scale, "kernel": kernel, "layer_idx": layer_idx}
    whole = _leverage(points, scale, lam, n_queries=n_queries, **how).sum(-1)
    draws = []
    for _ in range(n_boot):
        chosen = _half_of_each(n_queries, points.shape[1], generator).to(points.device)
        scores = _leverage(points[:, chosen], scale, lam, n_queries=n_queries // 2, **how)
        draws.append(scores.sum(-1))
    replicates = torch.stack(draws)
    spread = (len(chosen) / (points.shape[1] - len(chosen))) ** 0.5
    relative = spread * (replicates / replicates.mean(0) - 1)
    ends = torch.tensor([0.5 - confidence / 2, 0.5 + confidence / 2]).to(relative)
    low, high = whole * (1 + relative.quantile(ends, dim=0))
    return low, high


def _check_replicates(
    layer_idx: int, n_queries: int, n_keys: int, n_boot: int, confidence: float
) -> None:
    if n_boot < 2 or 1 in (n_queries, n_keys) or not 0 < confidence < 1:
        raise SpectrumError(
            f"layer {layer_idx}: n_boot={n_boot}, {n_queries} queries, {n_keys} keys, "
            f"confidence={confidence}; take 2 replicates or more, 2 points or more of each kind, "
            "and a confidence between 0 and 1"
        )


def _half_of_each(n_queries: int, n_points: int, generator: torch.Generator) -> Tensor:
    """Indices of half of the queries, then half of the keys, without repeats."""
    halves = []
    for first, count in ((0, n_queries), (n_queries, n_points - n_queries)):
        order = torch.randperm(count, generator=generator, device=generator.device)
        halves.append(order[: count // 2] + first)
    return torch.cat(halves)


def _leverage(
    points: Tensor,
    scale: float,
    lam: float,
    *,
    n_queries: int,
    layer_idx: int,
    gram_scale: str,
    kernel: str,
) -> Tensor:
    """Diagonal of Σ(Σ + λI)^-1 of each head, [H, m] for Σ of m rows; one Σ at a time in memory.

    Raises:
        SpectrumError: λ is not positive, or so small that the rounding of float64 would win.
    """
    if not lam > 0:
        raise SpectrumError(f"layer {layer_idx}: lam={lam} must be positive; 2^-8 is a usual value")
    scores = []
    for head_idx, head in enumerate(points.split(1)):
        gram, log_factor = scaled_gram(
            head, scale, n_queries=n_queries, gram_scale=gram_scale, kernel=kernel
        )
        sigma, relative = gram[0], lam * float(torch.exp(-log_factor))
        # The trace bounds the largest eigenvalue: this asks no less than a spectrum does.
        if relative < len(sigma) * torch.finfo(torch.float64).eps * float(sigma.trace()):
            raise SpectrumError(
                f"layer {layer_idx}, head {head_idx}: float64 cannot resolve this Gram matrix at "
                f"lam={lam:.3g}; use gram_scale 'trace', or a larger lam"
            )
        sigma.diagonal().add_(relative)
        identity = torch.eye(len(sigma), dtype=sigma.dtype, device=sigma.device)
        factor = torch.linalg.cholesky(sigma)
        inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
        scores.append((1 - relative * inverse.square_().sum(0)).clamp_(0.0, 1.0))
    return torch.stack(scores)
