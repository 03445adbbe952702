"""Whole sweeps through the command line, a real local Ray and a real trained teacher."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cli.conftest import TINY, Cli

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

SMALL = ["--corpus", "pydoc", "--seq-len", "64", "--train-tokens", "4096", "--heldout-tokens",
         "1024", "--budget", "8", "--lam", "2^-6", "--set", "n_points=128",
         "--set", "batch_size=1", "--set", "checkpoint_steps=16"]  # fmt: skip


def small(family: str) -> list[str]:
    return ["--model", str(TINY / family), *SMALL]


def strategies(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in rows}


@pytest.fixture(scope="module")
def finished(cluster_cli: Cli) -> list[dict[str, Any]]:
    """Leaderboard of a finished sweep."""
    rows: list[dict[str, Any]] = cluster_cli.json("launch", *small("llama"), "--name", "first")
    return rows


def test_leaderboard(finished: list[dict[str, Any]], cluster_cli: Cli) -> None:
    rows = strategies(finished)
    assert set(rows) == {"teacher", "untrained", "fix", "dof", "dof_clip"}
    for name in ("fix", "dof", "dof_clip"):
        assert rows["teacher"]["heldout_loss"] < rows[name]["heldout_loss"]
        assert rows[name]["heldout_loss"] < rows["untrained"]["heldout_loss"]
        assert rows[name]["mean_kl"] < rows["untrained"]["mean_kl"]
        assert rows[name]["state_bytes"] == rows["fix"]["state_bytes"]
        assert rows[name]["budget"] == 8
        assert rows[name]["heldout_stderr"] > 0
    assert rows["fix"]["lam"] is None
    assert rows["dof"]["lam"] == 2**-6
    assert cluster_cli.json("leaderboard", "first") == finished
    text = cluster_cli.ok("leaderboard", "first")
    assert "dof_clip" in text
    assert f"{rows['dof']['heldout_loss']:.4f}" in text
    assert max(map(len, text.splitlines())) <= 100


def test_teacher_loss_is_the_models_own(finished: list[dict[str, Any]], cluster_cli: Cli) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (folder,) = (cluster_cli.home / "storage" / "corpora").iterdir()
    tokens = torch.from_numpy(np.load(folder / "heldout.npy").astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(TINY / "llama", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = float(model(tokens, labels=tokens).loss)
    assert strategies(finished)["teacher"]["heldout_loss"] == pytest.approx(wanted, rel=1e-5)


def test_show_ls_and_logs(finished: list[dict[str, Any]], cluster_cli: Cli) -> None:
    (row,) = [r for r in cluster_cli.json("ls") if r["name"] == "first"]
    assert row["state"] == "finished"
    assert row["id"] == finished[0]["sweep"]
    shown = cluster_cli.json("show", row["id"])
    assert shown["config"]["budget"] == [8]
    assert shown["versions"]["torch"]
    assert {t["stage"] for t in shown["timings"]} >= {"capture", "spectra", "distill", "evaluate"}
    assert len(shown["trials"]) == 5
    for command in (["show", "first"], ["ls"]):
        assert "finished" in cluster_cli.ok(*command)
    assert "strategy=[fix dof dof_clip]" in " ".join(cluster_cli.ok("show", "first").split())
    assert "Traceback" not in cluster_cli.ok("logs", "first")


def test_dof_and_plan_use_the_stored_spectra(
    finished: list[dict[str, Any]], cluster_cli: Cli
) -> None:
    before = {row["id"] for row in cluster_cli.json("ls")}
    same_text = [w for w in small("llama") if w not in {"--budget", "8"}]
    rows = cluster_cli.json("dof", *same_text, "--lam", "2^-8")
    dof = np.array([r["dof"] for r in rows]).reshape(2, 4, 2)
    assert (dof[1] > dof[0]).all()  # N falls with λ
    assert (dof > 0).all()
    assert (dof < 2**8).all()  # trace scale: N < 1/λ
    plans = {r["strategy"]: r for r in cluster_cli.json("plan", *small("llama"))}
    assert plans["fix"]["feature_dims"] == [[8, 8]] * 4
    assert plans["dof"]["mean_dim"] == 8
    share = np.array([layer[0] for layer in plans["dof"]["feature_dims"]])
    assert np.argmax(share) == np.argmax(dof[0].max(axis=1))
    assert {row["id"] for row in cluster_cli.json("ls")} == before


def test_windows_direct_loss_and_polish(cluster_cli: Cli) -> None:
    rows = cluster_cli.json(
        "launch", *small("neox"), "--strategy", "fix", "--strategy", "sink_window", "--window", "8",
        "--loss", "softmax_output", "--loss", "direct", "--set", "sinks=2",
        "--set", "polish_steps=6", "--set", "batch_size=4", "--name", "windowed",
    )  # fmt: skip
    loss = {row["loss"] or row["strategy"]: row["heldout_loss"] for row in rows}
    assert set(loss) == {
        "teacher", "untrained", "sink_window", "softmax_output", "direct",
        "softmax_output+polish", "direct+polish",
    }  # fmt: skip
    for name in ("softmax_output", "direct"):
        assert loss["teacher"] < loss[name] < loss["untrained"]
    assert loss["softmax_output+polish"] < loss["softmax_output"]
    sizes = {row["strategy"]: row["window_size"] for row in rows}
    state = {row["strategy"]: row["state_bytes"] for row in rows}
    assert sizes["fix"] == sizes["untrained"] == 8
    assert sizes["sink_window"] > 8
    token = state["sink_window"] // (sizes["sink_window"] + 2)
    assert state["fix"] - token < state["sink_window"] <= state["fix"]
    shown = cluster_cli.json("show", "windowed")
    of = {(t["trial_number"], t["stage"]): t for t in shown["timings"]}
    for row in (row for row in rows if row["loss"]):
        loop = of[row["number"], "train_loop"]
        assert loop["n_students"] == (1 if row["loss"] in ("softmax_output", "direct") else 2)
        assert loop["tokens"] == (6 * 4 * 64 if row["loss"].endswith("+polish") else 4096)
        assert loop["peak_bytes"] > 2**20
        assert 0 < of[row["number"], "train_features"]["seconds"] < loop["seconds"]
        assert 0 < row["gap_closed"] < 1
    assert all(row["output_error"] > 0 for row in rows if row["strategy"] != "teacher")
    assert max(map(len, cluster_cli.ok("leaderboard", "windowed").splitlines())) <= 100


def driver_of(sweep: str) -> psutil.Process | None:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == ["-m", "dofsweep.driver", sweep]:
            return process
    return None


def wait_for_stage(cli: Cli, sweep: str, stages: set[str]) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        row = cli.json("show", sweep)
        if row["stage"] in stages or row["state"] not in {"submitted", "running"}:
            return row
        time.sleep(0.5)
    raise AssertionError(f"{sweep} never came to {stages}")


def wait_for_checkpoint(cli: Cli, sweep: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if list((cli.home / "storage" / "runs").glob(f"{sweep}-*/checkpoint_*")):
            return
        time.sleep(0.05)
    raise AssertionError(f"{sweep} never made a checkpoint")


def test_a_killed_driver_leaves_a_sweep_that_resumes_to_the_same_numbers(
    finished: list[dict[str, Any]], cluster_cli: Cli
) -> None:
    sweep = cluster_cli.json("launch", *small("llama"), "--detach")["sweep"]
    wait_for_checkpoint(cluster_cli, sweep)
    driver = driver_of(sweep)
    assert driver is not None
    driver.kill()
    driver.wait(timeout=30)
    (row,) = [r for r in cluster_cli.json("ls") if r["id"] == sweep]
    assert row["state"] == "interrupted"
    assert "interrupted" in cluster_cli.ok("show", sweep)
    resumed = cluster_cli.json("resume", sweep)
    same = ("strategy", "heldout_loss", "mean_kl", "state_bytes", "state")
    assert [[r[k] for k in same] for r in resumed] == [[r[k] for k in same] for r in finished]
    stages = {t["stage"] for t in cluster_cli.json("show", sweep)["timings"]}
    assert "evaluate" in stages
    assert not stages & {"capture", "spectra"}  # the first sweep's are in the store
    done = cluster_cli.run("resume", sweep)
    assert done.returncode == 2
    assert "has finished" in done.stderr


def test_stop(cluster_cli: Cli, tmp_path: Path) -> None:
    sweep = cluster_cli.ok("launch", *small("llama"), "--detach").strip()
    wait_for_stage(cluster_cli, sweep, {"capture", "distill"})
    assert cluster_cli.json("stop", sweep)["state"] == "stopped"
    assert driver_of(sweep) is None
    assert cluster_cli.json("stop", sweep)["state"] == "stopped"  # stopping twice is no error
