"""Causal linear attention as a differentiable function of log features.

Both walk over segments of tokens with the running sums of ``attention_chunks``. Nothing of size
L x L, or L x M x D, outlives a segment: the forward pass keeps its output, one number per row, and
the running sums at each segment's start; the backward pass computes a segment's factors again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dofsweep.core.attention_chunks import (
    Running,
    Segment,
    SegmentGrads,
    by_chunk,
    first_reference,
    make_segment,
    segment_grads,
    segment_sums,
    split_rows,
)
from dofsweep.core.attention_inputs import Heads, split_heads

CHUNK = 64
"""Tokens of a chunk: the pairs within it cost as much as the running sums when C is about M."""

SEGMENT_FLOATS = 160_000
"""Size of a segment's queries on a CPU (0.6 MB): 256 tokens of 9 heads and 64 features."""

SEGMENT_FLOATS_GPU = 1 << 24


@dataclass(frozen=True)
class Cut:
    """Tokens start to stop, in whole chunks."""

    start: int
    stop: int
    chunk: int


def cut_tokens(log_q: Tensor, n_channels: int, chunk: int) -> list[Cut]:
    """Segments of tokens for log_q [B,H,L,M]; what does not fill a chunk is a chunk of its own.

    A segment is enough work for one operation and little enough to stay in a CPU's cache, and to
    be allocated without asking the system for fresh pages.
    """
    B, H, n_tokens, M = log_q.shape
    floats = SEGMENT_FLOATS if log_q.device.type == "cpu" else SEGMENT_FLOATS_GPU
    chunk = min(chunk, n_tokens)
    n_chunks = n_tokens // chunk
    most = max(floats // (B * H * max(M, n_channels) * chunk), 1)
    step = ceil(n_chunks / ceil(n_chunks / most)) * chunk
    whole = n_chunks * chunk
    cuts = [Cut(at, min(at + step, whole), chunk) for at in range(0, whole, step)]
    if whole < n_tokens:
        cuts.append(Cut(whole, n_tokens, n_tokens - whole))
    return cuts


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call: [B,H,L,M], [B,K,L,M], [B,G,L,D], [B,L] or None."""

    heads: Heads
    log_q: Tensor
    log_k: Tensor
    v: Tensor
    key_mask: Tensor | None

    def segment(self, cut: Cut) -> Segment:
        """The tokens of one cut, in chunks."""
        at = slice(cut.start, cut.stop)
        mask = None if self.key_mask is None else self.key_mask[:, at]
        q, k, v = (x[:, :, at] for x in (self.log_q, self.log_k, self.v))
        return make_segment(self.heads, q, k, v, mask, cut.chunk)

    def empty_state(self) -> Running:
        """No key yet; the reference is the first real key's."""
        scale = first_reference(self.log_k.to(self.heads.dtype), self.key_mask)
        return Running(scale, scale.new_zeros((*scale.shape, self.v.shape[-1] + 1)))


def walk(
    inputs: Inputs, cuts: list[Cut], state: Running
) -> Iterator[tuple[Cut, Tensor, Tensor, Running]]:
    """Row sums of each segment: the cut, num [B,K,n,R·C,E], r [B,K,n,R·C,1], the state after."""
    for cut in cuts:
        num, shift, state = segment_sums(inputs.segment(cut), state)
        yield cut, num, shift, state


def chunked(x: Tensor, cut: Cut, heads: int) -> Tensor:
    """View the rows of one cut of x [B,heads·R,L,X] as [B,heads,n,R,C,X]."""
    return by_chunk(x[:, :, cut.start : cut.stop], heads, cut.chunk)


def walk_back(
    inputs: Inputs, cuts: list[Cut], states: list[Running], grads: Iterator[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_q, log_k and v, given num's for each segment from the last to the first."""
    heads = inputs.heads
    d_q, d_k, d_v = (torch.empty_like(x) for x in (inputs.log_q, inputs.log_k, inputs.v))
    later = torch.zeros_like(states[0].sums)
    for cut, state, grad in zip(reversed(cuts), reversed(states), grads, strict=True):
        own, later = segment_grads(inputs.segment(cut), state, later, grad)
        store_grads(heads, cut, own, (d_q, d_k, d_v))
    if inputs.key_mask is not None:
        d_k.masked_fill_(~inputs.key_mask[:, None, :, None], 0)
    return d_q, d_k, d_v


def store_grads(
    heads: Heads, cut: Cut, own: SegmentGrads, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write one segment's gradients where they belong."""
    d_q, d_k, d_v = into
    rows = chunked(d_q, cut, heads.keys)
    rows.copy_(own.log_q.view(rows.shape))
    chunked(d_k, cut, heads.keys)[:, :, :, 0].copy_(own.log_k)
    values = split_heads(own.values[..., :-1], heads.values).sum(2)
    chunked(d_v, cut, heads.values)[:, :, :, 0].copy_(values)


class LinearAttention(torch.autograd.Function):
    """num[:D] / num[D] of every row, and log num[D], the log of its normaliser."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Inputs, cuts: list[Cut], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tensors are log_q, log_k, v of ``inputs``, given so that autograd sees them."""
        log_q, log_k, v = tensors
        heads, D = inputs.heads, v.shape[-1]
        wanted = any(ctx.needs_input_grad)
        out = v.new_empty((*log_q.shape[:3], D))
        total = v.new_empty((*log_q.shape[:3], 1), dtype=heads.dtype)
        log_sum = torch.empty_like(total)
        state = inputs.empty_state()
        states = [state]
        for cut, num, shift, after in walk(inputs, cuts, state):
            rows = split_rows(num, cut.chunk)
            chunked(total, cut, heads.keys).copy_(rows[..., D:])
            chunked(log_sum, cut, heads.keys).copy_(split_rows(shift, cut.chunk))
            if wanted:
                states.append(after)
            write_ratio(rows, chunked(out, cut, heads.keys))
        exact_first_row(out, v, inputs.key_mask)
        log_sum.add_(total.log())
        ctx.set_materialize_grads(False)
        if wanted:
            ctx.inputs, ctx.cuts, ctx.states = (heads, inputs.key_mask), cuts, states[:-1]
            ctx.save_for_backward(log_q, log_k, v, out, total)
        return out, log_sum.squeeze(-1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, grad: Tensor | None, grad_log: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """With out = num/den: d num = [grad, grad_log - grad·out] / den."""
        log_q, log_k, v, out, total = ctx.saved_tensors
        heads, key_mask = ctx.inputs
        inputs = Inputs(heads, log_q, log_k, v, key_mask)
        grad = torch.zeros_like(out) if grad is None else grad

        def num_grads() -> Iterator[Tensor]:
            """Gradient of each segment's num [v, 1] sums, last segment first."""
            for cut in reversed(ctx.cuts):
                g, o, den = (chunked(x, cut, heads.keys) for x in (grad, out, total))
                g = g.to(heads.dtype)
                last = (g * o).sum(-1, keepdim=True).neg_()
                if grad_log is not None:
                    last += chunked(grad_log[..., None], cut, heads.keys)
                yield (torch.cat([g, last], -1) / empty_as_inf(den)).flatten(3, 4)

        return None, None, *walk_back(inputs, ctx.cuts, ctx.states, num_grads())


def write_ratio(rows: Tensor, out: Tensor) -> None:
    """num[:D] / num[D] of rows [..., D + 1] into out [..., D], 0 where there is no key."""
    num, den = rows[..., :-1], nonzero(rows[..., -1:])
    if out.dtype == num.dtype:
        torch.div(num, den, out=out)
    else:
        out.copy_(num / den)


def nonzero(den: Tensor) -> Tensor:
    """The row sums, 1 where there is no key (padding before the first token)."""
    return den.masked_fill(den == 0, 1)


def empty_as_inf(den: Tensor) -> Tensor:
    """The row sums, infinite where there is no key: such a row has no gradient."""
    return den.masked_fill(den == 0, torch.inf)


def exact_first_row(out: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """A row with one key is its value, without the rounding of (a v) / a. In place."""
    B, G = v.shape[:2]
    rows = out.view(B, G, -1, *out.shape[2:])
    if key_mask is None:
        rows[:, :, :, 0] = v[:, :, None, 0]
        return
    at = key_mask.int().argmax(1)
    batch = torch.arange(B, device=v.device)
    rows[batch, :, :, at] = v[batch, :, at][:, :, None]
