"""The driver of one sweep, run as a Ray job: ``python -m dofsweep.driver SWEEP_ID``.

It holds the sweep's lease while it lives, runs the pipeline, and says in the database how it
ended. A driver that is killed says nothing; its lease then tells readers that it is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dofsweep.config import SweepConfig
from dofsweep.errors import DofsweepError
from dofsweep.rayrun.env import NAMESPACE
from dofsweep.store.lease import lease_holder
from dofsweep.store.queries import get_sweep
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store, default_home

LEASE_TTL_S = 30.0
LEASE_RENEW_S = 5.0
DB_URL_FILE = "DOFSWEEP_DB_FILE"
"""Names a file (mode 0600) that holds a database URL with its password."""

log = logging.getLogger("dofsweep")


class _Stopped(BaseException):
    """SIGTERM came: somebody stops the sweep."""


def _database_url() -> str | None:
    path = os.environ.get(DB_URL_FILE)
    return Path(path).read_text().strip() if path else None


@contextmanager
def _lease(repo: SweepRepository, sweep_id: str) -> Iterator[None]:
    """Hold the sweep; renewed by a thread for as long as this process lives."""
    holder = lease_holder()
    if not repo.acquire_lease(sweep_id, holder, LEASE_TTL_S):
        raise DofsweepError(f"sweep {sweep_id} is held by another driver; wait for it or stop it")
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(LEASE_RENEW_S):
            try:
                if not repo.renew_lease(sweep_id, holder, LEASE_TTL_S):
                    log.error("another driver holds this sweep now; this one ends")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
            except DofsweepError as err:
                log.warning("lease not renewed: %s", err)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5)
        repo.release_lease(sweep_id, holder)


def _run(sweep_id: str, store: Store, repo: SweepRepository) -> None:
    import ray

    from dofsweep.prepare import storage_of
    from dofsweep.rayrun.runner import RayRunner
    from dofsweep.sweep import SweepRun
    from dofsweep.teacher.resolve import resolve_teacher

    ray.init(
        address=os.environ.get("RAY_ADDRESS", "auto"),
        namespace=NAMESPACE,
        logging_level=logging.WARNING,
        log_to_driver=False,
        # Helpers of Ray Train look for the cluster by this variable; without it they wait.
        runtime_env={"env_vars": {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS", "")}},
    )

    def stopped(_signal: int, _frame: FrameType | None) -> None:
        raise _Stopped

    signal.signal(signal.SIGTERM, stopped)  # ray.init replaces handlers that were set before it
    stored = get_sweep(store, sweep_id)
    config = SweepConfig(**stored["config"])
    home = default_home()
    ref = resolve_teacher(config.model, home=home)
    runner = RayRunner(sweep_id, ref, config.dtype)
    run = SweepRun(sweep_id, config, ref, repo, runner, storage_of(config, home))
    run.run(spectra_only=stored["kind"] == "spectra")


def log_path(home: Path, sweep_id: str) -> Path:
    """The driver's own log, which outlives the cluster."""
    return home / "logs" / f"{sweep_id}.log"


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        handlers=[logging.StreamHandler(), logging.FileHandler(path)],
    )
    for noisy in ("httpx", "httpcore", "huggingface_hub", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def main() -> int:
    """Run a sweep; the exit code is 0 only when every trial finished."""
    sweep_id = sys.argv[1]
    _log_to(log_path(default_home(), sweep_id))
    with Store.open(_database_url()) as store:
        repo = SweepRepository(store)
        with _lease(repo, sweep_id):
            return _supervised(sweep_id, store, repo)


def _supervised(sweep_id: str, store: Store, repo: SweepRepository) -> int:
    repo.set_state(sweep_id, "running")
    try:
        _run(sweep_id, store, repo)
    except _Stopped:
        repo.set_state(sweep_id, "stopped", error="stopped on request")
        return 143
    except DofsweepError as err:
        repo.set_state(sweep_id, "failed", error=str(err))
        log.error("%s", err)
        return err.exit_code
    except Exception as err:
        repo.set_state(sweep_id, "failed", error=f"{type(err).__name__}: {err}")
        log.exception("the sweep broke down")
        return 1
    repo.set_state(sweep_id, "finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
