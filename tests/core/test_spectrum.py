"""Spectra by the dense reference: closed forms and properties; tables, inverse, intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from clouds import LAMS, cloud
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dofsweep.core import spectrum as sp
from dofsweep.core.kernel import log_gram
from dofsweep.errors import SpectrumError
from dofsweep.records import HeadSpectrum


def dof_by_solve(sigma: Tensor, lam: float) -> float:
    """tr Σ(Σ + λI)^-1 by a linear solve, without eigenvalues."""
    shifted = sigma.numpy() + lam * np.eye(len(sigma))
    return float(np.trace(np.linalg.solve(shifted, sigma.numpy())))


def exact(points: Tensor, scale: float, lam: float, **how: str) -> float:
    half = points.shape[1] // 2
    return sp.head_dof(sp.head_spectra_reference(points[:1], scale, n_queries=half, **how)[0], lam)


# --- closed forms -------------------------------------------------------------------------------


def test_orthogonal_huge_points_give_the_identity() -> None:
    points = 8.0 * torch.eye(16)[None]
    lam = 2**-4
    # exp(64) on the diagonal, 1 off it: Σ = I/16 on the trace scale.
    want = 16 * (1 / 16) / (1 / 16 + lam)
    assert exact(points, 1.0, lam) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("gram_scale", "largest"), [("trace", 1.0), ("mean", math.e), ("raw", 9 * math.e)]
)
def test_identical_points_have_rank_one(gram_scale: str, largest: float) -> None:
    points = torch.full((1, 9, 4), 0.5)
    lam = 0.25
    got = exact(points, 1.0, lam, gram_scale=gram_scale)
    assert got == pytest.approx(largest / (largest + lam), rel=1e-9)


def test_gaussian_points_have_the_spectrum_of_mehlers_formula() -> None:
    """One channel, x ~ N(0, 1), 0 < s < 1/2: the operator's eigenvalues are h^-1/2 (s/h)^k.

    Here h = 1/2 + sqrt(1/4 − s²) and k = 0, 1, …: Mehler's expansion of the Gaussian kernel in
    Hermite functions, with x rescaled. Their sum is the mean of exp(s x²), that is 1/sqrt(1 − 2s).
    The points are the quantiles of N(0, 1), so that no sampling noise hides a wrong factor.
    """
    s, n_points, lam = 0.15, 2000, 2**-4
    half = 0.5 + math.sqrt(0.25 - s * s)
    values = half**-0.5 * (s / half) ** np.arange(60)
    assert values.sum() == pytest.approx((1 - 2 * s) ** -0.5, rel=1e-12)
    want = (values / (values + lam)).sum()
    x = torch.special.ndtri((torch.arange(n_points, dtype=torch.float64) + 0.5) / n_points)
    assert exact(x[None, :, None], s, lam, gram_scale="mean") == pytest.approx(want, rel=5e-3)


def test_softmax_kernel_of_uniform_rows_has_rank_one() -> None:
    points = torch.zeros(1, 12, 4)
    # P has all entries 1/8: squared singular value 4/8, over 4 rows.
    (head,) = sp.head_spectra_reference(points, 1.0, n_queries=4, kernel="softmax")
    assert head.values[0] == pytest.approx(1 / 8)
    assert head.values[1:] == pytest.approx(np.zeros(3), abs=1e-15)


# --- definitions --------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("gram_scale", sp.GRAM_SCALES)
def test_reference_matches_a_linear_solve(head_dim: int, gram_scale: str) -> None:
    points = cloud(2, 61, head_dim, size=0.5)
    spectra = sp.head_spectra_reference(
        points, 0.2, n_queries=30, layer_idx=3, gram_scale=gram_scale
    )
    for head, spectrum in enumerate(spectra):
        gram = log_gram(points[head], points[head], 0.2).exp()
        divisor = {"trace": gram.trace(), "mean": 61.0, "raw": 1.0}[gram_scale]
        assert sp.head_dof(spectrum, 0.01) == pytest.approx(
            dof_by_solve(gram / divisor, 0.01), rel=1e-8
        )
        assert (spectrum.layer_idx, spectrum.head_idx, spectrum.n_points) == (3, head, 61)
        assert (np.diff(spectrum.values) <= 0).all()


def test_softmax_kernel_is_the_squared_singular_values() -> None:
    points = cloud(1, 41, 16)
    for n_queries in (11, 30):
        (head,) = sp.head_spectra_reference(points, 0.25, n_queries=n_queries, kernel="softmax")
        rows = log_gram(points[0, :n_queries], points[0, n_queries:], 0.25).softmax(-1)
        want = torch.linalg.svdvals(rows) ** 2 / n_queries
        assert head.values == pytest.approx(want.numpy(), abs=1e-14)


def test_degrees_of_freedom_broadcasts() -> None:
    values = torch.tensor([[1.0, 0.5, 0.0], [3.0, 3.0, 3.0]])
    got = sp.degrees_of_freedom(values, torch.tensor([0.5, 1.0]))
    assert got.tolist() == pytest.approx([2 / 3 + 1 / 2, 9 / 4])
    assert sp.degrees_of_freedom(values, 1.0).tolist() == pytest.approx([1 / 2 + 1 / 3, 9 / 4])


# --- properties ---------------------------------------------------------------------------------

spectra_values = st.lists(st.floats(0.0, 1e3), min_size=1, max_size=20).filter(lambda v: max(v) > 0)


@settings(deadline=None, max_examples=100)
@given(spectra_values, st.floats(1e-6, 1e2), st.floats(1.01, 100.0))
def test_dof_falls_with_lam_and_stays_below_the_rank(
    values: list[float], lam: float, factor: float
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    small, large = (float(sp.degrees_of_freedom(tensor, x)) for x in (lam, lam * factor))
    assert 0 <= large <= small <= int((tensor > 0).sum()) + 1e-9


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.integers(3, 21), st.sampled_from(LAMS))
def test_repeating_every_point_changes_nothing(seed: int, n_points: int, lam: float) -> None:
    points = cloud(1, n_points, 8, seed=seed, size=0.5)
    twice = points.repeat(1, 2, 1)
    for gram_scale in ("trace", "mean"):
        once = exact(points, 0.3, lam, gram_scale=gram_scale)
        again = exact(twice, 0.3, lam, gram_scale=gram_scale)
        assert again == pytest.approx(once, rel=1e-8)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.sampled_from(LAMS))
def test_the_scales_differ_by_their_factor_alone(seed: int, lam: float) -> None:
    points = cloud(1, 15, 8, seed=seed, size=0.5)
    trace = float(torch.diagonal(log_gram(points[0], points[0], 0.3)).exp().sum())
    raw = exact(points, 0.3, lam * trace, gram_scale="raw")
    assert exact(points, 0.3, lam, gram_scale="trace") == pytest.approx(raw, rel=1e-9)
    assert exact(points, 0.3, lam * trace / 15, gram_scale="mean") == pytest.approx(raw, rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.floats(-3.0, 3.0))
def test_softmax_kernel_ignores_a_shift_of_the_keys(seed: int, shift: float) -> None:
    points = cloud(1, 20, 8, seed=seed)
    moved = points.clone()
    moved[:, 8:] += shift
    one, other = (
        sp.head_spectra_reference(p, 0.3, n_queries=8, kernel="softmax")[0] for p in (points, moved)
    )
    assert sp.head_dof(one, 2**-8) == pytest.approx(sp.head_dof(other, 2**-8), rel=1e-4)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 30), st.sampled_from(LAMS))
def test_leverage_scores_sum_to_dof(seed: int, n_points: int, lam: float) -> None:
    points = cloud(2, n_points, 8, seed=seed)
    scores = sp.leverage_scores(points, 0.3, lam)
    assert scores.shape == (2, n_points)
    assert float(scores.min()) >= 0
    assert float(scores[0].sum()) == pytest.approx(exact(points, 0.3, lam), rel=1e-8)


# --- tables, inverse, interval ------------------------------------------------------------------


def made(layer: int, head: int, *values: float, tail: float = 0.0) -> HeadSpectrum:
    return HeadSpectrum(layer, head, np.array(values), tail, 64)


def test_table_holds_the_middle_of_every_bracket() -> None:
    spectra = [
        made(layer, head, 0.5, 0.1 * (layer + 1), 0.01 * (head + 1), tail=0.05)
        for layer in (4, 2, 7) for head in (1, 0)
    ]  # fmt: skip
    table = sp.dof_table(spectra, LAMS)
    assert table.shape == (len(LAMS), 3, 2)
    by_place = {(s.layer_idx, s.head_idx): s for s in spectra}
    for i, lam in enumerate(LAMS):
        for j, layer in enumerate((2, 4, 7)):
            for head in (0, 1):
                want = sp.head_dof(by_place[layer, head], lam)
                assert table[i, j, head] == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("drop", [slice(1, None), slice(0, 0)])
def test_table_refuses_a_missing_head(drop: slice) -> None:
    spectra = [made(layer, head, 1.0) for layer in (0, 1) for head in (0, 1)][drop]
    with pytest.raises(SpectrumError, match="measure the missing ones"):
        sp.dof_table(spectra, [0.1])


@settings(deadline=None, max_examples=30)
@given(st.floats(0.05, 2.9))
def test_lam_for_dof_inverts_head_dof(target: float) -> None:
    head = made(0, 0, 0.6, 0.3, 0.1)
    assert sp.head_dof(head, sp.lam_for_dof(head, target)) == pytest.approx(target, rel=1e-9)


def test_lam_for_dof_of_a_model_meets_the_mean_of_layer_maxima() -> None:
    spectra = [made(0, 0, 0.9, 0.1), made(0, 1, 0.5, 0.5), made(1, 0, 1.0), made(1, 1, 0.7, 0.3)]
    lam = sp.lam_for_dof(spectra, 1.5)
    assert sp.dof_table(spectra, [lam])[0].max(axis=1).mean() == pytest.approx(1.5, rel=1e-9)


@pytest.mark.parametrize("target", [0.0, -1.0, 3.5, float("nan")])
def test_lam_for_dof_refuses_what_cannot_be_met(target: float) -> None:
    with pytest.raises(SpectrumError, match="cannot be met"):
        sp.lam_for_dof(made(0, 0, 0.6, 0.3, 0.1), target)


def test_interval_covers_fresh_samples_about_as_often_as_it_says() -> None:
    """90 % intervals from single samples against N of the mean sample, on 60 samples."""
    n_points, scale, lam = 120, 0.3, 2**-6
    points = cloud(60, n_points, 8, seed=3, size=0.3)
    full = torch.tensor([exact(points[h : h + 1], scale, lam) for h in range(60)])
    low, high = sp.bootstrap_dof(
        points, scale, lam, n_queries=60, n_boot=80, generator=torch.Generator().manual_seed(0)
    )
    assert bool((low < full).all())
    assert bool((full < high).all())
    covered = ((low <= full.mean()) & (full.mean() <= high)).double().mean()
    assert 0.78 <= float(covered) <= 0.99
    half_width = ((high - low) / 2).mean()  # of a Gaussian: 1.645 standard deviations
    assert float(half_width) == pytest.approx(1.645 * float(full.std()), rel=0.25)


def test_interval_serves_odd_sizes_and_the_softmax_kernel() -> None:
    points = cloud(2, 41, 8)
    low, high = sp.bootstrap_dof(
        points, 0.3, 2**-6, n_queries=19, n_boot=20, kernel="softmax",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert low.shape == high.shape == (2,)
    assert bool((low > 0).all())
    assert bool((low < high).all())


# --- what cannot be answered --------------------------------------------------------------------


def test_huge_logits_are_marked_and_refused() -> None:
    points = torch.eye(4)[None] * 100.0
    points[0, 3] *= 0.001
    for gram_scale in ("mean", "raw"):
        (head,) = sp.head_spectra(
            points, 1.0, n_queries=2, lam_min=2**-8, gram_scale=gram_scale, layer_idx=2
        )
        assert np.isfinite(head.values).all()
        assert not head.resolved
        with pytest.raises(SpectrumError, match="layer 2, head 0.*gram_scale 'trace'"):
            sp.head_dof(head, 2**-8)
    (head,) = sp.head_spectra(points, 1.0, n_queries=2, lam_min=2**-8)
    assert head.resolved
    assert sp.head_dof(head, 2**-8) == pytest.approx(3 / (1 + 3 * 2**-8), rel=1e-9)


def test_a_spread_beyond_float64_is_refused_when_lam_is_known() -> None:
    points = torch.eye(4)[None] * 7.0  # eigenvalues about e^49: λ = 2^-8 is 1e-24 of that
    (head,) = sp.head_spectra_reference(points, 1.0, n_queries=2, gram_scale="raw")
    assert head.resolved
    with pytest.raises(SpectrumError, match="larger"):
        sp.head_dof(head, 2**-8)
    assert sp.head_dof(head, 1e21) == pytest.approx(4 / (1 + 1e21 / math.exp(49)), rel=1e-9)
    with pytest.raises(SpectrumError, match="larger"):
        sp.leverage_scores(points, 1.0, 2**-8, gram_scale="raw")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_points_that_are_not_finite_name_layer_and_head(value: float) -> None:
    points = cloud(3, 10, 4)
    points[1, 2, 3] = value
    with pytest.raises(SpectrumError, match="layer 7, head 1"):
        sp.head_spectra(points, 0.5, n_queries=5, lam_min=0.1, layer_idx=7)
    with pytest.raises(SpectrumError, match="layer 7, head 1"):
        sp.head_spectra_reference(points, 0.5, n_queries=5, layer_idx=7)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_queries": 11}, "sample more points"),
        ({"n_queries": 10, "kernel": "softmax"}, "takes 1 to 9"),
        ({"n_queries": 0, "kernel": "softmax"}, "takes 1 to 9"),
        ({"gram_scale": "best"}, "choose one of"),
        ({"kernel": "rbf"}, "choose one of"),
        ({"kernel": "softmax", "gram_scale": "mean"}, "leave gram_scale at 'trace'"),
        ({"lam_min": 0.0}, "must be positive"),
        ({"rel_width": -0.1}, "must be positive"),
    ],
)
def test_requests_that_make_no_sense(change: dict[str, object], match: str) -> None:
    call = {"n_queries": 5, "lam_min": 0.1, **change}
    with pytest.raises(SpectrumError, match=match):
        sp.head_spectra(cloud(1, 10, 4), 0.5, **call)  # type: ignore[arg-type]


def test_bad_shapes_and_scales() -> None:
    with pytest.raises(SpectrumError, match="heads, points, channels"):
        sp.head_spectra_reference(torch.zeros(4, 4), 0.5, n_queries=2)
    with pytest.raises(SpectrumError, match="attention scale"):
        sp.head_spectra_reference(torch.zeros(1, 4, 4), 0.0, n_queries=2)
    with pytest.raises(SpectrumError, match="2 points or more"):
        sp.bootstrap_dof(
            cloud(1, 10, 4), 0.5, 0.1, n_queries=1, n_boot=5, generator=torch.Generator()
        )


@pytest.mark.parametrize("lam", [0.0, -1.0, float("nan")])
def test_lam_must_be_positive(lam: float) -> None:
    with pytest.raises(SpectrumError, match="must be positive"):
        sp.degrees_of_freedom(torch.ones(3), lam)
    with pytest.raises(SpectrumError, match="must be positive"):
        sp.dof_bracket(made(0, 0, 1.0), lam)
    with pytest.raises(SpectrumError, match="must be positive"):
        sp.leverage_scores(cloud(1, 5, 4), 0.5, lam)


def test_negative_eigenvalues_beyond_rounding_are_refused() -> None:
    assert float(sp.degrees_of_freedom(torch.tensor([1.0, -1e-12]), 1.0)) == 0.5
    with pytest.raises(SpectrumError, match="none below zero"):
        sp.degrees_of_freedom(torch.tensor([1.0, -1e-3]), 1.0)
