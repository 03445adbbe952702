"""Sweeps as a service: submit a sweep to a cluster, follow it, stop it.

The command line is a thin layer over these functions; a script can call them as well.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dofsweep import __version__
from dofsweep.config import SweepConfig
from dofsweep.core.plan import Plan
from dofsweep.driver import DB_URL_FILE
from dofsweep.errors import ClusterError, DofsweepError, SweepFailed
from dofsweep.prepare import (
    capture_facts,
    content_key,
    corpus_of,
    plan_for,
    preflight,
    spectrum_options,
    storage_of,
)
from dofsweep.rayrun.jobs import ClusterAddress, Jobs, given_address, ping
from dofsweep.rayrun.local import ensure_cluster, find_cluster, stop_cluster, token_path
from dofsweep.records import HeadSpectrum
from dofsweep.store.queries import get_sweep
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store
from dofsweep.teacher.resolve import TeacherRef

ENDED = {"finished", "failed", "stopped", "interrupted"}
POLL_S = 0.5
JOB_POLL_S = 3.0
STOP_WAIT_S = 20.0
ID_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


@dataclass
class Submitted:
    """A sweep on a cluster."""

    sweep_id: str
    store: Store
    jobs: Jobs
    address: ClusterAddress
    home: Path
    own_cluster: bool
    """The cluster is this home's local one and ends when nobody needs it."""


def new_sweep_id() -> str:
    """An id that sorts by day and is free of look-alike letters: ``sw-20261201-k3f9q2``."""
    letters = "".join(secrets.choice(ID_LETTERS) for _ in range(6))
    return f"sw-{datetime.now(UTC):%Y%m%d}-{letters}"


