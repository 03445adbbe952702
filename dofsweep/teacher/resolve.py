"""From what a user typed to a folder of safetensors on this machine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dofsweep.errors import TeacherError
from dofsweep.records import ModelShape
from dofsweep.teacher.catalog import CATALOG, PACKAGED, converted_folder, find_alias, hub_cache
from dofsweep.teacher.hub import http_errors, hub_problem

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = [
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "chat_template*",
]  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
REMEDY = (
    "copy a folder made by save_pretrained to this machine and pass --model /that/folder, or set "
    "HF_HOME to a cache that holds the model, or set HF_ENDPOINT to a mirror"
)


@dataclass(frozen=True)
class TeacherRef:
    """A teacher that is on this machine."""

    name: str
    """Short name, or the last part of the hub id or path."""
    source: str
    """hub, local, gguf or package."""
    path: str
    """Folder with config.json, safetensors and tokenizer."""
    shape: ModelShape
    n_params: int
    """Tied parameters counted once."""
    fingerprint: str
    """SHA-256 of config and weights: the same model has the same one on every machine."""


def resolve_teacher(model: str, *, home: Path) -> TeacherRef:
    """Find a teacher, fetching or converting it where needed; only safetensors and GGUF are read.

    Args:
        model: a short name of ``dofsweep models``, a hub id ``org/name``, a local folder, or a
            .gguf file. A short name wins over a folder of that name; write ``./name`` for the
            folder.
        home: folder of the program, for converted models and remembered fingerprints.
    Raises:
        TeacherError: it cannot be found, is not safe to read, or is not a kind of model that can
            be a teacher. An unreachable hub is noticed within seconds.
    """
    name, source, folder = _find(model.strip(), home)
    from dofsweep.teacher.load import count_parameters, fingerprint, load_config, shape_of

    check_folder(folder)
    config = load_config(folder)
    shape = shape_of(config)
    digest = fingerprint(folder, home=home)
    return TeacherRef(name, source, str(folder), shape, count_parameters(config), digest)


def _find(model: str, home: Path) -> tuple[str, str, Path]:
    """Name, source and folder."""
    if entry := CATALOG.get(model.lower()):
        if entry.alias in PACKAGED:
            source, folder = _hub_or_package(entry.alias, entry.hub_id, home)
            return entry.alias, source, folder
        return entry.alias, "hub", _from_hub(entry.hub_id)
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", ".", "~")) or path.suffix.lower() == ".gguf"
    if looks_like_path or (model and path.exists()):
        source, folder = _from_path(path, home)
        return path.resolve().stem if source == "gguf" else path.resolve().name, source, folder
    if HUB_ID.fullmatch(model):
        return model.split("/")[1], "hub", _from_hub(model)
    if "/" in model:
        raise TeacherError(
            f"teacher {model!r} is neither a folder on this machine nor a hub id (org/name); "
            "check the path"
        )
    find_alias(model)  # raises: the catalogue was asked above
    raise AssertionError(model)


def _hub_or_package(alias: str, hub_id: str, home: Path) -> tuple[str, Path]:
    """A converted copy first, since it needs no network; then the hub; then the package."""
    from dofsweep.teacher.gguf import packaged_folder

    folder = converted_folder(alias, home)
    if (folder / "config.json").exists():
        return "package", folder
    try:
        return "hub", _from_hub(hub_id)
    except TeacherError as hub_error:
        try:
            return "package", packaged_folder(alias, home)
        except TeacherError as err:
            raise TeacherError(f"{hub_error}. Then the package was tried: {err}") from err


def _from_path(path: Path, home: Path) -> tuple[str, Path]:
    from dofsweep.teacher.gguf import converted_gguf

    if not path.exists():
        raise TeacherError(f"teacher {path} does not exist; check --model")
    if path.is_dir():
        return "local", path.resolve()
    if path.suffix.lower() == ".gguf":
        return "gguf", converted_gguf(path.resolve(), home)
    raise TeacherError(
        f"teacher {path} is a file of another kind than .gguf; give a .gguf file or the folder "
        "that holds config.json and the safetensors"
    )


def _from_hub(hub_id: str) -> Path:
    """Snapshot folder of a hub model: from the cache, else downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=HUB_FILES))
        if _is_complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    if problem := hub_problem():
        raise TeacherError(
            f"teacher {hub_id} is not in the cache ({hub_cache()}), and {problem}; {REMEDY}"
        )
    return _download(hub_id)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    failures: tuple[type[Exception], ...] = (ValueError, *http_errors())
    try:
        folder = snapshot_download(
            hub_id, allow_patterns=HUB_FILES, ignore_patterns=["*/*"], etag_timeout=10
        )
    except GatedRepoError as err:
        raise TeacherError(
            f"teacher {hub_id} is gated; ask for access on its hub page and set HF_TOKEN"
        ) from err
    except RepositoryNotFoundError as err:
        raise TeacherError(
            f"the hub has no model {hub_id}, or it is private; check the name, or set HF_TOKEN"
        ) from err
    except failures as err:
        raise TeacherError(f"teacher {hub_id} could not be downloaded: {err}; {REMEDY}") from err
    return Path(folder)


def _is_complete(folder: Path) -> bool:
    """Whether a cached snapshot has all we need; an interrupted download leaves a part of it."""
    try:
        check_folder(folder)
    except TeacherError:
        return False
    return True


def check_folder(folder: Path) -> None:
    """A model folder holds a config without foreign code, safetensors weights and a tokenizer.

    Raises:
        TeacherError: it does not, with what to do.
    """
    from dofsweep.teacher.load import weight_files

    config = _read_config(folder)
    if not weight_files(folder):
        if pickles := [p.name for pattern in PICKLES for p in folder.glob(pattern)]:
            raise TeacherError(
                f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code "
                "when it is read; convert it to safetensors where you trust it: "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        raise TeacherError(f"{folder} holds no .safetensors file; give a complete model folder")
    _refuse_foreign_code(folder, config)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise TeacherError(
            f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); save the model's own "
            "into it with tokenizer.save_pretrained"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as err:
        raise TeacherError(
            f"{folder} holds no config.json; give a folder made by save_pretrained"
        ) from err
    except (OSError, ValueError) as err:
        raise TeacherError(f"{path} cannot be read: {err}; copy the model again") from err
    if not isinstance(config, dict):
        raise TeacherError(f"{path} is not a JSON object; copy the model again")
    return config


def _refuse_foreign_code(folder: Path, config: dict[str, Any]) -> None:
    """A config may name Python files of its own; they are not run, and not needed where
    transformers knows the architecture."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in config:
        raise TeacherError(
            f"{folder} is a model of type {kind!r} that needs code of its own (auto_map in "
            "config.json), and code from a model is never run; choose an architecture that is "
            "part of transformers"
        )
    raise TeacherError(
        f"{folder}/config.json gives model_type {kind!r}, which this transformers does not know; "
        "choose another teacher, or upgrade transformers"
    )
