"""One step through the whole student against one layerwise step, with one student.

    python scripts/bench/direct.py --model DIR

Every round runs, over the same sequence: the bare forward, one layerwise step (softmax loss), one
step of the direct loss, and one of the polish. The student is fix at C = 64. The text is Python's
own manual. Every student starts anew, so the figures are of untrained features.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from engine import STEPS, bare_forward, capture_of, load, plans_of, text_tokens
from timing import add_timing_options, extra_memory_mb, paired, set_up, table
from transformers import PreTrainedModel

from dofsweep.core.plan import Plan
from dofsweep.distill.end_to_end import DirectTrainer, PolishTrainer
from dofsweep.distill.layerwise import LayerwiseTrainer
from dofsweep.distill.trainer import Trainer, TrainSettings
from dofsweep.methods import build_student
from dofsweep.teacher.capture import Capture
from dofsweep.teacher.load import shape_of

TRAINERS: dict[str, type[Trainer]] = {
    "softmax": LayerwiseTrainer,
    "direct": DirectTrainer,
    "polish": PolishTrainer,
}


def trainer(
    model: PreTrainedModel, capture: Capture, plan: Plan, feature_map: str, loss: str
) -> Trainer:
    """A trainer of one fresh student on a loss."""
    student = build_student(
        feature_map, plan, shape_of(model.config), feature_heads="kv", scales=capture.scales,
        key_means=capture.key_mean, init="gaussian", seed=0,
    )  # fmt: skip
    settings = TrainSettings(STEPS, 0.06, 0.1, 0.1, 1.0, loss)
    return TRAINERS[loss](model, {0: student}, {0: settings})


def memory_task(
    folder: Path, length: int, feature_map: str, loss: str, warm_up: bool = False
) -> Callable[[], object]:
    """One step on a loss at one length."""
    model, tokens = load(folder), text_tokens(folder, 1, 32 if warm_up else length)
    capture = capture_of(model, text_tokens(folder, 1, 256))
    plan = plans_of(capture, model, [64])[0]
    return partial(trainer(model, capture, plan, feature_map, loss).step, tokens)


def variants_of(
    model: PreTrainedModel, capture: Capture, feature_map: str, tokens: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """The layerwise step first: times are compared with it."""
    plan = plans_of(capture, model, [64])[0]
    steps: dict[str, Callable[[], object]] = {
        loss: partial(trainer(model, capture, plan, feature_map, loss).step, tokens)
        for loss in TRAINERS
    }
    return steps | {"forward": partial(bare_forward, model, tokens)}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_timing_options(parser)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512])
    parser.add_argument("--map", default="prf", help="feature map")
    args = parser.parse_args()
    clock = set_up(args)
    model = load(args.model)
    capture = capture_of(model, text_tokens(args.model, 2, 256))
    rows = []
    for length in args.lengths:
        tokens = text_tokens(args.model, 1, length)
        times = paired(clock, variants_of(model, capture, args.map, tokens), args.rounds)
        for name, (ms, ratio) in times.items():
            row = [str(length), name, f"{ms:.0f}", f"{1 / ratio:.2f}"]
            if name in TRAINERS:
                row.append(
                    f"{extra_memory_mb(memory_task, args.model, length, args.map, name):.0f}"
                )
            rows.append(row if name in TRAINERS else [*row, ""])
    table(["L", "", "ms", "over softmax", "extra MB"], rows)


if __name__ == "__main__":
    main()
