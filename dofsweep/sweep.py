"""The pipeline of a sweep, in reading order: capture, spectra, plans, distil, evaluate.

Every stage asks the store first and does only what is missing, and writes what it finished before
the next one starts. The driver alone writes to the database; actors compute and return.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dofsweep.config import SweepConfig
from dofsweep.core.plan import Plan
from dofsweep.corpus.cache import CachedCorpus
from dofsweep.distill.memory import split_by_memory, student_bytes
from dofsweep.errors import SweepFailed
from dofsweep.methods.base import cache_bytes, feature_head_count, student_state_bytes
from dofsweep.methods.registry import load_student, save_student
from dofsweep.prepare import (
    capture_facts,
    content_key,
    corpus_of,
    initial_student,
    plan_for,
    spectrum_options,
    window_for,
)
from dofsweep.records import HeadSpectrum, TrialResult, TrialSpec
from dofsweep.store.repository import SweepRepository
from dofsweep.teacher.capture import Capture
from dofsweep.teacher.resolve import TeacherRef

if TYPE_CHECKING:
    from dofsweep.rayrun.runner import Progress
    from dofsweep.rayrun.train import TrainJob, TrainOutcome

log = logging.getLogger("dofsweep")

LAYER_SEQUENCES = 8
"""Held-out sequences on which each layer's errors are measured."""
FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TEACHER_ROOM = 2
"""Memory kept for the teacher and its forward pass, in sizes of its weights."""


class Runner(Protocol):
    """What computes the stages; RayRunner is the one in use."""

    def capture(
        self, tokens: NDArray[np.int32], path: Path, options: dict[str, Any], progress: Progress
    ) -> None: ...

    def spectra(
        self, path: Path, n_layers: int, options: dict[str, Any], progress: Progress
    ) -> list[HeadSpectrum]: ...

    def distill(self, job: TrainJob, storage: str, progress: Progress) -> TrainOutcome: ...

    def room(self, workers: int | None) -> int: ...

    def evaluate(
        self,
        teacher_number: int | None,
        students: Sequence[tuple[int, Path]],
        tokens: NDArray[np.int32],
        layer_sequences: int,
        progress: Progress,
    ) -> Iterator[TrialResult]: ...


