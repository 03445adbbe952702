"""Documents of a dataset on the hub, streamed: only what is needed is downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dofsweep.corpus.documents import row_texts
from dofsweep.errors import CorpusError
from dofsweep.teacher.hub import http_errors, hub_problem

ALIASES = {"wikipedia": "wikimedia/wikipedia:20231101.en@train"}
SHUFFLE_SEED = 0
SHUFFLE_BUFFER = 1000
"""Documents in the shuffle buffer: files of a dataset are often ordered by age or title."""
_NAME = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.-]+))?")


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub: ``org/name[:config][@split]``."""

    path: str
    config: str | None
    split: str


def parse_dataset(name: str) -> HubDataset | None:
    """The dataset that a corpus name means, or None where it has not the form of one."""
    match = _NAME.fullmatch(ALIASES.get(name, name))
    if match is None:
        return None
    return HubDataset(match["path"], match["config"], match["split"] or "train")


def check_dataset(name: str) -> None:
    """Is the hub there?

    Raises:
        CorpusError: within seconds, where it is not.
    """
    if problem := hub_problem():
        raise CorpusError(
            f"corpus {name} is a dataset on the hub, and {problem}; use --corpus pydoc (built "
            "in) or a local .txt, .jsonl or .parquet file, or set HF_ENDPOINT to a mirror"
        )


def dataset_documents(name: str, text_field: str | None = None) -> Iterator[str]:
    """Documents of a hub dataset, always in the same shuffled order, read as far as asked.

    Raises:
        CorpusError: the hub, the dataset, its config or split is not there, it needs code to be
            run, or it has no text field.
    """
    dataset = parse_dataset(name)
    assert dataset is not None, name
    check_dataset(name)
    import pyarrow
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        rows = load_dataset(dataset.path, dataset.config, split=dataset.split, streaming=True)
        rows = rows.shuffle(seed=SHUFFLE_SEED, buffer_size=SHUFFLE_BUFFER)
        for text in row_texts(_numbered(rows), text_field, name):
            if text.strip():
                yield text
    # RuntimeError: the dataset is a script; ValueError: no such config or split.
    except (
        DatasetsError, pyarrow.ArrowException, RuntimeError, ValueError, *http_errors()
    ) as err:  # fmt: skip
        reason = " ".join(str(err).split())[:300]
        raise CorpusError(
            f"corpus {name} cannot be read from the hub: {reason}; write it as "
            "org/name:config@split, or give a local .txt, .jsonl or .parquet file"
        ) from err


def _numbered(rows: Any) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row
