"""The border of the core: torch, numpy, records and errors, and nothing heavier."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import dofsweep.core
for module in pkgutil.walk_packages(dofsweep.core.__path__, "dofsweep.core."):
    importlib.import_module(module.name)
ours = sorted(m for m in sys.modules if m.startswith("dofsweep."))
print(*[m for m in ours if not m.startswith("dofsweep.core")])
print(*[m for m in sys.argv[1:] if m in sys.modules])
"""
FORBIDDEN = ["ray", "optuna", "sqlalchemy", "alembic", "typer", "transformers", "pydantic"]


def test_core_imports_nothing_of_the_outer_layers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *FORBIDDEN], capture_output=True, text=True, check=True
    )
    ours, forbidden = done.stdout.splitlines()
    assert set(ours.split()) <= {"dofsweep.records", "dofsweep.errors"}
    assert forbidden == ""
