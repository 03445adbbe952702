"""What linear attention accepts, and how its heads belong together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dofsweep.errors import StudentError


@dataclass(frozen=True)
class Heads:
    """Numbers of heads, and the precision to work in."""

    queries: int
    """H"""
    keys: int
    """K: feature-key heads"""
    values: int
    """G: key/value heads"""
    dtype: torch.dtype
    """float64 when an input is, else float32"""

    @property
    def group(self) -> int:
        """R = H/K: query heads that share a feature-key head."""
        return self.queries // self.keys


def repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """Repeat [B, G, …] to [B, n_heads, …], head h from head h // (n_heads/G)."""
    return x.repeat_interleave(n_heads // x.shape[1], 1)


def split_heads(x: Tensor, n_groups: int) -> Tensor:
    """View [B, H, …] as [B, n_groups, H/n_groups, …]."""
    return x.view(x.shape[0], n_groups, x.shape[1] // n_groups, *x.shape[2:])


def check_inputs(log_q: Tensor, log_k: Tensor, v: Tensor, key_mask: Tensor | None) -> Heads:
    """The heads of log_q [B,H,L,M], log_k [B,K,L,M], v [B,G,L,D], key_mask [B,L] or None.

    Raises:
        StudentError: they do not fit together.
    """
    names = {"log_q": log_q, "log_k": log_k, "v": v}
    for name, x in names.items():
        if x.dim() != 4 or not x.is_floating_point():
            raise StudentError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}; give a floating-point tensor "
                "[batch, heads, tokens, features or channels]"
            )
    B, H, L, M = log_q.shape
    K, G = log_k.shape[1], v.shape[1]
    if log_k.shape != (B, K, L, M) or v.shape[:3] != (B, G, L) or 0 in (B, H, K, G, L, M):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in names.items())
        raise StudentError(
            f"{shapes} do not belong together: batch and tokens must agree in all three, features "
            "in log_q and log_k, and none may be empty; check that q, k and v are of one call"
        )
    if H % K or K % G:
        raise StudentError(
            f"{H} query, {K} feature-key and {G} value heads do not divide: feature-key heads "
            "must be a divisor of query heads and a multiple of value heads; build the features "
            "with as many key heads as v has, or as many as q has"
        )
    check_mask(key_mask, B, L)
    double = torch.float64 in (log_q.dtype, log_k.dtype, v.dtype)
    return Heads(H, K, G, torch.float64 if double else torch.float32)


def check_mask(key_mask: Tensor | None, batch: int, n_tokens: int) -> None:
    """Refuse all but None and a bool [batch, n_tokens].

    Raises:
        StudentError: the mask is of another kind.
    """
    if key_mask is None or (key_mask.dtype == torch.bool and key_mask.shape == (batch, n_tokens)):
        return
    raise StudentError(
        f"key_mask is {key_mask.dtype} of shape {tuple(key_mask.shape)}; linear attention is "
        f"causal by itself and takes a bool padding mask of shape ({batch}, {n_tokens}), True for "
        "a real token; pass the 2-D attention_mask as mask.bool(), not a 4-D or additive one"
    )
