"""SweepConfig: every setting of a sweep and every default, once.

The command line, the actors and the database all read their defaults from here. A config comes
from options, from a YAML or TOML file, or from both (options win), and is stored whole with the
sweep, so that every row can be traced to it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dofsweep.errors import ConfigError
from dofsweep.records import POLISHED, TrialSpec

MAX_CONFIG_BYTES = 1_000_000


def parse_lam(value: object) -> object:
    """λ as people write it: ``0.0039``, ``1/256`` or ``2^-8`` (also ``2**-8``)."""
    if not isinstance(value, str):
        return value
    text = value.strip().replace("**", "^")
    number = r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
    if power := re.fullmatch(rf"({number})\^\(?({number})\)?", text):
        base, exponent = float(power[1]), float(power[2])
        try:
            result = base**exponent
        except (OverflowError, ZeroDivisionError) as err:
            raise ValueError(f"{value!r} is out of range") from err
        if isinstance(result, complex):
            raise ValueError(f"{value!r} is not a real number")
        return result
    if ratio := re.fullmatch(rf"({number})/({number})", text):
        if float(ratio[2]) == 0:
            raise ValueError(f"{value!r} divides by zero")
        return float(ratio[1]) / float(ratio[2])
    return value


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, (list, tuple)) else [value]


Strategy = Literal["fix", "dof", "dof_clip", "sink_window"]
FeatureMap = Literal["prf", "prf_untied"]
Loss = Literal["softmax", "l2", "output", "softmax_output", "direct"]
Lam = Annotated[float, BeforeValidator(parse_lam), Field(gt=0, le=1e6, allow_inf_nan=False)]
Budget = Annotated[int, Field(ge=1, le=65536)]
WindowSize = Annotated[int, Field(ge=0, le=1_048_576)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Init = Literal["gaussian", "orthogonal"]
Rate = Annotated[float, Field(gt=0, le=10)]


class SweepConfig(BaseModel):
    """A sweep: one teacher, one corpus, and the product of the settings that are lists."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, max_length=4096)
    """Teacher: an alias of `dofsweep models`, a hub id, a local folder, or a .gguf file."""
    corpus: str = Field(default="wikipedia", min_length=1, max_length=4096)
    """Text: `pydoc` (built in), `wikipedia`, a hub dataset, or a .txt, .jsonl or .parquet file."""
    heldout_corpus: str | None = Field(default=None, min_length=1, max_length=4096)
    """Take the held-out text from here; by default it is split from the corpus by document."""
    text_field: str | None = None
    """Field of a corpus row that holds the text; by default text, page or content."""
    name: str | None = Field(default=None, min_length=1, max_length=100, pattern=r"^[\w.\- ]+$")
    """A name for people; the id of the sweep is made by the program."""

    strategy: Annotated[list[Strategy], BeforeValidator(_as_list)] = Field(
        default=["fix", "dof", "dof_clip"], min_length=1
    )
    """How feature dimensions are given to layers: fix, dof, dof_clip. sink_window is the baseline
    without features, whose window costs the same bytes (arXiv:2309.17453)."""
    feature_map: Annotated[list[FeatureMap], BeforeValidator(_as_list)] = Field(
        default=["prf"], min_length=1
    )
    """prf: one map for queries and keys, as in the paper; prf_untied: one for each."""
    loss: Annotated[list[Loss], BeforeValidator(_as_list)] = Field(
        default=["softmax"], min_length=1
    )
    """What distillation minimises, layer by layer. softmax: cross-entropy of the attention rows;
    l2: squared error of the kernel rows; output: squared error of the attention output;
    softmax_output: the sum of the first and the third. direct is the next-token loss of the whole
    student, which needs a pass of its own for every student."""
    budget: Annotated[list[Budget], BeforeValidator(_as_list)] = Field(default=[64], min_length=1)
    """C: mean feature dimension per layer."""
    window: Annotated[list[WindowSize], BeforeValidator(_as_list)] = Field(
        default=[0], min_length=1
    )
    """W: last tokens that every layer sees exactly, beside features for the rest; 0 for none."""
    sinks: int = Field(default=4, ge=0, le=65536)
    """First tokens that are seen exactly as well, where there is a window."""
    lam: Annotated[list[Lam], BeforeValidator(_as_list)] = Field(default=[2.0**-8], min_length=1)
    """λ of the degrees of freedom, in the units of the scaled Gram matrix (see gram_scale)."""
    seed: Annotated[list[Seed], BeforeValidator(_as_list)] = Field(default=[0], min_length=1)
    """Seed of a student's initial features. Capture and data order use the first one."""

    seq_len: int = Field(default=512, ge=2, le=1_048_576)
    """Tokens in a training, capture and held-out sequence."""
    train_tokens: int | None = Field(default=None, ge=2, le=10**12)
    """Tokens that every student is trained on, once. Default: the whole corpus, at most 2^20."""
    heldout_tokens: int = Field(default=32_768, ge=2, le=10**10)
    """Tokens on which teacher and students are compared."""

    feature_heads: Literal["kv", "query"] = "kv"
    """One feature map, and so one state, per key/value head; or per query head (the paper)."""
    center_keys: bool = True
    """Subtract each head's mean key, which softmax cannot see and random features can."""
    untrained: bool = True
    """Also evaluate untrained random features at every budget."""

    n_points: int = Field(default=1024, ge=8, le=65536)
    """J: points sampled from each head's queries and keys, half of each."""
    capture_sequences: int = Field(default=8, ge=1, le=65536)
    """T: training sequences from which those points are drawn."""
    gram_scale: Literal["trace", "mean", "raw"] = "trace"
    """Divisor of the Gram matrix: its trace, J, or 1."""
    kernel: Literal["exp", "softmax"] = "exp"
    """Kernel whose spectrum is taken."""
    min_dim: int = Field(default=1, ge=1, le=65536)
    """Least feature dimension of a layer."""
    multiple_of: int = Field(default=1, ge=1, le=1024)
    """Feature dimensions are multiples of this."""
    rounding: Literal["largest_remainder", "paper"] = "largest_remainder"
    """How dimensions become whole numbers; `paper` rounds each alone and may miss the budget."""

    init: Annotated[list[Init], BeforeValidator(_as_list)] = Field(
        default=["orthogonal"], min_length=1
    )
    """Distribution of the initial features: orthogonal (in blocks of d vectors) or gaussian."""
    batch_size: int = Field(default=4, ge=1, le=65536)
    """Sequences in one optimizer step, over all workers."""
    lr_features: Annotated[list[Rate], BeforeValidator(_as_list)] = Field(
        default=[0.06], min_length=1
    )
    """Peak learning rate of the feature vectors z."""
    lr_weights: Annotated[list[Rate], BeforeValidator(_as_list)] = Field(
        default=[0.1], min_length=1
    )
    """Peak learning rate of the log weights of the features."""
    lr_end_to_end: Rate = 0.02
    """Peak learning rate of both with the direct loss and in the polish."""
    polish_steps: int = Field(default=0, ge=0, le=10**9)
    """Steps that go on from every trained student, towards the teacher's next-token distribution;
    each polished student is a row of its own."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Part of the steps over which the learning rate rises; then it falls as a cosine."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of one layer's gradient."""
    micro_batch: int | None = Field(default=None, ge=1, le=65536)
    """Sequences that a worker sends through the teacher at once; by default all of its batch."""
    patience: int | None = Field(default=None, ge=1)
    """Steps without a better loss after which a student is done; by default none is done early."""
    checkpoint_steps: int = Field(default=50, ge=1)
    """Optimizer steps between checkpoints."""

    workers: int | None = Field(default=None, ge=1, le=65536)
    """Training workers; by default one per GPU of the cluster, or one on CPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the teacher. Features and states are float32 always."""
    storage_path: str | None = None
    """Where captures, checkpoints and students go; every node must see it. Default: the home."""

    def trials(self) -> list[TrialSpec]:
        """The sweep spelt out: teacher, untrained students, then the product of the lists.

        The plan of `fix` does not depend on λ, so it is one trial for all λ; `sink_window` depends
        on budget and window alone, whose bytes it takes.
        """
        found = [TrialSpec(0, "teacher")]
        if self.untrained:
            shared: dict[str, Any] = {"seed": self.seed[0], "init": self.init[0]}
            found += [
                TrialSpec(0, "untrained", budget=budget, feature_map=name, window=window, **shared)
                for name, budget, window in product(self.feature_map, self.budget, self.window)
            ]
        axes: dict[str, list[Any]] = {
            "feature_map": self.feature_map, "loss": self.loss, "budget": self.budget,
            "window": self.window, "lam": self.lam, "init": self.init,
            "lr_features": self.lr_features, "lr_weights": self.lr_weights, "seed": self.seed,
            "strategy": self.strategy,
        }  # fmt: skip
        found += [
            self._trial(dict(zip(axes, values, strict=True))) for values in product(*axes.values())
        ]
        rows = list(dict.fromkeys(found))
        if self.polish_steps:
            rows += [replace(row, loss=f"{row.loss}{POLISHED}") for row in rows if row.loss]
        return [replace(row, number=i) for i, row in enumerate(rows)]

    def _trial(self, values: dict[str, Any]) -> TrialSpec:
        """A trial without the settings that make no difference to it."""
        if values["strategy"] == "sink_window":
            values = {name: values[name] for name in ("strategy", "budget", "window")}
            return TrialSpec(0, feature_map="sink_window", **values)
        if values["strategy"] == "fix":
            values["lam"] = None
        if values["loss"] == "direct":
            values["lr_features"] = values["lr_weights"] = self.lr_end_to_end
        return TrialSpec(0, **values)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "feature_map": ["prf"],
        "loss": ["softmax"],
        "feature_heads": "query",
        "center_keys": False,
        "init": ["gaussian"],
        "rounding": "paper",
        "corpus": "wikipedia",
        "seq_len": 1024,
        "batch_size": 128,
        "lr_features": [0.02],
        "lr_weights": [0.2],
    },
}
"""Named sets of settings. `paper` is arXiv:2507.03340 as far as it states them."""


