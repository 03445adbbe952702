"""Linear attention from log features: one function in three forms.

Legend: B batch, H query heads, K feature-key heads (G or H), G key/value heads, L tokens,
M features, D value channels. The weight of query i on key j <= i is

    a_ij ∝ Σ_m exp(log_q[i,m] + log_k[j,m])

so a positive random feature map (arXiv:2009.14794) hands over the exponents of its features:
log_q = √s z·q, log_k = √s z·k - s‖k‖²/2. A feature whose log is -inf is absent. Query head h uses
feature-key head h // (H/K) and value head h // (H/G).

``attention_reference`` is the definition; ``linear_attention`` computes it for training and
``linear_attention_prefill`` and ``linear_attention_step`` for generation. How the exponents are
kept in range, and why no later token can move a bit of an earlier row, is in
``attention_chunks``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dofsweep.core.attention_grad import (
    CHUNK,
    Inputs,
    LinearAttention,
    cut_tokens,
)
from dofsweep.core.attention_inputs import Heads, check_inputs, repeat_heads
from dofsweep.core.attention_state import (
    LinearState,
    linear_attention_prefill,
    linear_attention_step,
)
from dofsweep.errors import StudentError

__all__ = [
    "LinearState",
    "attention_reference",
    "linear_attention",
    "linear_attention_prefill",
    "linear_attention_step",
    "linear_attention_sums",
]


def attention_reference(
    log_q: Tensor, log_k: Tensor, v: Tensor, key_mask: Tensor | None = None
) -> Tensor:
    """The definition, in float64 with logarithms of sums; memory is B·H·L²·M. For tests.

    Args and errors as in ``linear_attention``; returns [B, H, L, D] in float64.
    """
    check_inputs(log_q, log_k, v, key_mask)
    H, L = log_q.shape[1], log_q.shape[2]
    log_k, v = repeat_heads(log_k.double(), H), repeat_heads(v.double(), H)
    logits = (log_q.double()[:, :, :, None] + log_k[:, :, None]).logsumexp(-1)
    keep = torch.ones(L, L, dtype=torch.bool, device=v.device).tril()
    if key_mask is not None:
        keep = keep & key_mask[:, None, None, :]
    weights = logits.masked_fill(~keep, -torch.inf).softmax(-1)
    return weights.masked_fill(~keep.any(-1, keepdim=True), 0) @ v


def linear_attention(
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    form: str = "auto",
    chunk_size: int | None = None,
) -> Tensor:
    """Causal attention with the weights above; differentiable once in log_q, log_k and v.

    Time is L·(C + D)·M and memory linear in L; both passes keep only running sums between chunks.
    Sums are float32, or float64 when an input is, whatever the inputs are.

    Args:
        log_q: [B, H, L, M].
        log_k: [B, K, L, M].
        v: [B, G, L, D].
        key_mask: [B, L] bool, True for a real token. Padded keys add nothing; the output of a
            padded query is finite and has no meaning.
        form: "quadratic" treats the sequence as one chunk, "chunked" cuts it, "auto" takes
            the faster.
        chunk_size: tokens of a chunk (C); default 64. Not for the quadratic form.
    Returns:
        [B, H, L, D] in v's dtype. The first token's row is exactly its value.
    Raises:
        StudentError: shapes, dtypes, form or chunk size are not of this kind.
    """
    heads = check_inputs(log_q, log_k, v, key_mask)
    chunk = chunk_tokens(form, chunk_size, log_q.shape[2])
    return _attend(heads, chunk, log_q, log_k, v, key_mask)[0]


def linear_attention_sums(
    log_q: Tensor, log_k: Tensor, v: Tensor, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``linear_attention``, and the log of each row's normaliser Σ_j a_ij.

    With both, the keys of this call can share one softmax with other keys (``window``).

    Args and errors as in ``linear_attention``.
    Returns:
        [B, H, L, D], 0 in rows that see no key, and [B, H, L] in the working precision, -inf there.
        Both are differentiable once.
    """
    heads = check_inputs(log_q, log_k, v, key_mask)
    return _attend(heads, chunk_tokens("auto", None, log_q.shape[2]), log_q, log_k, v, key_mask)


def _attend(
    heads: Heads, chunk: int, log_q: Tensor, log_k: Tensor, v: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    cuts = cut_tokens(log_q, v.shape[-1], chunk)
    inputs = Inputs(heads, log_q.detach(), log_k.detach(), v.detach(), key_mask)
    both: tuple[Tensor, Tensor] = LinearAttention.apply(inputs, cuts, log_q, log_k, v)  # type: ignore[no-untyped-call]
    return both


def chunk_tokens(form: str, chunk_size: int | None, n_tokens: int) -> int:
    """C for a form, or an error that says what to change."""
    if form not in ("auto", "quadratic", "chunked"):
        raise StudentError(f"form={form!r} is unknown; use 'auto', 'quadratic' or 'chunked'")
    if chunk_size is not None and (form == "quadratic" or chunk_size < 1):
        raise StudentError(
            f"chunk_size={chunk_size} does not go with form={form!r}: it must be at least 1, and "
            "the quadratic form has none; drop it or use form='chunked'"
        )
    if form == "quadratic":
        return n_tokens
    return chunk_size or CHUNK
