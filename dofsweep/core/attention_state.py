"""Linear attention as a recurrence: a prompt at once, then token by token in constant memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dofsweep.core.attention_chunks import Running, split_rows
from dofsweep.core.attention_grad import (
    CHUNK,
    Inputs,
    chunked,
    cut_tokens,
    exact_first_row,
    nonzero,
    walk,
    write_ratio,
)
from dofsweep.core.attention_inputs import Heads, check_inputs, split_heads
from dofsweep.errors import StudentError


@dataclass(frozen=True)
class LinearState:
    """Sums over the keys seen, per feature in units of exp(log_scale).

    Σ_j exp(log_k[j,m]) v_j = exp(log_scale) S and Σ_j exp(log_k[j,m]) = exp(log_scale) Z. Always
    float32 (float64 for float64 inputs): a bfloat16 sum stops growing at 256.
    """

    S: Tensor
    """[B, K, M, D]"""
    Z: Tensor
    """[B, K, M]"""
    log_scale: Tensor
    """[B, K, M]: the largest log_k so far, rounded up; -1e30 where there is none."""

    @property
    def nbytes(self) -> int:
        """Bytes of the state; they do not grow with the number of tokens."""
        return sum(t.numel() * t.element_size() for t in (self.S, self.Z, self.log_scale))


@torch.no_grad()
def linear_attention_prefill(
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Attention of L new tokens over those in ``state`` and each other, and the state after them.

    No gradient. Args, output and errors as in ``linear_attention``; the state given is not changed.
    """
    heads = check_inputs(log_q, log_k, v, key_mask)
    inputs = Inputs(heads, log_q, log_k, v, key_mask)
    running = inputs.empty_state() if state is None else resume(state, inputs)
    out = v.new_empty((*log_q.shape[:3], v.shape[-1]))
    for cut, num, _, after in walk(inputs, cut_tokens(log_q, v.shape[-1], CHUNK), running):
        write_ratio(split_rows(num, cut.chunk), chunked(out, cut, heads.keys))
        running = after
    if state is None:
        exact_first_row(out, v, key_mask)
    return out, LinearState(running.sums[..., :-1], running.sums[..., -1], running.scale)


@torch.no_grad()
def linear_attention_step(
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    state: LinearState | None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """One token: [B, H, 1, D] and the state after it; time and memory do not depend on the past.

    No gradient. Args and errors as in ``linear_attention`` with L = 1; the state given is not
    changed.
    """
    heads = check_inputs(log_q, log_k, v, key_mask)
    if log_q.shape[2] != 1:
        raise StudentError(
            f"one step takes one token, not {log_q.shape[2]}; use linear_attention_prefill"
        )
    if state is None:
        return linear_attention_prefill(log_q, log_k, v, key_mask)
    check_state(state, log_k, v, heads)
    key = log_k[:, :, 0].to(heads.dtype)
    if key_mask is not None:
        key = key.masked_fill(~key_mask[:, :, None], -torch.inf)
    values = v[:, :, 0].to(heads.dtype).repeat_interleave(heads.keys // heads.values, 1)
    scale = torch.maximum(state.log_scale, key.ceil())
    decay = (state.log_scale - scale).exp_()
    key = (key - scale).exp_()
    sums = (state.S * decay[..., None]).addcmul_(key[..., None], values[:, :, None])
    total = torch.addcmul(key, state.Z, decay)
    query = split_heads(log_q.to(heads.dtype), heads.keys)[:, :, :, 0] + scale[:, :, None]
    query = (query - query.amax(-1, keepdim=True)).exp_()
    out = (query @ sums).div_(nonzero(query @ total[..., None]))
    return out.flatten(1, 2)[:, :, None].to(v.dtype), LinearState(sums, total, scale)


def check_state(state: LinearState, log_k: Tensor, v: Tensor, heads: Heads) -> None:
    """Refuse the state of another model or batch.

    Raises:
        StudentError: its shape or precision is not that of these inputs.
    """
    shape = (*log_k.shape[:2], log_k.shape[-1], v.shape[-1])
    if state.S.shape != shape or state.S.dtype != heads.dtype:
        raise StudentError(
            f"the state is {state.S.dtype} of shape {tuple(state.S.shape)}, these inputs need "
            f"{heads.dtype} of shape {shape}; pass the state returned for the same student and "
            "batch, or None to begin"
        )


def resume(state: LinearState, inputs: Inputs) -> Running:
    """The running sums of a state, checked against the inputs that continue it."""
    check_state(state, inputs.log_k, inputs.v, inputs.heads)
    return Running(state.log_scale, torch.cat([state.S, state.Z[..., None]], -1))
