"""Who drives a sweep: a name that tells whether its process still lives.

A lease expires when its holder stops renewing it. For a holder on this host there is no need to
wait: its process can be looked up, by its id and, as ids are reused, by its start.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from pathlib import Path

_UNKNOWN = "0"


def host_identity() -> str:
    """Name of the place where a process id means what it means here.

    Two machines, or two containers of one, may share a host name; on Linux the running kernel and
    the namespace of process ids tell them apart.
    """
    name = socket.gethostname().replace(":", "_")
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return name
    return f"{name}/{hashlib.sha256(f'{kernel} {namespace}'.encode()).hexdigest()[:8]}"


def lease_holder(pid: int | None = None) -> str:
    """A new name for a process as a holder of leases: ``host:pid:start:nonce``.

    Args:
        pid: the process; default this one. Two names of one process are two holders.
    """
    pid = os.getpid() if pid is None else pid
    return f"{host_identity()}:{pid}:{_start(pid) or _UNKNOWN}:{secrets.token_hex(4)}"


def holder_is_dead(holder: str) -> bool:
    """True only when the holder ran on this host and its process is certainly gone."""
    host, pid, start, _nonce = holder.rsplit(":", 3)
    if host != host_identity():
        return False
    if Path("/proc/self/stat").exists():
        return _start(int(pid)) != start
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, under another user
        return False
    return False


def _start(pid: int) -> str | None:
    """Start of a live process, in clock ticks since the boot; None if it is gone or unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold blanks and brackets
    state, start = fields[0], fields[19]
    return None if state in "ZX" else start  # a zombie has ended, nobody has asked how
