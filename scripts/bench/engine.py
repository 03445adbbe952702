"""Distillation against the teacher's bare forward, six students against one, and direct training.

    python scripts/bench/engine.py --model DIR

Every round runs, over the same sequence: the bare forward, one optimizer step with one student
(fix, C = 64), one step with six (fix, dof and dof_clip at C = 64 and 32), and one step of one
student with the direct loss and of the polish. The aims are 1.6 times the forward for one student,
2.5 times one student's step for six, and at least 2 for direct. The text is Python's own manual.
Every student starts anew, so the figures are of untrained features.
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
from dofsweep.distill.end_to_end import DirectTrainer, PolishTrainer
from dofsweep.distill.layerwise import LayerwiseTrainer
from dofsweep.distill.trainer import Trainer, TrainSettings
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
    model: PreTrainedModel,
    capture: Capture,
    plans: list[Plan],
    feature_map: str,
    kind: type[Trainer] = LayerwiseTrainer,
) -> Trainer:
    """A trainer of fresh students, one per plan."""
    students = {
        number: build_student(
            feature_map, plan, shape_of(model.config), feature_heads="kv", scales=capture.scales,
            key_means=capture.key_mean, init="gaussian", seed=number,
        )
        for number, plan in enumerate(plans)
    }  # fmt: skip
    settings = TrainSettings(STEPS, 0.06, 0.1, 0.1, 1.0)
    return kind(model, students, dict.fromkeys(students, settings))


def capture_of(model: PreTrainedModel, tokens: torch.Tensor) -> Capture:
    """What plans and centred students need."""
    return capture_points(
        model, tokens.numpy(), n_points=256, seed=0, feature_heads="kv", center_keys=True
    )


VARIANTS: dict[str, tuple[int, type[Trainer]]] = {
    "one student": (1, LayerwiseTrainer),
    "six students": (6, LayerwiseTrainer),
    "direct": (1, DirectTrainer),
    "polish": (1, PolishTrainer),
}


def memory_task(
    folder: Path, length: int, name: str, warm_up: bool = False
) -> Callable[[], object]:
    """One step of a variant at one length, or the bare forward."""
    model, tokens = load(folder), text_tokens(folder, 1, 32 if warm_up else length)
    if name == "forward":
        return partial(bare_forward, model, tokens)
    n_students, kind = VARIANTS[name]
    capture = capture_of(model, text_tokens(folder, 1, 256))
    one = plans_of(capture, model, [64])[:1] * n_students
    return partial(trainer(model, capture, one, "prf", kind).step, tokens)


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
        variants: dict[str, Callable[[], object]] = {
            "forward": partial(bare_forward, model, tokens)
        }
        for name, (n_students, kind) in VARIANTS.items():
            made = trainer(model, capture, plans[:n_students], args.map, kind)
            variants[name] = partial(made.step, tokens)
        times = paired(clock, variants, args.rounds)
        for name, (ms, ratio) in times.items():
            extra = extra_memory_mb(memory_task, args.model, length, name)
            row = [str(length), name, f"{ms:.0f}", f"{1 / ratio:.2f}", f"{extra:.0f}"]
            rows.append([*row, f"{ms / times['one student'][0]:.2f}"])
    table(["L", "", "ms", "over forward", "extra MB", "over one student"], rows)


if __name__ == "__main__":
    main()
