"""How many students fit into one pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import shape

from dofsweep.core.plan import make_plan
from dofsweep.distill.memory import split_by_memory, student_bytes
from dofsweep.errors import DistillError


def test_bytes_of_a_student_by_hand() -> None:
    plan = make_plan("fix", n_layers=3, n_heads=2, budget=5, head_dim=8)
    tied = 3 * 5 * (2 * 8 + 2) * 4 * 4 + 5 * 100 * (4 + 2) * 6 * 4
    assert student_bytes(plan, shape(4, 2), 100, untied=False) == tied
    untied = 3 * 5 * ((2 + 4) * 8 + 4) * 4 * 4 + 5 * 100 * (4 + 2) * 6 * 4
    assert student_bytes(plan, shape(4, 2), 100, untied=True) == untied


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), room=st.integers(50, 200))
def test_every_student_is_in_one_batch_that_fits(sizes: list[int], room: int) -> None:
    batches = split_by_memory(sizes, room)
    assert [i for batch in batches for i in batch] == list(range(len(sizes)))
    assert all(batch and sum(sizes[i] for i in batch) <= room for batch in batches)
    assert len(batches) <= 2 * sum(sizes) // room + 1


def test_batches_are_about_equal() -> None:
    assert [len(b) for b in split_by_memory([10] * 12, 90)] == [6, 6]
    assert split_by_memory([10] * 9, 90) == [list(range(9))]


def test_a_student_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DistillError, match="lower micro_batch"):
        split_by_memory([10, 100], 90)
