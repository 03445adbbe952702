"""Attention sinks and a sliding window, the baseline without features (arXiv:2309.17453).

Every row sees the last W keys and the first N exactly, and nothing else. Nothing is trained.
"""

from __future__ import annotations

from torch import Tensor

from dofsweep.core.losses import StudentRows
from dofsweep.errors import StudentError
from dofsweep.methods.base import Student, StudentMeta, near_keys
from dofsweep.teacher.seam import AttentionCall

NAME = "sink_window"


class SinkWindowStudent(Student):
    """A student whose layers have no features."""

    def __init__(self, meta: StudentMeta) -> None:
        if meta.window < 1:
            raise StudentError("sink_window needs a window of at least 1")
        super().__init__(meta, [])

    def rows(self, call: AttentionCall) -> StudentRows:
        """There are none: what is not near has no weight, so a row-wise loss is infinite."""
        raise StudentError("sink_window has no features and nothing to train")

    def attend(self, call: AttentionCall) -> Tensor:
        """Softmax over the near keys, [B, H, L, d] in v's dtype."""
        near = near_keys(call, self.window)
        assert near is not None
        return near[0].to(call.v.dtype)
