"""What every way of training students shares: steps, schedules, failures, exact resuming.

A trainer holds the students of many trials and takes one batch of tokens a step for all of them.
How a batch becomes gradients is its subclasses' matter: ``layerwise``, ``direct``, ``polish``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofsweep.errors import DistillError
from dofsweep.methods import Student

Reduce = Callable[[list[Tensor]], None]
"""Averages gradients over the workers, in place."""


@dataclass(frozen=True)
class TrainSettings:
    """How one student is trained; see SweepConfig for what each means."""

    total_steps: int
    lr_features: float
    lr_weights: float
    warmup: float
    grad_clip: float
    loss: str = "softmax"
    patience: int | None = None
    """Steps without a better loss after which a student is finished; None to use all steps."""

    def lr_factor(self, step: int) -> float:
        """Part of the peak learning rate at a step counted from 0: linear rise, cosine fall."""
        rise = max(1, round(self.warmup * self.total_steps))
        if step < rise:
            return (step + 1) / rise
        done = (step - rise) / max(1, self.total_steps - rise)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


SMOOTH = 0.9
"""Decay of the running mean of a student's loss that early stopping looks at."""
WORTH = 1e-3
"""Least relative fall of that mean that counts as better."""


class Trainer:
    """Trains the features of several students of one teacher.

    Args:
        teacher: model without gradients.
        students: by trial number.
        settings: of each trial.
        micro_batch: sequences that go through the model at once; all of a step's if None. The
            gradient of a step is the mean over its sequences whatever this is.
        reduce: averages gradients over workers; None for a single worker.
    Raises:
        DistillError: no student, or settings that do not name the same trials.
    """

    def __init__(
        self,
        teacher: PreTrainedModel,
        students: dict[int, Student],
        settings: dict[int, TrainSettings],
        *,
        micro_batch: int | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        if not students or set(students) != set(settings):
            raise DistillError(
                f"students {sorted(students)} and settings {sorted(settings)}: give at least one "
                "student, and settings for each"
            )
        self.teacher, self.students, self.settings = teacher, students, settings
        self.micro_batch, self.reduce = micro_batch, reduce
        self.steps_done = 0
        self.failed: dict[int, str] = {}
        """Students stopped by a loss that is not finite: trial number to reason."""
        self.finished: dict[int, int] = {}
        """Students stopped early: trial number to the steps they took."""
        self.seconds = {"step": 0.0, "features": 0.0}
        """Time in all steps, and the part of it that the students' features took."""
        self._best: dict[int, tuple[float, float, int]] = {}  # running mean, its best, at step
        self._optimizers = {n: self._optimizer(n, student) for n, student in students.items()}

    def _optimizer(self, number: int, student: Student) -> torch.optim.Optimizer:
        groups: dict[str, list[Any]] = {"features": [], "weights": []}
        for layer_idx in range(len(student.layers)):
            for kind, parameters in student.layer(layer_idx).parameter_groups().items():
                groups[kind] += parameters
        settings = self.settings[number]
        return torch.optim.Adam(
            [
                {"params": groups["features"], "peak_lr": settings.lr_features},
                {"params": groups["weights"], "peak_lr": settings.lr_weights},
            ]
        )

    @property
    def active(self) -> dict[int, Student]:
        """Students that are still being trained."""
        over = self.failed.keys() | self.finished.keys()
        return {n: s for n, s in self.students.items() if n not in over}

    def step(self, tokens: Tensor) -> dict[int, list[float]]:
        """One optimizer step of every active student on one batch.

        Args:
            tokens: [B, L] token ids without padding, this worker's part of the batch.
        Returns:
            By trial number its losses, mean over the workers: one per layer, or one of the whole
            model.
        """
        started = now(self.teacher.device)
        means: dict[int, list[float]] = {}
        for part in tokens.split(self.micro_batch or len(tokens)) if self.active else ():
            share = len(part) / len(tokens)
            for number, losses in self.backward(part.to(self.teacher.device), share).items():
                sums = means.setdefault(number, [0.0] * len(losses))
                means[number] = [a + share * b for a, b in zip(sums, losses, strict=True)]
        if self.reduce is not None and means:
            means = self._average(means, self.reduce)
        with self.timed_features():
            for number, losses in means.items():
                self._update(number, losses)
        self.steps_done += 1
        self.seconds["step"] += now(self.teacher.device) - started
        return means

    @contextmanager
    def timed_features(self) -> Iterator[None]:
        """Count the time of the block as spent in features."""
        started = now(self.teacher.device)
        yield
        self.seconds["features"] += now(self.teacher.device) - started

    def _average(self, means: dict[int, list[float]], reduce: Reduce) -> dict[int, list[float]]:
        """Average gradients in place, and losses, over the workers."""
        every = [p for n in means for p in self.students[n].parameters()]
        reduce([p.grad for p in every if p.grad is not None])
        table = torch.tensor([x for losses in means.values() for x in losses], dtype=torch.float64)
        reduce([table])
        parts = table.split([len(losses) for losses in means.values()])
        return {n: part.tolist() for n, part in zip(means, parts, strict=True)}

    def backward(self, tokens: Tensor, share: float) -> dict[int, list[float]]:
        """Add ``share`` times the gradients of one micro batch; returns its losses (unscaled)."""
        raise NotImplementedError

    def _update(self, number: int, losses: list[float]) -> None:
        optimizer, settings = self._optimizers[number], self.settings[number]
        layers = self.students[number].layers
        broken = [i for i, layer in enumerate(layers) if not _finite(layer)]
        if broken:
            self.failed[number] = (
                f"trial {number}: the gradient of layer {broken[0]} was not finite at step "
                f"{self.steps_done}; lower lr_features or lr_weights"
            )
            optimizer.zero_grad()
            return
        for layer in layers:
            torch.nn.utils.clip_grad_norm_(layer.parameters(), settings.grad_clip)
        factor = settings.lr_factor(self.steps_done)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad()
        if settings.patience is not None:
            self._watch(number, sum(losses) / len(losses), settings.patience)

    def _watch(self, number: int, loss: float, patience: int) -> None:
        """Finish a student whose running mean loss has stopped falling."""
        mean, best, at = self._best.get(number, (loss, math.inf, self.steps_done))
        mean = SMOOTH * mean + (1 - SMOOTH) * loss
        if mean < best - WORTH * abs(best) or math.isinf(best):
            best, at = mean, self.steps_done
        self._best[number] = (mean, best, at)
        if self.steps_done - at >= patience:
            self.finished[number] = self.steps_done + 1

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on from here as if it had not stopped."""
        return {
            "steps_done": self.steps_done,
            "failed": dict(self.failed),
            "finished": dict(self.finished),
            "best": dict(self._best),
            "seconds": dict(self.seconds),
            "students": {n: s.state_dict() for n, s in self.students.items()},
            "optimizers": {n: o.state_dict() for n, o in self._optimizers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            DistillError: the state is of other students.
        """
        if set(state["students"]) != set(self.students):
            raise DistillError(
                f"the checkpoint holds trials {sorted(state['students'])}, this run trains "
                f"{sorted(self.students)}; start the sweep anew"
            )
        try:
            for number, student in self.students.items():
                student.load_state_dict(state["students"][number])
                self._optimizers[number].load_state_dict(state["optimizers"][number])
        except (RuntimeError, ValueError) as err:
            raise DistillError(f"the checkpoint is of another plan: {err}") from err
        self.steps_done = state["steps_done"]
        self.failed, self.finished = dict(state["failed"]), dict(state["finished"])
        self._best, self.seconds = dict(state["best"]), dict(state["seconds"])


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _finite(layer: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters() if p.grad is not None)
