"""Layerwise distillation losses: what a student's attention must learn from its teacher's.

Legend: B batch, H query heads, K feature-key heads, G key/value heads, L tokens, M features, D
channels. Students are given as log features (see ``attention``), teachers as the q and k that
their attention sees. Gradients flow to the student's log features only, never to the teacher, and
means are over real query rows, heads and batch. Time is quadratic in L, memory linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dofsweep.core.losses_kernel import l2_loss, output_loss
from dofsweep.core.losses_rows import StudentRows, make_teacher, row_chunks
from dofsweep.core.losses_softmax import CrossEntropy, Stack
from dofsweep.errors import StudentError

__all__ = [
    "StudentRows",
    "attention_kl",
    "l2_loss",
    "output_loss",
    "softmax_loss",
    "softmax_losses",
    "teacher_rows",
]


@torch.no_grad()
def teacher_rows(
    q: Tensor, k: Tensor, scale: float, rows: slice, key_mask: Tensor | None = None
) -> Tensor:
    """The teacher's causal attention, softmax_j (scale q_i·k_j), for some query rows.

    Args:
        q, k: [B, H, L, D] and [B, G, L, D]; query head h sees key head h // (H/G).
        scale: attention scale.
        rows: query rows, with step 1.
        key_mask: [B, L] bool, True for a real token.
    Returns:
        [B, H, rows, rows.stop] float32: only the columns that a row can see. Rows of padded
        queries are finite and have no meaning.
    Raises:
        StudentError: shapes or mask do not fit.
    """
    start, stop, _ = rows.indices(q.shape[2])
    return make_teacher(q, k, scale, key_mask).logits(slice(start, stop)).softmax(-1)


def softmax_losses(
    students: Sequence[StudentRows],
    q: Tensor,
    k: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    *,
    v: Tensor | None = None,
    row_chunk: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy of each student's attention rows A against the teacher's P, mean over rows.

        -Σ_j P_ij log A_ij

    The teacher's entropy is in it: its minimum is that entropy (``attention_kl`` leaves it out).
    Each chunk of the teacher's rows is made once for all students, and students of equal shape are
    computed together. See ``losses_softmax``.

    Args:
        students: M, K and window may differ between them.
        q, k, scale, key_mask: the teacher, as in ``teacher_rows``.
        v: [B, G, L, D'], given where the teacher's attention output is wanted as well; it needs
            the same rows. Rows of padded queries are 0.
        row_chunk: query rows at a time; memory is B·H·row_chunk·L floats, four times.
    Returns:
        [n_students] float32, in nats, and that output [B, H, L, D'] in v's dtype, or None.
    Raises:
        StudentError: a shape or the mask does not fit, or there is no student or no real row.
    """
    if not students:
        raise StudentError("there is no student to compare; give at least one")
    teacher = make_teacher(q, k, scale, key_mask, v)
    if teacher.n_rows == 0:
        raise StudentError("key_mask has no real token; drop batches that are all padding")
    out = None if v is None else v.new_empty(*q.shape[:3], v.shape[-1])
    alike: dict[Any, list[int]] = {}
    for i, s in enumerate(students):
        alike.setdefault((s.log_q.shape, s.log_k.shape, s.window), []).append(i)
    stacks = [_stack([students[i] for i in members]) for members in alike.values()]
    features = [x for stack in stacks for x in (stack.log_q, stack.log_k)]
    losses: Tensor = CrossEntropy.apply(teacher, row_chunk, out, stacks, *features)  # type: ignore[no-untyped-call]
    order = torch.tensor([i for members in alike.values() for i in members])
    return losses[order.argsort().to(losses.device)], out


def _stack(students: list[StudentRows]) -> Stack:
    """Students of equal shape and window side by side along the batch."""
    first = students[0]
    if first.window and any(s.row_shift is None for s in students):
        raise StudentError("a student with a window needs row_shift; see window.windowed_attention")
    if len(students) == 1:
        return Stack(first.log_q, first.log_k, first.window, first.row_shift)
    shifts = [s.row_shift for s in students if s.row_shift is not None]
    return Stack(
        torch.cat([s.log_q for s in students]),
        torch.cat([s.log_k for s in students]),
        first.window,
        torch.cat(shifts) if first.window else None,
    )


def softmax_loss(
    log_q: Tensor,
    log_k: Tensor,
    q: Tensor,
    k: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    *,
    row_chunk: int = 64,
) -> Tensor:
    """``softmax_losses`` of one student without a window, a scalar."""
    rows = StudentRows(log_q, log_k)
    return softmax_losses([rows], q, k, scale, key_mask, row_chunk=row_chunk)[0][0]


@torch.no_grad()
def attention_kl(
    student: StudentRows,
    q: Tensor,
    k: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    *,
    row_chunk: int = 64,
) -> Tensor:
    """KL(P_i ‖ A_i) of the student's rows A from the teacher's P in nats, mean over rows.

    No gradient: for reports. Args and errors as in ``softmax_losses``.
    """
    cross = softmax_losses([student], q, k, scale, key_mask, row_chunk=row_chunk)[0][0]
    teacher = make_teacher(q, k, scale, key_mask)
    entropy = torch.zeros((), dtype=torch.float64)
    for rows in row_chunks(q.shape[2], row_chunk):
        p = teacher.drop_padded(teacher.logits(rows).softmax(-1), rows)
        entropy += torch.special.entr(p).sum().double()
    return cross - (entropy / teacher.n_rows).to(cross.dtype)
