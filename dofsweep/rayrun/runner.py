"""The stages of a sweep on a Ray cluster: the driver's hands."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError

from dofsweep.errors import ClusterError, DofsweepError
from dofsweep.rayrun.actors import Board, SpectrumActor, TeacherActor, board_name
from dofsweep.rayrun.devices import Share, spectrum_share, teacher_share, worker_memory
from dofsweep.rayrun.env import NAMESPACE
from dofsweep.rayrun.train import TrainJob, TrainOutcome, train
from dofsweep.records import HeadSpectrum, TrialResult
from dofsweep.teacher.resolve import TeacherRef

Progress = Callable[[int, int, str], None]
POLL_S = 0.5


def _start(kind: Any, name: str, options: dict[str, Any], *args: Any) -> Any:
    """A named actor, as the dashboard shows it."""
    return kind.options(name=name, namespace=NAMESPACE, **options).remote(*args)


@contextlib.contextmanager
def _watching(sweep_id: str, progress: Progress) -> Iterator[None]:
    """Carry the board's posts to ``progress`` until the block ends."""
    board = _start(Board, board_name(sweep_id), {})
    ray.get(board.latest.remote())
    stop = threading.Event()

    def watch() -> None:
        seen = (0, 0, "")
        while not stop.wait(POLL_S):
            with contextlib.suppress(RayActorError, ray.exceptions.GetTimeoutError):
                latest = ray.get(board.latest.remote(), timeout=5)
                if latest != seen:
                    seen = latest
                    progress(*latest)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=10)
        ray.kill(board)


def _get(ref: Any) -> Any:
    """Result of a call; an error of ours comes out as itself, a lost actor as ClusterError."""
    try:
        return ray.get(ref)
    except RayTaskError as err:
        cause = err.cause if isinstance(err.cause, Exception) else err
        raise (cause if isinstance(cause, DofsweepError) else err) from None
    except RayActorError as err:
        raise ClusterError(f"an actor was lost and could not be restarted: {err}") from err


class RayRunner:
    """Runs the stages of one sweep; the caller writes what they return."""

    def __init__(self, sweep_id: str, ref: TeacherRef, dtype: str) -> None:
        self.sweep_id, self.ref, self.dtype = sweep_id, ref, dtype

    @contextlib.contextmanager
    def _teachers(self, count: int) -> Iterator[list[Any]]:
        share = teacher_share()
        actors = [
            _start(
                TeacherActor,
                f"teacher-{self.sweep_id}-{i}",
                share.options,
                self.ref,
                self.dtype,
                share.threads,
                self.sweep_id,
            )
            for i in range(min(count, share.count))
        ]
        try:
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)

    def capture(
        self, tokens: NDArray[np.int32], path: Path, options: dict[str, Any], progress: Progress
    ) -> None:
        """Sample queries and keys into a file."""
        with _watching(self.sweep_id, progress), self._teachers(1) as (actor,):
            _get(actor.capture.remote(tokens, str(path), options))

    def spectra(
        self, path: Path, n_layers: int, options: dict[str, Any], progress: Progress
    ) -> list[HeadSpectrum]:
        """Spectra of all heads, one task a layer, over all the cluster's processors."""
        share = spectrum_share(n_layers)
        actors = [
            _start(SpectrumActor, f"spectra-{self.sweep_id}-{i}", share.options, share.threads)
            for i in range(share.count)
        ]
        try:
            found: list[HeadSpectrum] = []
            for done, layer in enumerate(
                _spread(actors, lambda a, i: a.layer.remote(str(path), i, options), range(n_layers))
            ):
                found += layer
                progress(done + 1, n_layers, "layers")
            return sorted(found, key=lambda s: (s.layer_idx, s.head_idx))
        finally:
            for actor in actors:
                ray.kill(actor)

    def room(self, workers: int | None) -> int:
        """Bytes of memory that a training worker may use."""
        return worker_memory(job_share(workers))

    def distill(self, job: TrainJob, storage: str, progress: Progress) -> TrainOutcome:
        """Train all students of a job from one teacher pass."""
        share = job_share(job.config.workers)
        with _watching(self.sweep_id, progress):
            return train(job, share, storage)

    def evaluate(
        self,
        teacher_number: int | None,
        students: Sequence[tuple[int, Path]],
        tokens: NDArray[np.int32],
        layer_sequences: int,
        progress: Progress,
    ) -> Iterator[TrialResult]:
        """Held-out loss of the teacher and of every student, each as soon as it is known."""
        items: list[tuple[int, Path | None]] = list(students)
        if teacher_number is not None:
            items.insert(0, (teacher_number, None))
        shared = ray.put(tokens)

        def start(actor: Any, item: tuple[int, Path | None]) -> Any:
            number, path = item
            if path is None:
                return actor.evaluate_teacher.remote(number, shared)
            return actor.evaluate_student.remote(number, str(path), shared, layer_sequences)

        done = 0

        def within(sequences: int, total: int, _: str) -> None:
            progress(done, len(items), f"trials; sequence {sequences}/{total}")

        with _watching(self.sweep_id, within), self._teachers(len(items)) as actors:
            for result in _spread(actors, start, items):
                done += 1
                progress(done, len(items), "trials")
                yield result


def job_share(workers: int | None) -> Share:
    """Training workers and what each gets: one a GPU, or ``workers`` that share the cores."""
    share = teacher_share()
    if workers is None:
        return share if share.num_gpus else Share(1, share.num_cpus, 0)
    if share.num_gpus:
        if workers > share.count:
            raise ClusterError(
                f"workers={workers} but the cluster has {share.count} GPUs; lower workers"
            )
        return Share(workers, share.num_cpus, 1)
    cores = ray.cluster_resources().get("CPU", 1)
    per_worker = cores / workers
    return Share(workers, max(1, int(per_worker)) if per_worker >= 1 else per_worker, 0)


def _spread(
    actors: Sequence[Any], start: Callable[[Any, Any], Any], items: Sequence[Any]
) -> Iterator[Any]:
    """Results of one call an item over a pool of actors, in the order in which they end."""
    waiting, idle = list(items), list(actors)
    running: dict[Any, Any] = {}
    while waiting or running:
        while waiting and idle:
            actor = idle.pop()
            running[start(actor, waiting.pop(0))] = actor
        (ref,), _ = ray.wait(list(running), num_returns=1)
        idle.append(running.pop(ref))
        yield _get(ref)
