"""The scaled Gram matrix Σ of one layer's heads, in float64, on every scale and kernel.

kernel ``exp``: K_ij = exp(s x_i·x_j) over all J points, queries and keys together, and
``trace`` Σ = K / tr K,  ``mean`` Σ = K / J (the operator of arXiv:2507.03340),  ``raw`` Σ = K.

kernel ``softmax``: Σ = P Pᵀ / n with P the row-normalised matrix softmax(s q_i·k_j) of the n
queries. Its eigenvalues are the squared singular values of P over its number of rows. Softmax
fixes the scale by itself, and a common shift of the keys changes nothing.

Sizes: H heads, J points, n queries among them, d channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dofsweep.core.kernel import log_gram
from dofsweep.errors import SpectrumError

GRAM_SCALES = ("trace", "mean", "raw")
KERNELS = ("exp", "softmax")


def check_request(
    points: Tensor, scale: float, n_queries: int, layer_idx: int, gram_scale: str, kernel: str
) -> None:
    """Refuse what no spectrum can be taken of.

    Raises:
        SpectrumError: an unknown scale or kernel, or a scale given with kernel ``softmax``; points
            of the wrong shape or not finite (the message names layer and head); n_queries that
            does not fit the points.
    """
    if gram_scale not in GRAM_SCALES:
        raise SpectrumError(f"gram_scale={gram_scale!r} is unknown; choose one of {GRAM_SCALES}")
    if kernel not in KERNELS:
        raise SpectrumError(f"kernel={kernel!r} is unknown; choose one of {KERNELS}")
    if kernel == "softmax" and gram_scale != "trace":
        raise SpectrumError(
            f"gram_scale={gram_scale!r} has no meaning for kernel 'softmax', whose rows sum to 1; "
            "leave gram_scale at 'trace' (it is not used), or choose kernel 'exp'"
        )
    if points.ndim != 3 or 0 in points.shape:
        raise SpectrumError(
            f"layer {layer_idx}: points have shape {tuple(points.shape)}; give [heads, points, "
            "channels], none of them empty"
        )
    n_points = points.shape[1]
    least, most = (1, n_points - 1) if kernel == "softmax" else (0, n_points)
    if not least <= n_queries <= most:
        raise SpectrumError(
            f"layer {layer_idx}: n_queries={n_queries} of {n_points} points; kernel {kernel!r} "
            f"takes {least} to {most}: sample more points or correct n_queries"
        )
    if not scale > 0:
        raise SpectrumError(f"layer {layer_idx}: the attention scale is {scale}; it must be > 0")
    bad = (~torch.isfinite(points)).flatten(1).any(1)
    if bad.any():
        raise SpectrumError(
            f"layer {layer_idx}, head {int(bad.nonzero()[0])}: queries or keys hold NaN or "
            "infinity; load the teacher in float32 or bfloat16 and look at its inputs"
        )


def scaled_gram(
    points: Tensor,
    scale: float,
    *,
    n_queries: int,
    gram_scale: str,
    kernel: str,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ up to a factor that may not fit into a float: Σ = gram · e^log_factor.

    For ``trace`` and ``softmax`` the factor is 1 and no entry exceeds 1. For ``mean`` and ``raw``
    the entries are taken relative to the largest, so that gram is finite for any logits, and the
    factor holds the rest.

    Args:
        points: the first n_queries of the J points are queries, shape [H, J, d].
        out: float64, [H, J, J], overwritten with the result of kernel ``exp``: at large J the
            allocation costs more than the exponentials.
    Returns:
        (gram, log_factor): float64, shapes [H, J, J] (``softmax``: [H, m, m] with
        m = min(n, J − n)) and [H].
    """
    if kernel == "softmax":
        queries, keys = points[:, :n_queries], points[:, n_queries:]
        rows = log_gram(queries, keys, scale).softmax(-1) / n_queries**0.5
        columns = rows.transpose(-1, -2)
        small = rows @ columns if n_queries <= keys.shape[1] else columns @ rows
        return small, small.new_zeros(len(small))
    if gram_scale == "trace":
        # A channel more subtracts log tr K within the product: s(x·y − log tr K / s).
        points = points.double()
        log_trace = (scale * points.square().sum(-1)).logsumexp(-1)
        ones = torch.ones_like(points[..., :1])
        left = torch.cat([points, ones * (-log_trace / scale)[:, None, None]], dim=-1)
        logits = log_gram(left, torch.cat([points, ones], dim=-1), scale, out=out)
        # |K_ij| <= sqrt(K_ii K_jj) <= tr K, so nothing overflows.
        return logits.exp_(), torch.zeros_like(log_trace)
    logits = log_gram(points, points, scale, out=out)
    shift = logits.amax(dim=(-2, -1))
    log_size = math.log(points.shape[1]) if gram_scale == "mean" else 0.0
    return logits.sub_(shift[:, None, None]).exp_(), shift - log_size
