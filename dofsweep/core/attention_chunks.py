"""Causal linear attention in chunks: the sums, their scales, and their gradients.

Legend: B batch, K feature-key heads, R query heads that share one, L tokens, M features, D value
channels, n chunks of C tokens in a segment, E = D + 1 value channels and a one.

    num_i = Σ_{j<=i} a_ij [v_j, 1],   a_ij = Σ_m exp(log_q[i,m] + log_k[j,m])

Exponents of a real model reach several hundred, so every feature m carries a **reference** c_m,
the largest log_k[j,m] over the keys before the chunk (rounded up to a whole number, which keeps
the subtractions exact where it matters):

    q_im = exp(log_q[i,m] + c_m - r_i)  <= 1,   k_jm = exp(log_k[j,m] - c_m)

where r_i = max_m (log_q[i,m] + c_m) drops out of num_i[:D] / num_i[D]. Let m be the feature where
that maximum is reached: q_im = 1, and the key that set c_m adds at least exp(-1), so the
denominator is never small, whatever queries and keys are; features lost to underflow were
negligible. This is the running maximum of online softmax, kept per feature.

Only earlier keys enter c, q and k of a row, so a later key cannot change a bit of it. A key of
the *same* chunk may exceed the reference. Up to exp(MAX_RISE) that is harmless. Beyond, k is
clamped, which leaves the rows before that key as they were, and the rows from it on are computed
again in another **pass** that takes its reference at the first such row. Whether a row is in a
later pass depends on keys up to that row alone, and every pass works on arrays of equal shape, so
causality to the bit holds there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dofsweep.core.attention_inputs import Heads

MAX_RISE = 50.0
"""Largest log_k - c of a key within its chunk. exp(50) M times a value fits float32, and features
below exp(-87), float32's smallest, are lost against a row sum of at least exp(-1) only when they
weigh less than exp(-36)."""

NO_KEY = -1e30
"""Reference of a feature that no key has yet: finite, so that -inf minus it stays -inf."""


@dataclass
class Running:
    """Sums over the keys so far."""

    scale: Tensor
    """c, [B, K, M]"""
    sums: Tensor
    """Σ_j exp(log_k[j] - c) [v_j, 1], [B, K, M, E]"""


@dataclass
class Segment:
    """n chunks of C consecutive tokens, as views of the inputs in the order the products need."""

    heads: Heads
    log_q: Tensor
    """[B, K, n, R, C, M]"""
    log_k: Tensor
    """[B, K, n, C, M]; -inf where a key is padding."""
    values: Tensor
    """[B, K, n, C, E]; the last channel is one."""


def by_chunk(x: Tensor, heads: int, chunk: int) -> Tensor:
    """View [B, heads·R, n·C, X] as [B, heads, n, R, C, X]."""
    B, H, L, X = x.shape
    return x.view(B, heads, H // heads, L // chunk, chunk, X).transpose(2, 3)


def make_segment(
    heads: Heads, log_q: Tensor, log_k: Tensor, v: Tensor, key_mask: Tensor | None, chunk: int
) -> Segment:
    """Cut one slice of tokens, a whole number of chunks, into chunks."""
    B, G, T, D = v.shape
    K, n = heads.keys, T // chunk
    values = v.new_empty((B, K, n, chunk, D + 1), dtype=heads.dtype)
    values[..., D] = 1
    values.view(B, G, K // G, n, chunk, D + 1)[..., :D] = v.view(B, G, 1, n, chunk, D)
    keys = log_k.to(heads.dtype).view(B, K, n, chunk, -1)
    if key_mask is not None:
        keys = keys.masked_fill(~key_mask.view(B, 1, n, chunk, 1), -torch.inf)
    return Segment(heads, by_chunk(log_q.to(heads.dtype), K, chunk), keys, values)


def first_reference(log_k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Reference to begin with, [B, K, M]: the first real key's own features."""
    if key_mask is None:
        return log_k[:, :, 0].ceil().clamp_min(NO_KEY)
    at = key_mask.int().argmax(1).view(-1, 1, 1, 1)
    first = log_k.take_along_dim(at, 2).squeeze(2).ceil()
    return first.masked_fill(~key_mask.any(1).view(-1, 1, 1), NO_KEY).clamp_min(NO_KEY)


@dataclass
class Factors:
    """q, k and the references of all chunks of a segment."""

    q: Tensor
    """[B, K, n, R·C, M]"""
    k: Tensor
    """[B, K, n, C, M]"""
    q_shift: Tensor
    """r, [B, K, n, R·C, 1]"""
    reference: Tensor
    """c at the start of each chunk and at the end of the last, [B, K, n + 1, M]"""
    decay: Tensor
    """exp(c_t - c_{t+1}) <= 1, [B, K, n, M, 1]"""
    risen: list[int]
    """Chunks that need further passes."""


