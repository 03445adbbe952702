"""The command line as a user runs it: a process of its own, a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TINY = Path(__file__).resolve().parent.parent / "tiny"


@dataclass
class Cli:
    """Runs ``dofsweep`` in one home."""

    home: Path

    @property
    def env(self) -> dict[str, str]:
        """Environment of the commands: this home, no hub, and nothing of the caller's."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DOFSWEEP_", "RAY_"))}
        return kept | {
            "DOFSWEEP_HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "COLUMNS": "100",
        }

    def run(
        self, *words: str, timeout_s: float = 400, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "dofsweep.cli.app", *words],
            capture_output=True, text=True, timeout=timeout_s, env=self.env | env, check=False,
            cwd=self.home, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def ok(self, *words: str, **env: str) -> str:
        """Run a command that must succeed; returns its stdout."""
        done = self.run(*words, **env)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *words: str, **env: str) -> Any:
        """Run a command with --json; returns what it printed."""
        return json.loads(self.ok(*words, "--json", **env))


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """A home that is empty."""
    (tmp_path / "home").mkdir()
    return Cli(tmp_path / "home")


@pytest.fixture(scope="module")
def cluster_cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A home whose local cluster is up for all tests of a module."""
    cli = Cli(tmp_path_factory.mktemp("home"))
    cli.ok("cluster", "up")
    yield cli
    cli.ok("cluster", "down")
