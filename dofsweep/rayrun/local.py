"""The local cluster: a Ray head on this machine's loopback, ours to start and to end.

One local cluster a home. Its facts are in ``run/cluster.json`` (mode 0600), and its token, without
which its Jobs API refuses every request, in ``run/ray-token``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dofsweep.errors import ClusterError
from dofsweep.rayrun.env import QUIET

START_TIMEOUT_S = 120.0
START_ATTEMPTS = 3
STOP_TIMEOUT_S = 20.0
DASHBOARD_PORT = 8265
OBJECT_STORE_BYTES = 1_000_000_000


@dataclass(frozen=True)
class LocalCluster:
    """A running local cluster."""

    pid: int
    """Process that ends the whole cluster when it is terminated."""
    dashboard_url: str
    gcs_address: str
    temp_dir: str
    keep: bool
    """Stays up when the sweep that started it ends."""


def _run_dir(home: Path) -> Path:
    path = home / "run"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def token_path(home: Path) -> Path:
    """File that holds the token of the local cluster; made when it is not there."""
    path = _run_dir(home) / "ray-token"
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
    return path


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    with open(_run_dir(home) / "cluster.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_cluster(home: Path) -> LocalCluster | None:
    """The home's local cluster, if its process lives."""
    path = home / "run" / "cluster.json"
    try:
        stored = json.loads(path.read_text())
        cluster = LocalCluster(**stored)
    except (OSError, ValueError, TypeError):
        return None
    return cluster if _is_ray_head(cluster.pid, cluster.temp_dir) else None


def _is_ray_head(pid: int, temp_dir: str) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return any(temp_dir in word for word in process.cmdline())
    except psutil.Error:
        return False


def ensure_cluster(home: Path, *, keep: bool) -> tuple[LocalCluster, bool]:
    """The home's local cluster, started if there is none; and whether it was started.

    Raises:
        ClusterError: it did not come up; the message holds the end of its log.
    """
    with _locked(home):
        if found := find_cluster(home):
            if keep and not found.keep:
                found = _write(home, LocalCluster(**(asdict(found) | {"keep": True})))
            return found, False
        for attempt in range(START_ATTEMPTS):
            try:
                return _write(home, _start(home, keep)), True
            except ClusterError:  # Ray gives its parts 30 s, which a busy machine may exceed
                if attempt == START_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")


def _write(home: Path, cluster: LocalCluster) -> LocalCluster:
    path = _run_dir(home) / "cluster.json"
    part = path.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(asdict(cluster), file)
    part.replace(path)
    return cluster


def _free_ports(n: int, preferred: int) -> list[int]:
    """n distinct free ports of loopback, the first one the preferred if that is free."""
    held: list[socket.socket] = []
    try:
        for wanted in [preferred] + [0] * (n - 1):
            probe = socket.socket()
            held.append(probe)
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in held]
    finally:
        for probe in held:
            probe.close()


def _start(home: Path, keep: bool) -> LocalCluster:
    temp_dir = tempfile.mkdtemp(prefix="dofsweep-ray-")  # short: it holds sockets
    dashboard, gcs, agent, agent_grpc, metrics = _free_ports(5, DASHBOARD_PORT)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--temp-dir={temp_dir}"]
    command += [f"--dashboard-agent-grpc-port={agent_grpc}", f"--metrics-export-port={metrics}"]
    command += ["--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    env = os.environ | QUIET
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path(home))}
    env.pop("RAY_ADDRESS", None)
    log = _run_dir(home) / "cluster.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env,
            start_new_session=True, cwd=home,
        )  # fmt: skip
    try:
        address = _wait_until_up(process, Path(temp_dir), log)
    except BaseException:
        _end(process.pid, temp_dir)
        raise
    return LocalCluster(process.pid, f"http://127.0.0.1:{dashboard}", address, temp_dir, keep)


def _wait_until_up(process: subprocess.Popen[bytes], temp_dir: Path, log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    ready = temp_dir / "ray_current_cluster"  # written when every part is up
    while time.monotonic() < deadline:
        if ready.exists() and (address := ready.read_text().strip()):
            return address
        if process.poll() is not None:
            break
        time.sleep(0.1)
    tail = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    raise ClusterError(f"the local Ray cluster did not start (log {log}): {tail}")


def stop_cluster(home: Path) -> bool:
    """End the home's local cluster; False if there was none."""
    with _locked(home):
        found = find_cluster(home)
        if found:
            _end(found.pid, found.temp_dir)
        (home / "run" / "cluster.json").unlink(missing_ok=True)
        return found is not None


def _end(pid: int, temp_dir: str) -> None:
    """End the head and all that it started, by their pids, and remove its folder."""
    import psutil

    try:
        head = psutil.Process(pid)
        family = head.children(recursive=True)
        head.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        family = []
    else:
        _, alive = psutil.wait_procs([head, *family], timeout=STOP_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    shutil.rmtree(temp_dir, ignore_errors=True)
