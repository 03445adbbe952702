"""The seam hands over queries, keys and the scale exactly as each architecture uses them."""

from __future__ import annotations

import pytest
import torch
from models import FAMILIES, make_model, some_tokens

from dofsweep.errors import CaptureError, TeacherError
from dofsweep.teacher.seam import AttentionCall, Seam, softmax_attention


def plain_attention(call: AttentionCall) -> torch.Tensor:
    """Softmax attention written out, keys repeated in repeat_interleave order."""
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (call.k, call.v))
    logits = call.scale * call.q @ k.transpose(-1, -2)
    keep = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if call.key_mask is not None:
        keep = keep & call.key_mask[:, None, None, :]
    return logits.masked_fill(~keep, -1e9).softmax(-1) @ v


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_from_what_was_handed_over_equals_eager(family: str) -> None:
    model = make_model(family)
    tokens = torch.from_numpy(some_tokens(2, 33)).long()
    model.set_attn_implementation("eager")
    wanted = model(tokens, use_cache=False).logits
    for handler in (plain_attention, softmax_attention):
        with Seam(model, handler):
            found = model(tokens, use_cache=False).logits
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_padding_reaches_the_handler(family: str) -> None:
    model = make_model(family)
    tokens = torch.from_numpy(some_tokens(2, 20)).long()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 15:] = 0
    model.set_attn_implementation("eager")
    wanted = model(tokens, attention_mask=mask, use_cache=False).logits
    for handler in (plain_attention, softmax_attention):
        with Seam(model, handler):
            found = model(tokens, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], atol=1e-4, rtol=1e-4)


def test_scale_of_gpt2_falls_with_depth() -> None:
    scales = {}

    def handler(call: AttentionCall) -> torch.Tensor:
        scales[call.layer_idx] = call.scale
        return softmax_attention(call)

    model = make_model("gpt2_inverse_layer")
    with Seam(model, handler):
        model(torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    assert scales == pytest.approx({i: 8**-0.5 / (i + 1) for i in range(3)})


def test_a_layer_that_was_not_reached_is_an_error() -> None:
    model = make_model("llama")
    seam = Seam(model, softmax_attention)
    tokens = torch.zeros(1, 4, dtype=torch.long)

    def miss_the_second_layer() -> None:
        with seam:
            model.model.layers[1].self_attn.forward = lambda **kw: (kw["hidden_states"], None)
            model(tokens, use_cache=False)

    with pytest.raises(CaptureError, match=r"layers \[1\] of 3 did not reach"):
        miss_the_second_layer()


def test_caching_is_refused() -> None:
    model = make_model("llama")
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with Seam(model, softmax_attention):
        cache = model(tokens, use_cache=True).past_key_values
        with pytest.raises(CaptureError, match="use_cache=False"):
            model(tokens[:, :1], past_key_values=cache)


def test_sliding_window_and_soft_capping_are_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

    small = {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8,
    }  # fmt: skip
    tokens = torch.zeros(1, 16, dtype=torch.long)
    mistral = MistralForCausalLM(MistralConfig(**small, sliding_window=8)).eval()
    with (
        pytest.raises(TeacherError, match="attends only to the last 8 tokens and was given 16"),
        Seam(mistral, softmax_attention),
    ):
        mistral(tokens, use_cache=False)
    gemma = Gemma2ForCausalLM(Gemma2Config(**small)).eval()
    with (
        pytest.raises(TeacherError, match="caps its attention logits"),
        Seam(gemma, softmax_attention),
    ):
        gemma(tokens, use_cache=False)
    with Seam(mistral, softmax_attention):
        mistral(tokens[:, :8], use_cache=False)


def test_a_model_with_its_own_attention_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)).eval()
    with (
        pytest.raises(TeacherError, match="does not use transformers' attention interface"),
        Seam(bloom, softmax_attention),
    ):
        bloom(torch.zeros(1, 4, dtype=torch.long), use_cache=False)
