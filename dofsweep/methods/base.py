"""The protocol of a student: per layer, log features of queries and keys.

Shapes: B batch, H query heads, G key/value heads, F feature heads (G or H), L tokens, M features,
d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from dofsweep.core.attention import linear_attention
from dofsweep.core.losses import StudentRows
from dofsweep.core.plan import Plan
from dofsweep.core.window import Window, near_attention, windowed_attention
from dofsweep.errors import StudentError
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

    def row_shift(self, q: Tensor) -> Tensor:
        """Log of what the features leave out of the kernel exp(s q·k) of each query.

        It cancels in linear attention; beside exact keys (``core.window``) it does not.

        Args:
            q: [B, H, L, d].
        Returns:
            [B, H, L] float32.
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
    window: int = 0
    """Last keys that every layer sees exactly, the row's own among them."""
    sinks: int = 0
    """First keys that every layer sees exactly."""


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

    @property
    def window(self) -> Window:
        """Keys that every layer sees exactly."""
        return Window(self.meta.window, self.meta.sinks)

    def rows(self, call: AttentionCall) -> StudentRows:
        """What the losses must know of one layer."""
        layer = self.layer(call.layer_idx)
        return StudentRows(
            *layer.log_features(call.q, call.k), self.window, layer.row_shift(call.q)
        )

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention in place of the teacher's softmax, [B, H, L, d] in v's dtype."""
        if not self.window:
            log_q, log_k = self.layer(call.layer_idx).log_features(call.q, call.k)
            return linear_attention(log_q, log_k, call.v, call.key_mask)
        return self.output(self.rows(call), call, near_keys(call, self.window))

    def output(
        self, rows: StudentRows, call: AttentionCall, near: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """``attend``, from what was computed before: ``rows``, and ``near_keys`` of the window."""
        if near is None:
            return linear_attention(rows.log_q, rows.log_k, call.v, call.key_mask)
        assert rows.row_shift is not None
        return windowed_attention(
            rows.log_q, rows.log_k, rows.row_shift, near, call.v, rows.window, call.key_mask
        )


def near_keys(call: AttentionCall, window: Window) -> tuple[Tensor, Tensor] | None:
    """Attention over the near keys of a window, and the log of its normaliser; None without."""
    if not window:
        return None
    return near_attention(call.q, call.k, call.v, call.scale, window, call.key_mask)


def student_state_bytes(plan: Plan | None, shape: ModelShape, window: Window | None = None) -> int:
    """Bytes that one sequence's recurrent state takes, over all layers; no features if no plan."""
    near = 0 if window is None else window.size + window.sinks
    far_floats = 0 if plan is None else plan.state_floats(shape.head_dim)
    return STATE_FLOAT_BYTES * far_floats + cache_bytes(shape, near, STATE_FLOAT_BYTES)


def equal_window(state_bytes: int, shape: ModelShape, sinks: int) -> Window:
    """The window without features that takes at most these bytes, sinks included.

    Raises:
        StudentError: the bytes do not hold the sinks and one token more.
    """
    token = cache_bytes(shape, 1, STATE_FLOAT_BYTES)
    size = state_bytes // token - sinks
    if size < 1:
        raise StudentError(
            f"sink_window: {state_bytes} bytes hold {state_bytes // token} tokens, and {sinks} of "
            "them are sinks; raise budget or lower sinks"
        )
    return Window(size, sinks)


def cache_bytes(shape: ModelShape, n_tokens: int, float_bytes: int) -> int:
    """Bytes of the teacher's key/value cache after n_tokens, which grows with every token."""
    return 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * n_tokens * float_bytes


def feature_head_count(shape: ModelShape, feature_heads: str) -> int:
    """F: feature heads of a layer, for "kv" or "query"."""
    return shape.n_kv_heads if feature_heads == "kv" else shape.n_heads
