"""How much memory students take in training, and how many fit into one pass."""

from __future__ import annotations

from collections.abc import Sequence

from dofsweep.core.plan import Plan
from dofsweep.errors import DistillError
from dofsweep.records import ModelShape

FLOAT_BYTES = 4
PER_PARAMETER = 4
"""Floats that a parameter takes: itself, its gradient, and two moments of Adam."""
PER_FEATURE = 6
"""Floats that a query's or key's feature takes at most: its log, its exponential, and gradients."""


def student_bytes(plan: Plan, shape: ModelShape, tokens: int, *, untied: bool) -> int:
    """Memory that one student takes in layerwise training, at most.

    Parameters are there for all layers at once, features only for the widest layer.

    Args:
        tokens: of one micro batch, over its sequences.
        untied: queries have feature vectors of their own.
    """
    heads = plan.n_heads
    padded = [max(layer) for layer in plan.dims]  # heads of a layer are padded to the widest
    vectors = heads + (shape.n_heads if untied else 0)
    weights = shape.n_heads if untied else heads
    parameters = sum(m * (vectors * shape.head_dim + weights) for m in padded)
    features = max(padded) * tokens * (shape.n_heads + heads)
    return FLOAT_BYTES * (PER_PARAMETER * parameters + PER_FEATURE * features)


def split_by_memory(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Indices of students in batches that fit, in order; few batches of about equal size.

    Args:
        sizes: bytes of each student.
        room: bytes there are for them.
    Raises:
        DistillError: one student alone does not fit.
    """
    if max(sizes) > room:
        raise DistillError(
            f"one student needs {max(sizes) / 2**30:.2f} GiB for training and "
            f"{max(room, 0) / 2**30:.2f} GiB are left beside the teacher; lower micro_batch, "
            "seq_len or budget"
        )
    n_batches = 1
    while True:
        target = sum(sizes) / n_batches
        batches: list[list[int]] = [[]]
        held = 0
        for i, size in enumerate(sizes):
            full = held + size > room or (held >= target and len(batches) < n_batches)
            if full and batches[-1]:
                batches.append([])
                held = 0
            batches[-1].append(i)
            held += size
        if len(batches) <= n_batches:
            return batches
        n_batches += 1