@dataclass
class SweepRun:
    """One sweep on its way through the stages."""

    sweep_id: str
    config: SweepConfig
    ref: TeacherRef
    repo: SweepRepository
    runner: Runner
    storage: Path
    _plans: dict[int, Plan] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)

    def run(self, *, spectra_only: bool = False) -> None:
        """All stages that are not done yet.

        Raises:
            SweepFailed: some trials could not be trained; the others are finished and stored.
        """
        with self._stage("corpus"):
            corpus = corpus_of(self.config, self.ref, self.storage)
        self.repo.set_fingerprints(
            self.sweep_id, teacher=self.ref.fingerprint, corpus=corpus.fingerprint
        )
        capture_path, spectra = self._spectra(corpus)
        if spectra_only:
            return
        trials = self.config.trials()
        self._make_plans(trials, spectra)
        failed = self._distill(trials, corpus, capture_path)
        self._evaluate(trials, corpus, failed)
        if failed:
            raise SweepFailed(
                f"{len(failed)} of {len(trials)} trials failed: " + "; ".join(failed.values())
            )

    def _progress(self, stage: str) -> Progress:
        def report(done: int, total: int, detail: str = "") -> None:
            self.repo.progress(self.sweep_id, stage, done, total, detail)

        return report

    @contextmanager
    def _stage(self, stage: str) -> Iterator[Progress]:
        """Announce a stage, and store how long it took."""
        progress = self._progress(stage)
        progress(0, 0, "")
        self._note(stage, "started")
        started = time.monotonic()
        yield progress
        seconds = time.monotonic() - started
        self.repo.save_timing(self.sweep_id, stage, seconds=seconds)
        self._note(stage, f"finished in {seconds:.1f} s")

    def _note(self, stage: str, message: str) -> None:
        """Say what happened in the sweep's history and in the driver's log."""
        log.info("%s: %s", stage, message)
        self.repo.event(self.sweep_id, "info", stage, message)

    # -- capture and spectra ---------------------------------------------------------------

    def _spectra(self, corpus: CachedCorpus) -> tuple[Path, list[HeadSpectrum]]:
        """Spectra of all heads, from the store where the same teacher and text were seen."""
        config, shape = self.config, self.ref.shape
        sample = capture_facts(config, self.ref, corpus)
        facts = sample | spectrum_options(config)
        capture_path = self.storage / "captures" / f"{content_key(sample)}.safetensors"
        key = content_key(facts)
        self.repo.set_fingerprints(self.sweep_id, spectra_key=key)
        if not capture_path.exists():
            options = {
                "n_points": config.n_points,
                "seed": config.seed[0],
                "feature_heads": config.feature_heads,
                "center_keys": config.center_keys,
            }
            with self._stage("capture") as progress:
                tokens = np.asarray(corpus.train[: sample["sequences"]])
                self.runner.capture(tokens, capture_path, options, progress)
        if stored := self.repo.load_spectra(key):
            self._note("spectra", f"reused from the store: {key}")
            return capture_path, stored[1]
        with self._stage("spectra") as progress:
            spectra = self.runner.spectra(
                capture_path, shape.n_layers, spectrum_options(config), progress
            )
        n_heads = feature_head_count(shape, config.feature_heads)
        meta = facts | {"model": self.ref.name, "n_layers": shape.n_layers, "n_heads": n_heads}
        self.repo.save_spectra(key, meta, spectra)
        return capture_path, spectra

    # -- plans -----------------------------------------------------------------------------

    def _make_plans(self, trials: list[TrialSpec], spectra: list[HeadSpectrum]) -> None:
        for trial in trials:
            if trial.strategy == "teacher":
                continue
            window = window_for(self.config, self.ref, trial)
            if trial.strategy == "sink_window":
                state = student_state_bytes(None, self.ref.shape, window)
                key = f"window-{window.size}-{window.sinks}"
                dims: tuple[tuple[int, ...], ...] = ()
            else:
                plan = plan_for(self.config, self.ref, trial, spectra)
                self._plans[trial.number] = plan
                state = student_state_bytes(plan, self.ref.shape, window)
                key, dims = plan.key, plan.dims
            self._keys[trial.number] = key
            self.repo.save_plan(self.sweep_id, trial.number, key, dims, state, window.size)

    # -- distil ----------------------------------------------------------------------------

    def _student_path(self, number: int) -> Path:
        return self.storage / "students" / self.sweep_id / f"{number}.safetensors"

    def _distill(
        self, trials: list[TrialSpec], corpus: CachedCorpus, capture_path: Path
    ) -> dict[int, str]:
        """Train what is not trained; returns the trials that failed, with the reason."""
        from dofsweep.rayrun.train import TrainJob

        for trial in trials:
            made_now = trial.strategy in {"untrained", "sink_window"}
            if made_now and not self._student_path(trial.number).exists():
                capture, plan = Capture.load(capture_path), self._plans.get(trial.number)
                fresh = initial_student(self.config, self.ref, trial, plan, capture)
                self._keep_student(trial.number, fresh)
        trained = [t for t in trials if t.loss]
        missing = [t.number for t in trained if not self._student_path(t.number).exists()]
        if not missing:
            return {}
        first = self._first_alike(trained)
        todo = [t for t in trained if first[t.number] == t.number]
        failed: dict[int, str] = {}
        with self._stage("distill") as progress:
            for batch in self._batches(todo):
                # All of a batch, even if some are there: its checkpoint holds all of them.
                numbers = {t.number for t in batch}
                twins = {n: first[n] for n in missing if first[n] in numbers}
                start, orphans = self._polish_starts(batch, trained, failed)
                failed |= self._keep_failures(orphans, twins)
                batch = [t for t in batch if t.number not in orphans]
                twins = {n: t for n, t in twins.items() if t not in orphans}
                if not batch or not twins:
                    continue
                job = TrainJob(
                    self.sweep_id,
                    self.ref,
                    self.config,
                    tuple((trial, self._plans[trial.number]) for trial in batch),
                    str(capture_path),
                    str(corpus.train_path),
                    len(corpus.train),
                    start,
                )
                outcome = self.runner.distill(job, str(self.storage / "runs"), progress)
                failed |= self._keep_outcome(outcome, len(batch), twins)
        return failed

    def _polish_starts(
        self, batch: Sequence[TrialSpec], trained: Sequence[TrialSpec], failed: dict[int, str]
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Files that polished trials start from, and those whose plain trial failed, with why."""
        plain = {replace(t, number=0): t.number for t in trained}
        start, orphans = {}, {}
        for trial in (t for t in batch if t.kind == "polish"):
            base = plain[replace(trial.before_polish(), number=0)]
            if base in failed:
                orphans[trial.number] = f"its plain trial {base} failed: {failed[base]}"
            else:
                start[trial.number] = str(self._student_path(base))
        return start, orphans

    def _batches(self, trials: Sequence[TrialSpec]) -> list[list[TrialSpec]]:
        """Students that are trained from one pass: all of them, or as many as memory holds."""
        config = self.config
        sequences = min(config.micro_batch or config.batch_size, config.batch_size)
        sizes = [
            student_bytes(
                self._plans[t.number],
                self.ref.shape,
                sequences * config.seq_len,
                untied=t.feature_map == "prf_untied",
            )
            for t in trials
        ]
        teacher = self.ref.n_params * FLOAT_BYTES[config.dtype]
        room = self.runner.room(config.workers) - TEACHER_ROOM * teacher
        found = []
        for kind in ("layerwise", "direct", "polish"):
            members = [i for i, t in enumerate(trials) if t.kind == kind]
            if not members:
                continue
            batches = split_by_memory([sizes[i] for i in members], room)
            if len(batches) > 1:
                need = sum(sizes[i] for i in members) / 2**30
                self._note(
                    "distill",
                    f"{len(members)} {kind} students need {need:.1f} GiB beside the teacher, more "
                    f"than a worker has: trained in {len(batches)} passes",
                )
            found += [[trials[members[i]] for i in batch] for batch in batches]
        return found

    def _keep_failures(self, why: dict[int, str], twins: dict[int, int]) -> dict[int, str]:
        """Mark the trials whose twin failed; returns them with the reason."""
        failed = {n: why[twin] for n, twin in twins.items() if twin in why}
        for number, reason in failed.items():
            self.repo.set_trial_state(self.sweep_id, number, "failed", error=reason)
        return failed

    def _keep_outcome(
        self, outcome: TrainOutcome, n_students: int, twins: dict[int, int]
    ) -> dict[int, str]:
        """Store what a training pass made; returns the trials that failed, with the reason.

        Args:
            n_students: that were trained in the pass.
            twins: trial number to the number of the trial that was trained for it.
        """
        for number, (stage, seconds) in product(twins, outcome.timings.items()):
            self.repo.save_timing(
                self.sweep_id,
                stage,
                trial_number=number,
                n_students=n_students,
                seconds=seconds,
                tokens=outcome.tokens,
                peak_bytes=outcome.peak_bytes,
            )
        for number, twin in twins.items():
            self.repo.save_training(self.sweep_id, number, outcome.curves.get(twin, []))
            if twin not in outcome.failed:
                student = load_student(outcome.folder / f"student-{twin}.safetensors")
                self._keep_student(number, student)
        return self._keep_failures(outcome.failed, twins)

    def _first_alike(self, trials: Sequence[TrialSpec]) -> dict[int, int]:
        """For each trial the first one that is the same student: two λ may end at one plan."""
        first: dict[Any, int] = {}
        return {
            t.number: first.setdefault(
                (self._keys[t.number], replace(t, number=0, strategy="", budget=None, lam=None)),
                t.number,
            )
            for t in trials
        }

    def _keep_student(self, number: int, student: Any) -> None:
        path = self._student_path(number)
        save_student(student, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.repo.save_artifact(
            self.sweep_id,
            "student",
            trial_number=number,
            path=str(path),
            sha256=digest,
            size_bytes=path.stat().st_size,
        )

    # -- evaluate --------------------------------------------------------------------------

    def _evaluate(
        self, trials: list[TrialSpec], corpus: CachedCorpus, failed: dict[int, str]
    ) -> None:
        """Measure what is not measured; each result is stored as soon as it is known."""
        done = self.repo.finished_trials(self.sweep_id)
        todo = [t for t in trials if t.number not in done and t.number not in failed]
        if not todo:
            return
        alike = self._first_alike([t for t in todo if t.strategy != "teacher"])
        students = [(n, self._student_path(n)) for n in sorted(set(alike.values()))]
        teacher = next((t.number for t in todo if t.strategy == "teacher"), None)
        bytes_each = FLOAT_BYTES[self.config.dtype]
        cache = cache_bytes(self.ref.shape, self.config.seq_len, bytes_each)
        with self._stage("evaluate") as progress:
            for result in self.runner.evaluate(
                teacher, students, corpus.heldout, LAYER_SEQUENCES, progress
            ):
                same = [n for n, measured in alike.items() if measured == result.number]
                for number in same or [result.number]:
                    self.repo.save_result(
                        self.sweep_id,
                        replace(result, number=number),
                        state_bytes=cache if number == teacher else None,
                    )
                    self.repo.set_trial_state(self.sweep_id, number, "finished")
