"""Plans: how many features each layer, or each head, of a student gets.

A plan is a value. Two searches that end at the same plan share one training run, which is found
by ``Plan.key``. The budget C is the mean feature dimension per layer, the cost of
arXiv:2507.03340; with S layers a plan of uniform heads hands out S·C features.

Strategies: ``fix`` gives every layer C; ``dof`` gives a layer a share in proportion to the largest
degrees of freedom N among its heads; ``dof_clip`` is that plan cut at d (head_dim);
``dof_head`` gives each head a share in proportion to its own N, never less than a floor.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dofsweep.errors import PlanError

STRATEGIES = ("fix", "dof", "dof_clip", "dof_head")
ROUNDINGS = ("largest_remainder", "paper")


@dataclass(frozen=True)
class Plan:
    """Feature dimension M of every layer and feature head."""

    dims: tuple[tuple[int, ...], ...]
    """[layer][feature head] -> M."""

    def __post_init__(self) -> None:
        heads = {len(layer) for layer in self.dims}
        if not self.dims or len(heads) != 1 or heads == {0}:
            raise PlanError(
                f"a plan needs at least one layer and the same number of heads in each; this has "
                f"{len(self.dims)} layers with {sorted(heads)} heads; give [layer][head] dimensions"
            )
        smallest = min(m for layer in self.dims for m in layer)
        if smallest < 1:
            raise PlanError(
                f"a plan holds the dimension {smallest}; every head needs 1 or more: raise min_dim"
            )

    @property
    def n_layers(self) -> int:
        """S."""
        return len(self.dims)

    @property
    def n_heads(self) -> int:
        """Feature heads of a layer."""
        return len(self.dims[0])

    @property
    def layer_dims(self) -> tuple[int, ...]:
        """Largest M of each layer, length S."""
        return tuple(max(layer) for layer in self.dims)

    @property
    def mean_dim(self) -> float:
        """Mean M over layers and heads: what the budget C bounds."""
        return sum(map(sum, self.dims)) / (self.n_layers * self.n_heads)

    @cached_property
    def key(self) -> str:
        """Short name that two plans share only if their dimensions are equal (SHA-256, 16 hex)."""
        return hashlib.sha256(json.dumps(self.dims).encode()).hexdigest()[:16]

    def state_floats(self, head_dim: int) -> int:
        """Floats of recurrent state of one sequence: S [M, d], Z [M] and a log scale per head.

        Args:
            head_dim: d, channels of a head.
        """
        return sum(m * (head_dim + 1) + 1 for layer in self.dims for m in layer)

    def __str__(self) -> str:
        width = max(len(str(m)) for layer in self.dims for m in layer)
        rows = [f"layer  M per head ({self.n_heads})"]
        for layer_idx, layer in enumerate(self.dims):
            shown = layer[:1] if len(set(layer)) == 1 else layer
            rows.append(f"{layer_idx:5d}  " + " ".join(f"{m:{width}d}" for m in shown))
        return "\n".join([*rows, f" mean  {self.mean_dim:.2f}"])


def make_plan(
    strategy: str,
    *,
    n_layers: int,
    n_heads: int,
    budget: int,
    head_dim: int,
    dof: NDArray[np.float64] | None = None,
    min_dim: int = 1,
    multiple_of: int = 1,
    max_dim: int | None = None,
    rounding: str = "largest_remainder",
    floor: int | None = None,
) -> Plan:
    """Plan of a strategy under a budget.

    The shares are proportional to N, held between min_dim and max_dim, and what the bounds take
    or free is handed to the others in proportion, so that the sum stays S·C (S·H·C over heads).
    Largest remainder then makes them whole: a layer of larger N never gets less, and raising one N
    never lowers its dimension. ``dof_clip`` takes that plan and cuts it at head_dim; what the cut
    frees is saved, not handed on, so its mean is at most C and its state smaller (handed on, a
    budget of C = d would leave nothing but ``fix``).

    Args:
        strategy: one of STRATEGIES.
        n_layers: S.
        n_heads: feature heads of a layer.
        budget: C, mean feature dimension per layer.
        head_dim: d, where ``dof_clip`` cuts.
        dof: N, shape [S, n_heads]; needed by all strategies but ``fix``.
        min_dim: least dimension of any head.
        multiple_of: every dimension is a multiple of this; the sum is then the largest multiple
            that does not exceed S·C (``fix``: C rounded down).
        max_dim: greatest dimension of any head.
        rounding: ``largest_remainder`` (the sum is exact), or ``paper``: each share is rounded on
            its own to the nearest multiple, then clipped, and nothing is handed on, so that the
            mean may miss C.
        floor: least dimension of a head under ``dof_head``; default half the budget, since
            starving one head costs far more than feeding another gains.
    Raises:
        PlanError: an unknown name, dof missing, of the wrong shape or not positive, or bounds that
            the budget cannot meet.
    """
    _check_names(strategy, rounding, floor)
    _check_sizes(n_layers=n_layers, n_heads=n_heads, budget=budget, head_dim=head_dim)
    _check_sizes(min_dim=min_dim, multiple_of=multiple_of)
    if max_dim is not None and max_dim < min_dim:
        raise PlanError(f"max_dim={max_dim} is below min_dim={min_dim}; raise max_dim")
    if strategy == "fix":
        return Plan(((_fixed_dim(budget, min_dim, max_dim, multiple_of),) * n_heads,) * n_layers)

    table = _checked_dof(strategy, dof, n_layers, n_heads)
    lowest = min_dim
    if strategy == "dof_head":
        lowest = max(min_dim, (budget + 1) // 2 if floor is None else floor)
        weights = table.ravel()
    else:
        weights = table.max(axis=1)
    share = _paper_shares if rounding == "paper" else _exact_shares
    dims = share(weights, budget, lowest, max_dim, multiple_of)
    if strategy == "dof_clip":
        dims = np.minimum(dims, _clip_at(head_dim, lowest, multiple_of))
    if strategy == "dof_head":
        return Plan(tuple(tuple(map(int, row)) for row in dims.reshape(n_layers, n_heads)))
    return Plan(tuple((int(m),) * n_heads for m in dims))


def _fixed_dim(budget: int, lowest: int, cap: int | None, step: int) -> int:
    """C, rounded down to a multiple of step."""
    dim = budget // step * step
    if dim < lowest or (cap is not None and dim > cap):
        raise PlanError(
            f"budget={budget} gives every layer {dim}, outside min_dim={lowest} to "
            f"max_dim={cap} in steps of {step}; change the budget or the bounds"
        )
    return dim


def _clip_at(head_dim: int, lowest: int, step: int) -> int:
    """Where ``dof_clip`` cuts: d, rounded down to a multiple of step."""
    cap = head_dim // step * step
    if cap < lowest:
        raise PlanError(
            f"dof_clip gives a layer at most {cap} features (head_dim={head_dim}, "
            f"multiple_of={step}) and min_dim={lowest} asks for more; lower min_dim"
        )
    return cap


def _exact_shares(
    weights: NDArray[np.float64], budget: int, lowest: int, cap: int | None, step: int
) -> NDArray[np.int64]:
    """Whole multiples of step, proportional to the weights within the bounds, of a given sum."""
    total = len(weights) * budget // step
    low = -(-lowest // step)
    high = total if cap is None else cap // step
    if low > high or low * len(weights) > total or high * len(weights) < total:
        raise PlanError(
            f"budget={budget} cannot be shared among {len(weights)} layers or heads that each take "
            f"{lowest} to {cap if cap is not None else 'any'} in steps of {step}; "
            "raise the budget or lower the minimum, or raise max_dim if that is what binds"
        )
    return largest_remainder(_fill(weights, total, low, high), total, high) * step


def _paper_shares(
    weights: NDArray[np.float64], budget: int, lowest: int, cap: int | None, step: int
) -> NDArray[np.int64]:
    """Proportional shares, each rounded to the nearest multiple of step and clipped by itself."""
    shares = weights * (len(weights) * budget / weights.sum())
    dims = np.rint(shares / step).astype(np.int64) * step
    low = -(-lowest // step) * step
    high = None if cap is None else cap // step * step
    if high is not None and high < low:
        raise PlanError(
            f"no multiple of {step} lies between the minimum {lowest} and the maximum {cap}; "
            "lower multiple_of or the minimum, or raise max_dim"
        )
    clipped: NDArray[np.int64] = np.clip(dims, low, high)
    return clipped


def _fill(weights: NDArray[np.float64], total: int, low: int, high: int) -> NDArray[np.float64]:
    """x_i = clip(t w_i, low, high), with the t for which they sum to total (water-filling).

    sum_i x_i is piecewise linear in t and changes slope only where a share meets a bound. So the
    bends on either side of the total are found exactly, and t between them by interpolation.
    """
    bends = np.unique(np.concatenate([low / weights, high / weights]))
    sums = np.clip(bends[:, None] * weights, low, high).sum(axis=1)
    if total <= sums[0]:
        return np.full(len(weights), float(low))
    after = min(int(np.searchsorted(sums, total)), len(bends) - 1)
    before = after - 1
    span = sums[after] - sums[before]
    part = (total - sums[before]) / span if span > 0 else 0.0
    t = bends[before] + part * (bends[after] - bends[before])
    shares: NDArray[np.float64] = np.clip(t * weights, low, high)
    return shares


def largest_remainder(shares: NDArray[np.float64], total: int, high: int) -> NDArray[np.int64]:
    """Whole numbers next to the shares that sum to total; the largest fractions are rounded up.

    Args:
        shares: non-negative, shape [n]; their sum is total up to rounding.
        total: the sum to reach.
        high: no result exceeds this.
    Returns:
        int64, shape [n]; among equal fractions the earlier share is rounded up.
    """
    nearest = np.rint(shares)
    snapped = np.where(np.abs(shares - nearest) < 1e-9 * np.maximum(1.0, nearest), nearest, shares)
    whole = np.floor(snapped).astype(np.int64)
    missing = total - int(whole.sum())
    order = np.argsort(-(snapped - whole), kind="stable")
    order = order[whole[order] < high]
    assert 0 <= missing <= len(order), (total, shares)
    whole[order[:missing]] += 1
    return whole


def _check_names(strategy: str, rounding: str, floor: int | None) -> None:
    if strategy not in STRATEGIES:
        raise PlanError(f"strategy={strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    if rounding not in ROUNDINGS:
        raise PlanError(f"rounding={rounding!r} is unknown; choose one of {', '.join(ROUNDINGS)}")
    if floor is not None and strategy != "dof_head":
        raise PlanError(f"floor={floor} is for dof_head, not {strategy}; use min_dim instead")


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise PlanError(f"{name}={value} must be 1 or more; raise it")


def _checked_dof(
    strategy: str, dof: NDArray[np.float64] | None, n_layers: int, n_heads: int
) -> NDArray[np.float64]:
    if dof is None:
        raise PlanError(
            f"strategy={strategy} needs the degrees of freedom of every layer and head; "
            "measure spectra first, or use the strategy fix"
        )
    table = np.asarray(dof, dtype=np.float64)
    if table.shape != (n_layers, n_heads):
        raise PlanError(
            f"dof has shape {table.shape}, but the model has {n_layers} layers and {n_heads} "
            "feature heads; give one figure for each"
        )
    if not np.isfinite(table).all() or (table <= 0).any():
        bad = np.argwhere(~(np.isfinite(table) & (table > 0)))[0]
        raise PlanError(
            f"the degrees of freedom of layer {bad[0]}, head {bad[1]} are {table[tuple(bad)]}; "
            "they must be positive and finite: measure that spectrum again"
        )
    return table
