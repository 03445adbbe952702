"""load_corpus: text to packed token sequences, training and held-out, divided by document."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dofsweep.corpus.documents import SUFFIXES, check_file, file_documents, pydoc_documents
from dofsweep.corpus.hub import ALIASES, check_dataset, dataset_documents, parse_dataset
from dofsweep.errors import CorpusError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = "pydoc"
STREAMED_HELDOUT = 0.1
"""Part of a streamed corpus that is set aside as held-out, by the hash of each document."""
MOST_TRAIN_TOKENS = 2**20
"""Training tokens taken where no number is asked for."""
STREAM_BYTES = 256 * 2**20
"""Local files of more than this are streamed in their own order, like a hub dataset."""
BATCH_CHARS = 2**18
"""Characters that are tokenised at once, at most."""
CHARS_PER_TOKEN = 4
"""A guess of how much text is still needed; a wrong one costs a few more batches."""


@dataclass(frozen=True)
class Corpus:
    """Packed text of one tokenizer and one sequence length."""

    train: NDArray[np.int32]
    """[n_train, seq_len] token ids."""
    heldout: NDArray[np.int32]
    """[n_heldout, seq_len] token ids of other documents."""
    fingerprint: str
    """Covers both arrays, the name, the sequence length and the tokenizer."""
    name: str
    n_documents_train: int
    n_documents_heldout: int


@dataclass(frozen=True)
class _Packed:
    """One side of the split, as far as it goes."""

    tokens: NDArray[np.int32]
    """All tokens up to the number asked for, or fewer where the text ended; shape [n]."""
    digests: frozenset[bytes]
    """Of the documents that they come from."""
    n_documents: int


def is_remote(name: str) -> bool:
    """Whether a corpus comes from the hub."""
    return _local_path(name) is None and name != BUILTIN and parse_dataset(name) is not None


def check_corpus(name: str, heldout_name: str | None = None) -> None:
    """Cheap checks before anything is read: files are there and not empty, the hub answers.

    Raises:
        CorpusError: with what to do, within seconds.
    """
    for one in dict.fromkeys(n for n in (name, heldout_name) if n is not None):
        if one == BUILTIN:
            continue
        if path := _local_path(one):
            check_file(path)
        elif parse_dataset(one):
            check_dataset(one)
        else:
            _refuse(one)


def load_corpus(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    train_tokens: int | None,
    heldout_tokens: int,
    seed: int = 0,
    heldout_name: str | None = None,
    text_field: str | None = None,
) -> Corpus:
    """Documents tokenised one by one, joined by the end-of-text token, cut to ``seq_len``.

    A document is on one side only, and identical documents are on the same side. Documents of a
    local corpus are taken in the order of their hashes, held-out first, so that any corpus with
    enough text can serve both sides; of a streamed one (hub, or a file above ``STREAM_BYTES``)
    those whose hash falls into the first tenth are held out. Either way the held-out side depends
    on neither ``train_tokens`` nor ``seed``, and more tokens only add to the fewer.

    Args:
        name: ``pydoc``, ``wikipedia``, a hub dataset ``org/name[:config][@split]``, or a .txt,
            .jsonl or .parquet file.
        seq_len: tokens in a sequence.
        train_tokens: rounded down to whole sequences, at least one; the same for heldout_tokens.
            None takes what the corpus has beside the held-out text, at most MOST_TRAIN_TOKENS.
        seed: of the order of the training sequences.
        heldout_name: take the held-out documents from here; then all others of ``name`` train.
        text_field: field of a row that holds the text; default text, page or content.
    Raises:
        CorpusError: the text is missing, unreadable, or shorter than what was asked.
    """
    asked = MOST_TRAIN_TOKENS if train_tokens is None else train_tokens
    n_train, n_heldout = max(1, asked // seq_len), max(1, heldout_tokens // seq_len)
    train_docs, heldout_docs = _sides(name, heldout_name, text_field)
    heldout = _pack(heldout_docs, tokenizer, n_heldout * seq_len)
    train = _pack(train_docs, tokenizer, n_train * seq_len, leave_out=heldout.digests)
    if train_tokens is None:
        n_train = max(1, len(train.tokens) // seq_len)
    for side, n_wanted in ((train, n_train), (heldout, n_heldout)):
        if len(side.tokens) < n_wanted * seq_len:
            raise _too_short(
                name, heldout_name, seq_len, (n_train, len(train.tokens)),
                (n_heldout, len(heldout.tokens)),
            )  # fmt: skip
    order = np.random.default_rng(seed).permutation(n_train)
    train_rows = train.tokens[: n_train * seq_len].reshape(n_train, seq_len)[order]
    heldout_rows = heldout.tokens.reshape(n_heldout, seq_len)
    names = [_public_name(n) for n in (name, heldout_name) if n is not None]
    return Corpus(
        train_rows,
        heldout_rows,
        _fingerprint(train_rows, heldout_rows, names, tokenizer),
        name,
        train.n_documents,
        heldout.n_documents,
    )


def _local_path(name: str) -> Path | None:
    """The file that a name means, whether or not it exists; None for any other kind of name."""
    if name == BUILTIN or name in ALIASES:
        return None
    path = Path(name).expanduser()
    is_path = name.startswith(("/", ".", "~")) or path.suffix.lower() in SUFFIXES
    return path if is_path or path.exists() else None


def _public_name(name: str) -> str:
    """A file may lie elsewhere on another machine and is the same corpus still."""
    path = _local_path(name)
    return path.name if path else name


def _refuse(name: str) -> None:
    near = difflib.get_close_matches(name, [BUILTIN, *ALIASES], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise CorpusError(
        f"unknown corpus {name!r}; give pydoc, wikipedia, a hub dataset org/name[:config][@split], "
        f"or a .txt, .jsonl or .parquet file.{hint}"
    )


def _sides(
    name: str, heldout_name: str | None, text_field: str | None
) -> tuple[Iterable[str], Iterable[str]]:
    """Candidates for the training and the held-out side; those of a local corpus are the same,
    and what the held-out side takes is left out of the other."""
    documents, streamed = _source(name, text_field)
    if heldout_name is not None:
        return documents, _source(heldout_name, text_field)[0]
    if not streamed:
        return documents, documents
    one, other = itertools.tee(documents)  # the stream is read once for both
    return (d for d in one if not _is_heldout(d)), (d for d in other if _is_heldout(d))


def _source(name: str, text_field: str | None) -> tuple[Iterable[str], bool]:
    """Documents, always in the same order, and whether they are a stream to be read once."""
    if (path := _local_path(name)) is not None:
        check_file(path)
        if path.suffix.lower() != ".txt" and path.stat().st_size > STREAM_BYTES:
            return file_documents(path, text_field), True
        return sorted(file_documents(path, text_field), key=_digest), False
    if name == BUILTIN:
        return sorted(pydoc_documents(), key=_digest), False
    if parse_dataset(name) is None:
        _refuse(name)
    return dataset_documents(name, text_field), True


def _digest(document: str) -> bytes:
    return hashlib.sha256(document.encode()).digest()


def _is_heldout(document: str) -> bool:
    return int.from_bytes(_digest(document)[:8], "big") < STREAMED_HELDOUT * 2**64


def _take(documents: Iterator[str], n_chars: int) -> list[str]:
    """The next documents, up to the first with which they have ``n_chars`` characters."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= n_chars:
            break
    return batch


