"""A dataset on the hub, streamed by the real library from a server on loopback."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from mirror import Mirror, serving

REPO = Path(__file__).resolve().parent.parent.parent
CARD = b"""---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train-*
---
"""
N_ROWS = 3000


def parquet(first: int) -> bytes:
    """Rows numbered from ``first``, in groups of 100."""
    texts = [f"article {i} " + "of some words " * 20 for i in range(first, first + N_ROWS)]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer, row_group_size=100)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def mirror() -> Iterator[Mirror]:
    files = {
        "README.md": CARD,
        "small/train-00000-of-00002.parquet": parquet(0),
        "small/train-00001-of-00002.parquet": parquet(N_ROWS),
    }
    script = {"README.md": b"", "scripted.py": b"raise SystemExit('was run')"}
    repos = {"datasets/tiny/articles": files, "datasets/tiny/scripted": script}
    with serving(repos) as server:
        yield server


def run(code: str, folder: Path, server: Mirror) -> str:
    """Last line that the code prints, in a process of its own."""
    head = (
        "import json, os\n"
        "from itertools import islice\n"
        "from dofsweep.corpus.hub import dataset_documents\n"
        "from dofsweep.corpus.load import load_corpus\n"
        "from dofsweep.errors import CorpusError\n"
        "from transformers import AutoTokenizer\n"
    )
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HOME": str(folder / "hf"),
             "HF_ENDPOINT": server.url, "no_proxy": "127.0.0.1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, check=False,
        env=clean, cwd=REPO,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_a_streamed_corpus(tmp_path: Path, mirror: Mirror) -> None:
    """Both sides are apart, in the same order each time, and only a part of the data is read."""
    code = (
        "tokenizer = AutoTokenizer.from_pretrained('tests/tiny/llama')\n"
        "def load(n, seed): return load_corpus('tiny/articles:small', tokenizer, seq_len=64,\n"
        "    train_tokens=n, heldout_tokens=2048, seed=seed)\n"
        "a, b = load(8192, 0), load(16384, 1)\n"
        "numbers = lambda rows: sorted({w for t in tokenizer.batch_decode(rows)\n"
        "    for w in __import__('re').findall(r'article (\\d+) of', t)})\n"
        "print(json.dumps([(a.heldout == b.heldout).all().item(),\n"
        "    numbers(a.train), numbers(a.heldout), numbers(b.train)]))\n"
    )
    stable, train, heldout, more = json.loads(run(code, tmp_path, mirror))
    assert stable
    assert len(train) > 50
    assert len(heldout) > 10
    assert not set(more) & set(heldout)
    assert set(train) < set(more)
    assert len({int(n) // 100 for n in train}) > 5  # rows are shuffled, not the first ones


def test_datasets_that_cannot_be_had(tmp_path: Path, mirror: Mirror) -> None:
    wanted = {
        "tiny/articles:large": "large.*small",
        "tiny/articles:small@test": "test.*train",
        "tiny/nothing": "tiny/nothing",
        "tiny/scripted": "script",
    }
    code = (
        "messages = []\n"
        f"for name in {list(wanted)}:\n"
        "    try: messages.append(list(islice(dataset_documents(name), 1)))\n"
        "    except CorpusError as err: messages.append(str(err))\n"
        "print(json.dumps(messages))\n"
    )
    messages = json.loads(run(code, tmp_path, mirror))
    for message, (name, said) in zip(messages, wanted.items(), strict=True):
        assert message.startswith(f"corpus {name} cannot be read from the hub")
        assert "org/name:config@split" in message
        assert re.search(said, message)
