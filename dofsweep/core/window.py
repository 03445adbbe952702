"""An exact window and sinks beside linear attention, under one normaliser.

Row i of a windowed student sees two kinds of keys. **Near** are the last W keys (i - W < j <= i)
and the first N of the sequence, the sinks (arXiv:2309.17453): they keep the teacher's own weight
exp(s q_i·k_j). **Far** are all others, which weigh what the features say:

    o_i = Σ_j t_ij v_j / Σ_j t_ij,   t_ij = exp(s q_i·k_j) if j is near, e^{c_i} a_ij if it is far

c_i is the log of what the features leave out of exp(s q·k) for that query. W = 0 and N = 0 is plain
linear attention. As a state this is W + N keys and values, and the sums of the rest.

Key j becomes far for the row W tokens later, so the far part is causal linear attention over keys
that are moved W places on, and nothing else is needed for it.

Legend as in ``attention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dofsweep.core.attention import linear_attention_sums
from dofsweep.core.attention_inputs import repeat_heads
from dofsweep.errors import StudentError

BLOCK = 64
"""Rows that share one band of keys."""

MASKED = -1e30
"""Logit of a pair that is not to be seen: finite, so that an empty row is not NaN."""


@dataclass(frozen=True)
class Window:
    """How many of the last and of the first keys a row sees exactly."""

    size: int = 0
    """W, the row's own key among them"""
    sinks: int = 0
    """N"""

    def __post_init__(self) -> None:
        if self.size < 0 or self.sinks < 0 or (self.sinks and not self.size):
            raise StudentError(
                f"window={self.size} and sinks={self.sinks}: neither may be negative, and sinks "
                "need a window of at least 1"
            )

    def __bool__(self) -> bool:
        return self.size > 0

    def near(self, rows: slice, key_mask: Tensor | None, device: torch.device) -> Tensor:
        """[1 or B, 1, T, S] bool: which of the keys before ``rows.stop`` some rows see exactly.

        Args:
            key_mask: [B, L] bool, True for a real token: the sinks are the first real tokens.
        """
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(rows.stop, device=device)
        band = ((j <= i) & (j > i - self.size))[None, None]
        sinks = self.is_sink(rows.stop, key_mask, device)[:, None, None, :]
        return band | (sinks & (j <= i))

    def is_sink(self, n_tokens: int, key_mask: Tensor | None, device: torch.device) -> Tensor:
        """[1 or B, n_tokens] bool."""
        if key_mask is None:
            return (torch.arange(n_tokens, device=device) < self.sinks)[None]
        real = key_mask[:, :n_tokens]
        return real & (real.cumsum(1) <= self.sinks)


