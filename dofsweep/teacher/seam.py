"""The one seam to transformers: an attention function that hands every layer to a handler of ours.

transformers calls a registered attention function with queries, keys and values as the attention
sees them (after rotary embedding) and with the true scale, for every decoder family alike. A
handler observes them (capture, distillation) or computes something else with them (a student).

Shapes: B batch, H query heads, G key/value heads, L tokens, d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from dofsweep.errors import CaptureError, TeacherError

IMPLEMENTATION = "dofsweep"
_HANDLER = "_dofsweep_handler"


@dataclass(frozen=True)
class AttentionCall:
    """What one attention layer was asked to do."""

    layer_idx: int
    q: Tensor
    """Queries [B, H, L, d]."""
    k: Tensor
    """Keys [B, G, L, d]."""
    v: Tensor
    """Values [B, G, L, d]."""
    scale: float
    """s: the attention weight of query i on key j is exp(s q_i·k_j) up to its row's sum."""
    key_mask: Tensor | None
    """[B, L] bool, True for a real token; None where every token is real."""


Handler = Callable[[AttentionCall], Tensor]
"""Returns the attention output [B, H, L, d]."""


def softmax_attention(call: AttentionCall) -> Tensor:
    """The teacher's own causal softmax attention, [B, H, L, d]."""
    grouped = call.k.shape[1] != call.q.shape[1]
    if call.key_mask is None:
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, is_causal=True, scale=call.scale, enable_gqa=grouped
        )
    length = call.q.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=call.q.device).tril()
    mask = causal & call.key_mask[:, None, None, :]
    mask = mask | torch.eye(
        length, dtype=torch.bool, device=call.q.device
    )  # a padded row sees itself
    return F.scaled_dot_product_attention(
        call.q, call.k, call.v, attn_mask=mask, scale=call.scale, enable_gqa=grouped
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    handler = module.__dict__.get(_HANDLER)
    if handler is None:
        raise CaptureError(
            f"{type(module).__name__} runs dofsweep attention with no handler: use it inside Seam"
        )
    _refuse_what_is_not_plain(module, query, kwargs)
    if query.shape[2] != key.shape[2]:
        raise CaptureError(
            f"layer {module.layer_idx}: {query.shape[2]} queries but {key.shape[2]} keys; "
            "call the model on whole sequences with use_cache=False"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    mask = None if attention_mask is None else attention_mask.bool()
    out = handler(AttentionCall(int(module.layer_idx), query, key, value, scale, mask))  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous(), None


def _refuse_what_is_not_plain(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> None:
    """The kernel must be exp(s q·k) under a causal mask; anything added to it is refused."""
    name = type(module).__name__
    window = kwargs.get("sliding_window")
    if window is not None and window < query.shape[2]:
        raise TeacherError(
            f"{name} attends only to the last {window} tokens and was given {query.shape[2]}; "
            f"use --seq-len {window} or less, or a teacher with full attention"
        )
    for argument, meaning in (
        ("softcap", "caps its attention logits"),
        ("s_aux", "adds learned sinks to its attention"),
        ("position_bias", "adds a position bias to its attention logits"),
    ):
        if kwargs.get(argument) is not None:
            raise TeacherError(
                f"{name} {meaning} ({argument}); its kernel is not exp(s q·k). "
                "Choose a teacher with plain softmax attention, such as GPT-2, GPT-NeoX or Llama"
            )


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, flash_attention_mask)


class Seam:
    """While entered, every attention layer of a model calls one handler.

    >>> with Seam(model, handler):
    ...     model(tokens, use_cache=False)

    Leaving it restores the model and checks that each forward pass reached every layer once.

    Raises:
        TeacherError: the model does not use transformers' attention interface.
        CaptureError: a layer was not reached, or not as often as the others.
    """

    def __init__(self, model: PreTrainedModel, handler: Handler) -> None:
        self.model = model
        self.n_layers = int(model.config.get_text_config().num_hidden_layers)
        self._handler = handler
        self._calls = [0] * self.n_layers
        self._modules = [m for m in model.modules() if hasattr(m, "layer_idx")]
        self._before: str = model.config._attn_implementation

    def _count_and_handle(self, call: AttentionCall) -> Tensor:
        self._calls[call.layer_idx] += 1
        return self._handler(call)

    def __enter__(self) -> Seam:
        if any(_HANDLER in module.__dict__ for module in self._modules):
            raise CaptureError("this model is already inside another Seam; leave that one first")
        self.model.set_attn_implementation(IMPLEMENTATION)
        if self.model.config._attn_implementation != IMPLEMENTATION:
            raise TeacherError(
                f"{type(self.model).__name__} does not use transformers' attention interface; "
                "choose a teacher of another architecture, such as GPT-2, GPT-NeoX or Llama"
            )
        for module in self._modules:
            module.__dict__[_HANDLER] = self._count_and_handle
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for module in self._modules:
            module.__dict__.pop(_HANDLER, None)
        self.model.set_attn_implementation(self._before)
        if kind is None and len(set(self._calls)) > 1:
            missed = [i for i, n in enumerate(self._calls) if n < max(self._calls)]
            raise CaptureError(
                f"{type(self.model).__name__}: layers {missed} of {self.n_layers} did not reach "
                "the attention interface; layers without softmax attention are not supported"
            )
        if kind is None and not any(self._calls):
            raise CaptureError(
                f"{type(self.model).__name__}: no layer reached the attention interface"
            )
