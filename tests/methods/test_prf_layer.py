"""Random-feature students: what their log features mean, for grouped heads and per-head widths."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from models import make_model, shape, some_tokens

from dofsweep.core.plan import Plan, make_plan
from dofsweep.errors import StudentError
from dofsweep.methods import build_student, load_student, save_student
from dofsweep.methods.base import cache_bytes, student_state_bytes
from dofsweep.methods.prf import PrfLayer
from dofsweep.teacher.seam import AttentionCall, Seam


def make_layer(
    dims: tuple[int, ...], n_kv: int, n_heads: int, *, untied: bool = False, seed: int = 0
) -> PrfLayer:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n_kv, 8, generator=generator)
    return PrfLayer(
        dims, scale=8**-0.5, key_mean=mean, n_heads=n_heads, untied=untied, init="gaussian",
        generator=generator,
    )  # fmt: skip


def qkv(n_heads: int, n_kv: int, length: int = 9) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(2, h, length, 8, generator=generator) for h in (n_heads, n_kv, n_kv))


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize(("dims", "n_kv"), [((13, 13), 2), ((13,) * 4, 2), ((13,) * 4, 4)])
def test_log_features_by_hand(dims: tuple[int, ...], n_kv: int, untied: bool) -> None:
    layer = make_layer(dims, n_kv, 4, untied=untied)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    q, k, _ = qkv(4, n_kv)
    log_q, log_k = layer.log_features(q, k)
    assert log_q.shape == (2, 4, 9, 13)
    assert log_k.shape == (2, len(dims), 9, 13)
    root = layer.scale**0.5
    for head in range(4):
        feature_head = head // (4 // len(dims))
        z_q = layer.z_q[head] if untied else layer.z_k[feature_head]
        weight = layer.log_weight[head if untied else feature_head]
        torch.testing.assert_close(log_q[:, head], root * q[:, head] @ z_q.T + weight)
        kv_head = head // (4 // n_kv)
        key = k[:, kv_head] - layer.key_mean[kv_head]
        norm = key.square().sum(-1, keepdim=True)
        wanted = root * key @ layer.z_k[feature_head].T - layer.scale * norm / 2
        torch.testing.assert_close(log_k[:, feature_head], wanted)


def test_many_features_give_the_softmax_row() -> None:
    layer = make_layer((20_000,), 1, 1)
    layer.key_mean.mul_(0.3)
    q, k, _ = (x * 0.5 for x in qkv(1, 1))
    log_q, log_k = layer.log_features(q, k)
    estimate = torch.logsumexp(log_q[:, :, :, None] + log_k[:, :, None], dim=-1).softmax(-1)
    torch.testing.assert_close(
        estimate, (layer.scale * q @ k.transpose(-1, -2)).softmax(-1), atol=0.02, rtol=0.1
    )


def test_a_narrow_head_has_only_its_own_features() -> None:
    layer = make_layer((3, 5), 2, 4)
    _, log_k = layer.log_features(*qkv(4, 2)[:2])
    assert torch.isneginf(log_k[:, 0, :, 3:]).all()
    assert torch.isfinite(log_k[:, 0, :, :3]).all()
    assert torch.isfinite(log_k[:, 1]).all()
    q, k, v = qkv(4, 2)
    student = build_student(
        "prf", Plan(((3, 5),)), shape(4, 2, n_layers=1), feature_heads="kv", scales=[8**-0.5],
        key_means=[torch.zeros(2, 8)], init="gaussian", seed=0,
    )  # fmt: skip
    out = student.attend(AttentionCall(0, q, k, v, 8**-0.5, None))
    assert torch.isfinite(out).all()
    out.sum().backward()
    for parameter in student.parameters():
        assert torch.isfinite(parameter.grad).all()
    assert (student.layer(0).z_k.grad[0, 3:] == 0).all()


@pytest.mark.parametrize("feature_map", ["prf", "prf_untied"])
@pytest.mark.parametrize("family", ["gpt2_inverse_layer", "neox", "llama"])
def test_a_student_on_disk_computes_the_same(feature_map: str, family: str, tmp_path: Path) -> None:
    model = make_model(family)
    kv = 2 if family == "llama" else 4
    plan = make_plan("fix", n_layers=3, n_heads=kv, budget=6, head_dim=8)
    student = build_student(
        feature_map, plan, shape(4, kv), feature_heads="kv", scales=[0.3, 0.2, 0.1],
        key_means=[torch.randn(kv, 8) for _ in range(3)], init="orthogonal", seed=5,
    )  # fmt: skip
    save_student(student, tmp_path / "s.safetensors")
    again = load_student(tmp_path / "s.safetensors")
    assert again.meta == student.meta
    tokens = torch.from_numpy(some_tokens(2, 17)).long()
    with Seam(model, student.attend):
        wanted = model(tokens, use_cache=False).logits
    with Seam(model, again.attend):
        assert torch.equal(model(tokens, use_cache=False).logits, wanted)


def test_a_layers_features_do_not_depend_on_other_layers() -> None:
    means = [torch.zeros(2, 8)] * 3
    options = {"feature_heads": "kv", "scales": [1.0] * 3, "key_means": means, "init": "gaussian"}
    one = build_student("prf", Plan(((4, 4), (4, 4), (4, 4))), shape(4, 2), seed=0, **options)
    two = build_student("prf", Plan(((9, 9), (4, 4), (1, 1))), shape(4, 2), seed=0, **options)
    assert torch.equal(one.layer(1).z_k, two.layer(1).z_k)


def test_refusals(tmp_path: Path) -> None:
    options = {"feature_heads": "kv", "scales": [], "key_means": [], "init": "gaussian", "seed": 0}
    with pytest.raises(StudentError, match="unknown feature map 'relu'"):
        build_student("relu", Plan(((4,),)), shape(), **options)
    with pytest.raises(StudentError, match="the plan has 1 layers and the model 3"):
        build_student("prf", Plan(((4,),)), shape(), **options)
    with pytest.raises(StudentError, match="not a student file"):
        load_student(tmp_path / "none.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk" * 100)
    with pytest.raises(StudentError, match="not a student file"):
        load_student(tmp_path / "junk.safetensors")


def test_bytes_of_states() -> None:
    plan = Plan(((2, 2), (6, 6), (1, 1)))
    assert student_state_bytes(plan, shape(4, 2)) == 4 * (18 * (8 + 1) + 6)
    assert cache_bytes(shape(4, 2), 100, 2) == 2 * 3 * 2 * 8 * 100 * 2
    assert math.isclose(plan.mean_dim, 3.0)
