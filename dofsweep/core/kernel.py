"""The softmax kernel K(x, y) = exp(s x·y), always as logits until the largest has been taken off.

In a trained model s x·y reaches several hundred: exp of that overflows float32 (at 88) and loses
the small entries even in float64 once they are summed. So logits are computed in float64, their
maximum is subtracted, and the shift is handed back with the result.

Sizes: J, J' points, d channels of a head; leading dimensions (heads) are free.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_gram(x: Tensor, y: Tensor, scale: float, *, out: Tensor | None = None) -> Tensor:
    """Logits s x_i·y_j, the logarithm of the Gram matrix.

    Args:
        x: points, shape [..., J, d].
        y: points, shape [..., J', d].
        scale: attention scale s.
        out: float64 tensor of the result's shape to write into.
    Returns:
        float64, shape [..., J, J']; unit: nats.
    """
    return torch.matmul(x.double() * scale, y.double().transpose(-1, -2), out=out)


def shift_by_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits minus the maximum over their last two dimensions, and that maximum.

    Args:
        logits: shape [..., J, J'].
    Returns:
        (shifted, shift): shapes [..., J, J'] and [..., 1, 1]; logits = shifted + shift, and
        exp(shifted) lies in [0, 1] with at least one 1.
    """
    shift = logits.amax(dim=(-2, -1), keepdim=True)
    return logits - shift, shift


def shifted_gram(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Gram matrix exp(s x_i·y_j − shift), and the shift: K = gram · e^shift.

    Args:
        x: points, shape [..., J, d].
        y: points, shape [..., J', d].
        scale: attention scale s.
    Returns:
        (gram, shift), float64, shapes [..., J, J'] and [..., 1, 1]; entries of gram in [0, 1].
    """
    logits = log_gram(x, y, scale)
    shift = logits.amax(dim=(-2, -1), keepdim=True)
    return logits.sub_(shift).exp_(), shift
