"""Several processes on one database: ``python process.py COUNT TASK URL ARGUMENT…``.

One interpreter imports what is needed and forks, which is quicker than starting many. All children
begin together; this process reads the database while they work, and fails if one of them did.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from dofsweep.records import TrainingPoint
from dofsweep.store import migrate  # noqa: F401 - imported once, before the fork
from dofsweep.store.lease import lease_holder
from dofsweep.store.queries import list_sweeps
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store


def create(number: int, url: str) -> None:
    Store.open(url, create=True).dispose()


def write(number: int, url: str, rows: str) -> None:
    repo = SweepRepository(Store.open(url))
    for step in range(int(rows)):
        repo.save_training("sw-1", number, [TrainingPoint(step, step, 0, 0.5)])


def take_lease(number: int, url: str) -> None:
    """Try once, say so, and live until stdin is closed."""
    got = SweepRepository(Store.open(url)).acquire_lease("sw-1", lease_holder(), 60.0)
    os.write(1, f"{os.getpid()} {got}\n".encode())
    os.read(0, 1)


TASKS: dict[str, Callable[..., None]] = {"create": create, "write": write, "take_lease": take_lease}


def main() -> int:
    count, task, *arguments = sys.argv[1:]
    gate, opener = os.pipe()
    children = []
    for number in range(int(count)):
        if pid := os.fork():
            children.append(pid)
            continue
        os.close(opener)
        os.read(gate, 1)  # returns when the parent opens the gate, for all at once
        try:
            TASKS[task](number, *arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(opener)
    store = Store.open(arguments[0]) if task == "write" else None
    failed = 0
    while children:
        if store:
            list_sweeps(store)
        pid, status = os.waitpid(-1, os.WNOHANG if store else 0)
        if pid:
            children.remove(pid)
            failed += status != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
