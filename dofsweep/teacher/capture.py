"""Sampled queries and keys of every layer and head: the input of the spectra.

Shapes: T sequences, L tokens, H query heads, G key/value heads, F feature heads (H or G), J points,
d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from dofsweep.errors import CaptureError
from dofsweep.teacher.seam import AttentionCall, Seam, softmax_attention

TOKENS_PER_BATCH = 2048


@dataclass
class Capture:
    """What was sampled from a teacher, layer by layer."""

    points: list[Tensor]
    """Per layer float32 [F, J, d]: the first ``n_queries`` points are queries, the rest keys."""
    key_mean: list[Tensor]
    """Per layer float32 [G, d]: mean key, already subtracted from the keys when centred."""
    scales: list[float]
    """Per layer attention scale s."""
    n_queries: int

    def save(self, path: Path) -> None:
        """Write as safetensors, whole or not at all."""
        tensors = {"scales": torch.tensor(self.scales, dtype=torch.float64)}
        for i, (points, mean) in enumerate(zip(self.points, self.key_mean, strict=True)):
            tensors[f"points_{i:03d}"] = points.contiguous()
            tensors[f"key_mean_{i:03d}"] = mean.contiguous()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{id(self)}.part")
        save_file(tensors, part, metadata={"n_queries": str(self.n_queries)})
        part.replace(path)

    @staticmethod
    def load(path: Path, layer_idx: int | None = None) -> Capture:
        """Read what ``save`` wrote: all layers, or one alone."""
        with safe_open(path, framework="pt") as file:
            scales = file.get_tensor("scales").tolist()
            layers = range(len(scales)) if layer_idx is None else [layer_idx]
            return Capture(
                points=[file.get_tensor(f"points_{i:03d}") for i in layers],
                key_mean=[file.get_tensor(f"key_mean_{i:03d}") for i in layers],
                scales=[scales[i] for i in layers],
                n_queries=int(file.metadata()["n_queries"]),
            )


class _Sampler:
    """Handler that keeps the drawn positions of each layer and the running sum of its keys."""

    def __init__(self, n_sequences: int, n_points: int, seed: int, feature_heads: str) -> None:
        self.n_sequences, self.n_points, self.seed = n_sequences, n_points, seed
        self.pooled = feature_heads == "kv"
        self.n_queries = n_points // 2
        self.first = 0  # index of the first sequence of the batch now in the model
        self.points: dict[int, Tensor] = {}
        self.key_sum: dict[int, Tensor] = {}
        self.scales: dict[int, float] = {}
        self._draws: dict[int, tuple[Tensor, Tensor]] = {}

    def _draw(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Flat positions of the drawn queries and keys, [F, J_q] and [F, J_k], no repeats."""
        (_, n_heads, length, _), n_kv = call.q.shape, call.k.shape[1]
        n_feature_heads = n_kv if self.pooled else n_heads
        group = n_heads // n_feature_heads
        generator = torch.Generator().manual_seed(self.seed * 100_003 + call.layer_idx)
        pool = self.n_sequences * length
        queries, keys = [], []
        for _ in range(n_feature_heads):
            queries.append(torch.randperm(pool * group, generator=generator)[: self.n_queries])
            keys.append(torch.randperm(pool, generator=generator)[: self.n_points - self.n_queries])
        return torch.stack(queries), torch.stack(keys)

    def __call__(self, call: AttentionCall) -> Tensor:
        layer, (_, n_heads, length, dim) = call.layer_idx, call.q.shape
        if not (torch.isfinite(call.q).all() and torch.isfinite(call.k).all()):
            raise CaptureError(
                f"layer {layer}: queries or keys hold NaN or infinity; "
                "load the teacher in float32 (--dtype float32)"
            )
        if layer not in self._draws:
            self._draws[layer] = self._draw(call)
            n_feature_heads = self._draws[layer][0].shape[0]
            self.points[layer] = torch.empty(n_feature_heads, self.n_points, dim)
            self.key_sum[layer] = torch.zeros(call.k.shape[1], dim, dtype=torch.float64)
            self.scales[layer] = call.scale
        queries, keys = self._draws[layer]
        n_feature_heads = queries.shape[0]
        group, shared = n_heads // n_feature_heads, n_feature_heads // call.k.shape[1]
        self.key_sum[layer] += call.k.double().sum(dim=(0, 2)).cpu()
        for head in range(n_feature_heads):
            # Flat order: sequence, then query head of the group, then token.
            pool = call.q[:, head * group : (head + 1) * group].reshape(-1, dim)
            self._take(layer, head, 0, queries[head], pool, self.first * group * length)
            pool = call.k[:, head // shared].reshape(-1, dim)
            self._take(layer, head, self.n_queries, keys[head], pool, self.first * length)
        return softmax_attention(call)

    def _take(
        self, layer: int, head: int, start: int, drawn: Tensor, pool: Tensor, first: int
    ) -> None:
        here = ((drawn >= first) & (drawn < first + len(pool))).nonzero().squeeze(1)
        taken = pool[(drawn[here] - first).to(pool.device)]
        self.points[layer][head, start + here] = taken.float().cpu()


@torch.no_grad()
def capture_points(
    model: PreTrainedModel,
    tokens: NDArray[np.int32],
    *,
    n_points: int,
    seed: int,
    feature_heads: str,
    center_keys: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Capture:
    """Draw J points from each feature head's queries and keys, without repeats.

    Half of the points are queries (of all query heads of the group when ``feature_heads`` is
    "kv"), half are keys. With ``center_keys`` each head's mean key over the whole sample is
    subtracted from its keys; softmax attention does not change under that shift.

    Args:
        tokens: [T, L] token ids, no padding.
        n_points: J per feature head.
        progress: called with sequences done and their number.
    Raises:
        CaptureError: J exceeds what T·L tokens hold, a value is not finite, or a layer was missed.
    """
    n_sequences, length = tokens.shape
    if n_points > 2 * n_sequences * length:
        raise CaptureError(
            f"n_points={n_points} but {n_sequences} sequences of {length} tokens hold "
            f"{2 * n_sequences * length} queries and keys a head; "
            "lower n_points or raise capture_sequences"
        )
    sampler = _Sampler(n_sequences, n_points, seed, feature_heads)
    batch = max(1, TOKENS_PER_BATCH // length)
    with Seam(model, sampler):
        for sampler.first in range(0, n_sequences, batch):
            part = torch.from_numpy(tokens[sampler.first : sampler.first + batch].astype(np.int64))
            model.base_model(part.to(model.device), use_cache=False)
            if progress:
                progress(min(sampler.first + batch, n_sequences), n_sequences)
    layers = range(len(sampler.points))
    key_mean = [(sampler.key_sum[i] / (n_sequences * length)).float() for i in layers]
    points = [sampler.points[i] for i in layers]
    if center_keys:
        for drawn, mean in zip(points, key_mean, strict=True):
            shared = drawn.shape[0] // mean.shape[0]
            drawn[:, sampler.n_queries :] -= mean.repeat_interleave(shared, dim=0)[:, None]
    scales = [sampler.scales[i] for i in layers]
    return Capture(points, key_mean, scales, sampler.n_queries)