def near_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: Window, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every row over its near keys, and the log of their sum of weights.

    Memory is linear in L: BLOCK rows at a time meet the keys of their band and the sinks.

    Args:
        q, k, v: [B, H, L, d], [B, G, L, d], [B, G, L, D].
        scale: attention scale s.
        key_mask: [B, L] bool, True for a real token.
    Returns:
        [B, H, L, D] float32 and [B, H, L] float32 (or float64 for float64 inputs), differentiable;
        a row that sees no key (its query is padding) is finite, and below -1e29.
    """
    B, H, L, d = q.shape
    G, D = k.shape[1], v.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q * scale, k, v))
    sink_at = _sink_places(L, window, key_mask, q)
    places = sink_at.clamp_max(L - 1)[:, None, :, None]
    sink_k, sink_v = k.take_along_dim(places, 2), v.take_along_dim(places, 2)
    outs, logs = [], []
    for start in range(0, L, BLOCK):
        stop = min(start + BLOCK, L)
        first = max(0, start - window.size + 1)
        keys = torch.cat([sink_k, k[:, :, first:stop]], 2)
        values = torch.cat([sink_v, v[:, :, first:stop]], 2)
        rows = q[:, :, start:stop].reshape(B, G, -1, d)
        logits = (rows @ keys.transpose(-1, -2)).view(B, H, stop - start, -1)
        seen = _seen(slice(start, stop), first, sink_at, window, key_mask)
        logits = logits.masked_fill(~seen, MASKED)
        p = logits.softmax(-1).view(B, G, -1, keys.shape[2])
        outs.append((p @ values).view(B, H, -1, D))
        logs.append(logits.logsumexp(-1))
    return torch.cat(outs, 2), torch.cat(logs, 2)


def _sink_places(n_tokens: int, window: Window, key_mask: Tensor | None, q: Tensor) -> Tensor:
    """Places of the sinks, [B, N]; n_tokens where a sequence has fewer real tokens."""
    n = min(window.sinks, n_tokens)
    if key_mask is None:
        return torch.arange(n, device=q.device).expand(len(q), n)
    order = torch.where(key_mask, torch.arange(n_tokens, device=q.device), n_tokens)
    return order.sort(1).values[:, :n]


def _seen(
    rows: slice, first: int, sink_at: Tensor, window: Window, key_mask: Tensor | None
) -> Tensor:
    """[B, 1, T, N + S] bool: which sinks, then which keys first to rows.stop, the rows see."""
    i = torch.arange(rows.start, rows.stop, device=sink_at.device)[:, None]
    j = torch.arange(first, rows.stop, device=sink_at.device)
    band = ((j <= i) & (j > i - window.size)).expand(len(sink_at), -1, -1)
    if key_mask is not None:
        band = band & key_mask[:, None, first : rows.stop]
    beyond = sink_at[:, None, :] <= i - window.size  # a sink within the band is counted there
    return torch.cat([beyond, band], 2)[:, None]


def windowed_attention(
    log_q: Tensor,
    log_k: Tensor,
    row_shift: Tensor,
    near: tuple[Tensor, Tensor],
    v: Tensor,
    window: Window,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention over near keys exactly and over far keys by features, [B, H, L, D] in v's dtype.

    Args:
        log_q, log_k, v, key_mask: as in ``linear_attention``.
        row_shift: c, [B, H, L].
        near: what ``near_attention`` returned for the same keys and window.
    Raises:
        StudentError: as ``linear_attention``.
    """
    near_out, near_log = near
    W, L = window.size, v.shape[2]
    if L <= W:
        return near_out.to(v.dtype)
    # Keys W places on, so that a causal sum holds exactly those that have left the window.
    far = ~window.is_sink(L, key_mask, v.device)
    if key_mask is not None:
        far = far & key_mask
    far = far[:, : L - W].expand(len(v), -1)
    far_out, far_log = linear_attention_sums(
        log_q[:, :, W:], log_k[:, :, : L - W], v[:, :, : L - W], far
    )
    weight = (far_log + row_shift[:, :, W:] - near_log[:, :, W:]).sigmoid()[..., None]
    later = near_out[:, :, W:]
    out = torch.cat([near_out[:, :, :W], later + weight * (far_out.to(later) - later)], 2)
    return out.to(v.dtype)


def windowed_reference(
    log_q: Tensor,
    log_k: Tensor,
    row_shift: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: Window,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The definition in float64, with every pair's weight written out. For tests.

    Args as in ``windowed_attention`` and ``near_attention``; rows of padded queries mean nothing.
    """
    H, L = q.shape[1], q.shape[2]
    k, v, log_k = (repeat_heads(x.double(), H) for x in (k, v, log_k))
    far = (log_q.double()[:, :, :, None] + log_k[:, :, None]).logsumexp(-1)
    far = far + row_shift.double()[..., None]
    near = window.near(slice(0, L), key_mask, v.device)
    logits = torch.where(near, scale * q.double() @ k.transpose(-1, -2), far)
    keep = torch.ones(L, L, dtype=torch.bool, device=v.device).tril()
    if key_mask is not None:
        keep = keep & key_mask[:, None, None, :]
    return logits.masked_fill(~keep, MASKED).softmax(-1) @ v
