"""A sweep with a row of every kind, for tests of the store."""

from __future__ import annotations

from typing import Any

import numpy as np
from sqlalchemy import select

from dofsweep.records import EvalRecord, HeadSpectrum, TrainingPoint, TrialResult, TrialSpec
from dofsweep.store.models import Base
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store

TRIALS = (
    TrialSpec(0, "teacher"),
    TrialSpec(1, "fix", "prf", "softmax", 64, None, 0),
    TrialSpec(2, "dof", "prf", "softmax", 64, 2**-8, 2**40),
)
SPECTRA = [
    HeadSpectrum(layer, head, np.array([3.5, 1e-300, 5e-324]) + head, 1e-17, 512, head == 0)
    for layer in range(2)
    for head in range(2)
]
RESULT = TrialResult(
    2,
    3.25,
    0.125,
    8,
    np.int64(2**33),  # type: ignore[arg-type]
    (
        EvalRecord("kl", 0.5, None, 8, 0.01),
        EvalRecord("kl", 0.75, 1, 8, 0.02),
        EvalRecord("kl", 0.25, 0),
        EvalRecord("output_error", 0.0625),
        EvalRecord("heldout_loss", 3.5, None, 8, 0.25, context=4),
        EvalRecord("heldout_loss", 3.25, None, 8, 0.125),
        EvalRecord("recall", np.float32(0.5), None, 100),  # type: ignore[arg-type]
    ),
    (3.0, 3.5),
)


def create(repo: SweepRepository, id_: str = "sw-1", name: str = "demo", **other: Any) -> str:
    given: dict[str, Any] = {
        "kind": "sweep",
        "model": "smollm2-135m",
        "config": {"budget": [64], "lam": [2**-8], "note": "λ"},
        "versions": {"torch": "2.13"},
        "code_version": "0.1.0",
        "job_address": "http://127.0.0.1:8265",
    }
    repo.create_sweep(id=id_, name=name, **(given | other))
    return id_


def write_all(repo: SweepRepository) -> None:
    create(repo)
    repo.add_trials("sw-1", TRIALS, "kv")
    repo.set_fingerprints("sw-1", teacher="t", corpus="c")
    repo.set_fingerprints("sw-1", spectra_key="k")
    repo.progress("sw-1", "distil", 3, 10, "step 3")
    repo.save_spectra("k", {"gram_scale": "trace"}, SPECTRA)
    repo.save_plan("sw-1", 2, "plan", [[9, 277], [64, 64]], 4096)
    repo.save_training("sw-1", 2, [TrainingPoint(s, 512 * s, 1, 1 / s) for s in (1, 2, 3)])
    repo.save_result("sw-1", RESULT)
    repo.set_trial_state("sw-1", 2, "finished")
    repo.save_timing("sw-1", "capture", seconds=1.5, tokens=2**40, peak_bytes=2**41)
    repo.save_timing("sw-1", "evaluate", seconds=0.5, trial_number=2)
    repo.save_artifact(
        "sw-1", "student", trial_number=2, path="/s/2", sha256="ab", size_bytes=2**42
    )
    repo.save_artifact("sw-1", "report", path="/r", sha256="cd", size_bytes=7)


def all_rows(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, without the times of writing."""
    found = {}
    with store.reading() as session:
        for table in Base.metadata.sorted_tables:
            rows = session.execute(select(table).order_by(*table.primary_key)).mappings()
            found[table.name] = [
                {k: v for k, v in row.items() if k not in {"updated_at", "created_at"}}
                for row in rows
            ]
    return found
