"""Rows of the teacher's attention and of a student's, a few query rows at a time.

Legend: B batch, H query heads, K feature-key heads, G key heads, L tokens, M features,
T query rows of a chunk, S = rows.stop key columns, D head channels.

A row-wise loss needs every pair of a query and an earlier key, so its time is quadratic in L, but
one chunk of rows is enough at a time. A loss says how it depends on a student's pair weights;
everything else is here:

    b_im,j = Σ_m x_im y_jm,   log Σ_m exp(log_q[i,m] + log_k[j,m]) = log b_ij + r_i + n_j

with x and y the student's features, each row divided by its largest. With W_ij the derivative of
the loss to that logit, d log_q[i] = x_i ∘ Σ_j (W_ij/b_ij) y_j and d log_k[j] likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dofsweep.core.attention_inputs import Heads, check_inputs, check_mask, split_heads
from dofsweep.core.window import MASKED, Window
from dofsweep.errors import StudentError

TINY = 1e-36
"""Pair weights below this are near the end of float32."""


@dataclass(frozen=True)
class StudentRows:
    """What a loss must know of one student's attention rows."""

    log_q: Tensor
    """[B, H, L, M]"""
    log_k: Tensor
    """[B, K, L, M]"""
    window: Window = Window()
    row_shift: Tensor | None = None
    """c of ``window``, [B, H, L]: exp(c_i) Σ_m exp(log_q + log_k) stands for exp(s q_i·k_j).
    Needed by the l2 loss, and by every loss of a student with a window."""


