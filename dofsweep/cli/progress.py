"""Progress of a sweep on stderr: a live line on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dofsweep.service import Submitted, follow

LOG_EVERY_S = 20.0


def say(text: str) -> None:
    """One line for the person, on stderr; stdout carries results alone."""
    print(text, file=sys.stderr, flush=True)


class _Lines:
    """Prints a line when the stage changes, and now and then in between."""

    def __init__(self) -> None:
        self._stage, self._at, self._start = "", 0.0, time.monotonic()

    def __call__(self, row: dict[str, Any]) -> None:
        now, stage = time.monotonic(), row["stage"] or row["state"]
        if stage == self._stage and now - self._at < LOG_EVERY_S:
            return
        self._stage, self._at = stage, now
        counts = f" {row['done']}/{row['total']}" if row["total"] else ""
        detail = f" {row['detail']}" if row["detail"] else ""
        say(f"[{now - self._start:6.1f} s] {stage}{counts}{detail}")


def watcher() -> Any:
    """Context manager whose value takes a sweep's row: live on a terminal, else lines."""
    return _Live() if sys.stderr.isatty() else _Plain()


class _Plain:
    def __enter__(self) -> _Lines:
        return _Lines()

    def __exit__(self, *_: object) -> None:
        return


class _Live:
    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[stage]:<9}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[counts]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", stage="submitted", counts="", total=None)

    def __enter__(self) -> _Live:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, row: dict[str, Any]) -> None:
        total = row["total"] or None
        counts = f"{row['done']}/{total} {row['detail'] or ''}" if total else row["detail"] or ""
        self._progress.update(
            self._task,
            stage=row["stage"] or row["state"],
            completed=row["done"] or 0,
            total=total,
            counts=counts,
        )


def follow_with_progress(sweep: Submitted) -> dict[str, Any]:
    """Wait for the end of a sweep and show how far it is."""
    with watcher() as watch:
        return follow(sweep, watch)
