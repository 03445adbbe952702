"""The softmax loss: cross-entropy of a student's attention rows A against the teacher's P.

With t_ij the teacher's weight exp(l_ij) where key j is near (see ``window``) and e^{c_i} a_ij where
it is far, A_ij = t_ij / Σ_j t_ij. In units of the teacher's own row sum, with m_i the probability
that the teacher gives to near keys, and a_ij = b_ij e^(r_i + n_j) as in ``losses_rows``,

    Z_i = m_i + e^{u_i} z_i,   z_i = Σ_far b_ij e^{n_j},   u_i = r_i + c_i - log Σ_j exp(l_ij)
    -Σ_j P_ij log A_ij = log Z_i - Σ_near P_ij log P_ij - Σ_far P_ij (log b_ij + n_j + u_i)
    W_ij/b_ij = e^{n_j + u_i}/Z_i - P_ij/b_ij   for far keys, W the derivative to log a_ij

so value and gradient come from the same pass over the pairs. Without a window every key is far,
m_i = 0, and u_i drops out. A row that float32 cannot hold, because a pair that matters or the sum z
is too small, is left out of that pass and done from the logs of its features (``exact_rows``). Real
models have hardly any.

Legend as in ``losses_rows``; N students of equal shape and window are stacked along the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
from dofsweep.core.window import Window

NEGLIGIBLE = 1e-12
"""Teacher probability below which a pair of tiny weight cannot matter to the loss."""

TINY_SUM = 1e-30
"""Row sums below this are too near the end of float32."""

LITTLE = 1e-6
"""Near mass below which a row needs its far sum exactly."""

ROWS_AT_ONCE = 16
"""Rows done from logs at a time: each takes S·M floats."""


@dataclass(frozen=True)
class Stack:
    """Students of equal shape and window, one after the other along the batch."""

    log_q: Tensor
    """[N·B, H, L, M]"""
    log_k: Tensor
    """[N·B, K, L, M]"""
    window: Window
    row_shift: Tensor | None
    """c, [N·B, H, L]; None without a window"""


class CrossEntropy(torch.autograd.Function):
    """Mean over real rows of -Σ_j P_ij log A_ij, for each student."""

    @staticmethod
    def forward(
        ctx: Any,
        teacher: Teacher,
        row_chunk: int,
        out: Tensor | None,
        stacks: list[Stack],
        *features: Tensor,
    ) -> Tensor:
        """The features are log_q, log_k of the first stack, of the second, …, for autograd.

        ``out`` [B, H, L, D'] is given where the teacher's attention output is wanted as well.
        """
        wanted = any(ctx.needs_input_grad)
        students = [make_student(s.log_q, s.log_k, teacher, with_grads=wanted) for s in stacks]
        totals = [torch.zeros(s.copies, dtype=torch.float64) for s in students]
        late = [LateGrads(student) for student in students]
        space = Workspace(teacher, row_chunk, 2)
        own = Workspace(teacher, row_chunk, 2, max(s.copies for s in students))
        for rows in row_chunks(teacher.q.shape[2], row_chunk):
            p, logits = space.views(rows)
            torch.softmax(teacher.logits(rows, out=logits), -1, out=p)
            teacher.drop_padded(p, rows)
            if out is not None:
                out[:, :, rows] = teacher.output(p, rows)
            chunks = {w: Chunk(teacher, rows, p, logits, w) for w in {s.window for s in stacks}}
            for i, (stack, student) in enumerate(zip(stacks, students, strict=True)):
                chunk = chunks[stack.window]
                views = own.views(rows, student.copies)
                totals[i] += chunk.take(stack, student, late[i], *views).cpu()
        ctx.n_rows, ctx.dtypes = teacher.n_rows, [x.dtype for x in features]
        ctx.copies = [s.copies for s in students]
        if wanted:
            both = zip(students, late, strict=True)
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
        return None, None, None, None, *grads


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
    """Some rows of the teacher as students of one window see them.

    Args:
        p: the teacher's rows [B, H, T, S], zero where the query is padding.
        logits: theirs, to the same shape.
    """

    def __init__(
        self, teacher: Teacher, rows: slice, p: Tensor, logits: Tensor, window: Window
    ) -> None:
        self.rows, self.window, self.key_mask = rows, window, teacher.key_mask
        self.later = later_keys(rows.stop - rows.start, p.device)
        self.p = p
        """P of far keys, 0 elsewhere, [B, H, T, S]"""
        self.entropy = torch.zeros((), dtype=torch.float64)
        """-Σ P log P over near pairs"""
        if window:
            self.near = window.near(rows, teacher.key_mask, p.device)
            top = logits.amax(-1, keepdim=True)
            self.log_sum = top - p.amax(-1, keepdim=True).clamp_min(TINY).log()
            self.p = p.masked_fill(self.near, 0)
            near = p - self.p
            self.mass = near.sum(-1, keepdim=True)
            self.entropy = torch.special.entr(near).sum().double()
            self.hidden = self.near.clone()
            self.hidden[..., rows.start :] |= self.later
        self.per_key = self.p.sum(2)
        """Σ_i P_ij of far pairs, [B, H, S]"""

    def hide(self, x: Tensor) -> Tensor:
        """Zero where x [N·B, H, T, S] pairs a row with a key that is not far, in place."""
        if self.window:
            x.view(-1, *self.p.shape).masked_fill_(self.hidden, 0)
        else:
            x[..., self.rows.start :].masked_fill_(self.later, 0)
        return x

    def take(
        self, stack: Stack, student: Student, late: LateGrads, w: Tensor, scratch: Tensor
    ) -> Tensor:
        """Σ_i -Σ_j P_ij log A_ij per student, [N] float64, and its gradients into the student.

        Args:
            w, scratch: [N·B, H, T, S], overwritten.
        """
        p = self.p[None]
        pair = student.pair(self.rows)
        pair_weights(pair, w)
        e, top = self.key_weights(student)
        by_key = (len(w), student.heads.keys, -1, *w.shape[2:])  # [N·B, K, R, T, S]
        torch.mul(w.view(by_key), e, out=scratch.view(by_key))
        z = self.hide(scratch).sum(-1, keepdim=True)
        u, log_mass = self.row_units(stack, student, z)
        log_z = (z.log().view(*by_key[:-1], 1) + top).view(z.shape).add_(u)
        log_total = log_z if log_mass is None else torch.logaddexp(log_z, log_mass)
        skipped, lost = self.rows_to_skip(w, z, student.copies)
        if lost is not None:
            of_lost = lost.view(-1, *p.shape[1:4], 1)
            p = p.expand(student.copies, *self.p.shape).masked_fill(of_lost, 0)
        if skipped is not None:
            log_total = log_total.masked_fill(skipped, torch.inf)
        torch.log(w, out=scratch)
        kept = log_total.masked_fill(log_total == torch.inf, 0)
        total = kept.view(student.copies, -1).double().sum(1) - dots(scratch, p)
        total += self.entropy - self.shift_part(student, u, p)
        if student.d_x is not None:
            per_student = (student.copies, *self.p.shape)
            torch.div(p, w.view(per_student), out=scratch.view(per_student)).neg_()
            share = (u - log_total).view(*by_key[:-1], 1).add(top).exp_()
            scratch.view(by_key).addcmul_(share, e)
            student.add_grads(self.rows, pair, self.hide(scratch))
        if lost is not None:
            total += exact_rows(self, stack, student, lost, late)
        return total

    def key_weights(self, student: Student) -> tuple[Tensor, Tensor]:
        """exp(n_j - top) for keys that are far for a row here, and top: [B, K, 1, 1, S or 1]."""
        n = student.n[:, :, None, None, : self.rows.stop]
        if self.window:
            out_of_reach = self.hidden.all(2).expand(len(self.p), -1, -1)
            out_of_reach = out_of_reach.repeat(student.copies, 1, 1)
            n = n.masked_fill(out_of_reach[:, :, None, None], -torch.inf)
        top = n.amax(-1, keepdim=True).clamp_min(-1e30)
        return (n - top).exp_(), top

    def row_units(self, stack: Stack, student: Student, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """u_i and log m_i, [N·B, H, T, 1]; 0 and None without a window."""
        if not self.window:
            return torch.zeros_like(z), None
        assert stack.row_shift is not None
        own = (student.r + stack.row_shift.detach().float())[:, :, self.rows, None]
        copies = (student.copies, 1, 1, 1)
        return own - self.log_sum.repeat(copies), self.mass.log().repeat(copies)

    def shift_part(self, student: Student, u: Tensor, p: Tensor) -> Tensor:
        """Σ P_ij (n_j + u_i) over far pairs, [N] float64."""
        per_key = self.per_key.view(len(self.p), student.heads.keys, -1, self.rows.stop).sum(2)
        n = student.n[:, :, : self.rows.stop].nan_to_num(neginf=0)
        found = (n.view(student.copies, *per_key.shape) * per_key).flatten(1).double().sum(1)
        if self.window:
            far = p.sum(-1, keepdim=True)
            found += (u.view(student.copies, *far.shape[1:]) * far).flatten(1).double().sum(1)
        return found

    def rows_to_skip(
        self, w: Tensor, z: Tensor, copies: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """[N·B, H, T, 1] bool or None: rows of padding or out of range, and the latter alone.

        Pairs of ``w`` that are too small, in rows that are not, are set to 1: they add nothing.
        """
        padded = None
        if self.key_mask is not None:
            padded = (~self.key_mask[:, None, self.rows, None]).repeat(copies, 1, 1, 1).expand_as(z)
        lost = z < TINY_SUM
        if self.window:
            lost &= (self.mass < LITTLE).repeat(copies, 1, 1, 1)
        if w.amin() < TINY:
            p = self.p.repeat(copies, 1, 1, 1)
            tiny = w < TINY
            lost |= (tiny & (p > NEGLIGIBLE)).any(-1, keepdim=True)
            w.masked_fill_(tiny, 1)
        if padded is not None:
            lost &= ~padded
        if not lost.any():
            return padded, None
        return (lost if padded is None else lost | padded), lost


def dots(x: Tensor, p: Tensor) -> Tensor:
    """Σ x p over all but the students: [N·B, H, T, S], [N or 1, B, H, T, S] -> [N] float64."""
    if len(p) == 1:
        return torch.mv(x.view(-1, p.numel()), p.reshape(-1)).double()
    return (x.view_as(p) * p).flatten(1).double().sum(1)


def exact_rows(
    chunk: Chunk, stack: Stack, student: Student, lost: Tensor, late: LateGrads
) -> Tensor:
    """What ``Chunk.take`` still owes for the lost rows, [N] float64, from logs of their features.

    There they had no log Z, no log b and no u; only their -Σ P n has been counted.

    Args:
        lost: [N·B, H, T, 1] bool.
        late: takes in the gradients.
    """
    log_q, log_k = (x.detach().float() for x in (stack.log_q, stack.log_k))
    rows, total = chunk.rows, torch.zeros(student.copies, dtype=torch.float64)
    batch = len(chunk.p)
    for part in lost[..., 0].nonzero().split(ROWS_AT_ONCE):
        b, h, t = part.unbind(1)
        i, key_head = t + rows.start, h // student.heads.group
        pairs = log_q[b, h, i][:, None] + log_k[b, key_head, : rows.stop]  # [n, S, M]
        mass, n = chunk.p[b % batch, h, t], student.n[b, key_head, : rows.stop]
        unseen = torch.arange(rows.stop, device=i.device) > i[:, None]
        logits = pairs.logsumexp(-1)
        log_sum = torch.full_like(logits[:, 0], -torch.inf)
        if chunk.window:
            assert stack.row_shift is not None
            unseen = chunk.hidden.expand(batch, 1, -1, -1)[b % batch, 0, t]
            shift = stack.row_shift.detach()[b, h, i] - chunk.log_sum[b % batch, h, t, 0]
            logits = logits + shift[:, None]
            log_sum = chunk.mass[b % batch, h, t, 0].log()
        logits = logits.masked_fill(unseen | n.isneginf(), -torch.inf)
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1))
        held = (mass * (logits - n)).masked_fill(mass == 0, 0)
        value = log_sum.double() - held.double().sum(-1)
        total.index_add_(0, (b // batch).cpu(), value.cpu())
        if student.d_x is not None:
            weight = (logits - log_sum[:, None]).exp() - mass
            shares = pairs.softmax(-1) * weight[..., None]
            d_q, d_k = late.open()
            d_q.index_put_((b, h, i), shares.sum(1), accumulate=True)
            for row, b_row, head in zip(shares, b.tolist(), key_head.tolist(), strict=True):
                d_k[b_row, head, : rows.stop] += row
    return total
