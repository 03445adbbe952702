"""Layerwise distillation losses: what a student's attention must learn from its teacher's.

Legend: B batch, H query heads, K feature-key heads, G key/value heads, L tokens, M features, D
channels. Students are given as log features (see ``attention``), teachers as the q and k that
their attention sees. Gradients flow to the student's log features only, never to the teacher, and
means are over real query rows, heads and batch. Time is quadratic in L, memory linear.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dofsweep.core.losses_kernel import l2_loss, output_loss
from dofsweep.core.losses_rows import Teacher, make_teacher, row_chunks
from dofsweep.core.losses_softmax import CrossEntropy
from dofsweep.errors import StudentError

__all__ = [
    "attention_kl",
    "l2_loss",
    "output_loss",
    "softmax_loss",
    "softmax_losses",
    "softmax_losses_and_output",
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
    Each chunk of the teacher's rows is made once for all students, and students of equal shape are
    computed together. See ``losses_softmax``.

    Args:
        students: pairs of log_q [B, H, L, M] and log_k [B, K, L, M]; M and K may differ.
        q, k, scale, key_mask: the teacher, as in ``teacher_rows``.
        row_chunk: query rows at a time; memory is B·H·row_chunk·L floats, four times.
    Returns:
        [n_students] float32, in nats.
    Raises:
        StudentError: a shape or the mask does not fit, or there is no student or no real row.
    """
    return _compared(students, make_teacher(q, k, scale, key_mask), row_chunk, None)


def softmax_losses_and_output(
    students: Sequence[tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    *,
    row_chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """``softmax_losses``, and the teacher's attention output [B, H, L, D'] in v's dtype.

    Both need the teacher's rows, so a trainer that wants both pays for these once. Rows of padded
    queries are 0.
    """
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    losses = _compared(students, make_teacher(q, k, scale, key_mask, v), row_chunk, out)
    return losses, out


def _compared(
    students: Sequence[tuple[Tensor, Tensor]], teacher: Teacher, row_chunk: int, out: Tensor | None
) -> Tensor:
    """Losses in the order given, of students that are stacked where their shapes are equal."""
    if not students:
        raise StudentError("there is no student to compare; give at least one (log_q, log_k)")
    if teacher.n_rows == 0:
        raise StudentError("key_mask has no real token; drop batches that are all padding")
    shapes: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for i, (log_q, log_k) in enumerate(students):
        shapes.setdefault((log_q.shape, log_k.shape), []).append(i)
    features = []
    for members in shapes.values():
        for side in (0, 1):
            parts = [students[i][side] for i in members]
            features.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    losses: Tensor = CrossEntropy.apply(teacher, row_chunk, out, *features)  # type: ignore[no-untyped-call]
    order = [i for members in shapes.values() for i in members]
    return losses[torch.tensor(order).argsort().to(losses.device)]


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
