"""An exact window beside linear attention, against every pair written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dofsweep.core.attention import linear_attention, linear_attention_sums
from dofsweep.core.window import Window, near_attention, windowed_attention, windowed_reference
from dofsweep.errors import StudentError

SCALE = 0.35


def make(
    L: int, M: int = 9, d: int = 8, heads: tuple[int, int, int] = (4, 2, 2), batch: int = 2
) -> dict[str, Tensor]:
    """float64 features and row shifts, and q, k, v."""
    gen = torch.Generator().manual_seed(L)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    H, K, G = heads
    return {
        "log_q": draw(batch, H, L, M),
        "log_k": draw(batch, K, L, M),
        "row_shift": draw(batch, H, L),
        "q": draw(batch, H, L, d),
        "k": draw(batch, G, L, d),
        "v": draw(batch, G, L, d),
    }


def masks(L: int) -> Tensor:
    mask = torch.ones(2, L, dtype=torch.bool)
    mask[0, : L // 3] = False
    mask[1, L - L // 4 :] = False
    return mask


def fast(x: dict[str, Tensor], window: Window, mask: Tensor | None = None) -> Tensor:
    near = near_attention(x["q"], x["k"], x["v"], SCALE, window, mask)
    features = x["log_q"], x["log_k"], x["row_shift"]
    return windowed_attention(*features, near, x["v"], window, mask)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("L", "window", "sinks"),
    [(1, 1, 0), (63, 1, 1), (63, 7, 3), (130, 64, 4), (257, 33, 4), (20, 30, 2), (20, 3, 30)],
)
def test_it_is_the_definition(L: int, window: int, sinks: int, padded: bool) -> None:
    x, mask = make(L), masks(L) if padded else None
    shape = Window(window, sinks)
    inputs = {name: t.clone().requires_grad_() for name, t in x.items()}
    exact = {name: t.clone().requires_grad_() for name, t in x.items()}
    got = fast(inputs, shape, mask)
    want = windowed_reference(**exact, scale=SCALE, window=shape, key_mask=mask)
    weight = torch.randn_like(want)
    if mask is not None:
        weight = weight * mask[:, None, :, None]
    torch.testing.assert_close(got * (weight != 0), want * (weight != 0), rtol=0, atol=1e-10)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    for name, t in inputs.items():
        grad = torch.zeros_like(t) if t.grad is None else t.grad
        torch.testing.assert_close(grad, exact[name].grad, rtol=0, atol=1e-9)


def test_float32_is_near_the_definition() -> None:
    x = make(200, M=33)
    got = fast({name: t.float() for name, t in x.items()}, Window(16, 2))
    want = windowed_reference(**x, scale=SCALE, window=Window(16, 2))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_a_window_as_long_as_the_text_is_softmax() -> None:
    x = make(40)
    want = torch.nn.functional.scaled_dot_product_attention(
        x["q"], x["k"], x["v"], is_causal=True, scale=SCALE, enable_gqa=True
    )
    torch.testing.assert_close(fast(x, Window(40)), want)


def test_a_later_key_moves_no_bit_of_an_earlier_row() -> None:
    x = {name: t.float() for name, t in make(120).items()}
    before = fast(x, Window(16, 2))
    for name in ("k", "v", "log_k", "q", "log_q", "row_shift"):
        x[name][:, :, 70:] += 100.0
    assert torch.equal(fast(x, Window(16, 2))[:, :, :70], before[:, :, :70])


def test_log_row_sums() -> None:
    x = make(100)
    keys = x["log_k"].repeat_interleave(2, 1)
    logits = (x["log_q"][:, :, :, None] + keys[:, :, None]).logsumexp(-1)
    want = logits.masked_fill(~torch.ones(100, 100, dtype=torch.bool).tril(), -torch.inf)
    out, log_sum = linear_attention_sums(x["log_q"], x["log_k"], x["v"])
    torch.testing.assert_close(log_sum, want.logsumexp(-1))
    torch.testing.assert_close(out, linear_attention(x["log_q"], x["log_k"], x["v"]))
    small = [t[:, :, :9].clone().requires_grad_() for t in (x["log_q"], x["log_k"], x["v"])]
    assert torch.autograd.gradcheck(linear_attention_sums, small)


@pytest.mark.parametrize(("size", "sinks"), [(-1, 0), (4, -1), (0, 2)])
def test_a_window_that_makes_no_sense_is_refused(size: int, sinks: int) -> None:
    with pytest.raises(StudentError, match="need a window"):
        Window(size, sinks)
