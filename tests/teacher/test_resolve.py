"""Teachers are found, or refused with what to do, and nothing unsafe is read."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dofsweep.errors import TeacherError
from dofsweep.teacher import hub
from dofsweep.teacher.catalog import CATALOG, catalog_rows
from dofsweep.teacher.resolve import resolve_teacher

TINY = Path(__file__).resolve().parent.parent / "tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny teacher that a test may damage."""
    return Path(shutil.copytree(TINY / "llama", tmp_path / "teacher"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_is_found_and_described(folder: Path, tmp_path: Path) -> None:
    ref = resolve_teacher(str(folder), home=tmp_path / "home")
    assert (ref.name, ref.source, ref.path) == ("teacher", "local", str(folder))
    assert ref.n_params == 722_048
    assert ref == resolve_teacher(str(folder), home=tmp_path / "home")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("pythia-1bb", "did you mean pythia-1b"),
        ("GPT-2", "did you mean gpt2"),
        ("quite-something-else", "dofsweep models"),
        ("./no/such/folder", "does not exist"),
        ("~/no-such-folder-either", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("a/b/c", "neither a folder on this machine nor a hub id"),
        ("", "unknown teacher ''"),
    ],
)
def test_a_wrong_name_is_refused_at_once(given: str, said: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(TeacherError, match=said):
        resolve_teacher(given, home=tmp_path)
    assert time.monotonic() - started < 5


def test_weights_in_a_pickle_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(TeacherError, match=r"pickle \(pytorch_model.bin\).*convert it"):
        resolve_teacher(str(folder), home=tmp_path)


def test_code_of_the_model_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "evil.Config"})
    mark = tmp_path / "was-run"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(TeacherError, match="auto_map"):
        resolve_teacher(str(folder), home=tmp_path)
    assert not mark.exists()


def test_a_known_type_does_not_need_the_code_it_brings(folder: Path, tmp_path: Path) -> None:
    edit_config(folder, auto_map={"AutoConfig": "evil.Config"})
    mark = tmp_path / "was-run"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
    assert resolve_teacher(str(folder), home=tmp_path).shape.model_type == "llama"
    assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no .safetensors file"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_file_that_is_missing_is_named(
    folder: Path, tmp_path: Path, file: str, said: str
) -> None:
    (folder / file).unlink()
    with pytest.raises(TeacherError, match=said):
        resolve_teacher(str(folder), home=tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "unheard-of"}, "unheard-of"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "of another kind"),
    ],
)
def test_a_config_that_will_not_do_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(TeacherError, match=said):
        resolve_teacher(str(folder), home=tmp_path)


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(TeacherError, match="lacks 1 of 2 weight files, first model-00002"):
        resolve_teacher(str(folder), home=tmp_path)


def test_a_file_that_only_says_it_is_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(TeacherError, match="not a GGUF file"):
        resolve_teacher(str(tmp_path / "model.gguf"), home=tmp_path)


def test_a_cut_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(40))
    with pytest.raises(TeacherError, match="cannot be converted"):
        resolve_teacher(str(tmp_path / "model.gguf"), home=tmp_path / "home")
    assert [p.name for p in (tmp_path / "home/models").iterdir() if p.is_dir()] == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("kind", ["closed", "silent", "unknown", "malformed", "off"])
def test_a_hub_that_is_not_there_is_noticed_in_time(
    kind: str, tmp_path: Path, silent_port: int
) -> None:
    """In a process of its own, since the hub library reads its settings once."""
    env = {
        "closed": {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"},
        "silent": {"HF_ENDPOINT": f"http://127.0.0.1:{silent_port}"},
        "unknown": {"HF_ENDPOINT": "https://hub.invalid"},
        "malformed": {"HF_ENDPOINT": "hub.example"},
        "off": {"HF_HUB_OFFLINE": "1"},
    }[kind]
    code = (
        "import sys, time; from pathlib import Path\n"
        "import huggingface_hub.errors\n"
        "from dofsweep.teacher.resolve import resolve_teacher\n"
        "from dofsweep.errors import TeacherError\n"
        "started = time.monotonic()\n"
        "try: resolve_teacher('gpt2', home=Path(sys.argv[1]))\n"
        "except TeacherError as err: print(err)\n"
        "print(time.monotonic() - started)\n"
    )
    clean = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=True, env=clean | env,
        cwd=TINY.parent.parent,
    )  # fmt: skip
    message, seconds = done.stdout.strip().rsplit("\n", 1)
    assert float(seconds) < 15
    for said in ("openai-community/gpt2", str(tmp_path), next(iter(env)), "--model", "HF_HOME"):
        assert said in message
    assert done.stderr == ""


def test_the_hub_question_ends_even_if_names_are_never_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()

    def wait(*_args: object, **_kwargs: object) -> None:
        ended.wait(30)
        raise socket.gaierror("test over")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    started = time.monotonic()
    assert "did not answer within 0.5 s" in str(hub.hub_problem(0.5))
    assert time.monotonic() - started < 5
    ended.set()


def test_the_list_of_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    rows = {row["alias"]: row for row in catalog_rows(tmp_path)}
    assert list(rows) == list(CATALOG)
    assert not any(row["on_this_machine"] for row in rows.values())
    snapshot = tmp_path / "hub/models--openai-community--gpt2/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    (snapshot / "model.safetensors").touch()
    (tmp_path / "models/smollm2-135m").mkdir(parents=True)
    (tmp_path / "models/smollm2-135m/config.json").touch()
    here = {row["alias"] for row in catalog_rows(tmp_path) if row["on_this_machine"]}
    assert here == {"gpt2", "smollm2-135m"}


def test_the_list_needs_no_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from dofsweep.teacher.catalog import catalog_rows\n"
        "assert catalog_rows(Path(sys.argv[1]))\n"
        "print(*{'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TINY.parents[1])
    assert done.stdout.strip() == ""
