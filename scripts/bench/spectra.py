"""Certified head spectra against float64 eigvalsh, over the same heads in the same run.

    python scripts/bench/spectra.py --points-file points.safetensors --points 1024

The file holds one tensor ``layer_000``, ``layer_001``, … per layer, [heads, points, channels],
queries first, then keys, as the attention sees them; its metadata hold ``scale`` and ``n_queries``.
From each layer the first points/2 queries and the first points/2 keys are taken. Printed are the
seconds of both ways over all heads, their ratio, the widest bracket, and in how many heads the true
N lies inside its bracket at every λ from 2^-4 to 2^-10. Exit code 1 if it does not in all.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from dofsweep.core.plan import make_plan
from dofsweep.core.spectrum import (
    dof_bracket,
    dof_table,
    head_dof,
    head_spectra,
    head_spectra_reference,
)
from dofsweep.records import HeadSpectrum

LAMS = [2.0**-k for k in range(4, 11)]
REL_WIDTH = 0.01
ROUNDING = 1e-9
"""Relative slack of "inside", for the rounding of the reference itself."""


@dataclass
class Tally:
    """What both ways took and gave, layer by layer."""

    fast_s: float = 0.0
    dense_s: float = 0.0
    fast_cpu_s: float = 0.0
    dense_cpu_s: float = 0.0
    fast: list[HeadSpectrum] = field(default_factory=list)
    dense: list[HeadSpectrum] = field(default_factory=list)


def machine(device: torch.device) -> str:
    """One line that says what the figures were taken on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = models[0].split(":")[1].strip() if models else name
    gpu = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    return f"{name}{gpu}, {threads} threads, load {load:.1f}, torch {torch.__version__}"


def layer_points(
    path: Path, wanted: list[int] | None, n_points: int
) -> tuple[dict[int, torch.Tensor], float]:
    """Points of the wanted layers [H, n_points, d], half queries and half keys, and the scale."""
    with safe_open(path, "pt") as file:
        scale, n_queries = (file.metadata()[key] for key in ("scale", "n_queries"))
        found = sorted(int(key.removeprefix("layer_")) for key in file.keys())  # noqa: SIM118
        layers = {}
        for layer_idx in found if wanted is None else wanted:
            points = file.get_tensor(f"layer_{layer_idx:03d}")
            half, first_key = n_points // 2, int(n_queries)
            if half > min(first_key, points.shape[1] - first_key):
                raise SystemExit(f"layer {layer_idx} has too few points for --points {n_points}")
            queries, keys = points[:, :half], points[:, first_key : first_key + half]
            layers[layer_idx] = torch.cat([queries, keys], dim=1)
    return layers, float(scale)


def measure(
    layers: dict[int, torch.Tensor], scale: float, n_heads: int | None, device: torch.device
) -> Tally:
    """Both ways over every layer, taking turns, so that a busy machine is busy for both."""
    tally = Tally()
    for layer_idx, points in layers.items():
        points = points[:n_heads].to(device)
        how = {"n_queries": points.shape[1] // 2, "layer_idx": layer_idx}
        start = time.perf_counter(), time.process_time()
        tally.fast += head_spectra(points, scale, lam_min=LAMS[-1], rel_width=REL_WIDTH, **how)
        middle = time.perf_counter(), time.process_time()
        tally.dense += head_spectra_reference(points, scale, **how)
        end = time.perf_counter(), time.process_time()
        tally.fast_s += middle[0] - start[0]
        tally.fast_cpu_s += middle[1] - start[1]
        tally.dense_s += end[0] - middle[0]
        tally.dense_cpu_s += end[1] - middle[1]
    return tally


def plan_seconds(spectra: list[HeadSpectrum], head_dim: int) -> float:
    """Seconds for 15 λ x 8 budgets of plans from stored spectra."""
    start = time.perf_counter()
    table = dof_table(spectra, list(np.geomspace(2**-10, 1, 15)))
    for dof in table:
        for budget in range(16, 144, 16):
            make_plan(
                "dof", n_layers=dof.shape[0], n_heads=dof.shape[1], budget=budget,
                head_dim=head_dim, dof=dof,
            )  # fmt: skip
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points-file", type=Path, required=True)
    parser.add_argument("--points", type=int, default=1024, help="J: half queries, half keys")
    parser.add_argument("--layers", type=int, nargs="*", help="all if left out")
    parser.add_argument("--heads", type=int, help="first heads of each layer; all if left out")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    device = torch.device(args.device)
    print(machine(device))
    layers, scale = layer_points(args.points_file, args.layers, args.points)
    first = next(iter(layers.values()))
    head_spectra(first[:1].to(device), scale, n_queries=args.points // 2, lam_min=LAMS[-1])
    tally = measure(layers, scale, args.heads, device)

    inside, widest = 0, 0.0
    for fast, dense in zip(tally.fast, tally.dense, strict=True):
        ok = True
        for lam in LAMS:
            (low, high), true = dof_bracket(fast, lam), head_dof(dense, lam)
            ok &= low <= true * (1 + ROUNDING) and true <= high * (1 + ROUNDING)
            widest = max(widest, (high - low) / true)
        inside += ok
    n_heads = len(tally.fast)
    ranks = np.array([len(s.values) for s in tally.fast])
    print(f"J = {args.points}, {n_heads} heads, lam_min 2^-10, rel_width {REL_WIDTH}")
    print(
        f"certified {tally.fast_s:.2f} s ({1e3 * tally.fast_s / n_heads:.1f} ms a head), "
        f"eigvalsh {tally.dense_s:.2f} s ({1e3 * tally.dense_s / n_heads:.1f} ms a head), "
        f"ratio {tally.dense_s / tally.fast_s:.2f} "
        f"(of processor time, which a busy machine moves less: "
        f"{tally.dense_cpu_s / tally.fast_cpu_s:.2f})"
    )
    print(
        f"values kept: median {np.median(ranks):.0f}, mean {ranks.mean():.0f}, largest "
        f"{ranks.max()}; heads that fell back to the dense way: {(ranks >= args.points).sum()}"
    )
    print(f"widest bracket {100 * widest:.3f} % of N; true N inside in {inside} of {n_heads} heads")
    print(f"15 λ x 8 budgets of plans: {plan_seconds(tally.fast, first.shape[-1]):.3f} s")
    return 0 if inside == n_heads else 1


if __name__ == "__main__":
    raise SystemExit(main())
