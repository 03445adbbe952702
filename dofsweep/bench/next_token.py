"""Held-out next-token loss of teacher and students, and what each layer's attention lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dofsweep.core.losses import attention_kl, output_loss
from dofsweep.methods import Student
from dofsweep.records import EvalRecord, TrialResult
from dofsweep.teacher.seam import AttentionCall, Handler, Seam, softmax_attention

Progress = Callable[[int, int], None]

LOGIT_FLOATS_PER_BATCH = 64_000_000
"""Bounds the logits of one batch, [B, L, vocabulary], in memory."""


@dataclass(frozen=True)
class NextTokenLoss:
    """Mean next-token loss in nats per token, with its standard error over sequences."""

    loss: float
    stderr: float
    n_sequences: int
    n_tokens: int
    """Predicted tokens: L − 1 of each sequence of L."""
    per_sequence: tuple[float, ...]
    """Mean loss of each sequence, for paired comparisons of two students."""
    by_context: dict[int, tuple[float, float]]
    """Loss and standard error of the tokens with c to 2c - 1 tokens before them, by c = 1, 2, 4…"""


@torch.no_grad()
def next_token_loss(
    model: PreTrainedModel,
    tokens: NDArray[np.int32],
    handler: Handler = softmax_attention,
    progress: Progress | None = None,
) -> NextTokenLoss:
    """Next-token loss of a model whose attention layers are computed by ``handler``.

    Args:
        tokens: [T, L] token ids, no padding; every token but a sequence's first is predicted.
        handler: ``softmax_attention`` for the teacher, ``student.attend`` for a student.
    Returns:
        The standard error takes sequences as independent; NaN for a single one.
    """
    length = tokens.shape[1]
    batch = max(1, LOGIT_FLOATS_PER_BATCH // (length * model.config.get_text_config().vocab_size))
    rows: list[Tensor] = []
    with Seam(model, handler):
        for first in range(0, len(tokens), batch):
            part = _tensor(tokens[first : first + batch], model)
            logits = model(part, use_cache=False).logits
            token_losses = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten(), reduction="none"
            )
            rows.append(token_losses.view(len(part), -1).double().cpu())
            if progress:
                progress(min(first + batch, len(tokens)), len(tokens))
    table = torch.cat(rows)
    per_sequence = table.mean(dim=1)
    by_context = {
        context: _mean(table[:, context - 1 : 2 * context - 1].mean(dim=1))
        for context in (2**i for i in range((length - 1).bit_length()))
    }
    mean, stderr = _mean(per_sequence)
    losses = tuple(per_sequence.tolist())
    return NextTokenLoss(mean, stderr, len(table), table.numel(), losses, by_context)


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean of one value a sequence and its standard error, NaN for a single one."""
    n = len(values)
    return float(values.mean()), float(values.std() / math.sqrt(n)) if n > 1 else math.nan


@dataclass(frozen=True)
class LayerErrors:
    """What the attention of each layer of one student lost, on the teacher's own q, k and v."""

    output: list[float]
    """Squared error of the attention output, relative to the teacher's, by layer."""
    kl: list[float] | None
    """Mean over rows and heads of KL(teacher ‖ student) in nats, by layer. None where far keys
    have no weight: it is infinite."""


@torch.no_grad()
def layer_errors(
    model: PreTrainedModel, students: dict[int, Student], tokens: NDArray[np.int32]
) -> dict[int, LayerErrors]:
    """Errors of each layer's attention, in one teacher pass for all students.

    Every student sees the teacher's own queries, keys and values, so a layer's figure does not
    depend on the errors of the layers below it.

    Args:
        tokens: [T, L] token ids, no padding.
    Returns:
        Per trial number the means over sequences.
    """
    n_layers = model.config.get_text_config().num_hidden_layers
    output = {number: [0.0] * n_layers for number in students}
    kl = {number: [0.0] * n_layers for number, student in students.items() if len(student.layers)}

    def observe(call: AttentionCall) -> Tensor:
        teacher, layer_idx = softmax_attention(call), call.layer_idx
        for number, student in students.items():
            if number in kl:
                rows = student.rows(call)
                kl[number][layer_idx] += float(
                    attention_kl(rows, call.q, call.k, call.scale, call.key_mask)
                ) / len(tokens)
            own = student.attend(call)
            output[number][layer_idx] += float(output_loss(own, teacher, call.key_mask)) / len(
                tokens
            )
        return teacher

    with Seam(model, observe):
        for row in tokens:
            model.base_model(_tensor(row[None], model), use_cache=False)
    return {number: LayerErrors(output[number], kl.get(number)) for number in students}


def trial_result(number: int, measured: NextTokenLoss, errors: LayerErrors | None) -> TrialResult:
    """Pack what was measured of one trial for the driver."""
    n = measured.n_sequences
    records = [EvalRecord("heldout_loss", measured.loss, n=n, stderr=measured.stderr)]
    records += [
        EvalRecord("heldout_loss", loss, context=context, n=n, stderr=stderr)
        for context, (loss, stderr) in measured.by_context.items()
    ]
    found = {"output_error": errors.output, "kl": errors.kl} if errors else {}
    for metric, layers in found.items():
        if layers is not None:
            records.append(EvalRecord(metric, float(np.mean(layers))))
            records += [EvalRecord(metric, value, layer_idx=i) for i, value in enumerate(layers)]
    return TrialResult(
        number,
        measured.loss,
        measured.stderr,
        n,
        measured.n_tokens,
        tuple(records),
        measured.per_sequence,
    )


def _tensor(tokens: NDArray[np.int32], model: PreTrainedModel) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).to(model.device)
