"""The direct loss and the polish: plain autograd is their reference."""

from __future__ import annotations

import io
import weakref
from typing import Any

import pytest
import torch
from models import make_model, shape, some_tokens
from torch import Tensor, nn

from dofsweep.bench.next_token import next_token_loss
from dofsweep.core.plan import make_plan
from dofsweep.core.window import Window
from dofsweep.distill import end_to_end
from dofsweep.distill.end_to_end import DirectTrainer, EndToEndTrainer, PolishTrainer
from dofsweep.distill.trainer import TrainSettings
from dofsweep.errors import TeacherError
from dofsweep.methods import Student, build_student
from dofsweep.teacher.seam import AttentionCall, Seam, softmax_attention

SETTINGS = TrainSettings(30, 0.05, 0.1, 0.1, 1.0, "direct")
TRAINERS = (DirectTrainer, PolishTrainer)
HEADS = {"llama": (4, 2), "gpt2": (4, 4), "neox": (4, 4)}


def make_student(kind: str = "llama", seed: int = 0, window: int = 0) -> Student:
    heads = HEADS[kind]
    plan = make_plan("fix", n_layers=3, n_heads=heads[1], budget=6, head_dim=8)
    return build_student(
        "prf_untied", plan, shape(*heads), feature_heads="kv", scales=[8**-0.5] * 3,
        key_means=[torch.zeros(heads[1], 8)] * 3, init="gaussian", seed=seed,
        window=Window(window, 1) if window else None,
    )  # fmt: skip


def batches(n: int) -> list[Tensor]:
    return [torch.from_numpy(some_tokens(2, 24, seed)).long() for seed in range(n)]


