"""Shared fixtures: where the data folder is, and what a skip means in CI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


def skip_or_fail(reason: str) -> None:
    """Skip a test for want of something outside the project; in CI that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"must not be skipped in CI: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of benchmark and text data, which is not part of the project."""
    found = Path(os.environ.get("DOFSWEEP_TEST_DATA", REPO.parent / "shared" / "data"))
    if not found.is_dir():
        skip_or_fail(f"no data folder at {found}; set DOFSWEEP_TEST_DATA to one")
    return found
