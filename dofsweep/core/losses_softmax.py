"""The softmax loss: cross-entropy of a student's attention rows A against the teacher's P.

Of a row i, with a_ij = b_ij e^(r_i + n_j) as in ``losses_rows``, r_i drops out:

    -Σ_j P_ij log A_ij = log Σ_{j<=i} b_ij e^{n_j} - Σ_j P_ij (log b_ij + n_j)
    W_ij = A_ij - P_ij,   W_ij/b_ij = e^{n_j}/z_i - P_ij/b_ij,   z_i = Σ_{j<=i} b_ij e^{n_j}

with W the derivative to log a_ij. So value and gradient come from the same pass over the pairs. A
row that float32 cannot hold, because a pair that matters or the sum z is too small, is left out of
that pass and done from the logs of its features (``exact_rows``). Real models have hardly any.

Legend as in ``losses_rows``; N students of equal shape are stacked along the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dofsweep.core.attention_inputs import split_heads
from dofsweep.core.losses_rows import (
    TINY,
    Student,
    Teacher,
    Workspace,
    later_keys,
    make_student,
    pair_weights,
    row_chunks,
)

NEGLIGIBLE = 1e-12
"""Teacher probability below which a pair of tiny weight cannot matter to the loss."""

TINY_SUM = 1e-30
"""Row sums below this are too near the end of float32."""

ROWS_AT_ONCE = 16
"""Rows done from logs at a time: each takes S·M floats."""


class CrossEntropy(torch.autograd.Function):
    """Mean over real rows of -Σ_j P_ij log A_ij, for each student."""

    @staticmethod
    def forward(
        ctx: Any, teacher: Teacher, row_chunk: int, out: Tensor | None, *features: Tensor
    ) -> Tensor:
        """The features are log_q, log_k of the first stack of students, of the second, …

        ``out`` [B, H, L, D'] is given where the teacher's attention output is wanted as well.
        """
        pairs = list(zip(features[::2], features[1::2], strict=True))
        wanted = any(ctx.needs_input_grad)
        stacks = [make_student(a, b, teacher, with_grads=wanted) for a, b in pairs]
        totals = [torch.zeros(s.copies, dtype=torch.float64) for s in stacks]
        late = [LateGrads(stack) for stack in stacks]
        column_mass = teacher.q.new_zeros(teacher.q.shape[:3])
        rows_space = Workspace(teacher, row_chunk, 1)
        space = Workspace(teacher, row_chunk, 2, max(s.copies for s in stacks))
        for rows in row_chunks(teacher.q.shape[2], row_chunk):
            (p,) = rows_space.views(rows)
            torch.softmax(teacher.logits(rows, out=space.views(rows)[0]), -1, out=p)
            teacher.drop_padded(p, rows)
            column_mass[:, :, : rows.stop] += p.sum(2)
            if out is not None:
                out[:, :, rows] = teacher.output(p, rows)
            for i, (stack, pair) in enumerate(zip(stacks, pairs, strict=True)):
                chunk = Chunk(teacher, rows, p, *space.views(rows, stack.copies))
                totals[i] += chunk.take(stack, pair, late[i]).cpu()
        for i, stack in enumerate(stacks):
            totals[i] -= column_part(stack, column_mass).cpu()
        ctx.n_rows, ctx.dtypes = teacher.n_rows, [x.dtype for x in features]
        ctx.copies = [s.copies for s in stacks]
        if wanted:
            both = zip(stacks, late, strict=True)
            ctx.save_for_backward(*(g for s, more in both for g in more.added_to(s.grads())))
        return (torch.cat(totals) / teacher.n_rows).to(teacher.q)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass has found by each student's own grad / n_rows."""
        grads: list[Tensor] = []
        for i, scale in enumerate((grad / ctx.n_rows).split(ctx.copies)):
            for g in ctx.saved_tensors[2 * i : 2 * i + 2]:
                rows = g.view(len(scale), -1) * scale[:, None]
                grads.append(rows.view_as(g).to(ctx.dtypes[len(grads)]))
        return None, None, None, *grads


class LateGrads:
    """Gradients of log_q and log_k from rows that were done from logs; made when first needed."""

    def __init__(self, student: Student) -> None:
        self.shapes = student.x, student.y
        self.grads: tuple[Tensor, Tensor] | None = None

    def open(self) -> tuple[Tensor, Tensor]:
        """[B, H, L, M] and [B, K, L, M], to be added to."""
        if self.grads is None:
            self.grads = torch.zeros_like(self.shapes[0]), torch.zeros_like(self.shapes[1])
        return self.grads

    def added_to(self, grads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Both together."""
        if self.grads is None:
            return grads
        return grads[0].add_(self.grads[0]), grads[1].add_(self.grads[1])


class Chunk:
    """Some rows of the teacher, and space for as many of a student's.

    Args:
        p: the teacher's rows [B, H, T, S], zero where the query is padding.
        w, scratch: [N·B, H, T, S], overwritten.
    """

    def __init__(
        self, teacher: Teacher, rows: slice, p: Tensor, w: Tensor, scratch: Tensor
    ) -> None:
        self.rows, self.p, self.w, self.scratch = rows, p, w, scratch
        self.key_mask = teacher.key_mask
        self.later = later_keys(rows.stop - rows.start, p.device)

    def take(self, student: Student, features: tuple[Tensor, Tensor], late: LateGrads) -> Tensor:
        """Σ_i (log z_i - Σ_j P_ij log b_ij) per student, [N] float64, and its gradients."""
        w, scratch, p = self.w, self.scratch, self.p[None]
        pair = student.pair(self.rows)
        pair_weights(pair, w)
        e, top = student.key_weights(self.rows)
        by_key = (len(w), student.heads.keys, -1, *w.shape[2:])  # [N·B, K, R, T, S]
        torch.mul(w.view(by_key), e, out=scratch.view(by_key))
        z = self._hide_later(scratch).sum(-1, keepdim=True)
        skipped, lost = self._rows_to_skip(w, z, student.copies)
        if skipped is not None:
            z.masked_fill_(skipped, torch.inf)
        if lost is not None:
            of_lost = lost.view(-1, *p.shape[1:4], 1)
            p = p.expand(student.copies, *self.p.shape).masked_fill(of_lost, 0)
        torch.log(w, out=scratch)
        z = z.view(*by_key[:-1], 1)
        log_z = z.log().add_(top).nan_to_num_(0, 0, 0)
        total = log_z.view(student.copies, -1).double().sum(1) - dots(scratch, p)
        if student.d_x is not None:
            per_student = (student.copies, *self.p.shape)
            torch.div(p, w.view(per_student), out=scratch.view(per_student)).neg_()
            scratch.view(by_key).addcmul_(z.reciprocal(), e)
            student.add_grads(self.rows, pair, self._hide_later(scratch))
        if lost is not None:
            total += exact_rows(student, features, self.rows, self.p, lost, late)
        return total

    def _hide_later(self, x: Tensor) -> Tensor:
        """Zero where x [N·B, H, T, S] pairs a row with a later key, in place."""
        x[..., self.rows.start :].masked_fill_(self.later, 0)
        return x

    def _rows_to_skip(
        self, w: Tensor, z: Tensor, copies: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """[N·B, H, T, 1] bool or None: rows of padding or out of range, and the latter alone."""
        padded = None
        if self.key_mask is not None:
            padded = (~self.key_mask[:, None, self.rows, None]).repeat(copies, 1, 1, 1).expand_as(z)
        lost = z < TINY_SUM
        if w.amin() < TINY:
            p = self.p.repeat(copies, 1, 1, 1)
            tiny = w < TINY
            lost |= (tiny & (p > NEGLIGIBLE)).any(-1, keepdim=True)
            w.masked_fill_(tiny, 1)  # what is left of these adds nothing
        if padded is not None:
            lost &= ~padded
        if not lost.any():
            return padded, None
        return (lost if padded is None else lost | padded), lost


def dots(x: Tensor, p: Tensor) -> Tensor:
    """Σ x p over all but the students: [N·B, H, T, S], [N or 1, B, H, T, S] -> [N] float64."""
    if len(p) == 1:
        return torch.mv(x.view(-1, p.numel()), p.view(-1)).double()
    return (x.view_as(p) * p).flatten(1).double().sum(1)


def column_part(student: Student, column_mass: Tensor) -> Tensor:
    """Σ_ij P_ij n_j per student, [N] float64, with the columns' masses Σ_i P_ij [B, H, L]."""
    mass = split_heads(column_mass, student.heads.keys).sum(2).double()
    n = student.n.nan_to_num(neginf=0).view(student.copies, *mass.shape)
    return (n.double() * mass).flatten(1).sum(1)


def exact_rows(
    student: Student,
    features: tuple[Tensor, Tensor],
    rows: slice,
    p: Tensor,
    lost: Tensor,
    late: LateGrads,
) -> Tensor:
    """What ``Chunk.take`` returns, of the lost rows alone, from the logs of their features.

    Args:
        features: log_q and log_k of the stack.
        p: [B, H, T, S], the teacher's rows.
        lost: [N·B, H, T, 1] bool.
        late: takes in the gradients.
    """
    log_q, log_k = (x.detach().float() for x in features)
    total = torch.zeros(student.copies, dtype=torch.float64)
    batch = len(p)
    for part in lost[..., 0].nonzero().split(ROWS_AT_ONCE):
        b, h, t = part.unbind(1)
        i, key_head = t + rows.start, h // student.heads.group
        keys = log_k[b, key_head, : rows.stop]  # [n, S, M]
        pairs = log_q[b, h, i][:, None] + keys
        mass, n = p[b % batch, h, t], student.n[b, key_head, : rows.stop]
        unseen = torch.arange(rows.stop, device=i.device) > i[:, None]
        logits = pairs.logsumexp(-1).masked_fill(unseen | n.isneginf(), -torch.inf)
        log_sum = logits.logsumexp(-1)
        held = mass * (logits - n)
        value = log_sum.double() - held.masked_fill(mass == 0, 0).double().sum(-1)
        total.index_add_(0, (b // batch).cpu(), value.cpu())
        if student.d_x is not None:
            shares = pairs.softmax(-1) * (logits.softmax(-1) - mass)[..., None]
            d_q, d_k = late.open()
            d_q.index_put_((b, h, i), shares.sum(1), accumulate=True)
            for row, b_row, head in zip(shares, b.tolist(), key_head.tolist(), strict=True):
                d_k[b_row, head, : rows.stop] += row
    return total
