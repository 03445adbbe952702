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

from dofsweep.core.losses import attention_kl
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
    per_sequence: list[float] = []
    with Seam(model, handler):
        for first in range(0, len(tokens), batch):
            part = _tensor(tokens[first : first + batch], model)
            logits = model(part, use_cache=False).logits
            losses = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten(), reduction="none"
            )
            per_sequence += losses.view(len(part), -1).mean(dim=1).double().tolist()
            if progress:
                progress(len(per_sequence), len(tokens))
    n = len(per_sequence)
    stderr = float(np.std(per_sequence, ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return NextTokenLoss(float(np.mean(per_sequence)), stderr, n, n * (length - 1))


@torch.no_grad()
def layer_kl(
    model: PreTrainedModel, students: dict[int, Student], tokens: NDArray[np.int32]
) -> dict[int, list[float]]:
    """Mean Kullback-Leibler divergence of each layer's attention rows, in nats.

    Every student sees the teacher's own queries and keys, in one teacher pass for all, so a
    layer's figure does not depend on the errors of the layers below it.

    Args:
        tokens: [T, L] token ids, no padding.
    Returns:
        Per trial number one value a layer: the mean over rows and heads of KL(teacher ‖ student).
    """
    sums = {number: [0.0] * len(student.layers) for number, student in students.items()}

    def observe(call: AttentionCall) -> Tensor:
        for number, student in students.items():
            kl = attention_kl(student.rows(call), call.q, call.k, call.scale, call.key_mask)
            sums[number][call.layer_idx] += float(kl)
        return softmax_attention(call)

    with Seam(model, observe):
        for row in tokens:
            model.base_model(_tensor(row[None], model), use_cache=False)
    return {number: [s / len(tokens) for s in layers] for number, layers in sums.items()}


def trial_result(number: int, measured: NextTokenLoss, kl: list[float] | None) -> TrialResult:
    """Pack what was measured of one trial for the driver."""
    records = [
        EvalRecord("heldout_loss", measured.loss, n=measured.n_sequences, stderr=measured.stderr)
    ]
    if kl is not None:
        records.append(EvalRecord("kl", float(np.mean(kl))))
        records += [EvalRecord("kl", value, layer_idx=i) for i, value in enumerate(kl)]
    return TrialResult(
        number,
        measured.loss,
        measured.stderr,
        measured.n_sequences,
        measured.n_tokens,
        tuple(records),
    )


def _tensor(tokens: NDArray[np.int32], model: PreTrainedModel) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).to(model.device)
