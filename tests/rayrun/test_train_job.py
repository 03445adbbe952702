"""What a training run writes down of itself before it starts, without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dofsweep.config import make_config
from dofsweep.core.plan import make_plan
from dofsweep.errors import DistillError
from dofsweep.rayrun.train import TrainJob
from dofsweep.records import TrialSpec
from dofsweep.teacher.resolve import resolve_teacher

TINY = Path(__file__).resolve().parent.parent / "tiny"


def make_job(home: Path) -> TrainJob:
    ref = resolve_teacher(str(TINY / "llama"), home=home)
    config = make_config({"model": str(TINY / "llama"), "corpus": "pydoc", "polish_steps": 7})
    plan = make_plan("fix", n_layers=4, n_heads=2, budget=8, head_dim=32)
    trial = TrialSpec(1, "fix", "prf", "softmax", 8, lr_features=0.06, lr_weights=0.1)
    return TrainJob("sw-1", ref, config, ((trial, plan),), "capture", "tokens", 64)


def test_a_run_is_claimed_once_and_by_the_same_facts(tmp_path: Path) -> None:
    job, storage = make_job(tmp_path), str(tmp_path / "runs")
    job.claim(storage)
    job.claim(storage)
    assert [path.name for path in (tmp_path / "runs" / job.run_name).iterdir()] == ["facts.json"]


def test_a_checkpoint_of_anything_else_is_refused(tmp_path: Path) -> None:
    job, storage = make_job(tmp_path), str(tmp_path / "runs")
    job.claim(storage)
    (trial, _), *_ = job.trials
    fewer = make_plan("fix", n_layers=4, n_heads=2, budget=5, head_dim=32)
    for name, other in {
        "plan": replace(job, trials=((trial, fewer),)),
        "number of steps": replace(job, n_sequences=32),
        "model": replace(job, ref=replace(job.ref, fingerprint="another")),
    }.items():
        assert other.run_name == job.run_name
        with pytest.raises(DistillError, match=f"of another {name}: launch a new sweep"):
            other.claim(storage)


def test_a_polish_has_steps_of_its_own_and_begins_the_text_anew(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert (job.total_steps, job.batch(3)) == (16, slice(12, 16))
    (trial, plan), *_ = job.trials
    polish = replace(job, trials=((replace(trial, loss="softmax+polish"), plan),), n_sequences=8)
    assert polish.total_steps == 7
    assert [polish.batch(step).start for step in range(4)] == [0, 4, 0, 4]
