"""Plans: exact sums, bounds, monotonicity, messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dofsweep.core.plan import STRATEGIES, Plan, largest_remainder, make_plan
from dofsweep.errors import PlanError

SHAPE = {"n_layers": 4, "n_heads": 3, "head_dim": 64}


def table(*per_layer: float, n_heads: int = 3) -> np.ndarray:
    """DoF whose maximum over heads is given; the other heads have half of it."""
    dof = np.repeat(np.array(per_layer)[:, None] / 2, n_heads, axis=1)
    dof[:, 1] *= 2
    return dof


dofs = st.lists(st.floats(0.01, 1e4), min_size=12, max_size=12).map(
    lambda xs: np.array(xs).reshape(4, 3)
)


def test_fix_gives_every_head_the_budget() -> None:
    assert make_plan("fix", budget=64, **SHAPE).dims == ((64,) * 3,) * 4


def test_dof_is_proportional_to_the_largest_head_of_a_layer() -> None:
    plan = make_plan("dof", budget=10, dof=table(1, 2, 3, 4), **SHAPE)
    assert plan.layer_dims == (4, 8, 12, 16)
    assert all(len(set(layer)) == 1 for layer in plan.dims)


def test_the_largest_fraction_is_rounded_up_first() -> None:
    shares = np.array([1.5, 2.25, 3.9, 2.35])
    assert largest_remainder(shares, total=10, high=99).tolist() == [2, 2, 4, 2]


@settings(deadline=None, max_examples=200)
@given(dofs, st.integers(4, 200), st.integers(1, 9))
def test_dof_clip_is_dof_cut_at_head_dim(dof: np.ndarray, budget: int, step: int) -> None:
    if budget < 2 * step:
        return
    whole, cut = (
        make_plan(name, budget=budget, dof=dof, multiple_of=step, **SHAPE)
        for name in ("dof", "dof_clip")
    )
    most = 64 // step * step
    assert cut.layer_dims == tuple(min(m, most) for m in whole.layer_dims)
    assert cut.mean_dim <= budget


def test_paper_rounding_clips_and_rounds_each_layer_alone() -> None:
    plan = make_plan("dof_clip", budget=32, dof=table(1, 1, 1, 97), rounding="paper", **SHAPE)
    assert plan.layer_dims == (1, 1, 1, 64)
    thirds = make_plan("dof", budget=5, dof=table(1, 1, 1, 3), rounding="paper", **SHAPE)
    assert thirds.layer_dims == (3, 3, 3, 10)
    assert thirds.mean_dim == pytest.approx(4.75)


def test_dof_head_keeps_the_floor_and_the_sum() -> None:
    dof = np.full((4, 3), 1.0)
    dof[0, 0] = 1000.0
    plan = make_plan("dof_head", budget=16, dof=dof, **SHAPE)
    flat = [m for layer in plan.dims for m in layer]
    assert min(flat) == 8  # half the budget, unless told otherwise
    assert sum(flat) == 4 * 3 * 16
    assert flat[0] == 4 * 3 * 16 - 11 * 8
    lower = make_plan("dof_head", budget=16, dof=dof, floor=4, **SHAPE)
    assert min(m for layer in lower.dims for m in layer) == 4


@settings(deadline=None, max_examples=200)
@given(dofs, st.integers(4, 200), st.sampled_from(["dof", "dof_head"]))
def test_the_sum_is_exact(dof: np.ndarray, budget: int, strategy: str) -> None:
    plan = make_plan(strategy, budget=budget, dof=dof, **SHAPE)
    assert sum(map(sum, plan.dims)) == 4 * 3 * budget
    assert plan.mean_dim == budget


@settings(deadline=None, max_examples=200)
@given(dofs, st.integers(1, 64), st.integers(1, 9))
def test_bounds_and_multiples_hold(dof: np.ndarray, budget: int, step: int) -> None:
    if 4 * budget // step < 4 or 64 // step * 4 < 4 * budget // step:
        return
    plan = make_plan("dof", budget=budget, dof=dof, multiple_of=step, max_dim=64, **SHAPE)
    assert max(plan.layer_dims) <= 64
    assert all(m % step == 0 and m >= 1 for m in plan.layer_dims)
    assert sum(plan.layer_dims) == 4 * budget // step * step


@settings(deadline=None, max_examples=200)
@given(dofs, st.sampled_from(["dof", "dof_clip"]), st.sampled_from(["largest_remainder", "paper"]))
def test_more_dof_never_means_fewer_features(dof: np.ndarray, strategy: str, rounding: str) -> None:
    plan = make_plan(strategy, budget=40, dof=dof, rounding=rounding, **SHAPE)
    order = np.argsort(dof.max(axis=1), kind="stable")
    peaks = dof.max(axis=1)[order]
    dims = np.array(plan.layer_dims)[order]
    assert (np.diff(dims)[np.diff(peaks) > 1e-6 * peaks[:-1]] >= 0).all()


@settings(deadline=None, max_examples=200)
@given(dofs, st.integers(0, 3), st.floats(1.001, 50.0))
def test_raising_one_dof_never_lowers_its_layer(dof: np.ndarray, layer: int, factor: float) -> None:
    before = make_plan("dof", budget=20, dof=dof, **SHAPE)
    more = dof.copy()
    more[layer] *= factor
    after = make_plan("dof", budget=20, dof=more, **SHAPE)
    assert after.layer_dims[layer] >= before.layer_dims[layer]


@settings(deadline=None, max_examples=50)
@given(dofs, st.floats(1e-3, 1e3))
def test_the_unit_of_dof_does_not_matter(dof: np.ndarray, unit: float) -> None:
    one, other = (make_plan("dof", budget=64, dof=d, **SHAPE) for d in (dof, dof * unit))
    assert np.abs(np.subtract(one.layer_dims, other.layer_dims)).max() <= 1


def test_plans_are_values() -> None:
    one = make_plan("fix", budget=8, **SHAPE)
    other = make_plan("dof", budget=8, dof=np.ones((4, 3)), **SHAPE)
    assert one == other
    assert {one: 1}[other] == 1
    assert one.key == other.key
    assert one.key != make_plan("fix", budget=9, **SHAPE).key
    assert one.key != Plan(((8,) * 4,) * 3).key


def test_state_counts_feature_sums_normaliser_and_log_scale() -> None:
    assert Plan(((2, 3), (5, 1))).state_floats(head_dim=4) == (2 + 3 + 5 + 1) * 5 + 4


def test_a_plan_prints_as_a_table() -> None:
    lines = str(Plan(((8, 8), (120, 4)))).splitlines()
    assert lines[1:] == ["    0    8", "    1  120   4", " mean  35.00"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"strategy": "best"}, "choose one of fix, dof"),
        ({"rounding": "up"}, "choose one of largest_remainder"),
        ({"budget": 0}, "raise it"),
        ({"dof": None}, "measure spectra first"),
        ({"dof": np.ones((3, 3))}, "4 layers and 3"),
        ({"dof": np.zeros((4, 3))}, "positive and finite"),
        ({"dof": np.full((4, 3), np.nan)}, "measure that spectrum again"),
        (
            {"strategy": "dof_clip", "multiple_of": 50, "min_dim": 51, "budget": 150},
            "lower min_dim",
        ),
        ({"min_dim": 65}, "raise the budget or lower the minimum"),
        ({"max_dim": 63}, "raise max_dim"),
        ({"max_dim": 3, "min_dim": 4}, "raise max_dim"),
        ({"floor": 3}, "use min_dim instead"),
        ({"strategy": "fix", "multiple_of": 100}, "change the budget or the bounds"),
    ],
)
def test_messages_say_what_to_do(change: dict[str, object], match: str) -> None:
    call = {"strategy": "dof", "budget": 64, "dof": np.ones((4, 3)), **SHAPE, **change}
    with pytest.raises(PlanError, match=match):
        make_plan(**call)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [(), ((),), ((1, 2), (3,)), ((1, 0),)])
def test_a_malformed_plan_is_refused(dims: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(PlanError):
        Plan(dims)


def test_every_strategy_can_be_planned() -> None:
    for strategy in STRATEGIES:
        plan = make_plan(strategy, budget=64, dof=np.ones((4, 3)), **SHAPE)
        assert plan.layer_dims == (64,) * 4
