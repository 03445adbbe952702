"""How a cluster's processors are given to actors, and which device an actor computes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
import torch


@dataclass(frozen=True)
class Share:
    """What each of several equal actors gets."""

    count: int
    num_cpus: float
    num_gpus: float

    @property
    def options(self) -> dict[str, Any]:
        """Options of an actor that gets this share."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}

    @property
    def threads(self) -> int:
        """Compute threads of such an actor."""
        return max(1, int(self.num_cpus))


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def teacher_share() -> Share:
    """One actor a GPU; without GPUs one a node, with the cores of the smallest node."""
    nodes = _nodes()
    if gpus := int(sum(node.get("GPU", 0) for node in nodes)):
        return Share(gpus, 1, 1)
    cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    return Share(max(1, len(cores)), max(1, min(cores, default=1)), 0)


def spectrum_share(n_layers: int) -> Share:
    """One actor a GPU; without GPUs one a core; never more than there are layers."""
    nodes = _nodes()
    if gpus := int(sum(node.get("GPU", 0) for node in nodes)):
        return Share(min(gpus, n_layers), 1, 1)
    cores = int(sum(node.get("CPU", 0) for node in nodes))
    return Share(max(1, min(cores, n_layers)), 1, 0)


def use_device(threads: int) -> str:
    """Inside an actor: the device that Ray gave it.

    Ray's assignment decides, not what torch can see: an actor without GPUs may
    see all of them (ray issue 62492).
    """
    torch.set_num_threads(threads)
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return "cuda" if ids and torch.cuda.is_available() else "cpu"


def _gpu_memory() -> int:
    """Bytes of the GPU that Ray gave this task."""
    return int(torch.cuda.mem_get_info()[1])


def worker_memory(share: Share) -> int:
    """Bytes that one of several equal workers may use: of a GPU, or of the smallest node's memory.

    Ray counts as memory of a node what is not set aside for its object store.
    """
    if share.num_gpus:
        whole: int = ray.get(ray.remote(_gpu_memory).options(num_gpus=share.num_gpus).remote())
        return int(whole * min(1.0, share.num_gpus))
    nodes = [node for node in _nodes() if node.get("CPU", 0) >= 1]
    per_node = -(-share.count // max(1, len(nodes)))
    return int(min(node.get("memory", 0) for node in nodes) / per_node)
