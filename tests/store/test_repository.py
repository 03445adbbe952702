"""The contract of SweepRepository and of the queries, on both databases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import RESULT, SPECTRA, TRIALS, all_rows, create, write_all
from sqlalchemy import func, select, text

from dofsweep.errors import StoreError
from dofsweep.records import EvalRecord, TrainingPoint, TrialResult, TrialSpec
from dofsweep.store import queries
from dofsweep.store.models import SpectrumRow
from dofsweep.store.repository import SweepRepository
from dofsweep.store.session import Store


def test_every_save_may_be_repeated(store: Store, repo: SweepRepository) -> None:
    write_all(repo)
    once = all_rows(store)
    write_all(repo)
    assert all_rows(store) == once
    assert {name: len(rows) for name, rows in once.items()} == {
        "sweep": 1,
        "sweep_trial": 3,
        "spectra_set": 1,
        "spectrum": 4,
        "plan_entry": 4,
        "training_point": 3,
        "eval_result": 7,
        "eval_item": 2,
        "timing": 2,
        "artifact": 2,
        "event": 0,
    }


def test_reads_return_what_was_written(store: Store, repo: SweepRepository) -> None:
    write_all(repo)
    sweep = queries.get_sweep(store, "sw-1")
    assert sweep["config"] == {"budget": [64], "lam": [2**-8], "note": "λ"}
    assert sweep["versions"] == {"torch": "2.13"}
    assert (sweep["stage"], sweep["done"], sweep["total"], sweep["detail"]) == (
        "distil",
        3,
        10,
        "step 3",
    )
    assert [sweep[f"{name}_fingerprint"] for name in ("teacher", "corpus")] == ["t", "c"]
    assert sweep["spectra_key"] == "k"
    assert sweep["created_at"].endswith("+00:00")
    assert sweep["timings"] == [
        {
            "stage": "capture",
            "trial_number": None,
            "seconds": 1.5,
            "tokens": 2**40,
            "peak_bytes": 2**41,
            "n_students": 1,
        },
        {
            "stage": "evaluate",
            "trial_number": 2,
            "seconds": 0.5,
            "tokens": None,
            "peak_bytes": None,
            "n_students": 1,
        },
    ]
    assert queries.plan_of(store, "sw-1.2") == [[9, 277], [64, 64]]
    assert queries.plan_of(store, "sw-1.1") == []
    assert queries.training_curve(store, "sw-1.2")[1] == {
        "step": 2,
        "tokens": 1024,
        "layer": 1,
        "loss": 0.5,
    }
    assert queries.layer_results(store, "sw-1.2", "kl") == [
        {"layer": 0, "value": 0.25, "n": None, "stderr": None},
        {"layer": 1, "value": 0.75, "n": 8, "stderr": 0.02},
    ]
    assert repo.finished_trials("sw-1") == {2}
    assert repo.artifacts("sw-1")[1] == {
        "kind": "student",
        "trial_number": 2,
        "path": "/s/2",
        "sha256": "ab",
        "size_bytes": 2**42,
    }


def test_leaderboard_is_ordered_and_has_the_main_figures(
    store: Store, repo: SweepRepository
) -> None:
    write_all(repo)
    repo.save_result("sw-1", TrialResult(0, 3.0, 0.1, 8, 100), state_bytes=77)
    rows = queries.leaderboard(store, "demo")
    assert [row["trial"] for row in rows] == ["sw-1.0", "sw-1.2", "sw-1.1"]
    best, second, unmeasured = rows
    assert (best["state_bytes"], best["mean_kl"]) == (77, None)
    assert best["ppl"] == pytest.approx(math.exp(3.0))
    assert (second["mean_kl"], second["output_error"]) == (0.5, 0.0625)
    assert second["n_tokens"] == 2**33
    assert second["seed"] == 2**40
    assert (second["sweep"], second["sweep_name"], second["number"]) == ("sw-1", "demo", 2)
    assert (second["strategy"], second["budget"], second["lam"]) == ("dof", 64, 2**-8)
    assert (second["state"], second["state_bytes"]) == ("finished", 4096)
    assert unmeasured["heldout_loss"] is None
    assert unmeasured["ppl"] is None
    assert unmeasured["gap_closed"] is None


def test_the_share_of_the_gap_is_taken_against_the_same_map_budget_and_window(
    store: Store, repo: SweepRepository
) -> None:
    create(repo)
    same = {"feature_map": "prf", "budget": 8, "window": 4}
    trials = [
        TrialSpec(0, "teacher"),
        TrialSpec(1, "untrained", **same),  # type: ignore[arg-type]
        TrialSpec(2, "untrained", **same | {"budget": 16}),  # type: ignore[arg-type]
        TrialSpec(3, "dof", loss="softmax", **same),  # type: ignore[arg-type]
        TrialSpec(4, "dof", loss="softmax", **same | {"window": 0}),  # type: ignore[arg-type]
    ]
    repo.add_trials("sw-1", trials, "kv")
    for number, loss in enumerate((3.0, 7.0, 5.0, 4.0, 4.0)):
        repo.save_result("sw-1", TrialResult(number, loss, 0.1, 8, 100))
    shares = {row["number"]: row["gap_closed"] for row in queries.leaderboard(store)}
    assert shares == {0: None, 1: None, 2: None, 3: 0.75, 4: None}


def test_leaderboard_of_all_sweeps_keeps_each_together(store: Store, repo: SweepRepository) -> None:
    for id_, loss in (("sw-2", 1.0), ("sw-1", 2.0)):
        create(repo, id_, "same")
        repo.add_trials(id_, TRIALS[:2], "kv")
        repo.save_result(id_, TrialResult(1, loss, 0.1, 8, 100))
    rows = queries.leaderboard(store)
    assert [row["trial"] for row in rows] == ["sw-1.1", "sw-1.0", "sw-2.1", "sw-2.0"]
    # A name that is used twice means the newer sweep.
    assert {row["sweep"] for row in queries.leaderboard(store, "same")} == {"sw-1"}


def test_layer_plan_view_shows_the_widest_head(store: Store, repo: SweepRepository) -> None:
    write_all(repo)
    with store.reading() as session:
        rows = session.execute(text("SELECT * FROM layer_plan ORDER BY layer")).mappings().all()
    assert [(row["layer"], row["feature_dim"], row["n_heads"]) for row in rows] == [
        (0, 277, 2),
        (1, 64, 2),
    ]
    assert {(row["sweep"], row["trial"], row["strategy"]) for row in rows} == {
        ("sw-1", "sw-1.2", "dof")
    }


def test_spectra_come_back_bit_for_bit(repo: SweepRepository) -> None:
    repo.save_spectra("k", {"gram_scale": "trace"}, SPECTRA[::-1])
    stored = repo.load_spectra("k")
    assert stored is not None
    meta, spectra = stored
    assert meta == {"gram_scale": "trace"}
    assert [(s.layer_idx, s.head_idx, s.tail, s.n_points, s.resolved) for s in spectra] == [
        (s.layer_idx, s.head_idx, s.tail, s.n_points, s.resolved) for s in SPECTRA
    ]
    for found, saved in zip(spectra, SPECTRA, strict=True):
        assert found.values.dtype == np.float64
        np.testing.assert_array_equal(found.values, saved.values)
        assert found.values.flags.writeable


def test_spectra_that_lack_a_head_are_not_offered(store: Store, repo: SweepRepository) -> None:
    assert repo.load_spectra("k") is None
    repo.save_spectra("k", {}, SPECTRA)
    with store.session() as session:
        row = session.scalar(select(SpectrumRow).limit(1))
        session.delete(row)
    assert repo.load_spectra("k") is None


def test_saving_a_smaller_set_or_plan_leaves_nothing_of_the_old_one(
    store: Store, repo: SweepRepository
) -> None:
    write_all(repo)
    repo.save_spectra("k", {}, SPECTRA[:1])
    stored = repo.load_spectra("k")
    assert stored is not None
    assert len(stored[1]) == 1
    repo.save_plan("sw-1", 2, "other", [[5]], 10)
    assert queries.plan_of(store, "sw-1.2") == [[5]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_figures_that_are_not_finite_are_null(
    store: Store, repo: SweepRepository, value: float
) -> None:
    create(repo)
    repo.add_trials("sw-1", TRIALS, "kv")
    records = (EvalRecord("kl", value, None, 8, value),)
    repo.save_result("sw-1", TrialResult(2, value, value, 8, 100, records))
    repo.save_training("sw-1", 2, [TrainingPoint(1, 512, 0, value)])
    row = next(row for row in queries.leaderboard(store, "sw-1") if row["number"] == 2)
    assert row["heldout_loss"] is row["heldout_stderr"] is row["mean_kl"] is None
    assert queries.training_curve(store, "sw-1.2")[0]["loss"] is None


def test_adding_a_trial_again_keeps_its_figures(store: Store, repo: SweepRepository) -> None:
    write_all(repo)
    repo.add_trials("sw-1", TRIALS, "kv")
    row = queries.leaderboard(store, "sw-1")[0]
    assert (row["state"], row["heldout_loss"]) == ("finished", 3.25)


def test_creating_a_sweep_again_keeps_its_state_and_takes_the_new_address(
    store: Store, repo: SweepRepository
) -> None:
    create(repo)
    repo.set_state("sw-1", "finished")
    before = queries.get_sweep(store, "sw-1")
    create(repo, job_address="http://127.0.0.1:9999")
    after = queries.get_sweep(store, "sw-1")
    assert after["state"] == "finished"
    assert after["created_at"] == before["created_at"]
    assert after["job_address"] == "http://127.0.0.1:9999"


def test_states_keep_the_end_and_the_reason(store: Store, repo: SweepRepository) -> None:
    create(repo)
    repo.set_state("sw-1", "failed", error="out of memory")
    ended = queries.get_sweep(store, "sw-1")
    assert ended["error"] == "out of memory"
    assert ended["finished_at"] is not None
    repo.set_state("sw-1", "submitted")
    again = queries.get_sweep(store, "sw-1")
    assert (again["state"], again["error"], again["finished_at"]) == ("submitted", None, None)


def test_a_trial_can_fail_with_a_reason(store: Store, repo: SweepRepository) -> None:
    create(repo)
    repo.add_trials("sw-1", TRIALS, "kv")
    repo.set_trial_state("sw-1", 1, "failed", error="loss is not finite")
    row = next(row for row in queries.leaderboard(store, "sw-1") if row["number"] == 1)
    assert (row["state"], row["error"]) == ("failed", "loss is not finite")
    assert repo.finished_trials("sw-1") == set()


def test_events_are_read_on_from_the_last_one_seen(repo: SweepRepository) -> None:
    create(repo)
    create(repo, "sw-2")
    for stage in ("capture", "spectra"):
        repo.event("sw-1", "info", stage, "started")
        repo.event("sw-2", "info", stage, "started")
    first, second = repo.events("sw-1")
    assert (first["stage"], second["stage"]) == ("capture", "spectra")
    assert repo.events("sw-1", after_id=first["id"]) == [second]
    assert first["at"] <= second["at"]


def test_list_is_newest_first_and_counts_trials(store: Store, repo: SweepRepository) -> None:
    create(repo, "sw-old")
    create(repo, "sw-new", kind="spectra")
    repo.add_trials("sw-old", TRIALS, "kv")
    rows = queries.list_sweeps(store)
    assert [(row["id"], row["kind"], row["n_trials"]) for row in rows] == [
        ("sw-new", "spectra", 0),
        ("sw-old", "sweep", 3),
    ]
    assert set(rows[0]) == {*queries.LISTED, "n_trials"}


def test_an_unknown_sweep_names_its_neighbours(store: Store, repo: SweepRepository) -> None:
    with pytest.raises(StoreError, match="holds none yet"):
        queries.get_sweep(store, "demo")
    create(repo, "sw-20261201-k3f9q2", "nightly")
    with pytest.raises(StoreError, match="did you mean sw-20261201-k3f9q2"):
        queries.get_sweep(store, "sw-20261201-k3f9q3")
    with pytest.raises(StoreError, match="did you mean nightly"):
        queries.leaderboard(store, "nightli")
    with pytest.raises(StoreError, match="no trial 'sw-20261201-k3f9q2.9'"):
        queries.plan_of(store, "sw-20261201-k3f9q2.9")


UNKNOWN: list[Callable[[SweepRepository], Any]] = [
    lambda repo: repo.add_trials("gone", TRIALS, "kv"),
    lambda repo: repo.set_state("gone", "running"),
    lambda repo: repo.progress("gone", "distil", 1, 2),
    lambda repo: repo.event("gone", "info", "distil", "x"),
    lambda repo: repo.acquire_lease("gone", "h:1:1:a", 30),
    lambda repo: repo.save_plan("gone", 0, "k", [[1]], 1),
    lambda repo: repo.set_trial_state("gone", 0, "failed"),
    lambda repo: repo.save_training("gone", 0, []),
    lambda repo: repo.save_result("gone", RESULT),
    lambda repo: repo.save_timing("gone", "distil", seconds=1.0),
    lambda repo: repo.save_artifact("gone", "x", path="p", sha256="s", size_bytes=1),
]


@pytest.mark.parametrize("write", UNKNOWN)
def test_writing_to_an_unknown_sweep_says_so(
    repo: SweepRepository, write: Callable[[SweepRepository], Any]
) -> None:
    with pytest.raises(StoreError, match="no (sweep|trial) 'gone"):
        write(repo)


NAMES = st.one_of(
    st.sampled_from(
        [
            "'; DROP TABLE sweep; --",
            '" OR 1=1 --',
            "%s %(x)s :sweep ?",
            "a\\'b",
            "SELECT",
            "λ 模型 🙂",
            "",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
)


@settings(
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=NAMES)
def test_names_are_data_never_sql(store: Store, repo: SweepRepository, name: str) -> None:
    create(repo, "sw-1", name)
    repo.event("sw-1", "info", name, name)
    repo.save_timing("sw-1", name, seconds=1.0)
    assert queries.get_sweep(store, "sw-1")["name"] == name
    assert queries.get_sweep(store, name)["id"] == "sw-1"
    assert queries.leaderboard(store, name) == []
    assert repo.events("sw-1")[-1]["message"] == name
    with store.reading() as session:
        assert session.scalar(text("SELECT COUNT(*) FROM sweep")) == 1


def test_deleting_a_sweep_takes_its_rows_along(store: Store, repo: SweepRepository) -> None:
    write_all(repo)
    repo.event("sw-1", "info", "x", "y")
    with store.session() as session:
        session.execute(text("DELETE FROM sweep"))
    left = {name for name, rows in all_rows(store).items() if rows}
    assert left == {"spectra_set", "spectrum"}
    with store.reading() as session:
        assert session.scalar(select(func.count()).select_from(SpectrumRow)) == 4


def test_a_reader_sees_one_moment(store: Store, repo: SweepRepository) -> None:
    create(repo)
    with store.reading() as session:
        before = session.scalar(text("SELECT done FROM sweep"))
        repo.progress("sw-1", "distil", 5, 10)
        assert session.scalar(text("SELECT done FROM sweep")) == before == 0
    assert queries.get_sweep(store, "sw-1")["done"] == 5


def test_a_failed_transaction_leaves_nothing(store: Store, repo: SweepRepository) -> None:
    create(repo)

    def half_a_write() -> None:
        with store.session() as session:
            session.execute(text("UPDATE sweep SET name = 'other'"))
            raise KeyError

    with pytest.raises(KeyError):
        half_a_write()
    assert queries.get_sweep(store, "sw-1")["name"] == "demo"
