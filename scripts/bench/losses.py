"""Time and memory of the layerwise losses, forward and backward, for one layer.

The plain loss is the same cross-entropy in a few lines of autograd, which keeps every pair of
tokens; the ratio is its time over the others'.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from timing import add_timing_options, extra_memory_mb, paired, set_up, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dofsweep.core.attention import linear_attention
from dofsweep.core.losses import (
    StudentRows,
    l2_loss,
    output_loss,
    softmax_loss,
    softmax_losses,
)


def plain_softmax_loss(log_q: Tensor, log_k: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The definition, stabilised by each row's and key's largest feature."""
    top_q, top_k = (x.amax(-1, keepdim=True).detach() for x in (log_q, log_k))
    logits = ((log_q - top_q).exp() @ (log_k - top_k).exp().mT).log() + top_k.mT
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    log_a = logits.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0)
    p = (scale * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    return -(p * log_a).sum(-1).mean()


def inputs(args: argparse.Namespace, length: int) -> tuple[Tensor, ...]:
    """log_q and log_k of positive random features, q, k, v."""
    q, k, v = (torch.randn(1, args.heads, length, args.dim) for _ in range(3))
    z, root = torch.randn(args.heads, args.features, args.dim), args.dim**-0.25
    log_q = root * q @ z.mT
    log_k = root * k @ z.mT - root**2 * k.square().sum(-1, keepdim=True) / 2
    return log_q.requires_grad_(), log_k.requires_grad_(), q, k, v


def with_backward(
    loss: Callable[..., Tensor], features: tuple[Tensor, ...], *teacher: object
) -> Callable[[], object]:
    """Loss and gradients of the features."""
    return lambda: torch.autograd.grad(loss(*features, *teacher), features)


def output_of_linear(log_q: Tensor, log_k: Tensor, v: Tensor, target: Tensor) -> Tensor:
    """The student's attention output against the teacher's, which is at hand."""
    return output_loss(linear_attention(log_q, log_k, v), target)


def l2_of_features(log_q: Tensor, log_k: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The l2 loss of features of weight 1/M."""
    shift = -scale * q.square().sum(-1) / 2 - math.log(log_q.shape[-1])
    return l2_loss(StudentRows(log_q, log_k, row_shift=shift), q, k, scale)


def many(students: int) -> Callable[..., Tensor]:
    """The sum of the losses of several students of equal features."""

    def loss(log_q: Tensor, log_k: Tensor, *teacher: object) -> Tensor:
        return softmax_losses([StudentRows(log_q, log_k)] * students, *teacher)[0].sum()

    return loss


def memory_task(
    args: argparse.Namespace, length: int, loss: Callable[..., Tensor], warm_up: bool = False
) -> Callable[[], object]:
    """One loss at one length; the warm-up is a short one."""
    log_q, log_k, q, k, _ = inputs(args, 64 if warm_up else length)
    return with_backward(loss, (log_q, log_k), q, k, args.dim**-0.5)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_timing_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--dim", type=int, default=64, help="head channels")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--students", type=int, default=4, help="students of one teacher pass")
    args = parser.parse_args()
    clock = set_up(args)
    torch.manual_seed(0)
    rows = []
    for length in args.lengths:
        log_q, log_k, q, k, v = inputs(args, length)
        features, scale = (log_q, log_k), args.dim**-0.5
        target = scaled_dot_product_attention(q, k, v, is_causal=True)
        variants = {
            "plain": with_backward(plain_softmax_loss, features, q, k, scale),
            "softmax": with_backward(softmax_loss, features, q, k, scale),
            f"softmax, {args.students} students": with_backward(
                many(args.students), features, q, k, scale
            ),
            "l2": with_backward(l2_of_features, features, q, k, scale),
            "output": with_backward(output_of_linear, features, v, target),
        }
        rounds = args.rounds if length <= 512 else max(3, args.rounds // 3)
        for name, (ms, ratio) in paired(clock, variants, rounds).items():
            rows.append([str(length), name, f"{ms:.1f}", f"{ratio:.2f}", ""])
        for row, loss in ((-5, plain_softmax_loss), (-4, softmax_loss)):
            rows[row][-1] = f"{extra_memory_mb(memory_task, args, length, loss):.0f}"
    table(["L", "loss", "ms", "plain / this", "extra MB"], rows)


if __name__ == "__main__":
    main()
