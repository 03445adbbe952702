"""Bad input: one line that says what to do, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from cli.conftest import TINY, Cli

from dofsweep.cli.app import main

GOOD = ["--model", str(TINY / "llama"), "--corpus", "pydoc", "--seq-len", "64",
        "--train-tokens", "2048", "--heldout-tokens", "512", "--set", "n_points=64"]  # fmt: skip


class Here:
    """Runs commands in this process, which has torch and ray imported already."""

    def __init__(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
        self.home, self._capfd, self._patch = cli.home, capfd, monkeypatch
        for name in list(os.environ):
            if name.startswith(("DOFSWEEP_", "RAY_")):
                monkeypatch.delenv(name)
        for name, value in cli.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(cli.home)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        for name, value in env.items():
            self._patch.setenv(name, value)
        self._patch.setattr(sys, "argv", ["dofsweep", *words])
        self._capfd.readouterr()
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        out, err = self._capfd.readouterr()
        assert isinstance(code, int)
        return subprocess.CompletedProcess(words, code, out, err)


@pytest.fixture
def here(cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Here:
    return Here(cli, monkeypatch, capfd)


def refused(done: subprocess.CompletedProcess[str], *needles: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for needle in needles:
        assert needle in lines[0]


@pytest.mark.parametrize(
    ("words", "needles"),
    [
        (["--model", "smolm2-135m"], ["'smolm2-135m'", "smollm2-135m"]),
        (["--budget", "0"], ["budget='0'", "greater than or equal to 1"]),
        (["--lam", "-1"], ["lam='-1'", "greater than 0"]),
        (["--seq-len", "100000"], ["seq_len=100000", "positions"]),
        (["--corpus", "missing.txt"], ["missing.txt"]),
        (["--corpus", "empty.txt"], ["empty.txt", "empty"]),
        (["--train-tokens", "999999999"], ["999,999", "lower train_tokens"]),
        (["--heldout-tokens", "32"], ["heldout_tokens=32", "less than one sequence"]),
        (["--db", "postgres//x"], ["postgres//x"]),
        (["--db", "mysql://u:secret@h/d"], ["mysql"]),
        (["--address", "nonsense"], ["nonsense", "http://HOST:8265"]),
        (["--set", "n_points"], ["NAME=VALUE"]),
        (["--set", "n_pointz=3"], ["did you mean 'n_points'"]),
        (["--set", "n_points=60000"], ["n_points=60000", "lower n_points"]),
        (["--config", "none.yaml"], ["none.yaml"]),
        (["--preset", "papers"], ["did you mean 'paper'"]),
        (["--set", "workers=3"], ["batch_size=4", "3 workers"]),
    ],
)
def test_launch_refuses(here: Here, words: list[str], needles: list[str]) -> None:
    (here.home / "empty.txt").touch()
    done = here.run("launch", *GOOD, *words)
    refused(done, *needles)
    assert "secret" not in done.stderr
    assert not (here.home / "run" / "cluster.json").exists()


def test_a_cluster_that_does_not_answer(here: Here) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = here.run("launch", *GOOD, "--address", f"http://127.0.0.1:{port}")
    refused(done, f"127.0.0.1:{port}", "leave --address out")
    assert not (here.home / "dofsweep.db").exists()


def test_a_home_that_cannot_be_written(here: Here) -> None:
    (here.home / "file").touch()
    done = here.run("launch", *GOOD, DOFSWEEP_HOME=str(here.home / "file" / "below"))
    refused(done, "below")


def test_a_refusal_in_a_process_of_its_own(cli: Cli) -> None:
    refused(cli.run("launch", *GOOD, "--budget", "0"), "budget='0'")
    assert list(cli.home.iterdir()) == []


@pytest.mark.parametrize("model", ["gpt2", "pythia-1b"])
def test_a_model_of_an_unreachable_hub(cli: Cli, model: str) -> None:
    done = cli.run("launch", *GOOD, "--model", model, timeout_s=60)
    refused(done, model, "save_pretrained")


@pytest.mark.parametrize("command", ["ls", "leaderboard"])
def test_reading_without_a_database(here: Here, command: str) -> None:
    refused(here.run(command), "dofsweep launch")


def test_unknown_sweep(here: Here) -> None:
    assert here.run("db", "upgrade").returncode == 0
    for command in ("show", "logs", "stop", "leaderboard"):
        refused(here.run(command, "sw-nope"), "sw-nope")


def test_importing_the_command_line_is_light() -> None:
    code = (
        "import sys, dofsweep.cli.app; "
        "heavy = {'torch', 'ray', 'transformers', 'sqlalchemy', 'optuna', 'numpy', 'pydantic'}; "
        "sys.exit(' '.join(heavy & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_has_help(here: Here) -> None:
    text = here.run("--help").stdout
    for command in ("launch", "resume", "stop", "ls", "show", "leaderboard", "logs", "dof", "plan",
                    "models", "doctor", "db", "cluster"):  # fmt: skip
        assert command in text
        done = here.run(command, "--help")
        assert done.returncode == 0
        assert f"{command} [OPTIONS]" in done.stdout


def test_models_and_doctor(here: Here) -> None:
    rows = {row["alias"]: row for row in json.loads(here.run("models", "--json").stdout)}
    assert rows["pythia-1b"]["layers"] == 16
    assert rows["smollm2-135m"]["kv_heads"] == 3
    assert not rows["gpt2"]["on_this_machine"]
    assert "smollm2-135m" in here.run("models").stdout
    checks = {check["name"]: check for check in json.loads(here.run("doctor", "--json").stdout)}
    assert checks["database"]["state"] == "ok"
    assert checks["model hub"]["state"] == "warn"
    assert checks["model hub"]["remedy"]
    assert not (here.home / "dofsweep.db").exists()


def test_doctor_fails_on_what_cannot_work(here: Here) -> None:
    done = here.run("doctor", "--db", "nonsense://x", "--json")
    assert done.returncode == 1
    assert '"fail"' in done.stdout
