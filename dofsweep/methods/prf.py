"""Positive random features, learned (arXiv:2507.03340; the features of arXiv:2009.14794).

φ(x; z) = exp(√s z·x − s‖x‖²/2) with z ~ N(0, I) has E[φ(q) φ(k)] = exp(s q·k). Learned are the
vectors z and a weight α > 0 of each feature, kept as log α. The factor exp(−s‖q‖²/2) of the query
cancels between numerator and denominator and is left out.

Shapes: B batch, H query heads, G key/value heads, F feature heads (G or H), L tokens, M features,
d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dofsweep.core.features import gaussian_features, orthogonal_features, prf_log_features
from dofsweep.methods.base import FeatureLayer

INITIALISATIONS = {"gaussian": gaussian_features, "orthogonal": orthogonal_features}


class PrfLayer(FeatureLayer):
    """Positive random features of one layer.

    Args:
        dims: feature dimension of each feature head, length F.
        scale: attention scale s of the layer.
        key_mean: [G, d] subtracted from the keys (zeros for the paper's features).
        n_heads: H.
        untied: queries get maps of their own, one per query head; they start as their group's.
        init: gaussian or orthogonal.
    """

    z_k: nn.Parameter
    key_mean: Tensor
    absent: Tensor

    def __init__(
        self,
        dims: tuple[int, ...],
        *,
        scale: float,
        key_mean: Tensor,
        n_heads: int,
        untied: bool,
        init: str,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        n_feature_heads, n_kv, head_dim = len(dims), *key_mean.shape
        self.scale, self.n_heads, self.n_kv = scale, n_heads, n_kv
        self.group = n_heads // n_feature_heads
        width = max(dims)
        z = INITIALISATIONS[init](n_feature_heads, width, head_dim, generator=generator)
        self.z_k = nn.Parameter(z)
        self.z_q = nn.Parameter(z.repeat_interleave(self.group, dim=0)) if untied else None
        weight_heads = n_heads if untied else n_feature_heads
        # α = 1/M: then the sum over features estimates the kernel itself.
        log_dims = torch.tensor(dims).log().repeat_interleave(weight_heads // n_feature_heads)
        self.log_weight = nn.Parameter(-log_dims[:, None].expand(-1, width).clone())
        self.register_buffer("key_mean", key_mean.clone())
        present = torch.arange(width) < torch.tensor(dims)[:, None]
        absent = torch.zeros(n_feature_heads, width).masked_fill(~present, float("-inf"))
        self.register_buffer("absent", absent, persistent=False)
        self.ragged = len(set(dims)) > 1

    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Log features [B, H, L, M] and [B, F, L, M], float32; see FeatureLayer."""
        q, k = q.float(), k.float() - self.key_mean[:, None]
        if self.z_k.shape[0] != self.n_kv:  # a map per query head
            k = k.repeat_interleave(self.n_heads // self.n_kv, dim=1)
        log_k = prf_log_features(k, self.z_k, self.scale)
        if self.ragged:
            log_k = log_k + self.absent[:, None]
        if self.z_q is not None:
            log_q = prf_log_features(q, self.z_q, self.scale, self.log_weight, half_norm=False)
            return log_q, log_k
        batch, n_heads, length, dim = q.shape
        pooled = q.reshape(batch, -1, self.group * length, dim)  # queries of a group side by side
        log_q = prf_log_features(pooled, self.z_k, self.scale, self.log_weight, half_norm=False)
        return log_q.view(batch, n_heads, length, -1), log_k

    def row_shift(self, q: Tensor) -> Tensor:
        """s q·mean(k) - s‖q‖²/2, [B, H, L]: the mean key was taken off, and the norm left out."""
        q = q.float()
        mean = self.key_mean.repeat_interleave(self.n_heads // self.n_kv, dim=0)
        return self.scale * ((q * mean[:, None]).sum(-1) - q.square().sum(-1) / 2)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """z under ``features``, log α under ``weights``."""
        features = [self.z_k] + ([self.z_q] if self.z_q is not None else [])
        return {"features": features, "weights": [self.log_weight]}
