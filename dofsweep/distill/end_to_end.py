"""Training features through the whole student: the direct loss, and the polish.

The layerwise losses see one layer at a time. These two see the student as it will be used, every
layer on its predecessors' output, at the price of a forward and a backward pass for each student.
Only features get gradients. Every decoder layer is checkpointed (its inside is computed again in
the backward pass), and logits are made a slice of positions at a time, so that neither the layers'
insides nor [B, L, vocabulary] are ever held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dofsweep.distill.trainer import Trainer
from dofsweep.errors import TeacherError
from dofsweep.teacher.seam import Handler, Seam, softmax_attention

LOGIT_FLOATS = 16_000_000
"""Bounds the logits of one slice in memory."""

LOGIT_TOL = 1e-3


class EndToEndTrainer(Trainer):
    """Trains every student through its own forward and backward pass over the same tokens."""

    def backward(self, tokens: Tensor, share: float) -> dict[int, list[float]]:
        """One pass a student; its loss is a mean over positions, in nats."""
        prepared = self.prepare(tokens)
        losses = {}
        for number, student in self.active.items():
            with (
                self.timed_features(),
                torch.enable_grad(),
                Seam(self.teacher, student.attend),
                checkpointed_layers(self.teacher),
            ):
                loss = self.loss(hidden_states(self.teacher, tokens), tokens, prepared)
                (share * loss).backward()  # type: ignore[no-untyped-call]
            losses[number] = [float(loss.detach())]
        return losses

    def prepare(self, tokens: Tensor) -> Tensor | None:
        """What all students are compared with, made once for a micro batch."""
        return None

    def loss(self, hidden: Tensor, tokens: Tensor, prepared: Tensor | None) -> Tensor:
        """Loss of a student by its last hidden states [B, L, width]."""
        raise NotImplementedError


class DirectTrainer(EndToEndTrainer):
    """The next-token loss of the whole student, the paper's ``direct`` (arXiv:2507.03340)."""

    def loss(self, hidden: Tensor, tokens: Tensor, prepared: Tensor | None) -> Tensor:
        """Mean over predicted tokens of -log p(token)."""

        def part(states: Tensor, targets: Tensor) -> Tensor:
            logits = logits_of(self.teacher, states)
            return F.cross_entropy(logits, targets, reduction="sum")

        states, targets = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        return _sum_over_slices(self.teacher, part, states, targets) / len(targets)


class PolishTrainer(EndToEndTrainer):
    """Distillation of the teacher's next-token distribution, after layerwise training."""

    def prepare(self, tokens: Tensor) -> Tensor:
        """The teacher's last hidden states [B, L, width]."""
        with torch.no_grad(), Seam(self.teacher, softmax_attention):
            return hidden_states(self.teacher, tokens)

    def loss(self, hidden: Tensor, tokens: Tensor, prepared: Tensor | None) -> Tensor:
        """Mean over positions of KL(teacher ‖ student)."""
        assert prepared is not None

        def part(states: Tensor, wanted: Tensor) -> Tensor:
            logits = logits_of(self.teacher, states).log_softmax(-1)
            target = logits_of(self.teacher, wanted).log_softmax(-1)
            return F.kl_div(logits, target, log_target=True, reduction="sum")

        states, wanted = hidden.flatten(0, 1), prepared.flatten(0, 1)
        return _sum_over_slices(self.teacher, part, states, wanted) / len(states)


def hidden_states(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Last hidden states of a model, [B, L, width], from token ids [B, L] without padding."""
    states: Tensor = model.base_model(tokens, use_cache=False).last_hidden_state
    return states


def logits_of(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [..., vocabulary] in float32 from last hidden states [..., width]."""
    logits: Tensor = model.get_output_embeddings()(states)
    return logits.float()


@torch.no_grad()
def check_logits(model: PreTrainedModel, handler: Handler = softmax_attention) -> None:
    """Make sure that ``logits_of`` is all that this model does after its last layer.

    Raises:
        TeacherError: it scales or caps its logits, for example.
    """
    tokens = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    with Seam(model, handler):
        wanted = model(tokens, use_cache=False).logits.float()
        found = logits_of(model, hidden_states(model, tokens))
    if not torch.allclose(
        wanted, found, rtol=LOGIT_TOL, atol=LOGIT_TOL * float(wanted.abs().max())
    ):
        raise TeacherError(
            f"{type(model).__name__} changes its logits after the output layer; train with a "
            "layerwise loss (softmax, l2, output) instead of direct or polish"
        )


def _sum_over_slices(model: PreTrainedModel, part: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Sum of ``part`` over slices of rows, differentiable once in the first of them."""
    step = max(1, LOGIT_FLOATS // model.config.get_text_config().vocab_size)
    total: Tensor = SliceSum.apply(part, step, *rows)  # type: ignore[no-untyped-call]
    return total


class SliceSum(torch.autograd.Function):
    """A sum over slices whose gradient is found with its value: a slice's logits live once."""

    @staticmethod
    def forward(ctx: Any, part: Callable[..., Tensor], step: int, *rows: Tensor) -> Tensor:
        """``part`` takes a slice of each of ``rows`` and gives a scalar."""
        total, grads = rows[0].new_zeros((), dtype=torch.float32), []
        for states, *others in zip(*(x.split(step) for x in rows), strict=True):
            with torch.enable_grad():
                leaf = states.detach().requires_grad_()
                value = part(leaf, *others)
                grads.append(torch.autograd.grad(value, leaf)[0])
            total += value.detach()
        ctx.save_for_backward(torch.cat(grads))
        ctx.n_others = len(rows) - 1
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass has found."""
        (known,) = ctx.saved_tensors
        return None, None, known * grad.to(known.dtype), *[None] * ctx.n_others


@contextmanager
def checkpointed_layers(model: PreTrainedModel) -> Iterator[None]:
    """While entered, every decoder layer keeps its inputs alone for the backward pass.

    The backward pass must happen inside as well, and within the same Seam: it runs layers again.
    """
    layers = decoder_layers(model)

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        return run

    for layer in layers:
        layer.forward = wrap(layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a decoder, in order.

    Raises:
        TeacherError: they are not found as one list of modules.
    """
    n_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == n_layers
            and all(any(hasattr(m, "layer_idx") for m in layer.modules()) for layer in module)
        ):
            return list(module)
    raise TeacherError(f"{type(model).__name__} has no list of {n_layers} decoder layers")
