"""Documents are cut where a reader would cut, and faults are reported with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dofsweep.corpus.documents import file_documents, pydoc_documents, split_text
from dofsweep.errors import CorpusError

WIKITEXT = """ \n = First title = \n \n Some text . \n \n = = Part = = \n \n More text .
 \n = Second title = \n \n Other text . \n"""


def documents(path: Path, text_field: str | None = None) -> list[str]:
    return list(file_documents(path, text_field))


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.sampled_from("ab =\n\t.é"), max_size=400))
def test_cutting_loses_nothing(text: str) -> None:
    assert "".join(split_text(text)) == text


def test_wikitext_is_cut_at_titles_and_not_at_parts() -> None:
    first, second = [part for part in split_text(WIKITEXT) if part.strip()]
    assert "First title" in first
    assert "Part" in first
    assert second.startswith(" = Second title = ")


def test_plain_text_is_cut_at_blank_lines() -> None:
    assert split_text("one\ntwo\n\nthree\n \nfour") == ["one\ntwo\n", "\nthree\n", " \nfour"]


def test_text_without_blank_lines_is_cut_at_lines_and_then_at_words() -> None:
    lines = split_text("".join(f"line {i} of a poem\n" for i in range(1000)))
    assert 32 <= len(lines) <= 64
    assert all(piece.endswith("\n") for piece in lines)
    assert 32 <= len(split_text("word " * 10_000)) <= 64
    assert split_text("unbroken") == ["unbroken"]


def test_long_plain_text_is_cut_into_pieces_that_keep_neighbours_together() -> None:
    pieces = split_text("a paragraph of forty characters or so.\n\n" * 50_000)
    assert {8000 <= len(piece) < 8100 for piece in pieces[:-1]} == {True}


def test_pydoc_is_there_and_says_nothing_twice() -> None:
    pieces = pydoc_documents()
    paragraphs = [" ".join(p.split()) for piece in pieces for p in piece.split("\n\n")]
    paragraphs = [p for p in paragraphs if p]
    assert sum(map(len, pieces)) > 250_000
    assert len(paragraphs) == len(set(paragraphs))


@pytest.mark.parametrize("field", ["text", "page", "content"])
def test_the_usual_fields_are_found(tmp_path: Path, field: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"title": "t", field: "one"}, {field: "two"}])
    assert documents(path) == ["one", "two"]


def test_parquet_gives_the_same_documents(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(3000)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(3000)), "body": texts}), path)
    assert documents(path, "body") == texts
    with pytest.raises(CorpusError, match=r"row 1: no field text or page or content.*id, body"):
        documents(path)


def test_what_is_empty_or_odd_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "first"}\r\n\n{"text": "  "}\n{"text": null}\n{"text": "\\ud800x"}'
    )
    assert documents(path) == ["first", "?x"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"fine so far \xff and not here", "byte 0xff at offset 12"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "\xe9t\xe9"}\n', "byte 0xe9 at offset 27"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": \n', "line 3 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'["text"]\n', "line 1: a row must be an object"),
        ("a.jsonl", b'{"text": "fine"}\n{"txt": "oops"}\n', "line 2: no field text.*are txt"),
        ("a.jsonl", b'{"title": "t", "body": "b"}\n', "no field text or page .*title, body"),
        ("a.jsonl", b'{"text": ["a", "list"]}\n', "line 1: field text holds list"),
        ("a.parquet", b"PAR1 and no more", "cannot be read as Parquet"),
        ("a.docx", b"PK", "ends in .docx.*.txt, .jsonl, .parquet"),
        ("plain", b"text", "ends in nothing"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=said) as caught:
        documents(path)
    assert str(path) in str(caught.value)


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="does not exist"):
        documents(tmp_path / "missing.txt")
    with pytest.raises(CorpusError, match="is a folder"):
        documents(tmp_path)
