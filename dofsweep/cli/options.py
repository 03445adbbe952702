"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dofsweep.errors import ConfigError

Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="DOFSWEEP_DB",
        help="Database URL or SQLite file. Default: dofsweep.db in DOFSWEEP_HOME.",
        show_envvar=True,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Dashboard address of a Ray cluster, http://HOST:8265. "
        "Default: the local cluster, started if there is none.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Teacher: an alias of `dofsweep models`, hub id, folder or .gguf."
    ),
]
CorpusName = Annotated[
    str | None,
    typer.Option(
        "--corpus", help="pydoc, wikipedia, a hub dataset, or a .txt, .jsonl, .parquet file."
    ),
]
Lam = Annotated[
    list[str] | None, typer.Option("--lam", help="λ, as 2^-8, 1/256 or 0.0039. Repeatable.")
]
Budget = Annotated[
    list[str] | None,
    typer.Option("--budget", "-c", help="C: mean feature dimension per layer. Repeatable."),
]
SeqLen = Annotated[str | None, typer.Option("--seq-len", help="Tokens in a sequence.")]
TrainTokens = Annotated[
    str | None,
    typer.Option("--train-tokens", help="Tokens to train on. Default: all, at most 2^20."),
]
HeldoutTokens = Annotated[
    str | None, typer.Option("--heldout-tokens", help="Tokens to compare on.")
]
FeatureHeads = Annotated[
    str | None,
    typer.Option("--feature-heads", help="kv: a map per key/value head; query: per query head."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML or TOML file of settings; options win.")
]
Preset = Annotated[str | None, typer.Option("--preset", help="Named settings: paper.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any other setting of the config. Repeatable."
    ),
]


def collect_settings(
    config: Path | None, preset: str | None, settings: list[str] | None, options: dict[str, Any]
) -> Any:
    """The config from a preset, a file, ``--set`` and options; each wins over those before it.

    Raises:
        ConfigError: see ``make_config``.
    """
    from dofsweep.config import make_config, read_config_file

    values = read_config_file(config) if config else {}
    for text in settings or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {text!r} is not NAME=VALUE, such as --set n_points=512")
        values[name.strip().replace("-", "_")] = value.strip()
    values |= {name: value for name, value in options.items() if value not in (None, [])}
    return make_config(values, preset=preset)


def print_json(value: Any) -> None:
    """A result on stdout, as JSON."""
    import json

    typer.echo(json.dumps(value, indent=1, default=str))
