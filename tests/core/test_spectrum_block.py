"""The certified fast path against the dense reference, and against spectra made to order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clouds import LAMS, cloud
from hypothesis import given, settings
from hypothesis import strategies as st

from dofsweep.core import spectrum as sp
from dofsweep.core.spectrum_block import certified_top
from dofsweep.records import HeadSpectrum

CASES = [
    # heads, points, channels, size
    (3, 301, 64, 0.5),
    (3, 301, 8, 1.0),
    (2, 401, 80, 2.0),
    (2, 333, 128, 2.0),
    (1, 300, 64, 1.0),  # too flat: ends dense
]


def assert_contained(fast: HeadSpectrum, full: HeadSpectrum, rel_width: float) -> None:
    for lam in LAMS:
        low, high = sp.dof_bracket(fast, lam)
        true = sp.head_dof(full, lam)
        assert low <= true * (1 + 1e-9)
        assert true <= high * (1 + 1e-9)
        assert high - low <= rel_width * true * (1 + 1e-9)


@pytest.mark.parametrize(("n_heads", "n_points", "head_dim", "size"), CASES)
@pytest.mark.parametrize("rel_width", [0.05, 0.01])
def test_the_bracket_contains_the_truth(
    n_heads: int, n_points: int, head_dim: int, size: float, rel_width: float
) -> None:
    points = cloud(n_heads, n_points, head_dim, size=size)
    how = {"n_queries": n_points // 2, "layer_idx": 5}
    fast = sp.head_spectra(points, head_dim**-0.5, lam_min=LAMS[-1], rel_width=rel_width, **how)
    full = sp.head_spectra_reference(points, head_dim**-0.5, **how)
    assert [(s.layer_idx, s.head_idx, s.n_points) for s in fast] == [
        (5, h, n_points) for h in range(n_heads)
    ]
    for one, other in zip(fast, full, strict=True):
        assert_contained(one, other, rel_width)
        assert (one.values <= other.values[: len(one.values)] * (1 + 1e-9) + 1e-15).all()
        assert one.values.sum() + one.tail == pytest.approx(1.0, rel=1e-10)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 1000), st.integers(97, 220), st.floats(0.2, 8.0), st.sampled_from([1, 3, 8, 64])
)
def test_the_bracket_holds_for_clouds_of_any_size(
    seed: int, n_points: int, size: float, head_dim: int
) -> None:
    """From flat spectra to those whose end drowns in the rounding of float32."""
    points = cloud(1, n_points, head_dim, seed=seed, size=size)
    (fast,) = sp.head_spectra(points, 0.25, n_queries=n_points // 2, lam_min=2**-10)
    (full,) = sp.head_spectra_reference(points, 0.25, n_queries=n_points // 2)
    assert_contained(fast, full, 0.01)


def test_identical_points_need_one_value() -> None:
    points = torch.ones(1, 200, 8)
    (fast,) = sp.head_spectra(points, 0.25, n_queries=100, lam_min=2**-10)
    assert fast.values == pytest.approx([1.0])
    assert fast.tail == 0.0


def test_the_fast_path_is_taken_and_is_short() -> None:
    fast = sp.head_spectra(cloud(3, 301, 64, size=0.5), 0.125, n_queries=150, lam_min=2**-10)
    assert all(len(s.values) <= 100 and s.tail > 0 for s in fast)


def test_the_fast_path_serves_the_softmax_kernel() -> None:
    points = cloud(2, 601, 16)
    how = {"n_queries": 280, "kernel": "softmax"}
    fast = sp.head_spectra(points, 0.25, lam_min=2**-10, **how)
    full = sp.head_spectra_reference(points, 0.25, **how)
    for one, other in zip(fast, full, strict=True):
        assert len(one.values) < 280
        assert_contained(one, other, 0.01)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 1000),
    st.sampled_from(["power", "steps", "exponential", "flat", "low rank"]),
    st.integers(0, 12),
)
def test_certificates_hold_for_any_shape_of_spectrum(seed: int, shape: str, lam_log: int) -> None:
    """Spectra made to order, with clusters and plateaus where subspace iteration stalls."""
    n, lam = 150, 2.0**-lam_log
    j = torch.arange(1, n + 1, dtype=torch.float64)
    values = {
        "power": j**-2,
        "steps": 4.0 ** -(j // 12),
        "exponential": torch.exp(-0.3 * j),
        "flat": torch.cat([torch.ones(20), torch.full((n - 20,), 1e-3)]).double(),
        "low rank": torch.cat([torch.rand(9) + 0.5, torch.zeros(n - 9)]).double(),
    }[shape]
    values = (values / values.sum()).sort(descending=True).values
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    sigma = (basis * values) @ basis.T
    top = certified_top(
        sigma, sigma.float(), lam_min=lam, rel_width=0.02, max_rank=120, generator=generator
    )
    if top is None:  # no proof found: the caller decomposes densely
        return
    full = HeadSpectrum(0, 0, values.numpy(), 0.0, n)
    fast = HeadSpectrum(0, 0, top.values.numpy(), top.tail, n)
    for factor in (1.0, 1.7, 10.0, 1000.0):
        low, high = sp.dof_bracket(fast, lam * factor)
        true = sp.head_dof(full, lam * factor)
        assert low <= true * (1 + 1e-9)
        assert true <= high * (1 + 1e-9)
        assert high - low <= 0.02 * true * (1 + 1e-9)


def test_a_short_block_ends_in_the_dense_decomposition() -> None:
    points = cloud(1, 120, 64, size=0.5)
    (fast,) = sp.head_spectra(points, 0.125, n_queries=60, lam_min=2**-10, max_rank=2)
    (full,) = sp.head_spectra_reference(points, 0.125, n_queries=60)
    assert fast.values == pytest.approx(full.values, abs=1e-15)
    assert fast.tail == 0.0


def test_the_fast_path_repeats() -> None:
    points = cloud(2, 300, 16)
    one, two = (
        sp.head_spectra(points, 0.25, n_queries=150, lam_min=2**-8, generator=g)
        for g in (None, torch.Generator().manual_seed(0))
    )
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a.values, b.values)
        assert a.tail == b.tail