def plain_loss(kind: type[EndToEndTrainer], model, student: Student, tokens: Tensor) -> Tensor:
    """With every activation kept."""
    with torch.no_grad(), Seam(model, softmax_attention):
        target = model(tokens, use_cache=False).logits.log_softmax(-1)
    with Seam(model, student.attend):
        logits = model(tokens, use_cache=False).logits.log_softmax(-1)
    if kind is PolishTrainer:
        return (target.exp() * (target - logits)).sum(-1).mean()
    return -logits[:, :-1].gather(-1, tokens[:, 1:, None]).mean()


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("window", [0, 5])
def test_loss_and_gradient_are_those_of_plain_autograd(
    kind: type[EndToEndTrainer], family: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = make_model(family).requires_grad_(False), batches(1)[0]
    monkeypatch.setattr(end_to_end, "LOGIT_FLOATS", 7 * model.config.vocab_size)
    student = make_student(family, window=window)
    want = plain_loss(kind, model, student, tokens)
    want.backward()
    wanted = [p.grad.clone() for p in student.parameters()]
    student.zero_grad()
    trainer = kind(model, {1: student}, {1: SETTINGS})
    losses = trainer.backward(tokens, 0.5)
    assert losses == {1: [pytest.approx(float(want.detach()), rel=1e-5)]}
    for p, ref in zip(student.parameters(), wanted, strict=True):
        torch.testing.assert_close(2 * p.grad, ref, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("kind", TRAINERS)
def test_training_lowers_the_loss_and_resumes_to_the_bit(kind: type[EndToEndTrainer]) -> None:
    model, steps = make_model("llama").requires_grad_(False), batches(8)
    student = make_student()
    trainer = kind(model, {1: student}, {1: SETTINGS})
    first = trainer.step(steps[0])[1]
    for batch in steps[1:]:
        trainer.step(batch)
    assert trainer.backward(steps[0], 1.0)[1] < first

    half = kind(model, {1: make_student()}, {1: SETTINGS})
    for batch in steps[:3]:
        half.step(batch)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    again = make_student()
    other = kind(model, {1: again}, {1: SETTINGS})
    other.load_state_dict(torch.load(file, weights_only=True))
    for batch in steps[3:]:
        other.step(batch)
    for a, b in zip(student.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_direct_loss_is_the_next_token_loss() -> None:
    model, tokens = make_model("neox").requires_grad_(False), some_tokens(2, 24)
    student = make_student("neox")
    trainer = DirectTrainer(model, {1: student}, {1: SETTINGS})
    loss = trainer.backward(torch.from_numpy(tokens).long(), 1.0)[1][0]
    assert loss == pytest.approx(next_token_loss(model, tokens, student.attend).loss, rel=1e-5)


def test_a_student_that_is_its_teacher_has_nothing_to_polish() -> None:
    class Same(Student):
        def attend(self, call: AttentionCall) -> Tensor:
            still = next(self.parameters()).sum() * 0
            return softmax_attention(call) + still

    model, fresh = make_model("llama").requires_grad_(False), make_student()
    student = Same(fresh.meta, [fresh.layer(i) for i in range(3)])
    trainer = PolishTrainer(model, {1: student}, {1: SETTINGS})
    assert abs(trainer.backward(batches(1)[0], 1.0)[1][0]) < 1e-6


def test_students_together_are_the_same_as_alone_and_one_that_breaks_stops_alone() -> None:
    model = make_model("llama").requires_grad_(False)
    students = {n: make_student(seed=n) for n in (1, 2)}
    with torch.no_grad():
        students[1].layer(1).log_weight[0, 0] = float("nan")
    trainer = DirectTrainer(model, students, dict.fromkeys(students, SETTINGS))
    for batch in batches(2):
        trainer.step(batch)
    assert set(trainer.failed) == {1}
    alone = make_student(seed=2)
    single = DirectTrainer(model, {2: alone}, {2: SETTINGS})
    for batch in batches(2):
        single.step(batch)
    for a, b in zip(students[2].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Ledger:
    """Counts the floats saved for the backward pass that are alive at the same time."""

    def __init__(self, ignore: set[int]) -> None:
        self.ignore, self.now, self.most = ignore, 0, 0

    def keep(self, tensor: Tensor) -> Any:
        if tensor.data_ptr() in self.ignore:
            return tensor
        held = [tensor]
        self.now += tensor.numel()
        self.most = max(self.most, self.now)
        box = Box(held)
        weakref.finalize(box, self.release, tensor.numel())
        return box

    def release(self, floats: int) -> None:
        self.now -= floats


class Box(list[Tensor]):
    """A list that can be watched."""


@pytest.mark.parametrize("kind", TRAINERS)
def test_neither_layers_nor_logits_are_kept_whole(
    kind: type[EndToEndTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without either way of saving memory the bounds below are passed several times over."""
    model, tokens = make_model("llama").requires_grad_(False), batches(1)[0]
    monkeypatch.setattr(end_to_end, "LOGIT_FLOATS", 4 * model.config.vocab_size)
    ledger = Ledger({p.data_ptr() for p in model.parameters()})
    trainer = kind(model, {1: make_student()}, {1: SETTINGS})
    with torch.autograd.graph.saved_tensors_hooks(
        ledger.keep, lambda x: x[0] if isinstance(x, Box) else x
    ):
        trainer.backward(tokens, 1.0)
    layer_inputs = 3 * tokens.numel() * model.config.hidden_size
    assert layer_inputs <= ledger.most < 3 * layer_inputs


def test_the_model_is_as_before_after_an_error() -> None:
    model = make_model("llama").requires_grad_(False)
    with pytest.raises(ValueError, match="stop"), end_to_end.checkpointed_layers(model):
        raise ValueError("stop")
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = make_model("llama").requires_grad_(False)
    end_to_end.check_logits(model)

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * x

    inner = model.forward

    def scaled(*args, **kwargs):
        out = inner(*args, **kwargs)
        out.logits = Scaled()(out.logits)
        return out

    model.forward = scaled
    with pytest.raises(TeacherError, match="layerwise loss"):
        end_to_end.check_logits(model)