@dataclass(frozen=True)
class Teacher:
    """Queries and keys as the teacher's attention sees them."""

    q: Tensor
    """[B, H, L, D] float32, times the attention scale"""
    k: Tensor
    """[B, G, L, D] float32"""
    key_mask: Tensor | None
    """[B, L] bool, True for a real token"""
    v: Tensor | None = None
    """[B, G, L, D'] float32, where the attention output is wanted as well"""

    @property
    def n_rows(self) -> int:
        """Query rows that count, over batch and heads."""
        B, H, L, _ = self.q.shape
        return H * (B * L if self.key_mask is None else int(self.key_mask.sum()))

    def logits(self, rows: slice, out: Tensor | None = None) -> Tensor:
        """Causal logits [B, H, T, S], ``MASKED`` where the row must not look."""
        B, H, _, D = self.q.shape
        G, T, S = self.k.shape[1], rows.stop - rows.start, rows.stop
        q = self.q[:, :, rows].reshape(B * G, H // G * T, D)
        k = self.k[:, :, :S].reshape(B * G, S, D).transpose(1, 2)
        into = None if out is None else out.view(B * G, H // G * T, S)
        logits = torch.bmm(q, k, out=into).view(B, H, T, S)
        return self.hide(logits, rows, MASKED)

    def output(self, p: Tensor, rows: slice) -> Tensor:
        """P v of some rows, [B, H, T, D'], from their P [B, H, T, S]."""
        assert self.v is not None
        B, H, T, S = p.shape
        v = self.v[:, :, :S].reshape(B * self.v.shape[1], S, -1)
        return torch.bmm(p.view(len(v), -1, S), v).view(B, H, T, -1)

    def hide(self, x: Tensor, rows: slice, value: float) -> Tensor:
        """Write ``value`` where x [B, H, T, S] pairs a row with a later or padded key, in place."""
        x[..., rows.start :].masked_fill_(later_keys(rows.stop - rows.start, x.device), value)
        if self.key_mask is not None:
            x.masked_fill_(~self.key_mask[:, None, None, : rows.stop], value)
        return x

    def drop_padded(self, x: Tensor, rows: slice) -> Tensor:
        """Zero the rows of padded queries of x [B, H, T, …], in place."""
        if self.key_mask is not None:
            x.masked_fill_(~self.key_mask[:, None, rows, None], 0)
        return x


@lru_cache(maxsize=8)
def later_keys(T: int, device: torch.device) -> Tensor:
    """[T, T] bool: which keys of a chunk's own tokens a row must not see. Not to be changed."""
    return torch.ones(T, T, dtype=torch.bool, device=device).triu_(1)


def make_teacher(
    q: Tensor, k: Tensor, scale: float, key_mask: Tensor | None, v: Tensor | None = None
) -> Teacher:
    """Check the teacher's queries and keys, [B, H, L, D] and [B, G, L, D].

    Raises:
        StudentError: they do not fit each other or the mask.
    """
    if (
        q.dim() != 4
        or k.dim() != 4
        or k.shape != (q.shape[0], k.shape[1], *q.shape[2:])
        or q.shape[1] % k.shape[1]
    ):
        raise StudentError(
            f"the teacher's q {tuple(q.shape)} and k {tuple(k.shape)} do not fit: they must be "
            "[B, H, L, D] and [B, G, L, D] with H a multiple of G; take both from the same call"
        )
    check_mask(key_mask, q.shape[0], q.shape[2])
    values = None if v is None else v.detach().float()
    return Teacher(q.detach().float() * scale, k.detach().float(), key_mask, values)


@dataclass
class Student:
    """Features of all rows, and the gradients of the loss so far.

    N students of equal shape may be stacked along the batch: then B here is N times the teacher's.
    """

    heads: Heads
    copies: int
    """N"""
    x: Tensor
    """[B, H, L, M] float32, exp(log_q + c - r)"""
    y: Tensor
    """[B, K, L, M] float32, exp(log_k - c - n)"""
    r: Tensor
    """[B, H, L]"""
    n: Tensor
    """[B, K, L]; -inf where the key is padding"""
    d_x: Tensor | None
    """Σ_j (W_ij/b_ij) y_j so far, like x; None when no gradient is wanted."""
    d_y: Tensor | None

    def pair(self, rows: slice) -> tuple[Tensor, Tensor]:
        """x and y of some rows as [B·K, R·T, M] and [B·K, S, M]."""
        B, K, _, M = self.y.shape
        x = self.x[:, :, rows].reshape(B * K, -1, M)
        return x, self.y[:, :, : rows.stop].reshape(B * K, -1, M)

    def add_grads(self, rows: slice, pair: tuple[Tensor, Tensor], per_weight: Tensor) -> None:
        """Take in d loss / d b = W/b of some rows, [B, H, T, S], with their ``pair``."""
        assert self.d_x is not None
        assert self.d_y is not None
        x, y = pair
        pairs = per_weight.view(x.shape[0], x.shape[1], rows.stop)
        self.d_x[:, :, rows] = torch.bmm(pairs, y).view(self.d_x[:, :, rows].shape)
        into = self.d_y[:, :, : rows.stop]
        into += torch.bmm(pairs.transpose(1, 2), x).view(into.shape)

    def grads(self) -> tuple[Tensor, Tensor]:
        """Gradients of log_q and log_k."""
        assert self.d_x is not None
        assert self.d_y is not None
        return self.d_x.mul_(self.x), self.d_y.mul_(self.y)


def pair_weights(pair: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
    """b of some rows, written to ``out`` [B, H, T, S]."""
    x, y = pair
    torch.bmm(x, y.transpose(1, 2), out=out.view(len(x), x.shape[1], y.shape[1]))
    return out


def make_student(log_q: Tensor, log_k: Tensor, teacher: Teacher, *, with_grads: bool) -> Student:
    """Features of log_q [B,H,L,M] and log_k [B,K,L,M], each row divided by its largest.

    Before that, a constant c per feature is moved from the keys to the queries, so that both sides
    reach equally high: it does not change a pair's sum, and keeps more of it in float32's range.

    Raises:
        StudentError: the features do not fit the teacher's queries and keys.
    """
    copies, rest = divmod(log_q.shape[0], teacher.q.shape[0])
    mask = teacher.key_mask
    if mask is not None and copies > 1:
        mask = mask.repeat(copies, 1)
    heads = check_inputs(log_q, log_k, log_k[..., :0], mask if not rest else None)
    if rest or log_q.shape[1:3] != teacher.q.shape[1:3] or log_k.shape[1] % teacher.k.shape[1]:
        raise StudentError(
            f"features of {tuple(log_q.shape[:3])} queries and {log_k.shape[1]} key heads do not "
            f"fit the teacher's {tuple(teacher.q.shape[:3])} and {teacher.k.shape[1]} key heads; "
            "compute them from the q and k that are passed here"
        )
    log_q, log_k, padded = log_q.detach().float(), log_k.detach().float(), None
    if mask is not None:
        padded = ~mask[:, None, :, None]
        log_q, log_k = (x.masked_fill(padded, -torch.inf) for x in (log_q, log_k))
    top_q = split_heads(log_q, heads.keys).amax((2, 3))
    c = (log_k.amax(2) - top_q).div_(2).nan_to_num_(0, 0, 0)[:, :, None]
    x = (split_heads(log_q, heads.keys) + c[:, :, None]).flatten(1, 2)
    y = log_k - c
    if padded is not None:  # a padded row weighs nothing in the teacher; here it must be finite
        x.masked_fill_(padded, 0)
        y.masked_fill_(padded, 0)
    r, n = x.amax(-1, keepdim=True), y.amax(-1, keepdim=True)
    x, y = x.sub_(r).exp_(), y.sub_(n).exp_()
    if padded is not None:
        n = n.masked_fill(padded, -torch.inf)
    d_x, d_y = (torch.empty_like(x), torch.zeros_like(y)) if with_grads else (None, None)
    return Student(heads, copies, x, y, r.squeeze(-1), n.squeeze(-1), d_x, d_y)


def row_chunks(n_tokens: int, row_chunk: int) -> Iterator[slice]:
    """Slices of at most row_chunk rows."""
    if row_chunk < 1:
        raise StudentError(f"row_chunk={row_chunk} must be at least 1; the default is 64")
    for start in range(0, n_tokens, row_chunk):
        yield slice(start, min(start + row_chunk, n_tokens))


class Workspace:
    """Memory for [B, H, T, S] chunks, allocated once and handed out again for each chunk."""

    def __init__(self, teacher: Teacher, row_chunk: int, count: int, copies: int = 1) -> None:
        self.batch, self.n_heads, L, _ = teacher.q.shape
        size = copies * self.batch * self.n_heads * min(row_chunk, L) * L
        self.memory = teacher.q.new_empty(count, size)

    def views(self, rows: slice, copies: int = 1) -> list[Tensor]:
        """One contiguous [N·B, H, T, S] view per buffer; contents are arbitrary."""
        shape = (copies * self.batch, self.n_heads, rows.stop - rows.start, rows.stop)
        size = torch.Size(shape).numel()
        return [buffer[:size].view(shape) for buffer in self.memory]
