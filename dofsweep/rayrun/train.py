"""Distillation by Ray Train: each worker holds the teacher and its part of every batch.

Only the gradients of the students are reduced. A run with the same name and storage goes on from
its last checkpoint by itself, after a lost worker as after a lost driver.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from dofsweep.config import SweepConfig
from dofsweep.core.plan import Plan
from dofsweep.distill.end_to_end import DirectTrainer, PolishTrainer, check_logits
from dofsweep.distill.layerwise import LayerwiseTrainer
from dofsweep.distill.trainer import Trainer, TrainSettings
from dofsweep.errors import DistillError
from dofsweep.methods import load_student, save_student
from dofsweep.prepare import initial_student
from dofsweep.rayrun.actors import Poster
from dofsweep.rayrun.devices import Share
from dofsweep.rayrun.env import TRAIN
from dofsweep.records import TrainingPoint, TrialSpec
from dofsweep.teacher.capture import Capture
from dofsweep.teacher.load import load_teacher
from dofsweep.teacher.resolve import TeacherRef

MAX_FAILURES = 3
TRAINERS: dict[str, type[Trainer]] = {
    "layerwise": LayerwiseTrainer,
    "direct": DirectTrainer,
    "polish": PolishTrainer,
}
CURVE_POINTS = 60
"""Points of a stored loss curve; losses between two points are averaged."""


@dataclass(frozen=True)
class TrainJob:
    """All that a training worker needs to know."""

    sweep_id: str
    ref: TeacherRef
    config: SweepConfig
    trials: tuple[tuple[TrialSpec, Plan], ...]
    capture_path: str
    tokens_path: str
    n_sequences: int
    """Training sequences in that file."""
    start: dict[int, str] = field(default_factory=dict)
    """Student files that polishing goes on from, by trial number."""

    @property
    def kind(self) -> str:
        """How all of its trials are trained."""
        return self.trials[0][0].kind

    @property
    def total_steps(self) -> int:
        """Optimizer steps: one pass over the training sequences without a rest, or the polish."""
        if self.kind == "polish":
            return self.config.polish_steps
        return self.n_sequences // self.config.batch_size

    def batch(self, step: int) -> slice:
        """Training sequences of a step; a long polish begins anew at the end of the text."""
        per_pass = self.n_sequences // self.config.batch_size
        first = step % per_pass * self.config.batch_size
        return slice(first, first + self.config.batch_size)

    @property
    def run_name(self) -> str:
        """Name of the run and of its folder: the same trials of a sweep go on with one."""
        numbers = ",".join(str(trial.number) for trial, _ in self.trials)
        return f"{self.sweep_id}-{hashlib.sha256(numbers.encode()).hexdigest()[:8]}"

    def claim(self, storage: str) -> None:
        """Note in the run's folder what it trains, before its first checkpoint is made there.

        Raises:
            DistillError: the folder is of other facts, so its checkpoints cannot be gone on from.
        """
        path = Path(storage) / self.run_name / "facts.json"
        facts = {
            "model": self.ref.fingerprint,
            "plan": {str(trial.number): plan.key for trial, plan in self.trials},
            "number of steps": self.total_steps,
        }
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(facts))
            part.replace(path)
            return
        found = json.loads(path.read_text())
        for name, value in facts.items():
            if found.get(name) != value:
                raise DistillError(
                    f"the checkpoint of sweep {self.sweep_id} is of another {name}: launch a new "
                    "sweep, or restore what the sweep was started with"
                )

    def settings(self, trial: TrialSpec) -> TrainSettings:
        """How one trial is trained."""
        assert trial.loss is not None
        assert trial.lr_features is not None
        assert trial.lr_weights is not None
        config, polish = self.config, trial.kind == "polish"
        return TrainSettings(
            self.total_steps,
            config.lr_end_to_end if polish else trial.lr_features,
            config.lr_end_to_end if polish else trial.lr_weights,
            config.warmup,
            config.grad_clip,
            trial.loss,
            config.patience,
        )


@dataclass(frozen=True)
class TrainOutcome:
    """What training left behind."""

    folder: Path
    """Holds ``student-NUMBER.safetensors`` of every trial."""
    curves: dict[int, list[TrainingPoint]]
    failed: dict[int, str]
    tokens: int
    timings: dict[str, float]
    """Seconds: ``train_loop`` in all, of which ``train_teacher`` in the teacher's forward and
    ``train_features`` in losses, gradients and updates of all students."""
    peak_bytes: int
    """Most memory that the first worker held."""


class _Curve:
    """Loss curves, thinned to CURVE_POINTS windows."""

    def __init__(self, total_steps: int, tokens_per_step: int) -> None:
        self.window = max(1, -(-total_steps // CURVE_POINTS))
        self.total_steps, self.tokens_per_step = total_steps, tokens_per_step
        self.points: dict[int, list[list[float]]] = {}
        """Per trial rows of [step, layer 0's mean loss, layer 1's, …]."""
        self._open: dict[int, list[list[float]]] = {}

    def add(self, step: int, losses: dict[int, list[float]]) -> None:
        for number, layers in losses.items():
            self._open.setdefault(number, []).append(layers)
        if step % self.window == 0 or step == self.total_steps:
            for number, rows in self._open.items():
                mean = np.mean(rows, axis=0).tolist()
                self.points.setdefault(number, []).append([step, *mean])
            self._open = {}

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points, "open": self._open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.points, self._open = state["points"], state["open"]

    def records(self) -> dict[int, list[TrainingPoint]]:
        return {
            number: [
                TrainingPoint(int(step), int(step) * self.tokens_per_step, layer_idx, loss)
                for step, *layers in rows
                for layer_idx, loss in enumerate(layers)
            ]
            for number, rows in self.points.items()
        }


def _all_reduce(grads: list[Tensor]) -> None:
    """Average gradients over workers, in one message."""
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def _train_loop(settings: dict[str, Any]) -> None:
    """Runs in every training worker."""
    job: TrainJob = settings["job"]
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(settings["threads"])
    device = str(ray.train.torch.get_device())
    teacher, _ = load_teacher(job.ref, device=device, dtype=job.config.dtype)
    capture = Capture.load(Path(job.capture_path))
    students = {
        trial.number: load_student(Path(job.start[trial.number]))
        if trial.number in job.start
        else initial_student(job.config, job.ref, trial, plan, capture)
        for trial, plan in job.trials
    }
    if job.kind != "layerwise":
        check_logits(teacher)
    trainer = TRAINERS[job.kind](
        teacher,
        {n: s.to(device) for n, s in students.items()},
        {trial.number: job.settings(trial) for trial, _ in job.trials},
        micro_batch=job.config.micro_batch,
        reduce=_all_reduce if world > 1 else None,
    )
    curve = _Curve(job.total_steps, job.config.batch_size * job.config.seq_len)
    seconds = _resume(trainer, curve)
    tokens = np.load(job.tokens_path, mmap_mode="r")
    post = Poster(job.sweep_id) if rank == 0 else None
    started = time.monotonic()
    while trainer.steps_done < job.total_steps:
        rows = np.asarray(tokens[job.batch(trainer.steps_done)][rank::world], dtype=np.int64)
        losses = trainer.step(torch.from_numpy(rows))
        curve.add(trainer.steps_done, losses)
        done = trainer.steps_done
        if post:
            post(done, job.total_steps, _detail(losses))
        if done % job.config.checkpoint_steps == 0 and done < job.total_steps:
            _checkpoint(trainer, curve, job, rank, seconds + time.monotonic() - started)
    _checkpoint(trainer, curve, job, rank, seconds + time.monotonic() - started)


def _detail(losses: dict[int, list[float]]) -> str:
    means = [float(np.mean(layers)) for layers in losses.values()]
    return f"loss {np.mean(means):.3f}" if means else "no student left"


def _resume(trainer: Trainer, curve: _Curve) -> float:
    """Go on from the run's checkpoint, if it has one; returns the seconds trained before it."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0.0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt", weights_only=True, map_location="cpu")
    trainer.load_state_dict(state["trainer"])
    curve.load_state_dict(state["curve"])
    return float(state["seconds"])


