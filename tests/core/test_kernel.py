"""Logits of the softmax kernel, and their shift."""

from __future__ import annotations

import pytest
import torch

from dofsweep.core.kernel import log_gram, shift_by_max, shifted_gram


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_log_gram_is_the_scaled_inner_product(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, head_dim, generator=generator)
    y = torch.randn(3, 5, head_dim, generator=generator)
    got = log_gram(x, y, 0.3)
    assert got.dtype == torch.float64
    want = 0.3 * torch.einsum("hid,hjd->hij", x.double(), y.double())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_log_gram_writes_into_the_buffer_given() -> None:
    x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0))
    buffer = torch.empty(1, 5, 5, dtype=torch.float64)
    assert log_gram(x, x, 0.5, out=buffer) is buffer
    torch.testing.assert_close(buffer, log_gram(x, x, 0.5))


def test_shift_is_per_matrix_and_returned() -> None:
    logits = torch.tensor([[[1000.0, 999.0]], [[-5.0, -7.0]]], dtype=torch.float64)
    shifted, shift = shift_by_max(logits)
    assert shift.flatten().tolist() == [1000.0, -5.0]
    torch.testing.assert_close(shifted + shift, logits)
    assert shifted.flatten().tolist() == [0.0, -1.0, 0.0, -2.0]


def test_gram_of_huge_points_is_finite() -> None:
    x = 100.0 * torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
    gram, shift = shifted_gram(x, x, 1.0)
    assert float(shift.max()) > 1e4
    assert torch.isfinite(gram).all()
    assert gram.flatten(1).amax(1).tolist() == [1.0, 1.0]
    small, low = shifted_gram(x / 1000, x / 1000, 1.0)
    torch.testing.assert_close(small * low.exp(), log_gram(x / 1000, x / 1000, 1.0).exp())
