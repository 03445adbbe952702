"""Captured points are the model's own queries and keys, head for head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import make_model, some_tokens

from dofsweep.errors import CaptureError
from dofsweep.teacher.capture import Capture, capture_points
from dofsweep.teacher.seam import AttentionCall, Seam, softmax_attention


def all_calls(model: torch.nn.Module, tokens: torch.Tensor) -> dict[int, AttentionCall]:
    calls = {}

    def keep(call: AttentionCall) -> torch.Tensor:
        calls[call.layer_idx] = call
        return softmax_attention(call)

    with Seam(model, keep):  # type: ignore[arg-type]
        model(tokens.long(), use_cache=False)
    return calls


def rows_within(points: torch.Tensor, pool: torch.Tensor) -> bool:
    return bool((torch.cdist(points.double(), pool.double()).amin(dim=1) < 1e-4).all())


@pytest.mark.parametrize("feature_heads", ["kv", "query"])
@pytest.mark.parametrize("center", [True, False])
def test_points_come_from_the_right_heads(feature_heads: str, center: bool) -> None:
    model, tokens = make_model("llama"), some_tokens(3, 40)
    capture = capture_points(
        model, tokens, n_points=51, seed=1, feature_heads=feature_heads, center_keys=center
    )
    for layer_idx, call in all_calls(model, torch.from_numpy(tokens)).items():
        points = capture.points[layer_idx]
        heads = 2 if feature_heads == "kv" else 4
        assert points.shape == (heads, 51, 8)
        torch.testing.assert_close(capture.key_mean[layer_idx], call.k.mean(dim=(0, 2)))
        for head in range(heads):
            group = slice(head * 2, head * 2 + 2) if heads == 2 else slice(head, head + 1)
            kv_head = head if heads == 2 else head // 2
            keys = call.k[:, kv_head].reshape(-1, 8)
            if center:
                keys = keys - capture.key_mean[layer_idx][kv_head]
            assert capture.n_queries == 25
            assert rows_within(points[head, :25], call.q[:, group].reshape(-1, 8))
            assert rows_within(points[head, 25:], keys)
            assert not rows_within(points[head, 25:], call.q.reshape(-1, 8))


def test_batching_changes_no_point(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model("neox"), some_tokens(5, 16)
    options = {"n_points": 60, "seed": 3, "feature_heads": "query", "center_keys": True}
    whole = capture_points(model, tokens, **options)  # type: ignore[arg-type]
    monkeypatch.setattr("dofsweep.teacher.capture.TOKENS_PER_BATCH", 32)
    parts = capture_points(model, tokens, **options)  # type: ignore[arg-type]
    for a, b in zip(whole.points, parts.points, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_file_holds_it_all(tmp_path: Path) -> None:
    capture = capture_points(
        make_model("gpt2_inverse_layer"),
        some_tokens(2, 16),
        n_points=9,
        seed=0,
        feature_heads="kv",
        center_keys=True,
    )
    capture.save(tmp_path / "deep" / "capture.safetensors")
    again = Capture.load(tmp_path / "deep" / "capture.safetensors")
    assert again.scales == capture.scales
    assert again.n_queries == capture.n_queries == 4
    assert all(map(torch.equal, again.points, capture.points))
    assert all(map(torch.equal, again.key_mean, capture.key_mean))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["capture.safetensors"]


def test_too_many_points_are_refused() -> None:
    with pytest.raises(CaptureError, match="raise capture_sequences"):
        capture_points(
            make_model("gpt2"),
            some_tokens(2, 8),
            n_points=33,
            seed=0,
            feature_heads="kv",
            center_keys=True,
        )


def test_values_that_are_not_finite_are_named() -> None:
    model = make_model("llama")
    model.model.layers[1].self_attn.q_proj.weight[0] = float("nan")
    with pytest.raises(CaptureError, match="layer 1: queries or keys hold NaN"):
        capture_points(
            model, some_tokens(1, 8), n_points=8, seed=0, feature_heads="kv", center_keys=True
        )
