"""Tables for the terminal, at most 100 columns wide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dofsweep.config import SweepConfig
    from dofsweep.core.plan import Plan
    from dofsweep.report.doctor import Check
    from dofsweep.teacher.resolve import TeacherRef

WIDTH = 100
STAGES = (
    "corpus",
    "capture",
    "spectra",
    "distill",
    "train_loop",
    "train_teacher",
    "train_features",
    "evaluate",
)


def _console(out: IO[str]) -> Console:
    console = Console(file=out, highlight=False, markup=False)  # names may hold brackets
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _table(*columns: str, title: str | None = None) -> Table:
    """A plain table. A column whose name starts with > is aligned to the right; it and one whose
    name starts with ! are never cut."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        whole = right or name.startswith("!")
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name.lstrip(">!"), justify=justify, no_wrap=whole, overflow="fold")
    return table


def format_lam(lam: float | None) -> str:
    """λ as people write it: 2^-8 where it is a power of two."""
    if lam is None:
        return "-"
    exponent = math.log2(lam)
    return f"2^{round(exponent)}" if abs(exponent - round(exponent)) < 1e-9 else f"{lam:.4g}"


def format_bytes(n: float | None) -> str:
    """Bytes with three digits and a binary unit."""
    if n is None:
        return "-"
    power = min(4, int(math.log2(max(n, 1)) / 10))
    value, unit = n / 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{value:.0f} {unit}" if value >= 100 or power == 0 else f"{value:.3g} {unit}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def print_leaderboard(rows: Sequence[dict[str, Any]], out: IO[str]) -> None:
    """Trials by held-out loss, the best student in bold; one table a sweep."""
    console = _console(out)
    if not rows:
        console.print("no results yet; start a sweep with `dofsweep launch`")
        return
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        own = [row for row in rows if row["sweep"] == sweep]
        _print_one_leaderboard(sweep, own, console)


LEADERBOARD: dict[str, Callable[[dict[str, Any]], str]] = {
    "strategy": lambda r: r["strategy"],
    "map": lambda r: r["feature_map"] or "-",
    "loss": lambda r: r["loss"] or "-",
    ">C": lambda r: _plain(r["budget"]),
    ">W": lambda r: str(r["window_size"] or "-"),
    ">λ": lambda r: format_lam(r["lam"]),
    "init": lambda r: r["init"] or "-",
    ">lr": lambda r: _plain(r["lr_features"]),
    ">lr α": lambda r: _plain(r["lr_weights"]),
    ">seed": lambda r: _plain(r["seed"]),
    ">held-out": lambda r: _number(r["heldout_loss"], 4),
    ">s.e.": lambda r: _number(r["heldout_stderr"], 4),
    ">gap %": lambda r: _percent(r["gap_closed"]),
    ">KL": lambda r: _number(r["mean_kl"], 3),
    ">error": lambda r: _number(r["output_error"], 3),
    ">state": lambda r: format_bytes(r["state_bytes"]),
    "": lambda r: "" if r["state"] == "finished" else r["state"],
}
"""Columns of a leaderboard, and what a row shows in each."""
ONLY_WHERE_THEY_DIFFER = {"map", ">W", ">λ", "init", ">lr", ">lr α", ">seed", ""}


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"


def _print_one_leaderboard(sweep: str, rows: list[dict[str, Any]], console: Console) -> None:
    cells = {name: [show(row) for row in rows] for name, show in LEADERBOARD.items()}
    same: dict[str, str] = {}
    for name in ONLY_WHERE_THEY_DIFFER:
        given = set(cells[name]) - {"-", ""}
        if len(given) <= 1 and (name or not given):
            del cells[name]
            same |= {name.lstrip(">"): value for value in given}
    title = f"{rows[0]['model']}, sweep {sweep}: held-out loss in nats a token"
    table = _table(*cells, title=title)
    scored = [r for r in rows if r["heldout_loss"] is not None and r["strategy"] != "teacher"]
    best = min((r["heldout_loss"] for r in scored), default=None)
    for row, shown in zip(rows, zip(*cells.values(), strict=True), strict=True):
        is_best = best is not None and row in scored and row["heldout_loss"] == best
        table.add_row(*shown, style="bold" if is_best else None)
    console.print(table)
    if same:
        console.print("all: " + ", ".join(f"{name} {same[name]}" for name in sorted(same)))
    first = next((r for r in rows if r["heldout_loss"] is not None), None)
    if first:
        console.print(
            f"{first['n_sequences']} held-out sequences, {first['n_tokens']} tokens; s.e. over "
            "sequences. gap %: of the way from untrained\nto teacher. KL, and error of the "
            "attention outputs: means over layers. The teacher's state is its\n"
            "key/value cache at the sweep's sequence length."
        )


