"""Layerwise distillation against the teacher's bare forward, and six students against one.

    python scripts/bench/engine.py --model DIR

Every round runs, over the same sequence: the bare forward, one optimizer step with one student
(fix, C = 64), and one step with six (fix, dof and dof_clip at C = 64 and 32). The aims are 1.6
times the forward for one student, and 2.5 times one student's step for six. The text is Python's
own manual. Every student starts anew, so the figures are of untrained features.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from timing import add_timing_options, extra_memory_mb, paired, set_up, table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dofsweep.core.plan import Plan, make_plan
from dofsweep.core.spectrum import dof_table, head_spectra
from dofsweep.distill.layerwise import LayerwiseTrainer
from dofsweep.distill.trainer import TrainSettings
from dofsweep.methods import build_student
from dofsweep.teacher.capture import Capture, capture_points
from dofsweep.teacher.load import shape_of

STEPS = 1000


def load(folder: Path) -> PreTrainedModel:
    """The teacher in float32, without gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model.requires_grad_(False)


def text_tokens(folder: Path, n_sequences: int, length: int) -> torch.Tensor:
    """[n_sequences, length] token ids of Python's manual."""
    ids = AutoTokenizer.from_pretrained(folder)("\n".join(topics.values()))["input_ids"]
    return torch.tensor(ids[: n_sequences * length]).view(n_sequences, length)


def plans_of(capture: Capture, model: PreTrainedModel, budgets: list[int]) -> list[Plan]:
    """fix, dof and dof_clip at every budget; fix at the first one comes first."""
    shape = shape_of(model.config)
    spectra = []
    for i, (points, scale) in enumerate(zip(capture.points, capture.scales, strict=True)):
        how = {"n_queries": capture.n_queries, "lam_min": 2.0**-10, "layer_idx": i}
        spectra += head_spectra(points, scale, **how)
    dof = dof_table(spectra, [2.0**-8])[0]
    return [
        make_plan(
            strategy, n_layers=shape.n_layers, n_heads=shape.n_kv_heads, budget=budget,
            head_dim=shape.head_dim, dof=None if strategy == "fix" else dof,
        )
        for budget in budgets
        for strategy in ("fix", "dof", "dof_clip")
    ]  # fmt: skip


def trainer(
    model: PreTrainedModel, capture: Capture, plans: list[Plan], feature_map: str
) -> LayerwiseTrainer:
    """A trainer of fresh students, one per plan."""
    students = {
        number: build_student(
            feature_map, plan, shape_of(model.config), feature_heads="kv", scales=capture.scales,
            key_means=capture.key_mean, init="gaussian", seed=number,
        )
        for number, plan in enumerate(plans)
    }  # fmt: skip
    settings = TrainSettings(STEPS, 0.06, 0.1, 0.1, 1.0)
    return LayerwiseTrainer(model, students, dict.fromkeys(students, settings))


def capture_of(model: PreTrainedModel, tokens: torch.Tensor) -> Capture:
    """What plans and centred students need."""
    return capture_points(
        model, tokens.numpy(), n_points=256, seed=0, feature_heads="kv", center_keys=True
    )


def memory_task(
    folder: Path, length: int, n_students: int, warm_up: bool = False
) -> Callable[[], object]:
    """One step of n_students at one length, or the bare forward for none."""
    model, tokens = load(folder), text_tokens(folder, 1, 32 if warm_up else length)
    if not n_students:
        return partial(bare_forward, model, tokens)
    capture = capture_of(model, text_tokens(folder, 1, 256))
    one = plans_of(capture, model, [64])[:1] * n_students
    return partial(trainer(model, capture, one, "prf").step, tokens)


def bare_forward(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """The model without its head, as the layerwise trainer runs it."""
    with torch.no_grad():
        model.base_model(tokens, use_cache=False)


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
    plans = plans_of(capture, model, [64, 32])
    rows = []
    for length in args.lengths:
        tokens = text_tokens(args.model, 1, length)
        one = trainer(model, capture, plans[:1], args.map)
        six = trainer(model, capture, plans, args.map)
        variants = {
            "forward": lambda tokens=tokens: bare_forward(model, tokens),
            "one student": lambda tokens=tokens, one=one: one.step(tokens),
            "six students": lambda tokens=tokens, six=six: six.step(tokens),
        }
        times = paired(clock, variants, args.rounds)
        for i, (name, (ms, ratio)) in enumerate(times.items()):
            extra = extra_memory_mb(memory_task, args.model, length, [0, 1, 6][i])
            row = [str(length), name, f"{ms:.0f}", f"{1 / ratio:.2f}", f"{extra:.0f}"]
            rows.append([*row, f"{ms / times['one student'][0]:.2f}"])
    table(["L", "", "ms", "over forward", "extra MB", "over one student"], rows)


if __name__ == "__main__":
    main()
