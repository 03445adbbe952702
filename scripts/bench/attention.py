"""Time and memory of causal linear attention against softmax attention on the CPU.

Linear attention starts from log features, so its exponentials are in the time. Run with nothing
else on the machine, or with --clock cpu on a busy one. The ratio is softmax time over its time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import add_timing_options, extra_memory_mb, paired, set_up, table
from torch import Tensor

from dofsweep.core.attention import linear_attention, linear_attention_step


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's fused kernel."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def token_loop(log_q: Tensor, log_k: Tensor, v: Tensor) -> Tensor:
    """One recurrent step after another."""
    state, rows = None, []
    for i in range(v.shape[2]):
        at = slice(i, i + 1)
        row, state = linear_attention_step(log_q[:, :, at], log_k[:, :, at], v[:, :, at], state)
        rows.append(row)
    return torch.cat(rows, 2)


def cumulative_sum(log_q: Tensor, log_k: Tensor, v: Tensor) -> Tensor:
    """The running sums of all tokens at once, [B, H, L, M, D]; exponents must be small."""
    q, k = log_q.exp(), log_k.exp()
    sums = (k[..., None] * v[..., None, :]).cumsum(2)
    return (q[..., None, :] @ sums).squeeze(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)


def inputs(args: argparse.Namespace, length: int, *, grad: bool = False) -> tuple[Tensor, ...]:
    """Random q or log_q, k or log_k, and v; d = M, so both attentions take the same tensors."""
    shape = (1, args.heads, length, args.dim)
    return tuple(torch.randn(shape).requires_grad_(grad) for _ in range(3))


def call(
    attention: Callable[..., Tensor], tensors: tuple[Tensor, ...], *, backward: bool
) -> Callable[[], object]:
    """The forward pass, or forward and backward."""
    if not backward:
        return torch.no_grad()(lambda: attention(*tensors))
    weight = torch.randn_like(tensors[2])
    return lambda: torch.autograd.grad(attention(*tensors), tensors, weight)


def memory_task(
    args: argparse.Namespace, length: int, backward: bool, warm_up: bool = False
) -> Callable[[], object]:
    """Linear attention of one length; the warm-up is a short one."""
    tensors = inputs(args, 64 if warm_up else length, grad=backward)
    return call(linear_attention, tensors, backward=backward)


def compare_lengths(args: argparse.Namespace, clock: Callable[[], float]) -> None:
    """One row per length."""
    rows = []
    for length in args.lengths:
        row = [str(length)]
        rounds = args.rounds if length <= 2048 else max(3, args.rounds // 3)
        for backward in (False, True):
            tensors = inputs(args, length, grad=backward)
            times = paired(
                clock,
                {
                    "softmax": call(softmax_attention, tensors, backward=backward),
                    "linear": call(linear_attention, tensors, backward=backward),
                },
                rounds,
            )
            row += [f"{times['softmax'][0]:.1f}", f"{times['linear'][0]:.1f}"]
            row += [f"{times['linear'][1]:.2f}"]
            row += [f"{extra_memory_mb(memory_task, args, length, backward):.0f}"]
        rows.append(row)
    names = ["softmax ms", "linear ms", "ratio", "linear extra MB"]
    table(["L", *names, *(f"{name}, with backward" for name in names)], rows)


def compare_alternatives(args: argparse.Namespace, clock: Callable[[], float]) -> None:
    """Other ways to write the same function."""
    tensors = inputs(args, args.alternatives_at)
    variants = {
        "chunked": linear_attention,
        "token loop": token_loop,
        "cumulative sum": cumulative_sum,
    }
    outs = [attention(*tensors) for attention in variants.values()]
    worst = max(float((outs[0] - out).abs().max()) for out in outs[1:])
    calls = {name: call(f, tensors, backward=False) for name, f in variants.items()}
    times = paired(clock, calls, max(3, args.rounds // 3))
    print(f"Other forms at L = {args.alternatives_at} (largest difference {worst:.1e}):\n")
    rows = [[name, f"{ms:.1f}", f"{1 / ratio:.1f}"] for name, (ms, ratio) in times.items()]
    table(["form", "ms", "times as slow"], rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_timing_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 8192])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--dim", type=int, default=64, help="head channels and features")
    parser.add_argument("--alternatives-at", type=int, default=1024)
    args = parser.parse_args()
    clock = set_up(args)
    torch.manual_seed(0)
    compare_lengths(args, clock)
    compare_alternatives(args, clock)


if __name__ == "__main__":
    main()
