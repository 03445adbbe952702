"""Layerwise distillation: many students from one teacher pass, nothing kept between layers.

The teacher runs forward without gradients. As each layer's queries and keys appear, the loss of
every student's features of that layer is computed and back-propagated at once, through those
features alone, and everything but the gradients is freed. Peak memory is the teacher's forward
plus one layer, however many layers there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dofsweep.core.losses import l2_loss, output_loss, softmax_losses
from dofsweep.core.window import Window
from dofsweep.distill.trainer import Trainer
from dofsweep.methods.base import near_keys
from dofsweep.teacher.seam import AttentionCall, Seam, softmax_attention

LOSSES = ("softmax", "l2", "output", "softmax_output")
"""What a layer can be trained on; see ``core.losses``. The last is the sum of two."""


class LayerwiseTrainer(Trainer):
    """Trains the features of several students, each on its own loss of every layer."""

    def backward(self, tokens: Tensor, share: float) -> dict[int, list[float]]:
        """One forward pass of the teacher, and each layer's losses as its q and k appear."""
        losses: dict[int, list[float]] = {number: [] for number in self.active}

        def attend(call: AttentionCall) -> Tensor:
            with self.timed_features(), torch.enable_grad():
                by_number, out = self._layer(call)
                torch.stack(list(by_number.values())).sum().mul(share).backward()  # type: ignore[no-untyped-call]
            for number, loss in by_number.items():
                losses[number].append(float(loss.detach()))
            return out

        with torch.no_grad(), Seam(self.teacher, attend):
            self.teacher.base_model(tokens, use_cache=False)
        return losses

    def _layer(self, call: AttentionCall) -> tuple[dict[int, Tensor], Tensor]:
        """Loss of every active student on one layer, and the teacher's attention output."""
        kinds = {n: self.settings[n].loss for n in self.active}
        rows = {n: student.rows(call) for n, student in self.active.items()}
        found = {number: call.q.new_zeros((), dtype=torch.float32) for number in rows}
        teacher = (call.q, call.k, call.scale, call.key_mask)
        by_rows = [n for n, kind in kinds.items() if kind in ("softmax", "softmax_output")]
        if by_rows:
            losses, out = softmax_losses([rows[n] for n in by_rows], *teacher, v=call.v)
            found |= dict(zip(by_rows, losses.unbind(), strict=True))
        else:
            out = softmax_attention(call)
        assert out is not None
        near: dict[Window, tuple[Tensor, Tensor] | None] = {}
        for number, kind in kinds.items():
            if kind == "l2":
                found[number] = l2_loss(rows[number], *teacher)
            elif kind in ("output", "softmax_output"):
                window = rows[number].window
                if window not in near:
                    near[window] = near_keys(call, window)
                own = self.students[number].output(rows[number], call, near[window])
                found[number] = found[number] + output_loss(own, out, call.key_mask)
        return found, out
