"""The protocol of a student: per layer, log features of queries and keys.

Shapes: B batch, H query heads, G key/value heads, F feature heads (G or H), L tokens, M features,
d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from dofsweep.core.attention import linear_attention
from dofsweep.core.plan import Plan
from dofsweep.records import ModelShape
from dofsweep.teacher.seam import AttentionCall

STATE_FLOAT_BYTES = 4
"""The recurrent state is float32 whatever the model's precision."""


class FeatureLayer(nn.Module):
    """Feature map of one attention layer.

    A student weighs key j for query i by the sum over features m of
    exp(log_q[i, m] + log_k[j, m]); all else is in the shared attention code.
    """

    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Log features of queries and keys, float32.

        Args:
            q: [B, H, L, d] as the attention sees them. k: [B, G, L, d].
        Returns:
            log_q [B, H, L, M], log_k [B, F, L, M]; minus infinity marks an absent feature.
        """
        raise NotImplementedError

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by the learning rate they take: ``features`` or ``weights``."""
        raise NotImplementedError


@dataclass(frozen=True)
class StudentMeta:
    """What rebuilds a student around its weights."""

    feature_map: str
    feature_heads: str
    dims: tuple[tuple[int, ...], ...]
    """Feature dimension of each layer and feature head."""
    scales: tuple[float, ...]
    """Attention scale of each layer."""
    n_heads: int
    n_kv_heads: int
    head_dim: int


class Student(nn.Module):
    """The feature maps of all layers of one student; the rest of the model is the teacher's."""

    def __init__(self, meta: StudentMeta, layers: list[FeatureLayer]) -> None:
        super().__init__()
        self.meta = meta
        self.layers = nn.ModuleList(layers)

    def layer(self, layer_idx: int) -> FeatureLayer:
        """Feature map of one layer."""
        found = self.layers[layer_idx]
        assert isinstance(found, FeatureLayer)
        return found

    def attend(self, call: AttentionCall) -> Tensor:
        """Linear attention in place of the teacher's softmax, [B, H, L, d] in v's dtype."""
        log_q, log_k = self.layer(call.layer_idx).log_features(call.q, call.k)
        return linear_attention(log_q, log_k, call.v, call.key_mask)


def student_state_bytes(plan: Plan, shape: ModelShape) -> int:
    """Bytes that one sequence's recurrent state takes, over all layers."""
    return STATE_FLOAT_BYTES * plan.state_floats(shape.head_dim)


def cache_bytes(shape: ModelShape, n_tokens: int, float_bytes: int) -> int:
    """Bytes of the teacher's key/value cache after n_tokens, which grows with every token."""
    return 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * n_tokens * float_bytes


def feature_head_count(shape: ModelShape, feature_heads: str) -> int:
    """F: feature heads of a layer, for "kv" or "query"."""
    return shape.n_kv_heads if feature_heads == "kv" else shape.n_heads
