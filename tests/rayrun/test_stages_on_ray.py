"""The stages on a real Ray equal the same functions called in a plain loop, also after losses."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from dofsweep.bench.next_token import layer_errors, next_token_loss
from dofsweep.config import SweepConfig, make_config
from dofsweep.core.plan import make_plan
from dofsweep.core.spectrum import dof_bracket, head_dof, head_spectra_reference
from dofsweep.corpus.load import load_corpus
from dofsweep.distill.layerwise import LayerwiseTrainer
from dofsweep.errors import CaptureError
from dofsweep.methods import load_student, save_student
from dofsweep.prepare import initial_student
from dofsweep.rayrun.devices import Share
from dofsweep.rayrun.env import QUIET, TRAIN
from dofsweep.rayrun.runner import RayRunner
from dofsweep.rayrun.train import TrainJob, TrainOutcome
from dofsweep.records import TrialSpec
from dofsweep.teacher.capture import Capture, capture_points
from dofsweep.teacher.load import load_teacher, load_tokenizer
from dofsweep.teacher.resolve import TeacherRef, resolve_teacher

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

TINY = Path(__file__).resolve().parent.parent / "tiny"
CAPTURE = {"n_points": 64, "seed": 0, "feature_heads": "kv", "center_keys": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(QUIET | TRAIN | {"RAY_AUTH_MODE": "disabled"})
    context = ray.init(
        address="local", num_cpus=2, namespace="dofsweep", logging_level="ERROR",
        log_to_driver=False, include_dashboard=False, object_store_memory=300_000_000,
    )  # fmt: skip
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def ref(tmp_path_factory: pytest.TempPathFactory) -> TeacherRef:
    return resolve_teacher(str(TINY / "llama"), home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def tokens(ref: TeacherRef) -> Any:
    corpus = load_corpus(
        "pydoc", load_tokenizer(ref), seq_len=64, train_tokens=64 * 64, heldout_tokens=512
    )
    return corpus.train, corpus.heldout


def quiet(done: int, total: int, detail: str = "") -> None:
    """Takes progress and says nothing."""


def config_with(**more: Any) -> SweepConfig:
    values = {"model": str(TINY / "llama"), "corpus": "pydoc", "seq_len": 64, "n_points": 64,
              "train_tokens": 64 * 64, "budget": 8, "checkpoint_steps": 3}  # fmt: skip
    return make_config(values | more)


def job_for(
    ref: TeacherRef,
    config: SweepConfig,
    tokens: Any,
    folder: Path,
    name: str,
) -> TrainJob:
    folder.mkdir(exist_ok=True)
    np.save(folder / "train.npy", tokens[0])
    model, _ = load_teacher(ref)
    capture = capture_points(model, tokens[0][:4], **CAPTURE)  # type: ignore[arg-type]
    capture.save(folder / "capture.safetensors")
    plans = [
        make_plan("fix", n_layers=4, n_heads=2, budget=budget, head_dim=32) for budget in (8, 5)
    ]
    trials = [
        TrialSpec(i + 1, "fix", "prf", "softmax", 8, seed=i, init="orthogonal",
                  lr_features=0.06, lr_weights=0.1 / (i + 1))
        for i in range(2)
    ]  # fmt: skip
    pairs = tuple(zip(trials, plans, strict=True))
    return TrainJob(
        name, ref, config, pairs, str(folder / "capture.safetensors"), str(folder / "train.npy"),
        len(tokens[0]),
    )  # fmt: skip


def students_of(job: TrainJob) -> dict[int, Any]:
    """Before training."""
    capture = Capture.load(Path(job.capture_path))
    return {t.number: initial_student(job.config, job.ref, t, p, capture) for t, p in job.trials}


def train_plainly(job: TrainJob) -> tuple[dict[int, Any], list[float]]:
    """The same training in this process, without Ray; the loss of trial 1's layers a step."""
    model, _ = load_teacher(job.ref)
    students = students_of(job)
    config = job.config
    settings = {trial.number: job.settings(trial) for trial, _ in job.trials}
    trainer = LayerwiseTrainer(model, students, settings)
    tokens, batch = np.load(job.tokens_path), config.batch_size
    losses = []
    for step in range(job.total_steps):
        rows = tokens[step * batch : (step + 1) * batch].astype(np.int64)
        losses.append(float(np.mean(trainer.step(torch.from_numpy(rows))[1])))
    return students, losses


def distances(outcome: TrainOutcome, students: dict[int, Any]) -> float:
    """Largest difference of any parameter."""
    worst = 0.0
    for number, student in students.items():
        found = load_student(outcome.folder / f"student-{number}.safetensors")
        for a, b in zip(found.parameters(), student.parameters(), strict=True):
            worst = max(worst, float((a - b).abs().max()))
    return worst