def query_factor(log_q: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """q and r of [..., R, C, M] queries under references [..., M]: [..., R·C, M], [..., R·C, 1]."""
    q = torch.empty(log_q.shape, dtype=log_q.dtype, device=log_q.device)
    torch.add(log_q, reference[..., None, None, :], out=q)
    q = q.flatten(-3, -2)
    shift = q.amax(-1, keepdim=True).clamp_min_(2 * NO_KEY)
    return q.sub_(shift).exp_(), shift


def make_factors(seg: Segment, start: Tensor) -> Factors:
    """All exponentials of a segment whose keys so far have the reference ``start`` [B, K, M]."""
    top = seg.log_k.amax(3).ceil_().clamp_max_(torch.finfo(start.dtype).max)
    reference = torch.cat([start[:, :, None], top], 2)
    for t in range(top.shape[2]):
        reference[:, :, t + 1] = torch.maximum(reference[:, :, t], top[:, :, t])
    k = seg.log_k - reference[:, :, :-1, None]
    rise = reference[:, :, 1:] - reference[:, :, :-1]
    risen: list[int] = []
    if not rise.amax() <= MAX_RISE:  # written so that NaN counts as a rise
        k.clamp_max_(MAX_RISE)
        risen = (~(rise.amax((0, 1, 3)) <= MAX_RISE)).nonzero().flatten().tolist()
    q, shift = query_factor(seg.log_q, reference[:, :, :-1])
    return Factors(q, k.exp_(), shift, reference, rise.neg_().exp_()[..., None], risen)


@dataclass
class Pass:
    """A chunk's rows that a later reference serves."""

    reference: Tensor
    """[B, K, M]"""
    rows: Tensor
    """[B, K, C] bool"""


def later_passes(log_k: Tensor, reference: Tensor) -> Iterator[Pass]:
    """Passes after the first over a chunk's keys [B, K, C, M], until every row is served."""
    running = log_k.cummax(2).values.clamp_max_(torch.finfo(log_k.dtype).max)
    rows = (running - reference[:, :, None]).amax(-1) > MAX_RISE
    while rows.any():
        first = rows.int().argmax(-1)[..., None, None]
        at_first = running.take_along_dim(first, 2).squeeze(2).ceil()
        reference = torch.where(
            rows.any(-1, keepdim=True), torch.maximum(reference, at_first), reference
        )
        waiting = rows & ((running - reference[:, :, None]).amax(-1) > MAX_RISE)
        yield Pass(reference, rows & ~waiting)
        rows = waiting


def split_rows(x: Tensor, chunk: int) -> Tensor:
    """View [..., R·C, X] as [..., R, C, X]."""
    return x.view(*x.shape[:-2], -1, chunk, x.shape[-1])


def pair_weights(q: Tensor, k: Tensor) -> Tensor:
    """Causal part of q kᵀ: [..., R·C, M], [..., C, M] -> [..., R·C, C]."""
    weights = q @ k.transpose(-1, -2)
    split_rows(weights, k.shape[-2]).tril_()
    return weights


def segment_sums(seg: Segment, state: Running) -> tuple[Tensor, Tensor, Running]:
    """num [B, K, n, R·C, E] and r [B, K, n, R·C, 1] of a segment, and the state after it."""
    f = make_factors(seg, state.scale)
    num = pair_weights(f.q, f.k) @ seg.values
    starts, end = scan_sums(seg, f, state.sums)
    num.flatten(0, 2).baddbmm_(f.q.flatten(0, 2), starts.flatten(0, 2))
    for t in f.risen:
        for p in later_passes(seg.log_k[:, :, t], f.reference[:, :, t]):
            q, k, start = pass_factors(seg, f, t, p, starts[:, :, t])
            rows = p.rows.repeat(1, 1, seg.heads.group)[..., None]
            again = pair_weights(q[0], k) @ seg.values[:, :, t] + q[0] @ start
            num[:, :, t] = torch.where(rows, again, num[:, :, t])
            f.q_shift[:, :, t] = torch.where(rows, q[1], f.q_shift[:, :, t])
    return num, f.q_shift, Running(f.reference[:, :, -1], end)


def pass_factors(
    seg: Segment, f: Factors, t: int, p: Pass, start: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """(q, r), k and the chunk's starting sums, all under the reference of a later pass."""
    k = (seg.log_k[:, :, t] - p.reference[:, :, None]).clamp_max_(MAX_RISE).exp_()
    decay = (f.reference[:, :, t] - p.reference).exp()[..., None]
    return query_factor(seg.log_q[:, :, t], p.reference), k, start * decay


def end_keys(seg: Segment, f: Factors, t: int) -> Tensor:
    """exp(log_k - c) of chunk t under the reference at its end: at most 1, [B, K, C, M]."""
    return (seg.log_k[:, :, t] - f.reference[:, :, t + 1, None]).exp_()


def scan_sums(seg: Segment, f: Factors, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Running sums before each chunk, [B, K, n, M, E], and after the last, [B, K, M, E]."""
    added = (f.k.transpose(-1, -2) @ seg.values).mul_(f.decay)
    for t in f.risen:
        added[:, :, t] = end_keys(seg, f, t).transpose(-1, -2) @ seg.values[:, :, t]
    starts = torch.empty_like(added)
    for t in range(added.shape[2]):
        starts[:, :, t] = sums
        sums = torch.addcmul(added[:, :, t], sums, f.decay[:, :, t])
    return starts, sums


@dataclass
class SegmentGrads:
    """Gradients of a segment's inputs, shaped as they are in ``Segment``."""

    log_q: Tensor
    log_k: Tensor
    values: Tensor


def segment_grads(
    seg: Segment, state: Running, later: Tensor, grad: Tensor
) -> tuple[SegmentGrads, Tensor]:
    """Backward of ``segment_sums`` for a function of num that does not depend on r.

    Args:
        seg, state: what the forward pass was given.
        later: Σ_i q_i grad_iᵀ over the rows after this segment, under the reference at its end,
            [B, K, M, E].
        grad: gradient with respect to num, [B, K, n, R·C, E].
    Returns:
        The gradients, and ``later`` for the segment before.

    With P_ij = grad_i · values_j:  d log_q[i] = q_i ∘ Σ_{j<=i} P_ij k_j,
    d log_k[j] = k_j ∘ Σ_{i>=j} P_ij q_i,  d values_j = Σ_{i>=j} a_ij grad_i.
    """
    f = make_factors(seg, state.scale)
    starts, _ = scan_sums(seg, f, state.sums)
    first = grad
    if f.risen:
        first = grad.clone()
        for t in f.risen:
            for p in later_passes(seg.log_k[:, :, t], f.reference[:, :, t]):
                first[:, :, t].masked_fill_(p.rows.repeat(1, 1, seg.heads.group)[..., None], 0)
    grads = chunk_grads(f.q, f.k, seg.values, starts, first)
    sent = f.q.transpose(-1, -2) @ first
    for t in f.risen:
        for p in later_passes(seg.log_k[:, :, t], f.reference[:, :, t]):
            sent[:, :, t] += pass_grads(seg, f, t, p, starts[:, :, t], grad[:, :, t], grads)
    after = torch.empty_like(starts)
    for t in reversed(range(starts.shape[2])):
        decayed = later * f.decay[:, :, t]
        if t in f.risen:
            k, v = end_keys(seg, f, t), seg.values[:, :, t]
            grads.log_k[:, :, t] += k * (v @ later.transpose(-1, -2))
            grads.values[:, :, t] += k @ later
            after[:, :, t] = 0
        else:
            after[:, :, t] = decayed
        later = decayed.add_(sent[:, :, t])
    grads.log_k += (seg.values @ after.transpose(-1, -2)).mul_(f.k)
    grads.values += f.k @ after
    return grads, later


def chunk_grads(q: Tensor, k: Tensor, values: Tensor, start: Tensor, grad: Tensor) -> SegmentGrads:
    """Gradients within chunks (keys up to the chunk's end, rows of the chunk)."""
    pairs = pair_weights(grad, values)
    d_q = (pairs @ k).add_(grad @ start.transpose(-1, -2)).mul_(q)
    d_k = (pairs.transpose(-1, -2) @ q).mul_(k)
    return SegmentGrads(d_q, d_k, pair_weights(q, k).transpose(-1, -2) @ grad)


def pass_grads(
    seg: Segment, f: Factors, t: int, p: Pass, start: Tensor, grad: Tensor, into: SegmentGrads
) -> Tensor:
    """Add the gradients of one later pass of chunk t to ``into``; returns its Σ_i q_i grad_iᵀ."""
    (q, _), k, start = pass_factors(seg, f, t, p, start)
    grad = grad.masked_fill(~p.rows.repeat(1, 1, seg.heads.group)[..., None], 0)
    own = chunk_grads(q, k, seg.values[:, :, t], start, grad)
    into.log_q[:, :, t] += own.log_q
    into.log_k[:, :, t] += own.log_k
    into.values[:, :, t] += own.values
    decay = (f.reference[:, :, t] - p.reference).exp()[..., None]
    return (q.transpose(-1, -2) @ grad).mul_(decay)
