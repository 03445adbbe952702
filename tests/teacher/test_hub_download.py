"""Downloads through the real hub library, from a server on loopback that speaks its protocol."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mirror import Mirror, serving

from dofsweep.teacher.load import fingerprint

REPO = Path(__file__).resolve().parent.parent.parent
MODEL = REPO / "tests" / "tiny" / "llama"


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    """Serves ``tiny/llama``, with a pickle beside its weights, and a gated ``tiny/gated``."""
    files = {file.name: file.read_bytes() for file in MODEL.iterdir()}
    with serving({"models/tiny/llama": files | {"pytorch_model.bin": b"a pickle"}}) as server:
        server.gated.add("models/tiny/gated")
        yield server


def resolve(model: str, folder: Path, **env: str) -> dict[str, str]:
    """resolve_teacher in a process of its own, since the hub library reads its settings once."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from dofsweep.errors import TeacherError\n"
        "from dofsweep.teacher.resolve import resolve_teacher\n"
        "try:\n"
        "    ref = resolve_teacher(sys.argv[1], home=Path(sys.argv[2]))\n"
        "    print(json.dumps({k: str(getattr(ref, k)) for k in\n"
        "                      ('name', 'source', 'path', 'fingerprint')}))\n"
        "except TeacherError as err: print(json.dumps({'error': str(err)}))\n"
    )
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HOME": str(folder / "hf"),
             "no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, model, str(folder / "home")],
        capture_output=True, text=True, check=True, env=clean | env, cwd=REPO,
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_model_is_downloaded_once_and_then_needs_no_hub(tmp_path: Path, mirror: Mirror) -> None:
    first = resolve("tiny/llama", tmp_path, HF_ENDPOINT=mirror.url)
    assert (first["name"], first["source"]) == ("llama", "hub")
    assert first["fingerprint"] == fingerprint(MODEL)
    assert not any(path.endswith(".bin") for path in mirror.asked)
    assert resolve("tiny/llama", tmp_path, HF_HUB_OFFLINE="1") == first


def test_a_download_that_broke_off_is_finished_later(tmp_path: Path, mirror: Mirror) -> None:
    mirror.broken.add("model.safetensors")
    failed = resolve("tiny/llama", tmp_path, HF_ENDPOINT=mirror.url)
    assert "tiny/llama could not be downloaded" in failed["error"]
    offline = resolve("tiny/llama", tmp_path, HF_HUB_OFFLINE="1")
    assert "tiny/llama is not in the cache" in offline["error"]
    mirror.broken.clear()
    found = resolve("tiny/llama", tmp_path, HF_ENDPOINT=mirror.url)
    assert found["fingerprint"] == fingerprint(MODEL)


@pytest.mark.parametrize(
    ("model", "said"),
    [("tiny/none", "has no model tiny/none.*HF_TOKEN"), ("tiny/gated", "is gated.*HF_TOKEN")],
)
def test_what_the_hub_refuses(tmp_path: Path, mirror: Mirror, model: str, said: str) -> None:
    assert re.search(said, resolve(model, tmp_path, HF_ENDPOINT=mirror.url)["error"])
