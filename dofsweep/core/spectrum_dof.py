"""Degrees of freedom from eigenvalues: N(λ) = Σ_j w_j / (w_j + λ), and its bracket and inverse.

N is the sum of f(w) = w / (w + λ), which rises with w and is concave; arXiv:2507.03340 sets the
feature dimension of a layer in proportion to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dofsweep.errors import SpectrumError
from dofsweep.records import HeadSpectrum

PSD_TOL = 1e-9
"""An eigenvalue may lie this far below zero, relative to the largest, by rounding alone."""

_EPS = float(np.finfo(np.float64).eps)
_BISECTIONS = 100


def degrees_of_freedom(values: Tensor, lam: float | Tensor) -> Tensor:
    """N(λ) of a whole spectrum: the sum over j of w_j / (w_j + λ).

    Args:
        values: eigenvalues w of Σ, shape [..., J], any order.
        lam: λ > 0 in the units of Σ; a tensor broadcasts against the leading dimensions.
    Returns:
        float64, shape [...]; unit: features; 0 <= N <= rank <= J.
    Raises:
        SpectrumError: a λ is not positive, or an eigenvalue is below -PSD_TOL times the largest.
    """
    values = values.double()
    lams = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    if not bool((lams > 0).all()):
        raise SpectrumError(f"lam={lam} must be positive; 2^-8 is a usual value")
    values = nonnegative(values)
    return (values / (values + lams.unsqueeze(-1))).sum(-1)


def nonnegative(values: Tensor) -> Tensor:
    """Eigenvalues with the negative dust of rounding set to zero.

    Raises:
        SpectrumError: an eigenvalue is below -PSD_TOL times the largest, or not a number.
    """
    largest = values.amax(-1, keepdim=True)
    if not bool((values >= -PSD_TOL * largest).all()):
        raise SpectrumError(
            f"an eigenvalue is {float(values.min()):.3g} where the largest is "
            f"{float(largest.max()):.3g}; a Gram matrix has none below zero: use gram_scale "
            "'trace', or measure the spectrum again"
        )
    return values.clamp_min(0.0)


def dof_bracket(spectrum: HeadSpectrum, lam: float) -> tuple[float, float]:
    """Bounds of N(λ) when r of J eigenvalues are known, and the sum e of the others.

        N_r + e/(λ + w_r)  <=  N  <=  N_r + e/(λ + e/(J − r)),   N_r = Σ_{i<=r} w_i/(w_i + λ)

    Left: the others are at most w_r, and f(w) >= w/(λ + w_r) there. Right: f is concave, so e
    spread evenly over the J − r others gives the most. Both hold as well for the certified Ritz
    values that ``head_spectra`` stores, at every λ from its lam_min on.

    Args:
        spectrum: of one head.
        lam: λ > 0 in the units of its gram scale.
    Returns:
        (low, high), unit: features; equal when the tail is 0.
    Raises:
        SpectrumError: λ is not positive, or lies below what float64 resolves of this spectrum.
    """
    low, high = _brackets([spectrum], [lam])
    return float(low[0, 0]), float(high[0, 0])


def head_dof(spectrum: HeadSpectrum, lam: float) -> float:
    """N(λ) of one head: the middle of its bracket. Raises as ``dof_bracket``."""
    low, high = dof_bracket(spectrum, lam)
    return 0.5 * (low + high)


def dof_table(spectra: Sequence[HeadSpectrum], lams: Sequence[float]) -> NDArray[np.float64]:
    """N of every head at every λ: the middle of each bracket.

    Args:
        spectra: in any order; every layer with the same heads, each once.
        lams: λ > 0.
    Returns:
        Shape [n_lam, n_layers, n_heads], layers and heads ascending; unit: features.
    Raises:
        SpectrumError: a head is missing or twice there, or as ``dof_bracket``.
    """
    ordered = sorted(spectra, key=lambda s: (s.layer_idx, s.head_idx))
    layers = sorted({s.layer_idx for s in ordered})
    heads = sorted({s.head_idx for s in ordered})
    wanted = [(layer, head) for layer in layers for head in heads]
    if not wanted or [(s.layer_idx, s.head_idx) for s in ordered] != wanted:
        raise SpectrumError(
            f"{len(ordered)} spectra do not cover {len(layers)} layers x {len(heads)} heads once "
            "each; measure the missing ones, or pass one set only"
        )
    low, high = _brackets(ordered, lams)
    return (0.5 * (low + high)).reshape(len(lams), len(layers), len(heads))


def lam_for_dof(spectra: HeadSpectrum | Sequence[HeadSpectrum], target: float) -> float:
    """The λ at which N(λ) is the target: of one head, or of the plan's measure for a model.

    For several spectra, N is the mean over layers of the largest N among a layer's heads. N falls
    as λ grows, so that bisection in log λ finds the only answer.

    N is the middle of its bracket, which is narrow down to the lam_min the spectra were taken for;
    a λ below that is only as good as ``dof_bracket`` says there.

    Args:
        spectra: one head, or all heads of a model.
        target: N to reach, unit: features.
    Returns:
        λ, in the units of the gram scale.
    Raises:
        SpectrumError: no λ that float64 resolves gives the target.
    """
    every = [spectra] if isinstance(spectra, HeadSpectrum) else list(spectra)
    largest = max(float(s.values[0]) for s in every)
    low = math.log(max(_resolution(s) for s in every) * (1 + 1e-9) or np.finfo(np.float64).tiny)
    high = math.log(sum(float(s.values.sum()) + s.tail for s in every)) + 60.0

    def measure(log_lam: float) -> float:
        """Mean over layers of the largest N of their heads."""
        table = dof_table(every, [math.exp(log_lam)])[0]
        return float(table.max(axis=1).mean())

    most = measure(low)
    if not 0 < target <= most or measure(high) > target:
        raise SpectrumError(
            f"target={target} degrees of freedom cannot be met: these spectra give up to "
            f"{most:.4g} (largest eigenvalue {largest:.3g}); ask for less, or sample more points"
        )
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if measure(middle) > target:
            low = middle
        else:
            high = middle
    return math.exp(0.5 * (low + high))


def _resolution(spectrum: HeadSpectrum) -> float:
    """Error that a float64 eigensolver leaves in each eigenvalue: about J · eps · the largest."""
    return spectrum.n_points * _EPS * float(spectrum.values[0])


def _brackets(
    spectra: Sequence[HeadSpectrum], lams: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lower and upper bounds, each of shape [n_lam, n_spectra]."""
    for spectrum in spectra:
        for lam in lams:
            _check_lam(spectrum, lam)
    width = max(len(s.values) for s in spectra)
    values = np.zeros((len(spectra), width))
    for row, spectrum in zip(values, spectra, strict=True):
        row[: len(spectrum.values)] = spectrum.values
    last = np.array([s.values[-1] for s in spectra])
    tail = np.array([max(s.tail, 0.0) for s in spectra])
    others = np.array([max(s.n_points - len(s.values), 1) for s in spectra])
    known = np.stack([(values / (values + lam)).sum(axis=1) for lam in lams])
    lam_column = np.asarray(lams, dtype=np.float64)[:, None]
    return known + tail / (lam_column + last), known + tail / (lam_column + tail / others)


def _check_lam(spectrum: HeadSpectrum, lam: float) -> None:
    where = f"layer {spectrum.layer_idx}, head {spectrum.head_idx}"
    if not lam > 0:
        raise SpectrumError(f"{where}: lam={lam} must be positive; 2^-8 is a usual value")
    if len(spectrum.values) == 0:
        raise SpectrumError(f"{where}: the spectrum is empty; measure it again")
    if not spectrum.resolved or lam < _resolution(spectrum):
        raise SpectrumError(
            f"{where}: float64 cannot resolve this spectrum at lam={lam:.3g}, since its largest "
            f"eigenvalue is {float(spectrum.values[0]):.3g}; use gram_scale 'trace', or a larger "
            "lam"
        )