def nearest(name: str, known: list[str]) -> str:
    """Text that offers the nearest of the known names, or all when none is near."""
    found = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if found:
        return "did you mean " + " or ".join(repr(word) for word in found) + "?"
    return "known: " + ", ".join(known)


def make_config(values: dict[str, Any], *, preset: str | None = None) -> SweepConfig:
    """Check settings and make a config of them.

    Args:
        values: settings by name; they win over the preset.
        preset: a name in PRESETS.
    Raises:
        ConfigError: an unknown setting or a value out of range; one line a fault.
    """
    base: dict[str, Any] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise ConfigError(f"unknown preset {preset!r}: {nearest(preset, list(PRESETS))}")
        base = dict(PRESETS[preset])
    try:
        return SweepConfig(**(base | values))
    except ValidationError as err:
        raise ConfigError(_explain(err)) from None


def _explain(err: ValidationError) -> str:
    fields = list(SweepConfig.model_fields)
    lines: dict[str, None] = {}
    for item in err.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else "config"
        if item["type"] == "extra_forbidden":
            lines[f"unknown setting {name!r}: {nearest(name, fields)}"] = None
        elif item["type"] == "missing":
            lines[f"{name} is missing: pass --{name.replace('_', '-')} or set it in the file"] = (
                None
            )
        else:
            shown = repr(item["input"])
            shown = shown if len(shown) <= 80 else shown[:77] + "…"
            rule = item["msg"].removeprefix("Value error, ")
            lines[f"{name}={shown} is not allowed: {rule[0].lower() + rule[1:]}"] = None
    return "; ".join(lines)


def read_config_file(path: Path) -> dict[str, Any]:
    """Settings from a YAML (.yaml, .yml) or TOML (.toml) file.

    Raises:
        ConfigError: the file is missing, too large, of another kind, or cannot be parsed.
    """
    if path.suffix not in {".yaml", ".yml", ".toml"}:
        raise ConfigError(f"{path}: a config file ends in .yaml, .yml or .toml")
    try:
        raw = path.read_bytes()
    except OSError as err:
        raise ConfigError(f"cannot read config {path}: {err.strerror or err}") from err
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is {len(raw)} bytes; a config has at most {MAX_CONFIG_BYTES}")
    try:
        text = raw.decode()
        values = tomllib.loads(text) if path.suffix == ".toml" else _load_yaml(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError, RecursionError) as err:
        raise ConfigError(f"{path} cannot be parsed: {' '.join(str(err).split())}") from err
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must hold settings by name, such as `budget: 64`")
    return values


def _load_yaml(text: str) -> object:
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """Without aliases, which can make a small file expand without end."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("YAML aliases are not supported")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader=PlainLoader)
    except yaml.YAMLError as err:
        raise ValueError(str(err)) from err
