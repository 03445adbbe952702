"""Small random models of several families, for tests that do not need trained weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dofsweep.records import ModelShape

VOCAB = 97
FAMILIES = ("gpt2", "gpt2_inverse_layer", "neox", "neox_full_rotary", "llama", "qwen3", "opt")


def _gpt2(**more: Any) -> PreTrainedModel:
    config = GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=3, n_head=4, **more)
    return GPT2LMHeadModel(config)


def _neox(rotary_pct: float) -> PreTrainedModel:
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary_pct
        },
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose attention is far from uniform."""
    torch.manual_seed(seed)
    grouped = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
    }
    model = {
        "gpt2": _gpt2,
        "gpt2_inverse_layer": lambda: _gpt2(scale_attn_by_inverse_layer_idx=True),
        "neox": lambda: _neox(0.25),
        "neox_full_rotary": lambda: _neox(1.0),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**grouped)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**grouped, head_dim=8)),
        "opt": lambda: OPTForCausalLM(
            OPTConfig(
                vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                ffn_dim=64, max_position_embeddings=128, word_embed_proj_dim=32,
            )
        ),
    }[family]()  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return model.eval().requires_grad_(False)


def shape(n_heads: int = 4, n_kv_heads: int = 4, n_layers: int = 3) -> ModelShape:
    """Shape of those models."""
    return ModelShape("test", n_layers, n_heads, n_kv_heads, 8, 128, VOCAB)


def some_tokens(n_sequences: int, length: int, seed: int = 0) -> NDArray[np.int32]:
    """Random token ids [n_sequences, length]."""
    found = np.random.default_rng(seed).integers(3, VOCAB, (n_sequences, length))
    return found.astype(np.int32)
