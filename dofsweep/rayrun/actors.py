"""Ray actors around the plain functions of teacher, core and bench.

Every method is safe to repeat: same input, same answer, and files appear whole or not at all.
Results go back to the driver, which alone writes to the database.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from dofsweep.bench.next_token import layer_errors, next_token_loss, trial_result
from dofsweep.core.spectrum import head_spectra
from dofsweep.methods import load_student
from dofsweep.rayrun.devices import use_device
from dofsweep.rayrun.env import NAMESPACE
from dofsweep.records import HeadSpectrum, TrialResult
from dofsweep.teacher.capture import Capture, capture_points
from dofsweep.teacher.load import load_teacher
from dofsweep.teacher.resolve import TeacherRef
from dofsweep.teacher.seam import softmax_attention

RETRIES = {"max_restarts": 2, "max_task_retries": -1}
"""A lost actor is started again and its call repeated; two losses of one actor are the limit."""


@ray.remote(num_cpus=0)
class Board:
    """Where workers say how far they are; the driver reads it and writes to the database."""

    def __init__(self) -> None:
        self._latest: tuple[int, int, str] = (0, 0, "")

    def post(self, done: int, total: int, detail: str = "") -> None:
        """Say that ``done`` of ``total`` is done."""
        self._latest = (done, total, detail)

    def latest(self) -> tuple[int, int, str]:
        """The last post."""
        return self._latest


def board_name(sweep_id: str) -> str:
    """Name of a sweep's board in NAMESPACE."""
    return f"board-{sweep_id}"


class Poster:
    """A worker's way to the board; posts are not waited for."""

    def __init__(self, sweep_id: str) -> None:
        self._board = ray.get_actor(board_name(sweep_id), namespace=NAMESPACE)

    def __call__(self, done: int, total: int, detail: str = "") -> None:
        self._board.post.remote(done, total, detail)


@ray.remote(**RETRIES)
class TeacherActor:
    """Holds one teacher on one device: captures, and evaluates students."""

    def __init__(self, ref: TeacherRef, dtype: str, threads: int, sweep_id: str) -> None:
        self._device = use_device(threads)
        self._model, _ = load_teacher(ref, device=self._device, dtype=dtype)
        self._post = Poster(sweep_id)

    def capture(self, tokens: NDArray[np.int32], path: str, options: dict[str, Any]) -> str:
        """Sample queries and keys into a file; returns its path."""
        capture = capture_points(self._model, tokens, progress=self._post, **options)
        capture.save(Path(path))
        return path

    def evaluate_teacher(self, number: int, tokens: NDArray[np.int32]) -> TrialResult:
        """Held-out loss of the teacher itself."""
        measured = next_token_loss(self._model, tokens, softmax_attention, self._post)
        return trial_result(number, measured, None)

    def evaluate_student(
        self, number: int, path: str, tokens: NDArray[np.int32], layer_sequences: int
    ) -> TrialResult:
        """Held-out loss of a student, and its layers' errors on the first ``layer_sequences``."""
        student = load_student(Path(path)).to(self._device)
        measured = next_token_loss(self._model, tokens, student.attend, self._post)
        errors = layer_errors(self._model, {number: student}, tokens[:layer_sequences])
        return trial_result(number, measured, errors[number])


@ray.remote(**RETRIES)
class SpectrumActor:
    """Spectra of a layer's heads."""

    def __init__(self, threads: int) -> None:
        self._device = use_device(threads)

    def layer(self, path: str, layer_idx: int, options: dict[str, Any]) -> list[HeadSpectrum]:
        """Spectra of all feature heads of one layer of a capture file."""
        capture = Capture.load(Path(path), layer_idx)
        points = capture.points[0].to(self._device)
        with torch.no_grad():
            return head_spectra(
                points,
                capture.scales[0],
                n_queries=capture.n_queries,
                layer_idx=layer_idx,
                **options,
            )
