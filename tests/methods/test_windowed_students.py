"""Students with an exact window: what they weigh, what they cost, and that files keep them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import make_model, shape, some_tokens

from dofsweep.bench.next_token import layer_errors, next_token_loss
from dofsweep.core.plan import make_plan
from dofsweep.core.window import Window, windowed_reference
from dofsweep.distill.layerwise import LayerwiseTrainer
from dofsweep.distill.trainer import TrainSettings
from dofsweep.errors import StudentError
from dofsweep.methods import (
    Student,
    build_student,
    load_student,
    save_student,
    sink_window_student,
)
from dofsweep.methods.base import equal_window, student_state_bytes
from dofsweep.teacher.seam import AttentionCall, Seam, softmax_attention

PLAN = make_plan("fix", n_layers=3, n_heads=2, budget=6, head_dim=8)


def make_student(window: Window, feature_map: str = "prf") -> Student:
    generator = torch.Generator().manual_seed(3)
    means = [torch.randn(2, 8, generator=generator) for _ in range(3)]
    return build_student(
        feature_map, PLAN, shape(4, 2), feature_heads="kv", scales=[8**-0.5] * 3,
        key_means=means, init="gaussian", seed=0, window=window,
    )  # fmt: skip


@pytest.mark.parametrize("feature_map", ["prf", "prf_untied"])
def test_far_keys_weigh_what_the_features_say(feature_map: str) -> None:
    """The mean key and the query's norm are made good, so both kinds of weights are comparable."""
    student, window = make_student(Window(5, 2), feature_map), Window(5, 2)
    calls: list[AttentionCall] = []

    def watch(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return softmax_attention(call)

    with torch.no_grad(), Seam(make_model("llama"), watch) as seam:
        seam.model(torch.from_numpy(some_tokens(2, 40)).long(), use_cache=False)
    for call in calls:
        rows = student.rows(call)
        want = windowed_reference(
            rows.log_q, rows.log_k, rows.row_shift, call.q, call.k, call.v, call.scale, window
        )
        torch.testing.assert_close(student.attend(call).double(), want, atol=1e-5, rtol=1e-4)


def test_many_features_and_a_window_are_the_teacher() -> None:
    model, tokens = make_model("llama"), some_tokens(2, 40)
    plan = make_plan("fix", n_layers=3, n_heads=2, budget=4000, head_dim=8)
    generator = torch.Generator().manual_seed(3)
    student = build_student(
        "prf", plan, shape(4, 2), feature_heads="kv", scales=[8**-0.5] * 3,
        key_means=[torch.randn(2, 8, generator=generator) / 3 for _ in range(3)],
        init="orthogonal", seed=0, window=Window(5, 1),
    )  # fmt: skip
    few = make_student(Window(5, 1))
    errors = layer_errors(model, {1: student, 2: few}, tokens)
    for many, less in ((errors[1].kl, errors[2].kl), (errors[1].output, errors[2].output)):
        assert many is not None
        assert less is not None
        assert max(many) < 0.05
        assert all(a < b for a, b in zip(many, less, strict=True))


@pytest.mark.parametrize("loss", ["softmax", "l2", "output", "softmax_output"])
def test_they_can_be_trained(loss: str) -> None:
    model, student = make_model("llama"), make_student(Window(5, 2))
    settings = TrainSettings(30, 0.02, 0.05, 0.1, 1.0, loss)
    trainer = LayerwiseTrainer(model, {1: student}, {1: settings})
    batch = torch.from_numpy(some_tokens(2, 40)).long()
    first = trainer.step(batch)[1]
    for _ in range(20):
        last = trainer.step(batch)[1]
    assert sum(last) < sum(first)


def test_sink_window_is_softmax_over_what_is_near(tmp_path: Path) -> None:
    model, tokens = make_model("llama"), some_tokens(2, 40)
    student = sink_window_student(Window(40), shape(4, 2), [8**-0.5] * 3)
    whole = next_token_loss(model, tokens, student.attend).loss
    assert whole == pytest.approx(next_token_loss(model, tokens).loss, rel=1e-5)
    path = tmp_path / "s.safetensors"
    save_student(sink_window_student(Window(3, 1), shape(4, 2), [8**-0.5] * 3), path)
    again = load_student(path)
    assert again.window == Window(3, 1)
    assert next_token_loss(model, tokens, again.attend).loss != pytest.approx(whole, rel=1e-4)


def test_a_file_keeps_the_window(tmp_path: Path) -> None:
    student = make_student(Window(5, 2))
    save_student(student, tmp_path / "s.safetensors")
    again = load_student(tmp_path / "s.safetensors")
    assert again.window == Window(5, 2)
    assert again.meta == student.meta


def test_the_baseline_takes_the_bytes_of_the_students_beside_it() -> None:
    sizes = shape(4, 2)
    state = student_state_bytes(PLAN, sizes, Window(5, 2))
    assert state == 4 * (PLAN.state_floats(8) + 3 * 2 * 2 * 8 * 7)
    window = equal_window(state, sizes, sinks=2)
    assert student_state_bytes(None, sizes, window) <= state
    bigger = Window(window.size + 1, 2)
    assert student_state_bytes(None, sizes, bigger) > state
    with pytest.raises(StudentError, match="raise budget or lower sinks"):
        equal_window(state, sizes, sinks=1000)
