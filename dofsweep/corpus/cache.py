"""Packed corpora on disk: tokenised once, then mapped into memory by whoever trains."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dofsweep.corpus.load import Corpus, is_remote, load_corpus


@dataclass(frozen=True)
class CachedCorpus:
    """A packed corpus in a folder that every node sees."""

    folder: Path
    train: NDArray[np.int32]
    """[n_train, seq_len] token ids, mapped read-only."""
    heldout: NDArray[np.int32]
    """[n_heldout, seq_len] token ids, mapped read-only."""
    fingerprint: str

    @property
    def train_path(self) -> Path:
        """File of the training tokens."""
        return self.folder / "train.npy"


def cached_corpus(
    root: Path,
    make_tokenizer: Callable[[], Any],
    *,
    tokenizer_key: str,
    name: str,
    heldout_name: str | None,
    **options: Any,
) -> CachedCorpus:
    """The corpus from the cache, or packed now.

    Args:
        root: folder of all cached corpora.
        make_tokenizer: called only when the corpus is not cached.
        tokenizer_key: identifies the tokenizer.
        options: the other arguments of ``load_corpus``.
    Raises:
        CorpusError: see ``load_corpus``.
    """
    facts = {"tokenizer": tokenizer_key, "corpus": _stamp(name)} | options
    facts["heldout"] = None if heldout_name is None else _stamp(heldout_name)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    folder = root / key
    if not (folder / "meta.json").exists():
        corpus = load_corpus(name, make_tokenizer(), heldout_name=heldout_name, **options)
        _write(corpus, folder)
    meta = json.loads((folder / "meta.json").read_text())
    return CachedCorpus(
        folder,
        np.load(folder / "train.npy", mmap_mode="r"),
        np.load(folder / "heldout.npy", mmap_mode="r"),
        meta["fingerprint"],
    )


def _stamp(name: str) -> list[Any]:
    """What changes when the text behind a name changes."""
    if is_remote(name) or not (path := Path(name).expanduser()).exists():
        return [name]
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _write(corpus: Corpus, folder: Path) -> None:
    """Write the folder whole: two writers at once both succeed, the first one stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
    try:
        np.save(part / "train.npy", corpus.train)
        np.save(part / "heldout.npy", corpus.heldout)
        meta = {
            "fingerprint": corpus.fingerprint,
            "name": corpus.name,
            "documents_train": corpus.n_documents_train,
            "documents_heldout": corpus.n_documents_heldout,
        }
        (part / "meta.json").write_text(json.dumps(meta))
        part.chmod(0o755)
        part.rename(folder)
    except OSError:
        if not (folder / "meta.json").exists():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
