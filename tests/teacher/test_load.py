"""Tiny teachers load as they were saved; shapes and fingerprints say what they are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from models import FAMILIES, make_model
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from dofsweep.corpus.load import load_corpus
from dofsweep.errors import TeacherError
from dofsweep.records import ModelShape
from dofsweep.teacher.catalog import CATALOG
from dofsweep.teacher.load import (
    count_parameters,
    fingerprint,
    load_teacher,
    load_tokenizer,
    shape_of,
)
from dofsweep.teacher.resolve import TeacherRef, resolve_teacher

TINY = Path(__file__).resolve().parent.parent / "tiny"
TEACHERS = ("gpt2", "neox", "llama")
SHAPES = {
    "gpt2": ModelShape("gpt2", 4, 4, 4, 32, 512, 1024),
    "neox": ModelShape("gpt_neox", 4, 4, 4, 32, 512, 1024),
    "llama": ModelShape("llama", 4, 4, 2, 32, 512, 1024),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny teacher that a test may change."""
    return Path(shutil.copytree(TINY / "llama", tmp_path / "teacher"))


def ref_of(folder: Path, home: Path) -> TeacherRef:
    return resolve_teacher(str(folder), home=home)


@pytest.mark.parametrize("name", TEACHERS)
def test_shape_of_the_tiny_teachers(name: str, tmp_path: Path) -> None:
    assert ref_of(TINY / name, tmp_path).shape == SHAPES[name]


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_is_trained_and_reads_what_came_before(name: str, tmp_path: Path) -> None:
    """Held-out text costs much less than by token counts, and more when its past is shuffled."""
    model, tokenizer = load_teacher(ref_of(TINY / name, tmp_path))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    corpus = load_corpus("pydoc", tokenizer, seq_len=256, train_tokens=100_000, heldout_tokens=2048)
    counts = np.bincount(corpus.train.ravel(), minlength=len(tokenizer)) + 1.0
    by_counts = -np.log(counts / counts.sum())[corpus.heldout[:, -64:]].mean()
    ids = torch.from_numpy(corpus.heldout).long()
    shuffled = ids.clone()
    generator = torch.Generator().manual_seed(0)
    shuffled[:, :-65] = shuffled[:, torch.randperm(191, generator=generator)]

    def loss(tokens: torch.Tensor) -> float:
        logits = model(tokens, use_cache=False).logits[:, -65:-1]
        return float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -64:].flatten())
        )

    assert loss(ids) < by_counts - 1
    # What lies more than 64 tokens back matters too: attention reaches that far.
    assert loss(ids) < loss(shuffled)


@pytest.mark.parametrize("name", TEACHERS)
def test_tokenizer_gives_back_the_text(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ref_of(TINY / name, tmp_path))
    text = "def f(x):\n    return x  # naïve — 数\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0


def test_what_is_special_in_each_survives_saving(tmp_path: Path) -> None:
    assert AutoConfig.from_pretrained(TINY / "gpt2").scale_attn_by_inverse_layer_idx is True
    rope = AutoConfig.from_pretrained(TINY / "neox").rope_parameters
    assert rope["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_of_many_families(family: str) -> None:
    model = make_model(family)
    shape = shape_of(model.config)
    grouped = family in {"llama", "qwen3"}
    assert (shape.n_layers, shape.n_heads, shape.head_dim) == (3, 4, 8)
    assert shape.n_kv_heads == (2 if grouped else 4)
    assert (shape.max_positions, shape.vocab_size) == (128, 97)
    assert count_parameters(model.config) == model.num_parameters()


def test_head_dim_is_taken_from_the_config_where_it_has_one() -> None:
    config = CONFIG_MAPPING["qwen3"](hidden_size=64, num_attention_heads=4, head_dim=32)
    assert shape_of(config).head_dim == 32


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("t5", {}, "encoder with a decoder"),
        ("bart", {}, "encoder with a decoder"),
        ("bert", {}, "looks ahead"),
        ("mamba", {}, "of another kind|num_attention_heads"),
        ("deepseek_v3", {}, "latent"),
        ("qwen3_next", {}, "linear_attention"),
        ("vit", {}, "no causal language model"),
    ],
)
def test_what_cannot_be_a_teacher(kind: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(TeacherError, match=said):
        shape_of(CONFIG_MAPPING[kind](**options))


PUBLISHED: dict[str, PretrainedConfig] = {
    "gpt2": CONFIG_MAPPING["gpt2"](),
    "gpt2-xl": CONFIG_MAPPING["gpt2"](n_embd=1600, n_layer=48, n_head=25),
    "pythia-70m": CONFIG_MAPPING["gpt_neox"](
        vocab_size=50304, hidden_size=512, num_hidden_layers=6, num_attention_heads=8,
        intermediate_size=2048,
    ),
    "pythia-1b": CONFIG_MAPPING["gpt_neox"](
        vocab_size=50304, hidden_size=2048, num_hidden_layers=16, num_attention_heads=8,
        intermediate_size=8192,
    ),
    "smollm2-135m": CONFIG_MAPPING["llama"](
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, intermediate_size=1536, max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": CONFIG_MAPPING["qwen3"](
        vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, intermediate_size=3072,
        max_position_embeddings=40960, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("alias", PUBLISHED)
def test_the_catalogue_agrees_with_the_published_configs(alias: str) -> None:
    entry, config = CATALOG[alias], PUBLISHED[alias]
    shape = shape_of(config)
    assert count_parameters(config) == entry.n_params
    assert (shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.head_dim) == (
        entry.n_layers, entry.n_heads, entry.n_kv_heads, entry.head_dim,
    )  # fmt: skip
    assert shape.max_positions == entry.max_positions


def test_fingerprint_stays_when_the_folder_moves(folder: Path, tmp_path: Path) -> None:
    first = fingerprint(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    os.utime(moved / "model.safetensors", (1, 1))
    config = json.loads((moved / "config.json").read_text())
    reordered = dict(sorted(config.items(), reverse=True)) | {"transformers_version": "9.9"}
    (moved / "config.json").write_text(json.dumps(reordered, indent=7))
    assert fingerprint(moved) == first


def test_fingerprint_sees_one_weight_and_one_setting(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = fingerprint(folder, home=home)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    second = fingerprint(folder, home=home)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert len({first, second, fingerprint(folder, home=home)}) == 3


def test_fingerprint_reads_the_weights_once(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = fingerprint(folder, home=home)
    # Other bytes under the same size and time: only a remembered digest gives the same answer.
    weights = folder / "model.safetensors"
    status = weights.stat()
    weights.write_bytes(bytes(status.st_size))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint(folder, home=home) == first
    (home / "fingerprints.json").write_text("{ damaged")
    assert fingerprint(folder, home=home) != first


def test_weights_that_are_missing_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ref = ref_of(folder, tmp_path)
    with pytest.raises(TeacherError, match=r"lack 1 of.*layers\.2\.self_attn\.q_proj"):
        load_teacher(ref)


def test_a_cut_weight_file_is_refused(folder: Path, tmp_path: Path) -> None:
    ref = ref_of(folder, tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:100_000])
    with pytest.raises(TeacherError, match="cannot be loaded"):
        load_teacher(ref)


def test_a_damaged_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TeacherError, match=r"tokenizer.*save_pretrained"):
        load_tokenizer(ref_of(folder, tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_in_the_precision_asked_for(dtype: str, tmp_path: Path) -> None:
    model, _ = load_teacher(ref_of(TINY / "gpt2", tmp_path), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
