"""Layerwise training: what it minimises, what it keeps, and that resuming changes nothing."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from models import make_model, shape, some_tokens

from dofsweep.bench.next_token import layer_errors
from dofsweep.core.plan import Plan, make_plan
from dofsweep.distill.layerwise import LayerwiseTrainer as Layerwise
from dofsweep.distill.trainer import TrainSettings
from dofsweep.errors import DistillError
from dofsweep.methods import Student, build_student

SETTINGS = TrainSettings(
    total_steps=30, lr_features=0.05, lr_weights=0.1, warmup=0.1, grad_clip=1.0
)


def make_trainer(model, students, settings: TrainSettings, **options) -> Layerwise:
    """All students under the same settings."""
    return Layerwise(model, students, dict.fromkeys(students, settings), **options)


def make_students(plans: dict[int, Plan], feature_map: str = "prf") -> dict[int, Student]:
    return {
        number: build_student(
            feature_map, plan, shape(4, 2), feature_heads="kv", scales=[8**-0.5] * 3,
            key_means=[torch.zeros(2, 8)] * 3, init="gaussian", seed=number,
        )
        for number, plan in plans.items()
    }  # fmt: skip


def fix(budget: int) -> Plan:
    return make_plan("fix", n_layers=3, n_heads=2, budget=budget, head_dim=8)


def batches(n: int) -> list[torch.Tensor]:
    return [torch.from_numpy(some_tokens(2, 24, seed)).long() for seed in range(n)]


@pytest.mark.parametrize("feature_map", ["prf", "prf_untied"])
def test_training_lowers_every_layers_kl(feature_map: str) -> None:
    model, held_out = make_model("llama"), some_tokens(4, 24, seed=99)
    students = make_students({1: fix(8), 2: Plan(((2, 2), (8, 8), (14, 14)))}, feature_map)
    before = layer_errors(model, students, held_out)
    trainer = make_trainer(model, students, SETTINGS)
    for batch in batches(30):
        losses = trainer.step(batch)
    assert {n: len(v) for n, v in losses.items()} == {1: 3, 2: 3}
    after = layer_errors(model, students, held_out)
    for number in students:
        kl_before, kl_after = before[number].kl, after[number].kl
        assert kl_before is not None
        assert kl_after is not None
        for layer_before, layer_after in zip(kl_before, kl_after, strict=True):
            assert layer_after < layer_before
    assert trainer.failed == {}


def test_students_trained_together_are_the_same_as_alone() -> None:
    model = make_model("llama")
    plans = {1: fix(8), 2: fix(3), 3: Plan(((2, 2), (8, 8), (14, 14)))}
    together = make_students(plans)
    trainer = make_trainer(model, together, SETTINGS)
    for batch in batches(4):
        trainer.step(batch)
    for number, plan in plans.items():
        alone = make_students({number: plan})
        single = make_trainer(model, alone, SETTINGS)
        for batch in batches(4):
            single.step(batch)
        for a, b in zip(together[number].parameters(), alone[number].parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradient_is_that_of_the_loss_alone() -> None:
    """One step of plain gradients per layer, computed with everything kept, is the same."""
    from dofsweep.core.losses import softmax_loss
    from dofsweep.teacher.seam import AttentionCall, Seam, softmax_attention

    model, batch = make_model("neox"), batches(1)[0]
    plan = make_plan("fix", n_layers=3, n_heads=4, budget=5, head_dim=8)
    student = build_student(
        "prf", plan, shape(4, 4), feature_heads="kv", scales=[8**-0.5] * 3,
        key_means=[torch.zeros(4, 8)] * 3, init="gaussian", seed=0,
    )  # fmt: skip
    total = torch.zeros(())

    def keep(call: AttentionCall) -> torch.Tensor:
        nonlocal total
        log_q, log_k = student.layer(call.layer_idx).log_features(call.q, call.k)
        total = total + softmax_loss(log_q, log_k, call.q, call.k, call.scale)
        return softmax_attention(call)

    with Seam(model, keep):
        model(batch, use_cache=False)
    total.backward()
    wanted = [p.grad.clone() for p in student.parameters()]
    student.zero_grad()
    trainer = make_trainer(model, {0: student}, SETTINGS)
    seen: list[torch.Tensor] = []
    trainer.reduce = lambda grads: seen.extend(g.clone() for g in grads if g.dtype == torch.float32)
    losses = trainer.step(batch)
    assert sum(losses[0]) == pytest.approx(float(total.detach()), rel=1e-5)
    for a, b in zip(seen, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_resumed_equals_uninterrupted_to_the_bit() -> None:
    model, steps = make_model("llama"), batches(9)
    whole = make_students({1: fix(6), 2: fix(9)})
    trainer = make_trainer(model, whole, SETTINGS)
    for batch in steps:
        trainer.step(batch)
    first = make_trainer(model, make_students({1: fix(6), 2: fix(9)}), SETTINGS)
    for batch in steps[:4]:
        first.step(batch)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again = make_students({1: fix(6), 2: fix(9)})
    second = make_trainer(model, again, SETTINGS)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.steps_done == 4
    for batch in steps[4:]:
        second.step(batch)
    for number in whole:
        for a, b in zip(whole[number].parameters(), again[number].parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_student_that_breaks_stops_alone() -> None:
    model = make_model("llama")
    students = make_students({1: fix(6), 2: fix(6)})
    with torch.no_grad():
        students[1].layer(2).log_weight[0, 0] = float("nan")
    frozen = students[1].layer(0).z_k.clone()
    trainer = make_trainer(model, students, SETTINGS)
    moving = students[2].layer(0).z_k.clone()
    trainer.step(batches(1)[0])
    losses = trainer.step(batches(2)[1])
    assert set(losses) == {2}
    assert "trial 1: the gradient of layer 2 was not finite at step 0" in trainer.failed[1]
    assert torch.equal(students[1].layer(0).z_k, frozen)
    assert not torch.equal(students[2].layer(0).z_k, moving)


def test_a_checkpoint_of_others_is_refused() -> None:
    model = make_model("llama")
    state = make_trainer(model, make_students({1: fix(6)}), SETTINGS).state_dict()
    with pytest.raises(DistillError, match=r"holds trials \[1\], this run trains \[2\]"):
        make_trainer(model, make_students({2: fix(6)}), SETTINGS).load_state_dict(state)
    with pytest.raises(DistillError, match="checkpoint is of another plan"):
        make_trainer(model, make_students({1: fix(7)}), SETTINGS).load_state_dict(state)
    with pytest.raises(DistillError, match="at least one student"):
        make_trainer(model, {}, SETTINGS)


def test_learning_rate_rises_and_falls() -> None:
    settings = TrainSettings(100, 1.0, 1.0, 0.1, 1.0)
    factors = [settings.lr_factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0 < factors[99] < 0.01


@pytest.mark.parametrize("loss", ["l2", "output", "softmax_output"])
def test_every_loss_falls(loss: str) -> None:
    model, students = make_model("llama"), make_students({1: fix(8)}, "prf_untied")
    trainer = make_trainer(model, students, replace(SETTINGS, loss=loss, lr_features=0.02))
    batch = batches(1)[0]
    first = trainer.step(batch)[1]
    for _ in range(20):
        last = trainer.step(batch)[1]
    assert all(b < a for a, b in zip(first, last, strict=True))


def test_students_of_different_losses_are_the_same_as_alone() -> None:
    model, kinds = make_model("llama"), {1: "softmax", 2: "l2", 3: "softmax_output", 4: "softmax"}
    settings = {n: replace(SETTINGS, loss=kind, lr_features=0.01 * n) for n, kind in kinds.items()}
    together = make_students(dict.fromkeys(kinds, fix(8)))
    trainer = Layerwise(model, together, settings)
    for batch in batches(3):
        trainer.step(batch)
    for number in kinds:
        alone = make_students({number: fix(8)})
        single = Layerwise(model, alone, {number: settings[number]})
        for batch in batches(3):
            single.step(batch)
        for a, b in zip(together[number].parameters(), alone[number].parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_micro_batches_change_nothing() -> None:
    model, tokens = make_model("llama"), torch.from_numpy(some_tokens(5, 24)).long()
    whole, parts = (make_students({1: fix(8)}) for _ in range(2))
    a = make_trainer(model, whole, SETTINGS).step(tokens)[1]
    b = make_trainer(model, parts, SETTINGS, micro_batch=2).step(tokens)[1]
    assert a == pytest.approx(b, rel=1e-5)
    for x, y in zip(whole[1].parameters(), parts[1].parameters(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_a_student_that_no_longer_improves_is_finished_and_stays_so() -> None:
    model = make_model("llama")
    students = make_students({1: fix(6), 2: fix(6)})
    still = replace(SETTINGS, lr_features=1e-9, lr_weights=1e-9, patience=3)
    trainer = Layerwise(model, students, {1: still, 2: SETTINGS})
    batch = batches(1)[0]
    seen = [set(trainer.step(batch)) for _ in range(6)]
    assert seen == [{1, 2}] * 4 + [{2}] * 2
    assert trainer.finished == {1: 4}
    again = Layerwise(model, students, {1: still, 2: SETTINGS})
    again.load_state_dict(trainer.state_dict())
    assert set(again.step(batch)) == {2}
