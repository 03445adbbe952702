"""Feature maps by name, and students on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dofsweep.core.plan import Plan
from dofsweep.core.window import Window
from dofsweep.errors import StudentError
from dofsweep.methods.base import FeatureLayer, Student, StudentMeta
from dofsweep.methods.prf import PrfLayer
from dofsweep.methods.sink_window import NAME, SinkWindowStudent
from dofsweep.records import ModelShape

FEATURE_MAPS: dict[str, Callable[..., FeatureLayer]] = {
    "prf": partial(PrfLayer, untied=False),
    "prf_untied": partial(PrfLayer, untied=True),
}


def build_student(
    feature_map: str,
    plan: Plan,
    shape: ModelShape,
    *,
    feature_heads: str,
    scales: list[float],
    key_means: list[Tensor],
    init: str,
    seed: int,
    window: Window | None = None,
) -> Student:
    """A student with fresh features.

    Args:
        plan: feature dimension of each layer and feature head.
        scales: attention scale of each layer.
        key_means: per layer [G, d], subtracted from the keys; zeros to leave them.
        seed: of the initial features; a layer's features do not depend on other layers' plans.
        window: keys that every layer sees exactly beside its features.
    Raises:
        StudentError: an unknown feature map, or a plan of another model.
    """
    if feature_map not in FEATURE_MAPS:
        raise StudentError(f"unknown feature map {feature_map!r}: known are {list(FEATURE_MAPS)}")
    if plan.n_layers != shape.n_layers:
        raise StudentError(
            f"the plan has {plan.n_layers} layers and the model {shape.n_layers}; make it anew"
        )
    meta = StudentMeta(
        feature_map,
        feature_heads,
        plan.dims,
        tuple(scales),
        shape.n_heads,
        shape.n_kv_heads,
        shape.head_dim,
        window.size if window else 0,
        window.sinks if window else 0,
    )
    return _assemble(meta, key_means, init, seed)


def sink_window_student(window: Window, shape: ModelShape, scales: list[float]) -> Student:
    """The baseline without features."""
    heads = (shape.n_heads, shape.n_kv_heads, shape.head_dim)
    meta = StudentMeta(NAME, "kv", (), tuple(scales), *heads, window.size, window.sinks)
    return SinkWindowStudent(meta)


def _assemble(meta: StudentMeta, key_means: list[Tensor], init: str, seed: int) -> Student:
    if meta.feature_map == NAME:
        return SinkWindowStudent(meta)
    layers = []
    for layer_idx, dims in enumerate(meta.dims):
        generator = torch.Generator().manual_seed(seed * 100_003 + layer_idx)
        layers.append(
            FEATURE_MAPS[meta.feature_map](
                dims,
                scale=meta.scales[layer_idx],
                key_mean=key_means[layer_idx],
                n_heads=meta.n_heads,
                init=init,
                generator=generator,
            )
        )
    return Student(meta, layers)


def save_student(student: Student, path: Path) -> None:
    """Write features and meta data as one safetensors file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    tensors = {name: t.detach().cpu().contiguous() for name, t in student.state_dict().items()}
    save_file(tensors, part, metadata={"student": json.dumps(dataclasses.asdict(student.meta))})
    part.replace(path)


def load_student(path: Path) -> Student:
    """Read what ``save_student`` wrote.

    Raises:
        StudentError: the file is missing, damaged, or not a student's.
    """
    try:
        with safe_open(path, framework="pt") as file:
            stored = json.loads((file.metadata() or {})["student"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as err:
        raise StudentError(f"{path} is not a student file of dofsweep: {err}") from err
    stored["dims"] = tuple(tuple(layer) for layer in stored["dims"])
    stored["scales"] = tuple(stored["scales"])
    meta = StudentMeta(**stored)
    means = [tensors[f"layers.{i}.key_mean"] for i in range(len(meta.dims))]
    student = _assemble(meta, means, "gaussian", 0)
    student.load_state_dict(tensors)
    return student
