"""Held-out loss and layer KL against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from models import make_model, shape, some_tokens

from dofsweep.bench import next_token
from dofsweep.bench.next_token import layer_kl, next_token_loss, trial_result
from dofsweep.core.plan import make_plan
from dofsweep.methods import Student, build_student
from dofsweep.teacher.seam import AttentionCall, Seam, softmax_attention


def make_student(seed: int = 0, budget: int = 6) -> Student:
    plan = make_plan("fix", n_layers=3, n_heads=2, budget=budget, head_dim=8)
    return build_student(
        "prf", plan, shape(4, 2), feature_heads="kv", scales=[8**-0.5] * 3,
        key_means=[torch.zeros(2, 8)] * 3, init="gaussian", seed=seed,
    )  # fmt: skip


def test_loss_of_a_teacher_is_what_transformers_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model("llama"), some_tokens(5, 21)
    ids = torch.from_numpy(tokens).long()
    per_row = [float(model(row[None], labels=row[None]).loss) for row in ids]
    mean = sum(per_row) / 5
    spread = math.sqrt(sum((x - mean) ** 2 for x in per_row) / 4 / 5)
    for limit in (64_000_000, 1):
        monkeypatch.setattr(next_token, "LOGIT_FLOATS_PER_BATCH", limit)
        found = next_token_loss(model, tokens)
        assert found.loss == pytest.approx(mean, rel=1e-5)
        assert found.stderr == pytest.approx(spread, rel=1e-4)
        assert (found.n_sequences, found.n_tokens) == (5, 100)


def test_one_sequence_has_no_standard_error() -> None:
    assert math.isnan(next_token_loss(make_model("gpt2"), some_tokens(1, 8)).stderr)


def test_kl_of_each_layer_by_hand() -> None:
    model, tokens, student = make_model("llama"), some_tokens(3, 13), make_student()
    kl = layer_kl(model, {4: student}, tokens)[4]
    sums = [0.0] * 3

    def by_hand(call: AttentionCall) -> torch.Tensor:
        keep = torch.ones(13, 13, dtype=torch.bool).tril()
        k = call.k.repeat_interleave(2, dim=1)
        teacher = (call.scale * call.q @ k.mT).masked_fill(~keep, -1e9).log_softmax(-1)
        log_q, log_k = student.layer(call.layer_idx).log_features(call.q, call.k)
        log_k = log_k.repeat_interleave(2, dim=1)
        rows = torch.logsumexp(log_q[..., :, None, :] + log_k[..., None, :, :], -1)
        rows = rows.masked_fill(~keep, -1e9).log_softmax(-1)
        sums[call.layer_idx] = float((teacher.exp() * (teacher - rows)).sum(-1).mean())
        return softmax_attention(call)

    with Seam(model, by_hand):
        model(torch.from_numpy(tokens).long(), use_cache=False)
    assert kl == pytest.approx(sums, rel=1e-3)


def test_result_for_the_store() -> None:
    measured = next_token_loss(make_model("llama"), some_tokens(2, 9))
    result = trial_result(3, measured, [0.5, 1.5, 1.0])
    assert (result.number, result.heldout_loss) == (3, measured.loss)
    values = {(r.metric, r.layer_idx): r.value for r in result.records}
    assert values[("kl", None)] == 1.0
    assert values[("kl", 1)] == 1.5
    assert values[("heldout_loss", None)] == measured.loss