def _checkpoint(trainer: Trainer, curve: _Curve, job: TrainJob, rank: int, seconds: float) -> None:
    metrics = {"step": trainer.steps_done}
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        state = {"trainer": trainer.state_dict(), "curve": curve.state_dict()}
        torch.save(state | {"seconds": seconds}, path / "state.pt")
        if trainer.steps_done == job.total_steps:
            for number, student in trainer.students.items():
                save_student(student, path / f"student-{number}.safetensors")
            features = trainer.seconds["features"]
            outcome = {
                "points": curve.points,
                "failed": trainer.failed,
                "timings": {
                    "train_loop": seconds,
                    "train_teacher": trainer.seconds["step"] - features,
                    "train_features": features,
                },
                "peak_bytes": _peak_bytes(trainer.teacher.device),
            }
            (path / "outcome.json").write_text(json.dumps(outcome))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(path))


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def train(job: TrainJob, share: Share, storage: str) -> TrainOutcome:
    """Train all students of a job and wait for the end.

    Args:
        share: how many data-parallel workers, which must divide the batch, and what each gets.
        storage: folder, seen by every node, for checkpoints.
    Raises:
        DistillError: training broke down for good; the message has the worker's own. Or the run
            was begun with another model, plan or number of steps.
    """
    job.claim(storage)
    os.environ.update({k: v for k, v in TRAIN.items() if k not in os.environ})
    import ray.train
    import ray.train.torch

    trainer = ray.train.torch.TorchTrainer(
        _train_loop,
        train_loop_config={"job": job, "threads": share.threads},
        scaling_config=ray.train.ScalingConfig(
            num_workers=share.count,
            use_gpu=share.num_gpus > 0,
            resources_per_worker={"CPU": share.num_cpus, "GPU": share.num_gpus}
            if share.num_gpus
            else {"CPU": share.num_cpus},
        ),
        run_config=ray.train.RunConfig(
            name=job.run_name,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=MAX_FAILURES),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as err:
        raise DistillError(f"training failed: {_cause(err)}") from err
    assert result.checkpoint is not None
    folder = Path(result.checkpoint.path)
    outcome = json.loads((folder / "outcome.json").read_text())
    curve = _Curve(job.total_steps, job.config.batch_size * job.config.seq_len)
    curve.points = {int(n): rows for n, rows in outcome["points"].items()}
    return TrainOutcome(
        folder,
        curve.records(),
        {int(n): reason for n, reason in outcome["failed"].items()},
        job.total_steps * job.config.batch_size * job.config.seq_len,
        outcome["timings"],
        outcome["peak_bytes"],
    )


def _cause(err: Exception) -> str:
    errors = getattr(err, "worker_failures", None)
    first: object = next(iter(errors.values())) if errors else err
    lines = [line for line in str(first).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(err).__name__