def submit(
    config: SweepConfig,
    *,
    home: Path,
    db: str | None = None,
    address: str | None = None,
    keep_cluster: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Submitted:
    """Check everything, then write the sweep's row and submit its job.

    Args:
        db: database URL; default as in ``Store.open``.
        address: dashboard address of a cluster; default the local one, started if need be.
        keep_cluster: leave a local cluster up when the sweep ends.
        say: takes one line at a time on what is being done.
    Raises:
        DofsweepError: what is wrong, before any cluster time is spent.
    """
    with _opened(db, address, home, create=True) as (store, target):
        preflight(config, home)
        return _start(store, target, home, keep_cluster, say, lambda s: _write(s, config, "sweep"))


def resume(
    sweep: str,
    *,
    home: Path,
    db: str | None = None,
    address: str | None = None,
    keep_cluster: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Submitted:
    """Go on with a sweep that was stopped, interrupted or failed: only what is missing is done.

    Training goes on from its last checkpoint, so the numbers are those of an undisturbed run.

    Args:
        sweep: id or name; the others as in ``submit``.
    Raises:
        DofsweepError: it is under way, or has finished; or as in ``submit``.
    """
    with _opened(db, address, home, create=False) as (store, target):
        row = get_sweep(store, sweep)
        if row["state"] in {"submitted", "running"}:
            raise ClusterError(
                f"sweep {row['id']} is {row['state']}; watch it with `dofsweep show {row['id']}`, "
                "or stop it first"
            )
        if row["state"] == "finished":
            raise ClusterError(f"sweep {row['id']} has finished; nothing is missing")
        config = SweepConfig(**row["config"])
        preflight(config, home)

        def again(submitted: Submitted) -> None:
            submitted.jobs.forget(submitted.sweep_id)
            _write(submitted, config, row["kind"])
            SweepRepository(store).set_state(submitted.sweep_id, "submitted")

        return _start(store, target, home, keep_cluster, say, again, row["id"])


@contextlib.contextmanager
def _opened(
    db: str | None, address: str | None, home: Path, *, create: bool
) -> Iterator[tuple[Store, ClusterAddress | None]]:
    """The database, and the cluster where one was given; the database is let go of on an error."""
    target = given_address(address, home) if address else None
    if target:
        ping(target)
    store = Store.open(db, create=create)
    try:
        if target:
            _refuse_local_file(store, target)
        yield store, target
    except BaseException:
        store.dispose()
        raise


def _start(
    store: Store,
    target: ClusterAddress | None,
    home: Path,
    keep_cluster: bool,
    say: Callable[[str], None],
    write: Callable[[Submitted], None],
    sweep_id: str | None = None,
) -> Submitted:
    """Bring a cluster up if none was given, write the sweep's rows, and submit its job."""
    own, started = target is None, False
    try:
        if target is None:
            if not find_cluster(home):
                say("starting a local Ray cluster")
            cluster, started = ensure_cluster(home, keep=keep_cluster)
            target = ClusterAddress(cluster.dashboard_url, token_path(home).read_text().strip())
        sweep = Submitted(sweep_id or new_sweep_id(), store, Jobs(target), target, home, own)
        write(sweep)
        _submit_job(sweep)
    except BaseException:
        if started:
            stop_cluster(home)
        raise
    return sweep


def _refuse_local_file(store: Store, target: ClusterAddress) -> None:
    if store.url.startswith("sqlite") and not target.is_loopback:
        raise ClusterError(
            f"the cluster at {target.url} cannot write to the SQLite file {store.safe_url}; "
            "pass --db postgresql://… to a server that its nodes reach"
        )


def _write(sweep: Submitted, config: SweepConfig, kind: str) -> None:
    """The rows of a sweep and its trials; those that are there keep their states and figures."""
    repo = SweepRepository(sweep.store)
    repo.create_sweep(
        id=sweep.sweep_id,
        name=config.name or sweep.sweep_id,
        kind=kind,
        model=config.model,
        config=config.model_dump(),
        versions=library_versions(),
        code_version=code_version(),
        job_address=sweep.address.url,
    )
    if kind == "sweep":
        repo.add_trials(sweep.sweep_id, config.trials(), config.feature_heads)


def _submit_job(sweep: Submitted) -> None:
    row = get_sweep(sweep.store, sweep.sweep_id)
    try:
        sweep.jobs.submit(sweep.sweep_id, model=row["model"], env=_database_env(sweep))
    except DofsweepError as err:
        SweepRepository(sweep.store).set_state(sweep.sweep_id, "failed", error=str(err))
        raise


def _database_env(sweep: Submitted) -> dict[str, str]:
    """How the job finds the database: a job's variables are shown by the Jobs API, so a URL with
    a password goes through a file that only we can read."""
    env = {"DOFSWEEP_HOME": str(sweep.home)}
    if urlsplit(sweep.store.url).password is None:
        return env | {"DOFSWEEP_DB": sweep.store.url}
    path = sweep.home / "run" / f"{sweep.sweep_id}.db"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(sweep.store.url)
    return env | {DB_URL_FILE: str(path), "DOFSWEEP_DB": ""}


def library_versions() -> dict[str, str]:
    """Versions of what a result can depend on."""
    names = ("torch", "transformers", "ray", "datasets", "numpy", "sqlalchemy", "optuna", "lm-eval")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def code_version() -> str:
    """Version of dofsweep, with the commit where it runs from a checkout."""
    repo = Path(__file__).resolve().parent.parent
    if not (repo / ".git").exists():
        return __version__
    command = ["git", "-C", str(repo), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+{found.stdout.strip()}"


def follow(sweep: Submitted, watch: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Wait until a sweep ends; ``watch`` is given its row twice a second.

    Returns:
        The row as it ended.
    """
    asked = time.monotonic()
    while True:
        row = get_sweep(sweep.store, sweep.sweep_id)
        watch(row)
        if row["state"] in ENDED:
            return row
        if time.monotonic() - asked > JOB_POLL_S:
            asked = time.monotonic()
            _notice_dead_job(sweep)
        time.sleep(POLL_S)


def _notice_dead_job(sweep: Submitted) -> None:
    """A job that ended without writing how is an interrupted sweep."""
    try:
        status, message = sweep.jobs.status(sweep.sweep_id), ""
        if status in {"PENDING", "RUNNING"}:
            return
        message = sweep.jobs.message(sweep.sweep_id)
    except ClusterError as err:
        status, message = "cluster lost", str(err)
    time.sleep(1.0)  # the driver may have written its end just now
    if get_sweep(sweep.store, sweep.sweep_id)["state"] not in ENDED:
        reason = f"the job ended ({status}) without a word: {message[:500]}".strip()
        SweepRepository(sweep.store).set_state(sweep.sweep_id, "interrupted", error=reason)


def close(sweep: Submitted) -> None:
    """Let go of the database, and end a local cluster that nobody needs any more."""
    sweep.store.dispose()
    (sweep.home / "run" / f"{sweep.sweep_id}.db").unlink(missing_ok=True)
    if not sweep.own_cluster:
        return
    cluster = find_cluster(sweep.home)
    if cluster and not cluster.keep and not set(sweep.jobs.running()) - {sweep.sweep_id}:
        stop_cluster(sweep.home)


def jobs_of(row: dict[str, Any], home: Path) -> Jobs:
    """Jobs API of the cluster that a sweep was submitted to.

    Raises:
        ClusterError: that cluster is gone.
    """
    if not row["job_address"]:
        raise ClusterError(f"sweep {row['id']} was never submitted to a cluster")
    target = given_address(row["job_address"], home)
    ping(target)
    return Jobs(target)


def stop(store: Store, sweep_id: str, home: Path) -> dict[str, Any]:
    """Stop a sweep and wait until it has ended; one that has ended already is left alone.

    Returns:
        The sweep's row.
    """
    row = get_sweep(store, sweep_id)
    if row["state"] in ENDED:
        return row
    jobs_of(row, home).stop(row["id"])
    deadline = time.monotonic() + STOP_WAIT_S
    while time.monotonic() < deadline:
        row = get_sweep(store, row["id"])
        if row["state"] in ENDED:
            break
        time.sleep(POLL_S)
    if row["state"] != "stopped":
        SweepRepository(store).set_state(row["id"], "stopped", error="stopped on request")
    return get_sweep(store, row["id"])


def measure_spectra(
    config: SweepConfig,
    *,
    home: Path,
    db: str | None = None,
    address: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    watch: Callable[[dict[str, Any]], None] = lambda _: None,
) -> tuple[TeacherRef, list[HeadSpectrum]]:
    """Spectra of a teacher: from the store, or measured by a job.

    Raises:
        SweepFailed: the job did not finish.
    """
    ref = preflight(config, home)
    corpus = corpus_of(config, ref, storage_of(config, home))
    key = content_key(capture_facts(config, ref, corpus) | spectrum_options(config))
    with Store.open(db, create=True) as store:
        if stored := SweepRepository(store).load_spectra(key):
            say("spectra taken from the store")
            return ref, stored[1]
    with _opened(db, address, home, create=False) as (store, target):
        sweep = _start(store, target, home, False, say, lambda s: _write(s, config, "spectra"))
    try:
        row = follow(sweep, watch)
        if row["state"] != "finished":
            raise SweepFailed(f"{row['id']} {row['state']}: {row['error']}")
        stored = SweepRepository(store).load_spectra(key)
    finally:
        close(sweep)
    assert stored is not None
    return ref, stored[1]


def plans_for(
    config: SweepConfig, ref: TeacherRef, spectra: list[HeadSpectrum]
) -> list[tuple[str, int, float | None, Plan]]:
    """Plans of every strategy, budget and λ of a config: (strategy, budget, λ, plan)."""
    found = []
    for trial in config.trials():
        if not trial.loss or trial.seed != config.seed[0]:
            continue
        assert trial.budget is not None
        plan = plan_for(config, ref, trial, spectra)
        entry = (trial.strategy, trial.budget, trial.lam, plan)
        if entry not in found:
            found.append(entry)
    return found
