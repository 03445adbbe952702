"""Load a teacher from a local folder of safetensors, and know it again by its fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from dofsweep.errors import TeacherError
from dofsweep.records import ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from dofsweep.teacher.resolve import TeacherRef

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
VOLATILE_KEYS = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"}
"""Keys of a config that may change without changing the function that the model computes."""


def load_config(folder: Path) -> PretrainedConfig:
    """Config of a model folder; code that it names is never run.

    Raises:
        TeacherError: it is not valid, or of an architecture that transformers does not know.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as err:
        raise TeacherError(
            f"{folder}/config.json cannot be used: {_first_line(err)}; check the file, or whether "
            "this transformers is new enough for the model"
        ) from err


def shape_of(config: PretrainedConfig) -> ModelShape:
    """What the rest of the program must know of an architecture.

    Raises:
        TeacherError: it is not a causal decoder with one kind of softmax attention in every layer.
    """
    config = config.get_text_config(decoder=True)
    kind = str(config.model_type)
    if reason := _unfit(config, kind):
        raise TeacherError(
            f"a model of type {kind} cannot be a teacher: {reason}. Choose a decoder with softmax "
            "attention in every layer, such as GPT-2, GPT-NeoX (Pythia), Llama or Qwen"
        )
    n_heads = config.num_attention_heads
    return ModelShape(
        model_type=kind,
        n_layers=config.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // n_heads,
        max_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )


def _unfit(config: PretrainedConfig, kind: str) -> str | None:
    """Why a config is not that of a teacher, or None."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder"
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "transformers has no causal language model of this type"
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return "its attention looks ahead"
    if getattr(config, "kv_lora_rank", None):
        return "its keys and values are latent (MLA)"
    other = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if other:
        return f"some of its layers are of another kind ({', '.join(sorted(other))})"
    for key in ("num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
        try:
            value = getattr(config, key, None)
        except RuntimeError as err:  # transformers says so where layers differ from each other
            return _first_line(err)
        if not isinstance(value, int) or value < 1:
            return f"its config gives {key} as {value!r}, not one whole number"
    return None


def count_parameters(config: PretrainedConfig) -> int:
    """Parameters of the model, tied ones counted once; no memory is taken for them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def load_teacher(
    ref: TeacherRef, *, device: str = "cpu", dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in evaluation mode without gradients, and its tokenizer; no network is used.

    Args:
        device: as torch names it.
        dtype: of the weights: float32, bfloat16 or float16.
    Raises:
        TeacherError: a file is missing or damaged, or weights do not fit the config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            ref.path,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as err:
        raise TeacherError(
            f"teacher {ref.name} cannot be loaded from {ref.path}: {_first_line(err)}; copy or "
            "download it again"
        ) from err
    # transformers fills what is missing with random numbers and goes on.
    missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if missing:
        raise TeacherError(
            f"the weights in {ref.path} lack {len(missing)} of the model's tensors, or have them "
            f"in other shapes: {', '.join(missing[:3])}; copy or download it again"
        )
    return model.to(device).eval().requires_grad_(False), load_tokenizer(ref)


def load_tokenizer(ref: TeacherRef) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the weights.

    Raises:
        TeacherError: there is none, or it needs code that is not part of transformers.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            ref.path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as err:
        raise TeacherError(
            f"the tokenizer in {ref.path} cannot be loaded: {_first_line(err)}; save the model's "
            "tokenizer into that folder with tokenizer.save_pretrained"
        ) from err


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those its index names, or all.

    Raises:
        TeacherError: a file of the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as err:
        raise TeacherError(f"{index} is damaged; copy or download the model again") from err
    if absent := sorted(name for name in names if not (folder / name).exists()):
        raise TeacherError(
            f"{folder} lacks {len(absent)} of {len(names)} weight files, first {absent[0]}; "
            "copy or download the model again"
        )
    return sorted(folder / name for name in names)


def fingerprint(folder: Path, *, home: Path | None = None) -> str:
    """SHA-256 of what the model computes: its config and its weights, wherever they lie.

    Args:
        folder: config.json and safetensors files.
        home: where digests of files are remembered by path, size and time of change, so that
            gigabytes are read once only.
    """
    config = json.loads((folder / "config.json").read_bytes())
    stable = {key: value for key, value in config.items() if key not in VOLATILE_KEYS}
    total = hashlib.sha256(json.dumps(stable, sort_keys=True).encode())
    cache = None if home is None else home / "fingerprints.json"
    known = _read_digests(cache)
    fresh: dict[str, str] = {}
    for path in weight_files(folder):
        real = path.resolve()
        status = real.stat()
        key = f"{real}:{status.st_size}:{status.st_mtime_ns}"
        if key not in known:
            with path.open("rb") as file:
                known[key] = fresh[key] = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name}:{known[key]}\n".encode())
    if cache is not None and fresh:
        _write_digests(cache, _read_digests(cache) | fresh)
    return total.hexdigest()


def _read_digests(cache: Path | None) -> dict[str, str]:
    # A cache that is absent or damaged only costs the time to fill it again.
    with contextlib.suppress(OSError, ValueError):
        if cache is not None and isinstance(found := json.loads(cache.read_bytes()), dict):
            return found
    return {}


def _write_digests(cache: Path, digests: dict[str, str]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=cache.parent, prefix=".fingerprints-")
    with os.fdopen(handle, "w") as file:
        json.dump(digests, file, indent=0)
    os.replace(part, cache)


def _first_line(err: Any) -> str:
    """Libraries explain themselves over many lines; the first one says what is wrong."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(err).__name__
