"""The whole DoF stage against the bare forward passes over the tokens it samples from.

    python scripts/bench/dof_stage.py --model DIR

In every round the model first runs forward alone, then once more while queries and keys of every
layer are drawn, and then the spectra of all heads are taken. The text is Python's own manual. The
aim is a ratio of 1.2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from timing import cpu_name, table
from transformers import AutoModelForCausalLM, AutoTokenizer

from dofsweep.core.spectrum import head_spectra
from dofsweep.teacher.capture import TOKENS_PER_BATCH, capture_points


def forward(model: torch.nn.Module, tokens: np.ndarray) -> None:
    """The bare model over all tokens, in the batches that capture takes."""
    batch = max(1, TOKENS_PER_BATCH // tokens.shape[1])
    with torch.no_grad():
        for first in range(0, len(tokens), batch):
            part = torch.from_numpy(tokens[first : first + batch].astype(np.int64))
            model.base_model(part, use_cache=False)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--points", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    text = "\n".join(topics.values())
    ids = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    wanted = args.sequences * args.length
    tokens = np.array(ids[:wanted], dtype=np.int32).reshape(args.sequences, args.length)
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{args.sequences} x {args.length} tokens, J = {args.points}\n")
    forward(model, tokens[:1])
    rows = []
    for heads in ("kv", "query"):
        times = []
        for _ in range(args.rounds):
            start = time.perf_counter()
            forward(model, tokens)
            plain = time.perf_counter()
            capture = capture_points(
                model, tokens, n_points=args.points, seed=0, feature_heads=heads, center_keys=True
            )
            drawn = time.perf_counter()
            for points, scale in zip(capture.points, capture.scales, strict=True):
                head_spectra(points, scale, n_queries=capture.n_queries, lam_min=2.0**-10)
            times.append((plain - start, drawn - plain, time.perf_counter() - drawn))
        columns = zip(*times, strict=True)
        alone, capturing, spectra = (statistics.median(column) for column in columns)
        ratio = statistics.median((c + s) / a for a, c, s in times)
        rows.append([heads, *(f"{x:.2f}" for x in (alone, capturing, spectra, ratio))])
    table(["heads", "forward s", "with capture s", "spectra s", "stage / forward"], rows)


if __name__ == "__main__":
    main()
