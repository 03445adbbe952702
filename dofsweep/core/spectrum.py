"""Spectra of queries and keys, and the degrees of freedom that follow from them.

One spectrum serves every λ and every budget, so it is taken once per layer and head and stored:

    N(λ) = tr Σ(Σ + λI)^-1 = Σ_j w_j/(w_j + λ),   w the eigenvalues of Σ       (arXiv:2507.03340)

``head_spectra_reference`` is the definition: a dense float64 decomposition. ``head_spectra`` finds
the few eigenvalues that matter and a proven bracket of the rest, many times faster. The parts:
``spectrum_gram`` builds Σ, ``spectrum_block`` finds and proves, ``spectrum_dof`` turns eigenvalues
into N, ``spectrum_points`` looks at single points. All are reached from here.

Sizes: H heads, J points, d channels of a head.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dofsweep.core.spectrum_block import CertifiedTop, certified_top
from dofsweep.core.spectrum_dof import (
    PSD_TOL,
    degrees_of_freedom,
    dof_bracket,
    dof_table,
    head_dof,
    lam_for_dof,
    nonnegative,
)
from dofsweep.core.spectrum_gram import GRAM_SCALES, KERNELS, check_request, scaled_gram
from dofsweep.core.spectrum_points import bootstrap_dof, leverage_scores
from dofsweep.errors import SpectrumError
from dofsweep.records import HeadSpectrum

__all__ = [
    "GRAM_SCALES",
    "KERNELS",
    "PSD_TOL",
    "bootstrap_dof",
    "degrees_of_freedom",
    "dof_bracket",
    "dof_table",
    "head_dof",
    "head_spectra",
    "head_spectra_reference",
    "lam_for_dof",
    "leverage_scores",
]


def head_spectra_reference(
    points: Tensor,
    scale: float,
    *,
    n_queries: int,
    layer_idx: int = 0,
    gram_scale: str = "trace",
    kernel: str = "exp",
) -> list[HeadSpectrum]:
    """Whole spectrum of each head by a dense float64 decomposition; the definition, and slow.

    On the scales ``mean`` and ``raw`` eigenvalues may exceed float64 (s‖x‖² above about 700). Such
    values are stored as the largest finite float64 and the spectrum is marked ``resolved=False``;
    asking it for degrees of freedom raises SpectrumError. Where the values fit but their spread
    does not (λ below about J · eps · w_1), the same error is raised when λ is known.

    Args:
        points: queries, then keys, of each head as the attention sees them (after rotary
            embedding; keys centred if the student centres them), shape [H, J, d].
        scale: attention scale s.
        n_queries: how many of the J points are queries.
        layer_idx: written into the records, named in messages.
        gram_scale: ``trace`` (Σ = K / tr K), ``mean`` (K / J) or ``raw`` (K).
        kernel: ``exp`` (Gram matrix over all points) or ``softmax`` (squared singular values of
            the row-normalised softmax(s q_i·k_j) over its number of rows; gram_scale is not used
            and must be left at ``trace``).
    Returns:
        One record per head: every eigenvalue, descending; tail 0.
    Raises:
        SpectrumError: unknown names, points that are empty or not finite (layer and head are
            named), n_queries that does not fit.
    """
    check_request(points, scale, n_queries, layer_idx, gram_scale, kernel)
    return [
        _dense(
            *scaled_gram(
                points[head : head + 1],
                scale,
                n_queries=n_queries,
                gram_scale=gram_scale,
                kernel=kernel,
            ),
            layer_idx=layer_idx,
            head_idx=head,
            n_points=points.shape[1],
        )
        for head in range(len(points))
    ]


def head_spectra(
    points: Tensor,
    scale: float,
    *,
    n_queries: int,
    lam_min: float,
    rel_width: float = 0.01,
    layer_idx: int = 0,
    gram_scale: str = "trace",
    kernel: str = "exp",
    max_rank: int | None = None,
    generator: torch.Generator | None = None,
) -> list[HeadSpectrum]:
    """The eigenvalues of each head that matter at lam_min and above, and a proven bracket.

    Block subspace iteration in float32, certified in float64: for every λ >= lam_min,
    ``dof_bracket`` of the record contains N(λ) of the full float64 spectrum, up to the rounding of
    float64, and is no wider than rel_width of N (the relative width only falls as λ grows). The
    argument stands at the head of ``spectrum_block``. The dense decomposition is used, and tail
    is 0, on the scales ``mean`` and ``raw`` (whose spread no float32 block can follow) and where
    more than max_rank values would be wanted.

    Args:
        points, scale, n_queries, layer_idx, gram_scale, kernel: as ``head_spectra_reference``.
        lam_min: smallest λ that will be asked for, in units of Σ; 2^-10 is usual.
        rel_width: greatest relative width of the bracket.
        max_rank: largest block before the dense way is taken; J / 3 if None.
        generator: of the random start; a fixed one if None, so that the result is reproducible.
    Returns:
        One record per head, values descending. Each is a lower bound of the eigenvalue in its
        place; the last few may be copies of one number, the mean of what is left, which is how
        ``dof_bracket`` learns more of the tail than its sum.
    Raises:
        SpectrumError: as the reference, or lam_min or rel_width not positive.
    """
    check_request(points, scale, n_queries, layer_idx, gram_scale, kernel)
    _check_bracket(lam_min, rel_width)
    generator = generator or torch.Generator(points.device).manual_seed(0)
    n_points = points.shape[1]
    # One head at a time through the same two buffers: no allocation of J² floats per head.
    gram_buffer = points.new_empty(1, n_points, n_points, dtype=torch.float64)
    single_buffer: Tensor | None = None
    spectra = []
    for head in range(len(points)):
        gram, log_factor = scaled_gram(
            points[head : head + 1],
            scale,
            n_queries=n_queries,
            gram_scale=gram_scale,
            kernel=kernel,
            out=gram_buffer,
        )
        facts = {"layer_idx": layer_idx, "head_idx": head, "n_points": n_points}
        if gram_scale != "trace":
            spectra.append(_dense(gram, log_factor, **facts))
            continue
        if single_buffer is None:
            single_buffer = torch.empty_like(gram[0], dtype=torch.float32)
        top = certified_top(
            gram[0],
            single_buffer.copy_(gram[0]),
            lam_min=lam_min,
            rel_width=rel_width,
            max_rank=min(n_points if max_rank is None else max_rank, len(gram[0]) // 3),
            generator=generator,
        )
        spectra.append(_dense(gram, log_factor, **facts) if top is None else _kept(top, **facts))
    return spectra


def _check_bracket(lam_min: float, rel_width: float) -> None:
    if not lam_min > 0 or not rel_width > 0:
        raise SpectrumError(
            f"lam_min={lam_min} and rel_width={rel_width} must be positive; usual values are "
            "2^-10 and 0.01"
        )


def _kept(top: CertifiedTop, *, layer_idx: int, head_idx: int, n_points: int) -> HeadSpectrum:
    """Record of one head from the certified part of its spectrum."""
    return HeadSpectrum(layer_idx, head_idx, top.values.cpu().numpy(), top.tail, n_points)


def _dense(
    gram: Tensor, log_factor: Tensor, *, layer_idx: int, head_idx: int, n_points: int
) -> HeadSpectrum:
    """Record of one head from all eigenvalues of its Σ = gram · e^log_factor, [1, J, J] and [1]."""
    values = nonnegative(torch.linalg.eigvalsh(gram[0]).flip(0)).cpu().numpy()
    largest = np.finfo(np.float64).max
    with np.errstate(divide="ignore"):
        log_values = np.log(values) + float(log_factor)
    fits = log_values < np.log(largest)
    values = np.where(fits, np.exp(np.minimum(log_values, np.log(largest))), largest)
    return HeadSpectrum(
        layer_idx=layer_idx,
        head_idx=head_idx,
        values=values,
        tail=0.0,
        n_points=n_points,
        resolved=bool(fits.all()),
    )