def print_sweeps(rows: Sequence[dict[str, Any]], out: IO[str]) -> None:
    """Sweeps, newest first."""
    console = _console(out)
    if not rows:
        console.print("no sweeps yet; start one with `dofsweep launch`")
        return
    table = _table("!id", "name", "model", "!state", "stage", ">done", "!started (UTC)")
    for row in rows:
        name = "" if row["name"] == row["id"] else row["name"]
        name = name if row["kind"] == "sweep" else f"{name} ({row['kind']})".strip()
        model = row["model"].rstrip("/").split("/")[-1]
        counts = f"{row['done']}/{row['total']}" if row["total"] else ""
        started = str(row["created_at"])[:16].replace("T", " ")
        table.add_row(
            row["id"], name, model, row["state"], row["stage"] or "", counts,
            started,
        )  # fmt: skip
    console.print(table)


def print_sweep(row: dict[str, Any], trials: Sequence[dict[str, Any]], out: IO[str]) -> None:
    """One sweep in full."""
    console = _console(out)
    facts = _table("", "")
    facts.show_header = False
    for name in ("id", "name", "kind", "model", "state", "error", "created_at", "finished_at",
                 "job_address", "code_version", "teacher_fingerprint", "corpus_fingerprint",
                 "spectra_key"):  # fmt: skip
        if row.get(name):
            facts.add_row(name.replace("_", " "), str(row[name]))
    facts.add_row("versions", ", ".join(f"{name} {v}" for name, v in row["versions"].items()))
    config = {
        k: v for k, v in row["config"].items() if v is not None and k not in {"model", "name"}
    }
    facts.add_row("config", ", ".join(f"{k}={_short(v)}" for k, v in config.items()))
    console.print(facts)
    if row.get("timings"):
        table = _table("stage", "students", ">seconds", ">tokens/s", ">peak GiB")
        for timing in _passes(row["timings"]):
            rate = timing["tokens"] / timing["seconds"] if timing.get("tokens") else None
            peak = timing["peak_bytes"] / 2**30 if timing.get("peak_bytes") else None
            numbers = (_number(timing["seconds"], 1), _number(rate, 0), _number(peak, 2))
            table.add_row(timing["stage"], timing["students"], *numbers)
        console.print(table)
    if trials:
        _print_one_leaderboard(row["id"], list(trials), console)


def _passes(timings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Timings by stage; those that students shared as one, with the students' numbers."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for timing in timings:
        entry = found.setdefault((timing["stage"], timing["seconds"]), timing | {"students": ""})
        if (number := timing["trial_number"]) is not None:
            entry["students"] = f"{entry['students']} {number}".strip()
    return sorted(found.values(), key=_stage_order)


def _stage_order(timing: dict[str, Any]) -> int:
    return STAGES.index(timing["stage"]) if timing["stage"] in STAGES else len(STAGES)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(_short(item) for item in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_models(rows: Sequence[dict[str, Any]], out: IO[str]) -> None:
    """Teachers with a short name."""
    table = _table(
        "alias", ">params", ">layers", ">heads", ">kv", ">d", "weights from", "on this machine"
    )
    for row in rows:
        table.add_row(
            row["alias"],
            _params(row["params"]),
            str(row["layers"]),
            str(row["heads"]),
            str(row["kv_heads"]),
            str(row["head_dim"]),
            row["source"],
            "yes" if row["on_this_machine"] else "no",
        )
    _console(out).print(table)


def _params(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.0f}M"


def print_dof(
    model: str, lam: float, config: SweepConfig, table: NDArray[np.float64], out: IO[str]
) -> None:
    """N(λ) of each layer (rows) and feature head (columns), and each layer's largest."""
    n_heads = table.shape[1]
    shown = min(n_heads, 12)
    title = (
        f"{model}: degrees of freedom N(λ) at λ = {format_lam(lam)}, "
        f"J = {config.n_points}, scale {config.gram_scale}"
    )
    result = _table(">layer", ">max", *[f">head {h}" for h in range(shown)], title=title)
    for i, heads in enumerate(table):
        result.add_row(str(i), f"{heads.max():.1f}", *[f"{v:.1f}" for v in heads[:shown]])
    console = _console(out)
    console.print(result)
    if shown < n_heads:
        console.print(f"{n_heads - shown} more heads a layer; --json prints all")


def print_plans(
    ref: TeacherRef, plans: Sequence[tuple[str, int, float | None, Plan]], out: IO[str]
) -> None:
    """Feature dimension of each layer (rows) under each plan (columns)."""
    from dofsweep.methods.base import student_state_bytes

    heads = [
        f">{name}\nC={budget}" + ("" if lam is None else f"\nλ={format_lam(lam)}")
        for name, budget, lam, _ in plans
    ]
    table = _table(">layer", *heads, title=f"{ref.name}: feature dimension M of each layer")
    for i in range(ref.shape.n_layers):
        table.add_row(str(i), *[str(made.layer_dims[i]) for *_, made in plans])
    table.add_section()
    table.add_row("mean", *[f"{made.mean_dim:.2f}" for *_, made in plans])
    table.add_row(
        "state", *[format_bytes(student_state_bytes(made, ref.shape)) for *_, made in plans]
    )
    _console(out).print(table)


def print_checks(checks: Sequence[Check], out: IO[str]) -> None:
    """Findings of the doctor, and what to do about each."""
    table = _table("", "check", "found", "what to do")
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        state = Text(check.state, style=colours[check.state])
        table.add_row(state, check.name, check.found, check.remedy)
    _console(out).print(table)
