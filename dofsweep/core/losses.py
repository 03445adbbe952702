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
from torch.autograd.function import once_differentiable

from dofsweep.core.attention import causal_log_sums
from dofsweep.core.attention_inputs import split_heads
from dofsweep.core.losses_kernel import l2_loss, output_loss
from dofsweep.core.losses_rows import (
    TINY,
    Student,
    Teacher,
    Workspace,
    make_student,
    make_teacher,
    row_chunks,
)
from dofsweep.errors import StudentError

__all__ = [
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
    students: Sequence[tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    *,
    row_chunk: int = 64,
) -> Tensor:
    """Cross-entropy of each student's attention rows A against the teacher's P, mean over rows.

        -Σ_j P_ij log A_ij = log Σ_{j<=i} a_ij - Σ_j P_ij log a_ij

    The teacher's entropy is in it: its minimum is that entropy (``attention_kl`` leaves it out).
    The first term is linear attention; the second needs every pair, and its gradient is computed
    along with its value, so that each chunk of the teacher's rows is made once for all students.

    Args:
        students: pairs of log_q [B, H, L, M] and log_k [B, K, L, M]; M and K may differ.
        q, k, scale, key_mask: the teacher, as in ``teacher_rows``.
        row_chunk: query rows at a time; memory is B·H·row_chunk·L floats, four times.
    Returns:
        [n_students] float32, in nats.
    Raises:
        StudentError: a shape or the mask does not fit, or there is no student or no real row.
    """
    if not students:
        raise StudentError("there is no student to compare; give at least one (log_q, log_k)")
    teacher = make_teacher(q, k, scale, key_mask)
    if teacher.n_rows == 0:
        raise StudentError("key_mask has no real token; drop batches that are all padding")
    features = [x for pair in students for x in pair]
    mean_logits = MeanLogits.apply(teacher, row_chunk, *features)  # type: ignore[no-untyped-call]
    sums = [mean_log_sum(log_q, log_k, teacher) for log_q, log_k in students]
    losses: Tensor = torch.stack(sums) - mean_logits
    return losses


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
    """``softmax_losses`` of one student, a scalar."""
    return softmax_losses([(log_q, log_k)], q, k, scale, key_mask, row_chunk=row_chunk)[0]


@torch.no_grad()
def attention_kl(
    log_q: Tensor,
    log_k: Tensor,
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
    cross = softmax_loss(log_q, log_k, q, k, scale, key_mask, row_chunk=row_chunk)
    teacher = make_teacher(q, k, scale, key_mask)
    entropy = torch.zeros((), dtype=torch.float64)
    for rows in row_chunks(q.shape[2], row_chunk):
        p = teacher.drop_padded(teacher.logits(rows).softmax(-1), rows)
        entropy += torch.special.entr(p).sum().double()
    return cross - (entropy / teacher.n_rows).to(cross.dtype)


def mean_log_sum(log_q: Tensor, log_k: Tensor, teacher: Teacher) -> Tensor:
    """Mean over real rows of log Σ_{j<=i} a_ij."""
    sums = causal_log_sums(log_q, log_k, teacher.key_mask).float()
    if teacher.key_mask is not None:
        sums = sums.masked_fill(~teacher.key_mask[:, None], 0)
    return sums.sum() / teacher.n_rows


class MeanLogits(torch.autograd.Function):
    """Mean over real rows of Σ_j P_ij log a_ij, for each student."""

    @staticmethod
    def forward(ctx: Any, teacher: Teacher, row_chunk: int, *features: Tensor) -> Tensor:
        """The features are log_q, log_k of the first student, of the second, and so on."""
        pairs = list(zip(features[::2], features[1::2], strict=True))
        q = teacher.q
        wanted = any(ctx.needs_input_grad)
        students = [make_student(a, b, teacher, with_grads=wanted) for a, b in pairs]
        totals = torch.zeros(len(pairs), dtype=torch.float64)
        column_mass = q.new_zeros(q.shape[:3])
        space = Workspace(teacher, row_chunk, 3)
        for rows in row_chunks(q.shape[2], row_chunk):
            p, weights, scratch = space.views(rows)
            torch.softmax(teacher.logits(rows, out=scratch), -1, out=p)
            teacher.drop_padded(p, rows)
            column_mass[:, :, : rows.stop] += p.sum(2)
            for i, (student, pair) in enumerate(zip(students, pairs, strict=True)):
                totals[i] += add_rows(student, pair, rows, p, weights, scratch)
        for i, student in enumerate(students):
            totals[i] += shift_part(student, column_mass, teacher)
        ctx.n_rows = teacher.n_rows
        ctx.dtypes = [x.dtype for x in features]
        if wanted:
            ctx.save_for_backward(*(g for s in students for g in s.grads()))
        return (totals / teacher.n_rows).to(q)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """W_ij = P_ij / n_rows for every student."""
        scales = (grad / ctx.n_rows).repeat_interleave(2)
        grads = (
            (g * s).to(dtype)
            for g, s, dtype in zip(ctx.saved_tensors, scales, ctx.dtypes, strict=True)
        )
        return None, None, *grads


def add_rows(
    student: Student,
    features: tuple[Tensor, Tensor],
    rows: slice,
    p: Tensor,
    weights: Tensor,
    scratch: Tensor,
) -> float:
    """Σ_ij P_ij log b_ij of some rows, and its gradient into the student.

    ``p`` [B, H, T, S] is kept; ``weights`` and ``scratch``, of that shape, are overwritten.
    """
    student.weights(rows, weights)
    total = 0.0
    if weights.amin() < TINY:
        total = student.rescue_tiny(*features, rows, p, weights)
    torch.log(weights, out=scratch)
    total += float(torch.dot(scratch.view(-1), p.view(-1)))
    if student.d_x is not None:
        student.add_grads(rows, torch.div(p, weights, out=scratch))
    return total


def shift_part(student: Student, column_mass: Tensor, teacher: Teacher) -> Tensor:
    """Σ_ij P_ij (r_i + n_j), with the columns' masses Σ_i P_ij [B, H, L]."""
    r = student.r
    if teacher.key_mask is not None:
        r = r.masked_fill(~teacher.key_mask[:, None], 0)
    mass = split_heads(column_mass, student.heads.keys).sum(2)
    return r.double().sum() + (student.n.double() * mass).sum()
