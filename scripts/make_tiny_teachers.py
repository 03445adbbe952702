"""Train the tiny teachers of tests/tiny: real text, a few minutes of one CPU core each.

    python scripts/make_tiny_teachers.py [gpt2] [neox] [llama]

Three architectures, each with what tends to go wrong in it: GPT-2 whose attention scale depends on
the layer, GPT-NeoX that rotates a quarter of its channels, Llama with grouped queries. The text is
the language reference that comes with Python, so nothing is downloaded.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from dofsweep.corpus.documents import pydoc_documents
from dofsweep.corpus.load import Corpus, load_corpus

OUT = Path(__file__).resolve().parent.parent / "tests" / "tiny"
END = "<|endoftext|>"
VOCAB, SEQ_LEN, LAYERS, HIDDEN, HEADS, INNER = 1024, 512, 4, 128, 4, 256
STEPS, WARMUP, BATCH, LR, SEED = 500, 30, 4, 4e-3, 0
INIT_STD = 0.06  # wider than usual: with 0.02 so small a model learns slowly
TRAIN_TOKENS, HELDOUT_TOKENS = 110_000, 8192


def gpt2() -> PreTrainedModel:
    """Scale 1/(sqrt(d)·(layer + 1)): reading it from the head dimension alone is wrong."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=SEQ_LEN, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
            n_inner=INNER, scale_attn_by_inverse_layer_idx=True, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, initializer_range=INIT_STD, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def neox() -> PreTrainedModel:
    """Pythia's habits: 8 of 32 channels rotate, attention and MLP in parallel, untied head."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, hidden_size=HIDDEN,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=INNER,
            rope_parameters=rope, initializer_range=INIT_STD, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> PreTrainedModel:
    """Two key/value heads for four query heads."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, hidden_size=HIDDEN,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
            head_dim=HIDDEN // HEADS, intermediate_size=INNER, tie_word_embeddings=True,
            initializer_range=INIT_STD, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {"gpt2": gpt2, "neox": neox, "llama": llama}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of the same text; the end-of-text token is 0."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(pydoc_documents(), VOCAB, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, model_max_length=SEQ_LEN
    )


def unigram_loss(train: NDArray[np.int32], heldout: NDArray[np.int32]) -> float:
    """Nats a token of a model that knows only how often each token occurs."""
    counts = np.bincount(train.ravel(), minlength=VOCAB) + 1.0
    return float(-np.log(counts / counts.sum())[heldout.ravel()].mean())


@torch.no_grad()
def loss_on(model: PreTrainedModel, tokens: NDArray[np.int32]) -> float:
    """Mean next-token loss, nats."""
    model.eval()
    losses = [
        model(input_ids=(ids := torch.from_numpy(row[None]).long()), labels=ids).loss.item()
        for row in tokens
    ]
    model.train()
    return float(np.mean(losses))


def train(model: PreTrainedModel, corpus: Corpus) -> None:
    """AdamW, linear warm-up, cosine to a tenth."""

    def rate(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    rng = np.random.default_rng(SEED)
    model.train()
    for step in range(STEPS):
        rows = corpus.train[rng.integers(0, len(corpus.train), BATCH)]
        ids = torch.from_numpy(rows).long()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"  step {step:4d} loss {loss.item():.3f}", flush=True)


def make(name: str, tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> dict[str, float | int]:
    """Train one teacher, save it, and say how good it is."""
    torch.manual_seed(SEED)
    model = MAKERS[name]()
    started = time.monotonic()
    train(model, corpus)
    seconds = round(time.monotonic() - started)
    folder = OUT / name
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return {
        "parameters": model.num_parameters(),
        "train": round(loss_on(model, corpus.train[:16]), 3),
        "heldout": round(loss_on(model, corpus.heldout), 3),
        "in pieces of 32": round(loss_on(model, corpus.heldout.reshape(-1, 32)), 3),
        "seconds": seconds,
    }


def main() -> None:
    """Make the teachers named on the command line, or all."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    corpus = load_corpus(
        "pydoc", tokenizer, seq_len=SEQ_LEN,
        train_tokens=TRAIN_TOKENS, heldout_tokens=HELDOUT_TOKENS,
    )  # fmt: skip
    print(f"unigram loss {unigram_loss(corpus.train, corpus.heldout):.3f}")
    for name in sys.argv[1:] or MAKERS:
        print(name, json.dumps(make(name, tokenizer, corpus)), flush=True)


if __name__ == "__main__":
    main()
