"""Frozen dataclasses that cross borders: between processes, and between the stages of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ModelShape:
    """What the rest of the program must know of a teacher's architecture."""

    model_type: str
    """The transformers name of the architecture: gpt2, gpt_neox, llama, …"""
    n_layers: int
    n_heads: int
    """Query heads of a layer (H)."""
    n_kv_heads: int
    """Key/value heads of a layer (G); H when the model does not group its queries."""
    head_dim: int
    """Channels of a head (d)."""
    max_positions: int
    """Longest sequence that the model was made for, in tokens."""
    vocab_size: int

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads


@dataclass(frozen=True)
class HeadSpectrum:
    """Spectrum of one head's scaled Gram matrix Σ: the largest eigenvalues, and what is left.

    The degrees of freedom of the full matrix lie between the two bounds of
    ``dofsweep.core.spectrum.dof_bracket``; with ``tail == 0`` they coincide.
    """

    layer_idx: int
    head_idx: int
    """Index of the feature head: a query head, or a key/value head when queries are pooled."""
    values: NDArray[np.float64]
    """The r largest eigenvalues, descending, shape [r], in units of the gram scale. The last ones
    may be lower bounds that stand for several eigenvalues; the bracket holds all the same."""
    tail: float
    """tr Σ minus the sum of ``values``: what the eigenvalues left out add up to."""
    n_points: int
    """J: sampled points, the size of the Gram matrix."""
    resolved: bool = True
    """False where float64 cannot hold the spread of this spectrum (huge norms, mean or raw)."""


POLISHED = "+polish"
"""Ends the loss of a student that was polished after its own training."""


@dataclass(frozen=True)
class TrialSpec:
    """One row of the sweep: what makes this student different from its neighbours."""

    number: int
    strategy: str
    feature_map: str | None = None
    loss: str | None = None
    budget: int | None = None
    """C: mean feature dimension per layer."""
    lam: float | None = None
    """λ of the degrees of freedom; None where the plan does not depend on it."""
    seed: int | None = None
    window: int = 0
    """W: last tokens that every layer sees exactly, beside its features."""
    init: str | None = None
    """Distribution of the initial features."""
    lr_features: float | None = None
    """Peak learning rate of the feature vectors, before any polish."""
    lr_weights: float | None = None
    """Peak learning rate of the log weights of the features, before any polish."""

    @property
    def kind(self) -> str:
        """How it is trained: ``layerwise``, ``direct``, ``polish``, or ``none``."""
        if self.loss is None:
            return "none"
        if self.loss.endswith(POLISHED):
            return "polish"
        return "direct" if self.loss == "direct" else "layerwise"

    def before_polish(self) -> TrialSpec:
        """The trial whose student a polished one starts from, but for its number."""
        assert self.loss is not None
        return replace(self, loss=self.loss.removesuffix(POLISHED))


@dataclass(frozen=True)
class TrainingPoint:
    """Mean loss of one layer of one student around one step."""

    step: int
    tokens: int
    """Training tokens seen up to and including this step."""
    layer_idx: int
    loss: float


@dataclass(frozen=True)
class EvalRecord:
    """One measured figure of one trial."""

    metric: str
    value: float
    layer_idx: int | None = None
    n: int | None = None
    """Number of independent items behind the value (sequences, questions)."""
    stderr: float | None = None
    context: int | None = None
    """c where the value is over tokens with c to 2c - 1 tokens before them."""


@dataclass(frozen=True)
class TrialResult:
    """All that the evaluation of one student gives back to the driver."""

    number: int
    heldout_loss: float
    heldout_stderr: float
    n_sequences: int
    n_tokens: int
    records: tuple[EvalRecord, ...] = field(default=())
    sequence_losses: tuple[float, ...] = field(default=())
    """Held-out loss of each sequence, in the corpus's order."""
