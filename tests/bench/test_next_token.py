"""Held-out loss and layer KL against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from models import make_model, shape, some_tokens

from dofsweep.bench import next_token
from dofsweep.bench.next_token import LayerErrors, layer_errors, next_token_loss, trial_result
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


def test_errors_of_each_layer_by_hand() -> None:
    model, tokens, student = make_model("llama"), some_tokens(3, 13), make_student()
    found = layer_errors(model, {4: student}, tokens)[4]
    kl, output = [0.0] * 3, [0.0] * 3

    def by_hand(call: AttentionCall) -> torch.Tensor:
        keep = torch.ones(13, 13, dtype=torch.bool).tril()
        k = call.k.repeat_interleave(2, dim=1)
        teacher = (call.scale * call.q @ k.mT).masked_fill(~keep, -1e9).log_softmax(-1)
        log_q, log_k = student.layer(call.layer_idx).log_features(call.q, call.k)
        log_k = log_k.repeat_interleave(2, dim=1)
        rows = torch.logsumexp(log_q[..., :, None, :] + log_k[..., None, :, :], -1)
        rows = rows.masked_fill(~keep, -1e9).log_softmax(-1)
        kl[call.layer_idx] = float((teacher.exp() * (teacher - rows)).sum(-1).mean())
        v = call.v.repeat_interleave(2, dim=1)
        wanted, own = teacher.exp() @ v, rows.exp() @ v
        by_row = (own - wanted).square().sum((1, 2, 3)) / wanted.square().sum((1, 2, 3))
        output[call.layer_idx] = float(by_row.mean())
        return softmax_attention(call)

    with torch.no_grad(), Seam(model, by_hand):
        model(torch.from_numpy(tokens).long(), use_cache=False)
    assert found.kl == pytest.approx(kl, rel=1e-3)
    assert found.output == pytest.approx(output, rel=1e-3)


def test_loss_by_context_and_by_sequence_is_the_same_loss_taken_apart() -> None:
    found = next_token_loss(make_model("llama"), some_tokens(4, 12))
    assert sum(found.per_sequence) / 4 == pytest.approx(found.loss)
    counts = {1: 1, 2: 2, 4: 4, 8: 4}  # of the 11 tokens that have some context
    assert set(found.by_context) == set(counts)
    whole = sum(n * found.by_context[c][0] for c, n in counts.items()) / 11
    assert whole == pytest.approx(found.loss)
    alone = next_token_loss(make_model("llama"), some_tokens(4, 12)[:, :4])
    assert found.by_context[2][0] == pytest.approx(alone.by_context[2][0], rel=1e-5)


def test_result_for_the_store() -> None:
    measured = next_token_loss(make_model("llama"), some_tokens(2, 9))
    result = trial_result(3, measured, LayerErrors([0.1, 0.2, 0.6], [0.5, 1.5, 1.0]))
    assert (result.number, result.heldout_loss) == (3, measured.loss)
    assert result.sequence_losses == measured.per_sequence
    values = {(r.metric, r.layer_idx, r.context): r.value for r in result.records}
    assert values[("kl", None, None)] == 1.0
    assert values[("kl", 1, None)] == 1.5
    assert values[("output_error", None, None)] == pytest.approx(0.3)
    assert values[("heldout_loss", None, None)] == measured.loss
    assert values[("heldout_loss", None, 4)] == measured.by_context[4][0]
    blind = trial_result(3, measured, LayerErrors([0.1, 0.2, 0.6], None))
    assert "kl" not in {r.metric for r in blind.records}
