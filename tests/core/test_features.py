"""Random features: unbiased, and better where they claim to be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dofsweep.core.features import (
    gaussian_features,
    leverage_features,
    orthogonal_features,
    prf_log_features,
)
from dofsweep.core.kernel import log_gram
from dofsweep.errors import StudentError

DRAWS = {"gaussian": gaussian_features, "orthogonal": orthogonal_features}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kernel_estimate(
    q: Tensor, k: Tensor, z: Tensor, scale: float, log_weight: Tensor | None = None
) -> Tensor:
    """Mean over features of φ(q)φ(k), shape [H, Tq, Tk]; float64."""
    log_q = prf_log_features(q.double(), z, scale)
    log_k = prf_log_features(k.double(), z, scale, log_weight)
    return log_q.exp() @ log_k.exp().transpose(-1, -2) / z.shape[1]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_the_estimate_is_unbiased(name: str, head_dim: int) -> None:
    scale, n_repeats = head_dim**-0.5, 1500
    q, k = 0.5 * torch.randn(2, 1, 1, head_dim, generator=generator(1))
    # One repeat is one head: independent draws of M = d + 3 features, a whole block and a cut one.
    z = DRAWS[name](n_repeats, head_dim + 3, head_dim, generator=generator(2))
    estimate = kernel_estimate(q, k, z, scale).flatten()
    truth = float(log_gram(q[0], k[0], scale).exp())
    stderr = float(estimate.std() / math.sqrt(n_repeats))
    assert abs(float(estimate.mean()) - truth) < 4 * stderr
    assert stderr < 0.1 * truth  # so that the line above can fail


def test_orthogonal_features_have_no_more_variance() -> None:
    head_dim, scale = 16, 0.25
    q, k = 0.5 * torch.randn(2, 20, head_dim, generator=generator(3))
    truth = log_gram(q, k, scale).exp()
    errors = {
        name: (kernel_estimate(q, k, draw(3000, head_dim, head_dim, generator=generator(4)), scale)
               / truth - 1).square().mean()
        for name, draw in DRAWS.items()
    }  # fmt: skip
    assert errors["orthogonal"] < errors["gaussian"]


def test_orthogonal_blocks_are_orthogonal_and_their_lengths_chi() -> None:
    z = orthogonal_features(500, 24, 16, generator=generator(5)).double()
    gram = z[:, :16] @ z[:, :16].transpose(-1, -2)
    lengths = torch.diagonal(gram, dim1=-2, dim2=-1)
    off = gram - torch.diag_embed(lengths)
    assert float(off.abs().max()) < 1e-4
    # χ²_16 has mean 16 and variance 32.
    assert float(lengths.mean()) == pytest.approx(16, abs=4 * math.sqrt(32 / 8000))
    assert float(lengths.var()) == pytest.approx(32, rel=0.15)
    assert z.shape == (500, 24, 16)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_repeats_with_its_seed(name: str) -> None:
    one, two, other = (DRAWS[name](2, 5, 8, generator=generator(s)) for s in (6, 6, 7))
    assert one.dtype == torch.float32
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def clustered(n_points: int = 96, head_dim: int = 8) -> Tensor:
    """Points in four tight clusters away from the origin, [1, J, d]."""
    centres = torch.randn(4, head_dim, generator=generator(8))
    noise = 0.15 * torch.randn(n_points, head_dim, generator=generator(9))
    return (centres.repeat_interleave(n_points // 4, 0) + noise)[None]


def relative_error(points: Tensor, z: Tensor, log_weight: Tensor | None, scale: float) -> float:
    truth = log_gram(points, points, scale).exp()
    estimate = kernel_estimate(points, points, z, scale, log_weight)
    return float((estimate - truth).norm() / truth.norm())


def test_leverage_features_beat_gaussian_ones_on_clusters() -> None:
    points, scale, n_features = clustered(), 8**-0.5, 24
    errors: dict[str, list[float]] = {"gaussian": [], "leverage": []}
    for seed in range(12):
        z, log_weight = leverage_features(
            points, scale, feature_dim=n_features, lam=2**-6, n_candidates=2048,
            generator=generator(seed),
        )  # fmt: skip
        errors["leverage"].append(relative_error(points, z, log_weight, scale))
        plain = gaussian_features(1, n_features, 8, generator=generator(seed))
        errors["gaussian"].append(relative_error(points, plain, None, scale))
    mean = {name: sum(values) / len(values) for name, values in errors.items()}
    assert mean["leverage"] < 0.7 * mean["gaussian"]


def test_leverage_resampling_is_unbiased() -> None:
    points, scale, n_repeats = 0.7 * clustered(16), 8**-0.5, 400
    z, log_weight = leverage_features(
        points.expand(n_repeats, -1, -1), scale, feature_dim=16, lam=2**-4, n_candidates=128,
        generator=generator(10),
    )  # fmt: skip
    q = points[:, :1]
    estimate = kernel_estimate(q, points[:, 5:6], z, scale, log_weight).flatten()
    truth = float(log_gram(q[0], points[0, 5:6], scale).exp())
    stderr = float(estimate.std() / math.sqrt(n_repeats))
    assert abs(float(estimate.mean()) - truth) < 4 * stderr
    assert stderr < 0.05 * truth


def test_leverage_features_survive_huge_norms() -> None:
    z, log_weight = leverage_features(
        60 * clustered(), 1.0, feature_dim=8, lam=2**-8, n_candidates=32, generator=generator()
    )
    assert torch.isfinite(z).all()
    assert torch.isfinite(log_weight).all()


@pytest.mark.parametrize(
    ("change", "match"), [({"lam": 0.0}, "raise it"), ({"n_candidates": 3}, "ask for 16")]
)
def test_leverage_features_refuse_bad_numbers(change: dict[str, float], match: str) -> None:
    call = {"feature_dim": 4, "lam": 0.1, "n_candidates": 16, **change}
    with pytest.raises(StudentError, match=match):
        leverage_features(clustered(), 1.0, generator=generator(), **call)  # type: ignore[arg-type]


def test_log_features_are_the_formula() -> None:
    x = torch.randn(2, 3, 5, 8, generator=generator(11))
    z = gaussian_features(3, 6, 8, generator=generator(12))
    log_weight = torch.randn(3, 6, generator=generator(13))
    got = prf_log_features(x, z, 0.5, log_weight)
    assert got.shape == (2, 3, 5, 6)
    b, h, t, m = 1, 2, 4, 3
    point = x[b, h, t]
    want = math.sqrt(0.5) * (z[h, m] @ point) - 0.25 * point @ point + log_weight[h, m]
    assert float(got[b, h, t, m]) == pytest.approx(float(want), rel=1e-5)
    bare = prf_log_features(x, z, 0.5, log_weight, half_norm=False)
    torch.testing.assert_close(bare - got, 0.25 * x.square().sum(-1, keepdim=True).expand_as(got))


def test_half_precision_is_taken_up_and_double_kept() -> None:
    x = torch.randn(1, 4, 8, generator=generator(14))
    z = gaussian_features(1, 3, 8, generator=generator(15))
    assert prf_log_features(x.bfloat16(), z, 0.5).dtype == torch.float32
    assert prf_log_features(x.double(), z, 0.5).dtype == torch.float64
