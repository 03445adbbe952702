"""Layerwise distillation: many students from one teacher pass, nothing kept between layers.

The teacher runs forward without gradients. As each layer's queries and keys appear, the loss of
every student's features of that layer is computed and back-propagated at once, through those
features alone, and everything but the gradients is freed. Peak memory is the teacher's forward
plus one layer, however many layers there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofsweep.core.losses import softmax_losses_and_output
from dofsweep.errors import DistillError
from dofsweep.methods import Student
from dofsweep.teacher.seam import AttentionCall, Seam

Reduce = Callable[[list[Tensor]], None]
"""Averages gradients over the workers, in place."""


@dataclass(frozen=True)
class TrainSettings:
    """How features are trained; see SweepConfig for what each means."""

    total_steps: int
    lr_features: float
    lr_weights: float
    warmup: float
    grad_clip: float

    def lr_factor(self, step: int) -> float:
        """Part of the peak learning rate at a step counted from 0: linear rise, cosine fall."""
        rise = max(1, round(self.warmup * self.total_steps))
        if step < rise:
            return (step + 1) / rise
        done = (step - rise) / max(1, self.total_steps - rise)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class LayerwiseTrainer:
    """Trains the features of several students on the attention rows of one teacher.

    Args:
        teacher: model without gradients.
        students: by trial number.
        reduce: averages gradients over workers; None for a single worker.
    """

    def __init__(
        self,
        teacher: PreTrainedModel,
        students: dict[int, Student],
        settings: TrainSettings,
        reduce: Reduce | None = None,
    ) -> None:
        if not students:
            raise DistillError("there is no student to train; give at least one strategy")
        self.teacher, self.students, self.settings = teacher, students, settings
        self.reduce = reduce
        self.steps_done = 0
        self.failed: dict[int, str] = {}
        """Students stopped by a loss that is not finite: trial number to reason."""
        self._losses: dict[int, list[float]] = {}
        self._optimizers = {n: self._optimizer(student) for n, student in students.items()}

    def _optimizer(self, student: Student) -> torch.optim.Optimizer:
        groups: dict[str, list[Any]] = {"features": [], "weights": []}
        for layer_idx in range(len(student.layers)):
            for kind, parameters in student.layer(layer_idx).parameter_groups().items():
                groups[kind] += parameters
        return torch.optim.Adam(
            [
                {"params": groups["features"], "peak_lr": self.settings.lr_features},
                {"params": groups["weights"], "peak_lr": self.settings.lr_weights},
            ]
        )

    @property
    def active(self) -> dict[int, Student]:
        """Students that are still being trained."""
        return {n: s for n, s in self.students.items() if n not in self.failed}

    def step(self, tokens: Tensor) -> dict[int, list[float]]:
        """One optimizer step on one batch.

        Args:
            tokens: [B, L] token ids without padding, this worker's part of the batch.
        Returns:
            Loss of each layer, by trial number.
        """
        self._losses = {n: [] for n in self.active}
        if not self._losses:
            self.steps_done += 1
            return {}
        with torch.no_grad(), Seam(self.teacher, self._layer):
            self.teacher.base_model(tokens.to(self.teacher.device), use_cache=False)
        for number, student in self.active.items():
            self._update(number, student)
        self.steps_done += 1
        return self._losses

    def _layer(self, call: AttentionCall) -> Tensor:
        active = self.active
        with torch.enable_grad():
            pairs = [s.layer(call.layer_idx).log_features(call.q, call.k) for s in active.values()]
            losses, out = softmax_losses_and_output(
                pairs, call.q, call.k, call.v, call.scale, call.key_mask
            )
            losses.sum().backward()  # type: ignore[no-untyped-call]
        for number, loss in zip(active, losses.tolist(), strict=True):
            self._losses[number].append(loss)
        return out

    def _update(self, number: int, student: Student) -> None:
        optimizer = self._optimizers[number]
        grads = [p.grad for p in student.parameters() if p.grad is not None]
        if self.reduce is not None:
            self.reduce(grads)
        broken = [i for i, layer in enumerate(student.layers) if not _finite(layer)]
        if broken:
            self.failed[number] = (
                f"trial {number}: the gradient of layer {broken[0]} was not finite at step "
                f"{self.steps_done}; lower lr_features or lr_weights"
            )
            optimizer.zero_grad()
            return
        for layer in student.layers:
            torch.nn.utils.clip_grad_norm_(layer.parameters(), self.settings.grad_clip)
        factor = self.settings.lr_factor(self.steps_done)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on from here as if it had not stopped."""
        return {
            "steps_done": self.steps_done,
            "failed": dict(self.failed),
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
        self.failed = dict(state["failed"])


def _finite(layer: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters() if p.grad is not None)