def test_capture_and_spectra(cluster: None, ref: TeacherRef, tokens: Any, tmp_path: Path) -> None:
    path = tmp_path / "capture.safetensors"
    runner = RayRunner("sw-capture", ref, "float32")
    runner.capture(tokens[0][:4], path, CAPTURE, quiet)
    model, _ = load_teacher(ref)
    wanted = capture_points(model, tokens[0][:4], **CAPTURE)  # type: ignore[arg-type]
    found = Capture.load(path)
    for a, b in zip(found.points, wanted.points, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    options = {"gram_scale": "trace", "kernel": "exp", "lam_min": 2**-8}
    spectra = runner.spectra(path, 4, options, quiet)
    assert [(s.layer_idx, s.head_idx) for s in spectra] == [
        (i, h) for i in range(4) for h in (0, 1)
    ]
    plain = [
        s
        for i in range(4)
        for s in head_spectra_reference(
            found.points[i], found.scales[i], n_queries=found.n_queries, layer_idx=i
        )
    ]
    for lam in (2**-2, 2**-8):
        for a, b in zip(spectra, plain, strict=True):
            low, high = dof_bracket(a, lam)
            exact = head_dof(b, lam)
            assert low * (1 - 1e-9) <= exact <= high * (1 + 1e-9)
            assert high - low <= 0.01 * exact


def test_an_error_in_an_actor_comes_out_as_itself(
    cluster: None, ref: TeacherRef, tokens: Any, tmp_path: Path
) -> None:
    runner = RayRunner("sw-error", ref, "float32")
    with pytest.raises(CaptureError, match="raise capture_sequences"):
        runner.capture(tokens[0][:1], tmp_path / "c", CAPTURE | {"n_points": 1000}, quiet)


def test_two_workers_equal_one(cluster: None, ref: TeacherRef, tokens: Any, tmp_path: Path) -> None:
    job = job_for(ref, config_with(workers=2), tokens, tmp_path, "sw-two")
    outcome = RayRunner("sw-two", ref, "float32").distill(job, str(tmp_path / "runs"), quiet)
    _, losses = train_plainly(job)
    means = [np.mean([p.loss for p in outcome.curves[1] if p.step == s]) for s in range(1, 17)]
    np.testing.assert_allclose(means, losses, rtol=1e-4)


def training_workers() -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process().children(recursive=True)
        if p.name().startswith("ray::") and "RayTrainWorker" in " ".join(p.cmdline())
    ]


def test_training_equals_a_plain_loop_also_when_a_worker_is_killed(
    cluster: None, ref: TeacherRef, tokens: Any, tmp_path: Path
) -> None:
    config = config_with(batch_size=1)
    job = job_for(ref, config, tokens, tmp_path, "sw-killed")
    killed = threading.Event()

    def kill_once() -> None:
        while not killed.wait(0.02):
            checkpoints = list((tmp_path / "runs").glob("sw-killed-*/checkpoint_*"))
            if checkpoints and (workers := training_workers()):
                os.kill(workers[0].pid, signal.SIGKILL)
                killed.set()

    killer = threading.Thread(target=kill_once, daemon=True)
    killer.start()
    outcome = RayRunner("sw-killed", ref, "float32").distill(job, str(tmp_path / "runs"), quiet)
    assert killed.is_set()
    killer.join(timeout=5)
    students, losses = train_plainly(job)
    assert distances(outcome, students) < 1e-4
    steps = list(range(2, 65, 2))  # a point of the curve for every other of the 64 steps
    assert [p.step for p in outcome.curves[1] if p.layer_idx == 0] == steps
    means = [np.mean([p.loss for p in outcome.curves[1] if p.step == s]) for s in steps]
    np.testing.assert_allclose(means, np.reshape(losses, (32, 2)).mean(1), rtol=1e-4)
    assert {p.step for p in outcome.curves[2]} == set(steps)
    assert np.mean(losses[-8:]) < np.mean(losses[:8])


def test_evaluation(cluster: None, ref: TeacherRef, tokens: Any, tmp_path: Path) -> None:
    job = job_for(ref, config_with(), tokens, tmp_path, "sw-eval")
    students = students_of(job)
    paths = []
    for number, student in students.items():
        save_student(student, tmp_path / f"{number}.safetensors")
        paths.append((number, tmp_path / f"{number}.safetensors"))
    posts: list[tuple[int, int, str]] = []
    runner = RayRunner("sw-eval", ref, "float32")
    found = {
        r.number: r
        for r in runner.evaluate(0, paths, tokens[1], 2, lambda *post: posts.append(post))
    }
    model, _ = load_teacher(ref)
    assert found[0].heldout_loss == pytest.approx(next_token_loss(model, tokens[1]).loss, rel=1e-5)
    errors = layer_errors(model, students, tokens[1][:2])
    for number, student in students.items():
        wanted = next_token_loss(model, tokens[1], student.attend)
        assert found[number].heldout_loss == pytest.approx(wanted.loss, rel=1e-4)
        assert found[number].heldout_stderr == pytest.approx(wanted.stderr, rel=1e-3)
        layers = {r.layer_idx: r.value for r in found[number].records if r.metric == "kl"}
        assert layers[None] == pytest.approx(np.mean(errors[number].kl), rel=1e-3)
        assert layers[3] == pytest.approx(errors[number].kl[3], rel=1e-3)
        assert found[number].sequence_losses == pytest.approx(wanted.per_sequence, rel=1e-4)
    assert posts[-1][:2] == (3, 3)


def test_nothing_is_left_on_the_cluster(cluster: None) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if ray.available_resources().get("CPU") == 2:
            return
        time.sleep(0.5)
    pytest.fail(f"still held: {ray.available_resources()}")


def test_share_of_options() -> None:
    assert Share(2, 1.5, 0).threads == 1
    assert Share(1, 0.5, 1).options == {"num_cpus": 0.5, "num_gpus": 1}
