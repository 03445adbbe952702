"""Training and held-out text never share a document, and packing keeps every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dofsweep.corpus import load as corpus_load
from dofsweep.corpus.load import Corpus, check_corpus, is_remote, load_corpus
from dofsweep.errors import CorpusError

END = 0


def word_tokenizer(n_words: int = 20_000) -> PreTrainedTokenizerFast:
    """Word ``wN`` is token N, so that tokens tell which document they came from."""
    vocabulary = {"<end>": END} | {f"w{i}": i for i in range(1, n_words)} | {"?": n_words}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


TOKENIZER = word_tokenizer()


def write_documents(folder: Path, lengths: list[int], name: str = "docs.jsonl") -> Path:
    """Document i has ``lengths[i]`` words, none of which any other document has."""
    path, word = folder / name, 1
    with path.open("w") as file:
        for length in lengths:
            text = " ".join(f"w{w}" for w in range(word, word + length))
            file.write(json.dumps({"text": text}) + "\n")
            word += length
    assert word <= 20_000
    return path


def load(path: Path | str, **more: Any) -> Corpus:
    options = {"seq_len": 16, "train_tokens": 640, "heldout_tokens": 160} | more
    return load_corpus(str(path), TOKENIZER, **options)


def words(array: np.ndarray) -> set[int]:
    return set(array.ravel().tolist()) - {END}


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(5, 60), min_size=60, max_size=120), seed=st.integers(0, 9))
def test_no_document_is_on_both_sides_and_none_is_cut_within(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    path = write_documents(tmp_path_factory.mktemp("docs"), lengths)
    corpus = load(path, seq_len=8, train_tokens=160, heldout_tokens=48, seed=seed)
    assert corpus.train.shape == (20, 8)
    assert corpus.heldout.shape == (6, 8)
    assert corpus.train.dtype == corpus.heldout.dtype == np.int32
    starts = np.cumsum([1, *lengths])
    owners = [
        set(np.searchsorted(starts, sorted(words(side)), side="right").tolist())
        for side in (corpus.train, corpus.heldout)
    ]
    assert not owners[0] & owners[1]
    assert (corpus.n_documents_train, corpus.n_documents_heldout) == tuple(map(len, owners))


def test_packing_loses_nothing_but_the_tail(tmp_path: Path) -> None:
    """Words count up within a document, and an end token stands after its last word."""
    lengths = [7, 30, 1, 12, 25] * 20
    path = write_documents(tmp_path, lengths)
    last = set((np.cumsum([1, *lengths])[1:] - 1).tolist())
    flat = load(path, heldout_tokens=1200, train_tokens=160).heldout.ravel().tolist()
    for now, following in zip(flat, flat[1:], strict=False):
        if now == END:
            assert following != END
        else:
            assert following == (END if now in last else now + 1)


def test_every_token_can_be_had(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [9] * 100)  # 10 tokens with the end
    corpus = load(path, seq_len=10, train_tokens=800, heldout_tokens=200)
    assert len(words(corpus.train) | words(corpus.heldout)) == 900
    with pytest.raises(CorpusError, match="train_tokens to 800 and heldout_tokens to 200 at most"):
        load(path, seq_len=10, train_tokens=810, heldout_tokens=200)


def test_all_the_text_that_there_is(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [9] * 100)  # 10 tokens with the end
    corpus = load(path, seq_len=10, train_tokens=None, heldout_tokens=200)
    assert corpus.train.shape == (80, 10)
    with pytest.raises(CorpusError, match="too little text: 0 training and 1,000 held-out"):
        load(path, seq_len=10, train_tokens=None, heldout_tokens=1000)


def test_more_training_text_keeps_the_held_out_text_and_adds_to_the_rest(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [5, 40, 11] * 60)
    small, large = load(path), load(path, train_tokens=2000, seed=3)
    assert np.array_equal(small.heldout, large.heldout)
    assert {row.tobytes() for row in small.train} < {row.tobytes() for row in large.train}


def test_the_order_of_the_rows_does_not_matter_and_the_seed_does(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [5, 40, 11] * 60)
    turned = tmp_path / "turned" / path.name
    turned.parent.mkdir()
    turned.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert load(path).fingerprint == load(turned).fingerprint
    other = load(path, seed=1)
    assert not np.array_equal(load(path).train, other.train)
    assert sorted(load(path).train.tolist()) == sorted(other.train.tolist())


def test_identical_documents_are_on_the_same_side(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [10] * 100)
    path.write_text(path.read_text() * 3)
    corpus = load(path, train_tokens=1600, heldout_tokens=320)
    assert not words(corpus.train) & words(corpus.heldout)


def test_the_fingerprint_covers_what_a_student_is_trained_on(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [5, 40, 11] * 60)
    same = write_documents(tmp_path, [5, 40, 11] * 60, "other.jsonl")
    found = [
        load(path),
        load(path, seq_len=32),
        load(path, seed=1),
        load(path, train_tokens=656),
        load(path, heldout_tokens=176),
        load(same),
        load_corpus(str(path), word_tokenizer(20_001), seq_len=16, train_tokens=640,
                    heldout_tokens=160),
    ]  # fmt: skip
    assert len({corpus.fingerprint for corpus in found}) == len(found)
    assert load(path).fingerprint == found[0].fingerprint


def test_tokens_are_rounded_down_to_whole_sequences_but_never_to_none(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [20] * 60)
    corpus = load(path, train_tokens=47, heldout_tokens=3)
    assert corpus.train.shape == (2, 16)
    assert corpus.heldout.shape == (1, 16)


def test_held_out_text_of_another_file(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [20] * 60)
    other = write_documents(tmp_path, [19] * 10, "heldout.jsonl")
    corpus = load(path, heldout_name=str(other), train_tokens=1248)
    assert words(corpus.heldout) <= set(range(1, 191))
    assert corpus.n_documents_train == 60


def test_held_out_documents_that_are_in_the_corpus_too_are_not_trained_on(tmp_path: Path) -> None:
    lengths = [20] * 60
    path = write_documents(tmp_path, lengths)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    corpus = load(path, heldout_name=str(part), heldout_tokens=208)
    assert not words(corpus.train) & words(corpus.heldout)


def test_a_large_file_is_divided_by_hash_in_its_own_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_documents(tmp_path, [9] * 1900)
    monkeypatch.setattr(corpus_load, "STREAM_BYTES", 10_000)
    small, large = load(path, train_tokens=3200), load(path, train_tokens=14_400, seed=2)
    assert np.array_equal(small.heldout, large.heldout)
    assert not words(large.train) & words(large.heldout)
    assert {row.tobytes() for row in small.train} < {row.tobytes() for row in large.train}
    assert max(words(small.train)) < 4500  # only the beginning of the file was used
    with pytest.raises(CorpusError, match="too little text"):
        load(path, heldout_tokens=8000)  # a tenth of 19,000 tokens is set aside


@pytest.mark.parametrize("lengths", [[5], [8000], [3, 3, 3]])
def test_too_little_text_says_how_much_there_is(tmp_path: Path, lengths: list[int]) -> None:
    path = write_documents(tmp_path, lengths)
    with pytest.raises(CorpusError, match=r"too little text: [\d,]+ training and [\d,]+ held-out"):
        load(path, train_tokens=8192)


def test_a_text_of_a_single_line_is_divided_too(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_text(" ".join(f"w{i}" for i in range(1, 3000)))
    corpus = load(path)
    assert not words(corpus.train) & words(corpus.heldout)


def test_a_tokenizer_without_an_end_of_text_token_joins_documents_directly(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [20] * 60)
    plain = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer)
    corpus = load_corpus(str(path), plain, seq_len=16, train_tokens=640, heldout_tokens=160)
    assert END not in corpus.train


def test_special_tokens_are_not_put_around_documents(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    path = write_documents(tmp_path, [20] * 60)
    words_only = word_tokenizer()
    words_only.backend_tokenizer.post_processor = TemplateProcessing(
        single="w19999 $A", special_tokens=[("w19999", 19_999)]
    )
    corpus = load_corpus(str(path), words_only, seq_len=16, train_tokens=640, heldout_tokens=160)
    assert 19_999 not in corpus.train


@pytest.mark.parametrize(
    ("name", "remote"),
    [
        ("pydoc", False),
        ("wikipedia", True),
        ("org/name", True),
        ("org/name:config@validation", True),
        ("./text.txt", False),
        ("folder/text.txt", False),
        ("folder/rows.jsonl", False),
        ("/folder/rows", False),
        ("~/rows", False),
        ("nonsense", False),
    ],
)
def test_what_comes_from_the_hub(name: str, remote: bool) -> None:
    assert is_remote(name) is remote


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wikipedai", "unknown corpus 'wikipedai'.*Did you mean wikipedia"),
        ("nonsense", "unknown corpus 'nonsense'; give pydoc"),
        ("missing.txt", "missing.txt does not exist"),
        ("./missing", "missing does not exist"),
        ("a/b/c", "unknown corpus"),
    ],
)
def test_a_wrong_name_is_refused_by_check_and_by_load(name: str, said: str) -> None:
    with pytest.raises(CorpusError, match=said):
        check_corpus(name)
    with pytest.raises(CorpusError, match=said):
        load(name)
    with pytest.raises(CorpusError, match=said):
        check_corpus("pydoc", name)


def test_check_reads_no_further_than_it_must(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text and then \xff")
    check_corpus(str(path), "pydoc")
    path.write_bytes(b"")
    with pytest.raises(CorpusError, match="is empty"):
        check_corpus("pydoc", str(path))


@pytest.mark.parametrize(
    "call",
    [
        "check_corpus('wikipedia')",
        "check_corpus('pydoc', 'a/b')",
        "next(dataset_documents('wikipedia'))",
    ],
)
def test_a_hub_that_is_not_there_is_noticed_in_time(call: str, tmp_path: Path) -> None:
    code = (
        "from dofsweep.corpus.load import check_corpus, dataset_documents\n"
        "from dofsweep.errors import CorpusError\n"
        f"try: {call}\n"
        "except CorpusError as err: print(err)\n"
    )
    env = os.environ | {"HF_ENDPOINT": "https://hub.invalid", "HF_HOME": str(tmp_path)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert time.monotonic() - started < 30  # half of it for imports on a busy machine
    assert "hub.invalid cannot be reached" in done.stdout
    assert "--corpus pydoc" in done.stdout


@pytest.mark.data
def test_real_articles(data_dir: Path) -> None:
    """WikiText as plain text and as one article a row give the same split of the same text."""
    options = {"seq_len": 128, "train_tokens": 100_000, "heldout_tokens": 20_000}
    folder = data_dir / "wikitext"
    plain = load(folder / "validation.txt", **options)
    rows = load(folder / "document_level" / "validation.jsonl", **options)
    for corpus in (plain, rows):
        assert corpus.train.shape == (781, 128)
        assert corpus.heldout.shape == (156, 128)
        assert corpus.n_documents_train + corpus.n_documents_heldout <= 60
    apart = load(
        data_dir / "wikipedia/train.jsonl",
        heldout_name=str(data_dir / "wikipedia/validation.jsonl"),
        **options,
    )
    assert apart.train.shape == (781, 128)


@pytest.mark.data
def test_the_text_of_a_play_is_cut_into_scenes(data_dir: Path) -> None:
    corpus = load(data_dir / "tiny_shakespeare/input.txt", train_tokens=50_000)
    assert corpus.n_documents_train > 20
