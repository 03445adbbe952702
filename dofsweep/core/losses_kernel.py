"""Losses on the kernel and on the attention output, beside the softmax loss of ``losses``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dofsweep.core.losses_rows import (
    TINY,
    Student,
    StudentRows,
    Teacher,
    Workspace,
    make_student,
    make_teacher,
    pair_weights,
    row_chunks,
)
from dofsweep.errors import StudentError

LOG_CAP = 35.0
"""Largest log of an estimated kernel value, in units of the row's largest true value: its square
still fits float32. Beyond, value and slope are those at the cap, so the gradient stays finite."""


def l2_loss(
    student: StudentRows,
    q: Tensor,
    k: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
    *,
    row_chunk: int = 64,
) -> Tensor:
    """Squared error of the kernel rows relative to the teacher's, mean over rows.

        Σ_{j<=i} (Â_ij - K_ij)² / Σ_{j<=i} K_ij²,   K_ij = exp(s q_i·k_j - m_i),

    m_i the row's largest teacher logit. The student's estimate is in the same units,
    Â_ij = Σ_m exp(log_q[i,m] + log_k[j,m] + c_i - m_i): for positive random features of weight 1/M
    its mean is K_ij (arXiv:2009.14794). Near keys of a window have no error.

    Args, units of memory and errors as in ``losses.softmax_losses``; row_shift is needed.
    Returns:
        Scalar, no unit; 0 when every kernel value is met, 1 when the student is zero.
    """
    if student.row_shift is None:
        raise StudentError("the l2 loss needs row_shift, the size of the student's kernel values")
    teacher = make_teacher(q, k, scale, key_mask)
    if teacher.n_rows == 0:
        raise StudentError("key_mask has no real token; drop batches that are all padding")
    loss: Tensor = KernelError.apply(teacher, student, row_chunk, student.log_q, student.log_k)  # type: ignore[no-untyped-call]
    return loss


class KernelError(torch.autograd.Function):
    """Mean over real rows of the relative squared error; the gradient comes with the value."""

    @staticmethod
    def forward(
        ctx: Any,
        teacher: Teacher,
        given: StudentRows,
        row_chunk: int,
        log_q: Tensor,
        log_k: Tensor,
    ) -> Tensor:
        """Walk over chunks of rows."""
        wanted = any(ctx.needs_input_grad)
        student = make_student(log_q, log_k, teacher, with_grads=wanted)
        assert given.row_shift is not None
        units = student.r + given.row_shift.detach().float()
        total = 0.0
        space = Workspace(teacher, row_chunk, 3)
        for rows in row_chunks(teacher.q.shape[2], row_chunk):
            kernel, weights, estimate = space.views(rows)
            teacher.logits(rows, out=kernel)
            top = kernel.amax(-1, keepdim=True)
            kernel.sub_(top).exp_()
            size = kernel.square().sum(-1, keepdim=True)
            pair = student.pair(rows)
            pair_weights(pair, weights).clamp_min_(TINY)
            estimate_kernel(student, rows, weights, units[:, :, rows, None] - top, estimate)
            teacher.hide(estimate, rows, 0)
            error = teacher.drop_padded(torch.sub(estimate, kernel, out=kernel), rows)
            if given.window:
                error.masked_fill_(given.window.near(rows, teacher.key_mask, error.device), 0)
            total += float((error.square().sum(-1, keepdim=True) / size).double().sum())
            if wanted:
                slope = error.mul_(estimate).mul_(2 / size)
                student.add_grads(rows, pair, slope.div_(weights))
        ctx.n_rows, ctx.dtypes = teacher.n_rows, (log_q.dtype, log_k.dtype)
        if wanted:
            ctx.save_for_backward(*student.grads())
        return teacher.q.new_tensor(total / teacher.n_rows)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass has found."""
        grads = (
            (g * (grad / ctx.n_rows)).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, None, None, *grads


def estimate_kernel(
    student: Student, rows: slice, weights: Tensor, shift: Tensor, out: Tensor
) -> None:
    """b_ij exp(n_j + shift_i), capped, into ``out`` [B, H, T, S]."""
    n = student.n[:, :, : rows.stop].repeat_interleave(student.heads.group, 1)
    torch.log(weights, out=out)
    out.add_(n[:, :, None]).add_(shift).clamp_max_(LOG_CAP).exp_()


def output_loss(out: Tensor, target: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Squared error of the attention output, Σ ‖o_i - o*_i‖² / Σ ‖o*_i‖².

    Both sums run over real rows, heads and batch, so that rows count as much as their output is
    large.

    Args:
        out: o, the student's attention output, [B, H, L, D'].
        target: o*, the teacher's; no gradient flows to it.
        key_mask: [B, L] bool, True for a real token.
    Returns:
        Scalar float32, no unit.
    """
    target = target.detach().float()
    error = out.float() - target
    if key_mask is not None:
        padded = ~key_mask[:, None, :, None]
        error, target = error.masked_fill(padded, 0), target.masked_fill(padded, 0)
    size = target.square().sum().clamp_min(torch.finfo(target.dtype).tiny)
    return error.square().sum() / size
