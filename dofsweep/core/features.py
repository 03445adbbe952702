"""Positive random features: φ(x; z) = exp(√s z·x − s‖x‖²/2), z ~ N(0, I).

E_z[φ(q; z) φ(k; z)] = exp(s q·k) (arXiv:2009.14794, Lemma 1). With M features the estimate is the
**mean** over them. The factor 1/M is left out of the features here: it cancels between the
numerator and the denominator of attention, and who wants the kernel itself subtracts log M:

    log K(q, k) ≈ logsumexp_m(log φ_m(q) + log φ_m(k)) − log M

A weight α_m = exp(log_weight_m) belongs to a feature, not to a side: it is given to the keys or to
the queries, never to both.

Sizes: H heads, T tokens, M features, d channels of a head, J sampled points, n candidates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dofsweep.core.kernel import shifted_gram
from dofsweep.errors import StudentError


def gaussian_features(
    n_heads: int,
    feature_dim: int,
    head_dim: int,
    *,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Tensor:
    """Independent z ~ N(0, I).

    Args:
        n_heads: H.
        feature_dim: M.
        head_dim: d.
        generator: source of randomness; the draw is the same whatever the device asked for.
        device: where the result lies; that of the generator if None.
    Returns:
        float32, shape [H, M, d].
    """
    z = torch.randn(n_heads, feature_dim, head_dim, generator=generator, device=generator.device)
    return z.to(device)


def orthogonal_features(
    n_heads: int,
    feature_dim: int,
    head_dim: int,
    *,
    generator: torch.Generator,
    device: torch.device | str | None = None,
) -> Tensor:
    """Blocks of d mutually orthogonal z, each of them N(0, I) by itself (FAVOR+).

    The directions of a block are a Haar-distributed orthogonal matrix (QR of a Gaussian one, with
    the signs of R's diagonal taken out); the lengths are χ_d, drawn apart. Every z alone is
    N(0, I), so the estimate stays unbiased; orthogonality lowers its variance for any d
    (arXiv:2009.14794, Theorem 2). The last block is cut when d does not divide M.

    Args and Returns: as for gaussian_features.
    """
    n_blocks = -(-feature_dim // head_dim)

    def draw(*shape: int) -> Tensor:
        """N(0, 1) in float64, so that QR is exact enough."""
        return torch.randn(
            *shape, generator=generator, device=generator.device, dtype=torch.float64
        )

    q, r = torch.linalg.qr(draw(n_heads, n_blocks, head_dim, head_dim))
    directions = q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)
    rows = directions.transpose(-1, -2).reshape(n_heads, n_blocks * head_dim, head_dim)
    lengths = draw(n_heads, feature_dim, head_dim).norm(dim=-1, keepdim=True)
    z: Tensor = rows[:, :feature_dim] * lengths
    return z.float().to(device)


def leverage_features(
    points: Tensor,
    scale: float,
    *,
    feature_dim: int,
    lam: float,
    n_candidates: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """z resampled by ridge leverage, the density under which few features suffice; no training.

    Of n candidates from N(0, I), candidate z is kept with probability p_z in proportion to
    φ_zᵀ (K + λ tr K · I)^-1 φ_z, where φ_z is the feature over the J points and K their Gram
    matrix exp(s x_i·x_j) (the optimal density of arXiv:2507.03340). The weight of a kept one is
    1/(n p_z), so that, given the candidates, the weighted mean over the M kept features is an
    unbiased estimate of the mean over all n. Resampling is systematic (one uniform number, M equal
    steps along the cumulated p in random order): also unbiased, and z is repeated only where
    p_z exceeds 1/M.

    Args:
        points: queries and keys of each head, shape [H, J, d].
        scale: attention scale s.
        feature_dim: M.
        lam: λ > 0, in units of the trace scale.
        n_candidates: n, at least M.
        generator: source of randomness, on the device of the points.
    Returns:
        (z, log_weight): float32, shapes [H, M, d] and [H, M].
    Raises:
        StudentError: lam not positive, or fewer candidates than features.
    """
    if not lam > 0:
        raise StudentError(f"lam={lam} must be positive for leverage features; raise it")
    if n_candidates < feature_dim:
        raise StudentError(
            f"n_candidates={n_candidates} is below feature_dim={feature_dim}; "
            f"ask for {4 * feature_dim} candidates or more"
        )
    n_heads, _, head_dim = points.shape
    z = gaussian_features(n_heads, n_candidates, head_dim, generator=generator)
    z = z.to(points.device)
    share = _leverage_shares(points.double(), z.double(), scale, lam)
    order = torch.argsort(
        torch.rand(share.shape, generator=generator, device=generator.device), dim=-1
    ).to(points.device)
    cumulated = share.gather(-1, order).cumsum(-1)
    cumulated = cumulated / cumulated[:, -1:]
    start = torch.rand(n_heads, 1, generator=generator, device=generator.device).to(cumulated)
    steps = (torch.arange(feature_dim, device=points.device) + start) / feature_dim
    # A start within float32 rounding of 1 may step on the upper edge.
    rank = torch.searchsorted(cumulated, steps, right=True).clamp_(max=n_candidates - 1)
    chosen = order.gather(-1, rank)
    log_weight = -(n_candidates * share.gather(-1, chosen)).log()
    return z.gather(1, chosen[..., None].expand(-1, -1, head_dim)), log_weight.float()


def _leverage_shares(points: Tensor, z: Tensor, scale: float, lam: float) -> Tensor:
    """Probabilities [H, n] of candidates z [H, n, d], float64; each row sums to 1."""
    gram, _ = shifted_gram(points, points, scale)
    trace = torch.diagonal(gram, dim1=-2, dim2=-1).sum(-1)
    gram.diagonal(dim1=-2, dim2=-1).add_(lam * trace[:, None])
    log_phi = prf_log_features(points, z, scale)  # [H, J, n]
    phi = (log_phi - log_phi.amax(dim=(-2, -1), keepdim=True)).exp()
    half: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), phi, upper=False)
    scores = half.square_().sum(dim=-2)
    # A candidate far from all points may underflow to 0, and its weight would then be infinite.
    scores = scores.clamp_min_(torch.finfo(torch.float64).tiny)
    return scores / scores.sum(-1, keepdim=True)


def prf_log_features(
    x: Tensor,
    z: Tensor,
    scale: float,
    log_weight: Tensor | None = None,
    *,
    half_norm: bool = True,
) -> Tensor:
    """Log features √s z·x − s‖x‖²/2, plus log α where given.

    Args:
        x: queries or keys, shape [..., H, T, d]. Half precision is taken up to float32.
        z: shape [H, M, d].
        scale: attention scale s > 0.
        log_weight: log α, shape [H, M]; for the keys or the queries, not both.
        half_norm: False leaves −s‖x‖²/2 out. That is a factor per token: for queries it cancels
            in the ratio; for keys it does not.
    Returns:
        Shape [..., H, T, M], float32 or float64. No −log M: see the head of this module.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, z.dtype), torch.float32)
    x, z = x.to(dtype), z.to(dtype)
    log_phi = (x * math.sqrt(scale)) @ z.transpose(-1, -2)
    if half_norm:
        log_phi = log_phi - (0.5 * scale) * x.square().sum(-1, keepdim=True)
    if log_weight is not None:
        log_phi = log_phi + log_weight.to(dtype).unsqueeze(-2)
    return log_phi