def _pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    n_tokens: int,
    leave_out: frozenset[bytes] = frozenset(),
) -> _Packed:
    """Join documents, each with an end-of-text token after it, until there are ``n_tokens``."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id
    tail = [] if end is None else [end]
    parts: list[NDArray[np.int32]] = []
    digests: list[bytes] = []
    found = 0
    wanted = (d for d in documents if not leave_out or _digest(d) not in leave_out)
    # A stream is read no further than it must be, so the last batches are small.
    while batch := _take(wanted, min(BATCH_CHARS, CHARS_PER_TOKEN * (n_tokens - found))):
        encoded = tokenizer(
            batch, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        for document, ids in zip(batch, encoded, strict=True):
            if found < n_tokens:
                parts.append(np.asarray(ids + tail, dtype=np.int32))
                digests.append(_digest(document))
                found += len(parts[-1])
        if found >= n_tokens:
            break
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
    return _Packed(tokens[:n_tokens], frozenset(digests), len(digests))


def _too_short(
    name: str,
    heldout_name: str | None,
    seq_len: int,
    train: tuple[int, int],
    heldout: tuple[int, int],
) -> CorpusError:
    """Each pair: sequences asked, tokens found."""
    where = f"corpus {name} has" if heldout_name is None else f"corpora {name}, {heldout_name} have"
    possible = [found // seq_len * seq_len for _, found in (train, heldout)]
    remedy = (
        f"lower train_tokens to {possible[0]} and heldout_tokens to {possible[1]} at most"
        if all(possible)
        else "lower train_tokens, heldout_tokens or seq_len"
    )
    return CorpusError(
        f"{where} too little text: {train[1]:,} training and {heldout[1]:,} held-out tokens, and "
        f"{train[0]} + {heldout[0]} sequences of {seq_len} need {train[0] * seq_len:,} and "
        f"{heldout[0] * seq_len:,}; {remedy}, or give more text"
    )


def _fingerprint(
    train: NDArray[np.int32],
    heldout: NDArray[np.int32],
    names: list[str],
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    facts = {"names": names, "train": train.shape, "heldout": heldout.shape, "vocab": vocabulary}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for array in (train, heldout):
        digest.update(np.ascontiguousarray(array, dtype="<i4").tobytes())
    return digest.hexdigest()
