"""Paired timing for the benchmarks: every round runs each variant once, so load hits all alike."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch


def add_timing_options(parser: argparse.ArgumentParser) -> None:
    """Options that both benchmarks share."""
    parser.add_argument("--rounds", type=int, default=15, help="paired rounds per row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time of this thread alone, for a busy machine; implies --threads 1",
    )


def set_up(args: argparse.Namespace) -> Callable[[], float]:
    """Set the threads, print the machine, return the clock (seconds)."""
    threads = 1 if args.clock == "cpu" else args.threads
    torch.set_num_threads(threads)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{cpu_name()}, {os.cpu_count()} CPUs, load {load}; torch {torch.__version__}, ", end="")
    print(f"{threads} thread(s), {args.clock} time, median of {args.rounds} paired rounds\n")
    return time.thread_time if args.clock == "cpu" else time.perf_counter


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def paired(
    clock: Callable[[], float], variants: dict[str, Callable[[], object]], rounds: int
) -> dict[str, tuple[float, float]]:
    """Median milliseconds of each variant, and the median over rounds of first / variant."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + 1):
        for name, run in variants.items():
            start = clock()
            run()
            if i:  # the first round warms up
                times[name].append((clock() - start) * 1e3)
    first = next(iter(times.values()))
    return {
        name: (
            statistics.median(t),
            statistics.median(a / b for a, b in zip(first, t, strict=True)),
        )
        for name, t in times.items()
    }


def extra_memory_mb(task: Callable[..., object], *args: object) -> float:
    """Peak resident memory that ``task(*args)`` needs beyond what it held at its first call.

    Runs in a fresh process; ``task`` makes its inputs and returns the call to be measured.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_growth, (task, *args))


def _peak_growth(task: Callable[..., Callable[[], object]], *args: object) -> float:
    torch.set_num_threads(1)
    task(*args, warm_up=True)()
    run = task(*args)
    before = _peak_kb()
    run()
    return (_peak_kb() - before) / 1024


def _peak_kb() -> int:
    """Peak memory of this process; ru_maxrss would count the one it was forked from."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def table(header: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |", flush=True)
    print()
