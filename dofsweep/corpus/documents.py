"""Documents of local files and of the text that comes with Python."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dofsweep.errors import CorpusError

SUFFIXES = (".txt", ".jsonl", ".parquet")
TEXT_FIELDS = ("text", "page", "content")
"""Fields that are looked for, in this order, when no text field is named."""
PIECE_CHARS = 8000
"""Plain text without titles is cut into pieces of about this many characters,"""
MIN_PIECES = 64
"""or into about this many pieces where that makes them shorter."""
_HEADING = re.compile(
    r"(?m)^(?= = [^=\n].* = *$)"
)  # WikiText: ` = Title = `, but not ` = = Part = = `


def check_file(path: Path) -> None:
    """Cheap checks of a corpus file, before anything is read.

    Raises:
        CorpusError: it is missing, a folder, of an unknown kind, not readable, or empty.
    """
    if path.is_dir():
        raise CorpusError(f"corpus {path} is a folder; give one {', '.join(SUFFIXES)} file of it")
    if not path.exists():
        raise CorpusError(f"corpus file {path} does not exist; check --corpus, or use pydoc")
    if path.suffix.lower() not in SUFFIXES:
        raise CorpusError(
            f"corpus file {path} ends in {path.suffix or 'nothing'}; the kinds that are read are "
            f"{', '.join(SUFFIXES)}, so convert or rename it"
        )
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as err:
        raise CorpusError(f"cannot read corpus file {path}: {err.strerror}") from err
    if empty:
        raise CorpusError(f"corpus file {path} is empty; give one that holds text")


def file_documents(path: Path, text_field: str | None = None) -> Iterator[str]:
    """Documents of a file in its own order; those of nothing but white space are left out.

    Args:
        path: a .txt, .jsonl or .parquet file.
        text_field: field of a row that holds the text; default the first of ``TEXT_FIELDS``.
    Raises:
        CorpusError: it cannot be read, is not UTF-8, a line is not JSON, or the field is missing.
    """
    check_file(path)
    suffix = path.suffix.lower()
    if suffix == ".txt":
        found: Iterator[str] = iter(split_text(_decode(path.read_bytes(), path, 0)))
    elif suffix == ".jsonl":
        found = row_texts(_jsonl_rows(path), text_field, str(path))
    else:
        found = row_texts(_parquet_rows(path), text_field, str(path))
    return (text for text in found if text.strip())


def pydoc_documents() -> list[str]:
    """The language reference that every Python carries, in pieces, each paragraph once.

    Topics quote each other at length (``specialnames`` holds ``attribute-access`` and more), so a
    paragraph that was seen is left out: held-out text must not be met in training.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    pieces: list[str] = []
    for name in sorted(topics):
        fresh = []
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph)
        pieces += _group([f"{paragraph}\n\n" for paragraph in fresh], PIECE_CHARS // 2)
    return pieces


def split_text(text: str) -> list[str]:
    """Documents of a plain text: nothing is lost, ``"".join`` gives the text back.

    Cut at the titles of WikiText (` = Title = ` lines) where there are two or more. Otherwise at
    blank lines, else lines, else words, into pieces of neighbours of about ``PIECE_CHARS``
    characters, or a ``MIN_PIECES``-th of the text where that is shorter.
    """
    articles = [part for part in _HEADING.split(text) if part]
    if sum(bool(part.strip()) for part in articles) > 1:
        return articles
    target = min(PIECE_CHARS, len(text) // MIN_PIECES)
    for cut in (r"(?<=\n)(?=[ \t\r]*\n)", r"(?<=\n)", r"(?<=\s)(?=\S)"):
        atoms = [part for part in re.split(cut, text) if part]
        if sum(bool(atom.strip()) for atom in atoms) > 1:
            return _group(atoms, target)
    return [text]


def _group(atoms: Sequence[str], target: int) -> list[str]:
    """Join neighbours until each piece has ``target`` characters and something to read."""
    pieces: list[str] = []
    part: list[str] = []
    size = 0
    for atom in atoms:
        part.append(atom)
        size += len(atom)
        if size >= target and any(piece.strip() for piece in part):
            pieces.append("".join(part))
            part, size = [], 0
    if part:
        pieces.append("".join(part))
    return pieces


def row_texts(rows: Iterator[tuple[str, Any]], text_field: str | None, name: str) -> Iterator[str]:
    """Text of each row; rows come with the words that say where they stand ("line 3").

    Raises:
        CorpusError: a row is not an object, lacks the field, or holds something other than text.
    """
    for place, row in rows:
        if not isinstance(row, dict):
            raise CorpusError(
                f"{name}, {place}: a row must be an object with a text field, not "
                f"{type(row).__name__}; write one JSON object a line"
            )
        if text_field is None:
            text_field = next((field for field in TEXT_FIELDS if field in row), None)
        if text_field is None or text_field not in row:
            wanted = text_field or " or ".join(TEXT_FIELDS)
            raise CorpusError(
                f"{name}, {place}: no field {wanted}; its fields are "
                f"{', '.join(map(str, row)) or 'none'}: name the one that holds the text with "
                "--text-field"
            )
        text = row[text_field]
        if text is None:
            continue
        if not isinstance(text, str):
            raise CorpusError(
                f"{name}, {place}: field {text_field} holds {type(text).__name__}, not text; "
                "name another with --text-field"
            )
        # A lone surrogate (an escape such as \ud800) has no UTF-8 form and stops tokenizers.
        yield text.encode("utf-8", "replace").decode()


def _decode(data: bytes, path: Path, start: int) -> str:
    if start == 0:
        data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        raise CorpusError(
            f"corpus file {path} is not UTF-8: byte 0x{data[err.start]:02x} at offset "
            f"{start + err.start}; convert it, for example with iconv"
        ) from err


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = _decode(line, path, offset)
            offset += len(line)
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as err:
                raise CorpusError(
                    f"corpus file {path}, line {number} is not JSON: {err}; "
                    "write one JSON object a line"
                ) from err
            yield f"line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as err:
        raise CorpusError(
            f"corpus file {path} cannot be read as Parquet: {err}; write it again, or give .jsonl"
        ) from err
