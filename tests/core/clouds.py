"""Points like those of trained heads, for the tests of spectra."""

from __future__ import annotations

import torch
from torch import Tensor

LAMS = [2.0**-k for k in range(2, 11)]


def cloud(
    n_heads: int, n_points: int, head_dim: int, *, seed: int = 0, size: float = 1.0
) -> Tensor:
    """Gaussian points whose channels fall off like 1/channel, as that of trained heads does."""
    generator = torch.Generator().manual_seed(seed)
    fall = 1.0 / torch.arange(1, head_dim + 1).float()
    return 2 * size * fall * torch.randn(n_heads, n_points, head_dim, generator=generator)
