"""Several processes on one database: creating it, writing to it, leasing a sweep of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from samples import TRIALS, create
from sqlalchemy import text

from dofsweep.records import TrialSpec
from dofsweep.store import migrate
from dofsweep.store.lease import holder_is_dead, host_identity, lease_holder
from dofsweep.store.queries import get_sweep, list_sweeps
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store

SCRIPT = Path(__file__).with_name("process.py")


@contextmanager
def processes(count: int, task: str, url: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Processes that do one task of process.py at once."""
    command = [sys.executable, str(SCRIPT), str(count), task, url, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as started:
        yield started


def finish(started: subprocess.Popen[str]) -> str:
    """Close its stdin, wait, and return what it printed."""
    out, err = started.communicate(timeout=300)
    assert started.returncode == 0, err
    return out


def test_several_may_create_it_at_once(url: str) -> None:
    with processes(4, "create", url) as started:
        finish(started)
    migrate.check(url)


@pytest.mark.parametrize("n_rows", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_row_is_lost_by_eight_writers_beside_a_reader(
    store: Store, repo: SweepRepository, n_rows: int
) -> None:
    create(repo)
    repo.add_trials("sw-1", [TrialSpec(number, "dof") for number in range(8)], "kv")
    with processes(8, "write", store.url, str(n_rows)) as started:
        finish(started)
    with store.reading() as session:
        counted = session.execute(
            text("SELECT COUNT(*), COUNT(DISTINCT trial_id) FROM training_point")
        ).one()
    assert tuple(counted) == (8 * n_rows, 8)


def test_of_several_drivers_one_gets_the_lease(store: Store, repo: SweepRepository) -> None:
    create(repo)
    with processes(3, "take_lease", store.url) as drivers:
        assert drivers.stdout is not None
        answers = [drivers.stdout.readline().split()[1] for _ in range(3)]
        finish(drivers)
    assert sorted(answers) == ["False", "False", "True"]


def test_a_killed_driver_leaves_an_interrupted_sweep_at_once(
    store: Store, repo: SweepRepository
) -> None:
    create(repo)
    repo.set_state("sw-1", "running")
    with processes(1, "take_lease", store.url) as driver:
        assert driver.stdout is not None
        pid, got = driver.stdout.readline().split()
        assert got == "True"
        assert list_sweeps(store)[0]["state"] == "running"
        assert repo.acquire_lease("sw-1", lease_holder(), 60.0) is False
        os.kill(int(pid), signal.SIGKILL)
        assert driver.wait(30) == 1
    (row,) = list_sweeps(store)
    assert row["state"] == "interrupted"
    assert f"process {pid}, is gone" in row["error"]
    assert get_sweep(store, "sw-1")["finished_at"] is not None
    assert repo.acquire_lease("sw-1", lease_holder(), 60.0) is True


# -- leases in one process ----------------------------------------------------------------------


def test_a_lease_is_kept_renewed_and_given_back(store: Store, repo: SweepRepository) -> None:
    create(repo)
    mine, other = lease_holder(), lease_holder()
    assert repo.acquire_lease("sw-1", mine, 60.0)
    assert repo.acquire_lease("sw-1", mine, 60.0)
    assert not repo.acquire_lease("sw-1", other, 60.0)
    assert not repo.renew_lease("sw-1", other, 60.0)
    repo.release_lease("sw-1", other)
    assert repo.renew_lease("sw-1", mine, 90.0)
    expires = get_sweep(store, "sw-1")["lease_expires_at"]
    assert 80 < expires - time.time() < 100
    repo.release_lease("sw-1", mine)
    assert not repo.renew_lease("sw-1", mine, 60.0)
    assert repo.acquire_lease("sw-1", other, 60.0)


def test_an_expired_lease_is_free(store: Store, repo: SweepRepository) -> None:
    create(repo)
    assert repo.acquire_lease("sw-1", "elsewhere:1:1:aa", -1.0)
    assert repo.acquire_lease("sw-1", lease_holder(), 60.0)


def test_an_expired_lease_means_interrupted_and_a_sleeper_may_come_back(
    store: Store, repo: SweepRepository
) -> None:
    create(repo)
    repo.set_state("sw-1", "running")
    repo.acquire_lease("sw-1", "elsewhere:1:1:aa", 60.0)
    assert get_sweep(store, "sw-1")["state"] == "running"
    repo.renew_lease("sw-1", "elsewhere:1:1:aa", -1.0)
    row = get_sweep(store, "sw-1")
    assert row["state"] == "interrupted"
    assert "on elsewhere has not been heard of" in row["error"]
    assert repo.renew_lease("sw-1", "elsewhere:1:1:aa", 60.0)
    row = get_sweep(store, "sw-1")
    assert (row["state"], row["error"], row["finished_at"]) == ("running", None, None)


def test_a_sweep_submitted_again_is_not_blamed_for_its_dead_driver(
    store: Store, repo: SweepRepository
) -> None:
    create(repo)
    repo.set_state("sw-1", "running")
    repo.acquire_lease("sw-1", "elsewhere:1:1:aa", -1.0)
    assert get_sweep(store, "sw-1")["state"] == "interrupted"
    repo.set_state("sw-1", "submitted")
    assert get_sweep(store, "sw-1")["state"] == "submitted"
    assert not repo.renew_lease("sw-1", "elsewhere:1:1:aa", 60.0)


@pytest.mark.parametrize(("age_s", "state"), [(500, "submitted"), (610, "interrupted")])
def test_a_submitted_sweep_may_wait_ten_minutes_for_a_driver(
    store: Store, repo: SweepRepository, age_s: float, state: str
) -> None:
    create(repo)
    with store.session() as session:
        then = datetime.now(UTC) - timedelta(seconds=age_s)
        stamp = then.replace(tzinfo=None) if store.url.startswith("sqlite") else then
        session.execute(text("UPDATE sweep SET updated_at = :then"), {"then": str(stamp)})
    assert list_sweeps(store)[0]["state"] == state


@pytest.mark.parametrize("state", ["finished", "failed", "stopped"])
def test_sweeps_that_ended_stay_as_they_are(
    store: Store, repo: SweepRepository, state: str
) -> None:
    create(repo)
    repo.add_trials("sw-1", TRIALS, "kv")
    repo.acquire_lease("sw-1", "elsewhere:1:1:aa", -1.0)
    repo.set_state("sw-1", state, error="why")
    row = list_sweeps(store)[0]
    assert (row["state"], row["error"]) == (state, "why")


# -- holders ------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_holder_is_dead_when_its_process_is(
    sleeper: Callable[[], subprocess.Popen[bytes]],
) -> None:
    process = sleeper()
    holder = lease_holder(process.pid)
    assert not holder_is_dead(holder)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert holder_is_dead(holder)  # a zombie, nobody has asked for its exit status
    process.wait()
    assert holder_is_dead(holder)


def test_a_process_id_that_is_used_again_is_another_holder() -> None:
    host, pid, start, nonce = lease_holder().rsplit(":", 3)
    assert not holder_is_dead(f"{host}:{pid}:{start}:{nonce}")
    assert holder_is_dead(f"{host}:{pid}:{int(start) - 1}:{nonce}")


def test_a_holder_elsewhere_is_never_called_dead() -> None:
    assert not holder_is_dead("elsewhere:999999999:1:aa")
    assert not holder_is_dead(f"{host_identity()}x:999999999:1:aa")
    assert holder_is_dead(f"{host_identity()}:999999999:1:aa")
