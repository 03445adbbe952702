"""Before a sweep runs: the checks, the corpus, and what its results are keyed by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dofsweep.config import SweepConfig
from dofsweep.core.plan import Plan, make_plan
from dofsweep.core.spectrum import dof_table
from dofsweep.core.window import Window
from dofsweep.corpus.cache import CachedCorpus, cached_corpus
from dofsweep.corpus.load import check_corpus, is_remote
from dofsweep.errors import ConfigError
from dofsweep.methods import Student, build_student, sink_window_student
from dofsweep.methods.base import equal_window, feature_head_count, student_state_bytes
from dofsweep.records import HeadSpectrum, TrialSpec
from dofsweep.teacher.capture import Capture
from dofsweep.teacher.load import load_tokenizer
from dofsweep.teacher.resolve import TeacherRef, resolve_teacher

LAM_MIN = 2.0**-10
"""Spectra are certified from here up, or from the smallest λ asked for."""


def storage_of(config: SweepConfig, home: Path) -> Path:
    """Folder of captures, checkpoints and students."""
    return Path(config.storage_path).expanduser() if config.storage_path else home / "storage"


def preflight(config: SweepConfig, home: Path) -> TeacherRef:
    """Check all that can be checked before any cluster time is spent.

    Returns:
        The teacher, found and on this machine.
    Raises:
        DofsweepError: of the kind of the fault, saying what to do.
    """
    ref = resolve_teacher(config.model, home=home)
    if config.seq_len > ref.shape.max_positions:
        raise ConfigError(
            f"seq_len={config.seq_len} but {ref.name} has {ref.shape.max_positions} positions; "
            f"use --seq-len {ref.shape.max_positions} or less"
        )
    if config.heldout_tokens < config.seq_len:
        raise ConfigError(
            f"heldout_tokens={config.heldout_tokens} is less than one sequence of "
            f"{config.seq_len}; raise heldout_tokens or lower seq_len"
        )
    if config.workers and config.batch_size % config.workers:
        raise ConfigError(
            f"batch_size={config.batch_size} cannot be shared by {config.workers} workers; "
            "make it a multiple of workers"
        )
    for trial in config.trials():
        if trial.strategy in {"fix", "untrained"}:
            plan_for(config, ref, trial, ())
        window_for(config, ref, trial)
    check_corpus(config.corpus, config.heldout_corpus)
    _check_writable(storage_of(config, home))
    if config.train_tokens is not None:
        _check_sizes(config, config.train_tokens // config.seq_len)
    if not is_remote(config.corpus):
        corpus_of(config, ref, storage_of(config, home))
    return ref


def _check_sizes(config: SweepConfig, n_sequences: int) -> None:
    """Refuse training text that is less than a batch, or too little to sample from."""
    if n_sequences < config.batch_size:
        raise ConfigError(
            f"there are {n_sequences} training sequences of {config.seq_len} tokens, less than "
            f"one batch of {config.batch_size}; raise train_tokens or lower batch_size"
        )
    available = min(config.capture_sequences, n_sequences) * config.seq_len
    if -(-config.n_points // 2) > available:
        raise ConfigError(
            f"n_points={config.n_points} needs {-(-config.n_points // 2)} keys a head and the "
            f"sample has {available}; lower n_points or raise capture_sequences or train_tokens"
        )


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write-probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as err:
        raise ConfigError(
            f"cannot write to {folder}: {err.strerror or err}; set DOFSWEEP_HOME or storage_path "
            "to a folder that you may write"
        ) from err


def corpus_of(config: SweepConfig, ref: TeacherRef, storage: Path) -> CachedCorpus:
    """The packed corpus, tokenised once and kept in storage.

    Raises:
        CorpusError: there is too little text.
        ConfigError: there is less than a batch, or too little to sample from.
    """
    corpus = cached_corpus(
        storage / "corpora",
        lambda: load_tokenizer(ref),
        tokenizer_key=ref.fingerprint,
        name=config.corpus,
        seq_len=config.seq_len,
        train_tokens=config.train_tokens,
        heldout_tokens=config.heldout_tokens,
        seed=config.seed[0],
        heldout_name=config.heldout_corpus,
        text_field=config.text_field,
    )
    _check_sizes(config, len(corpus.train))
    return corpus


def capture_facts(config: SweepConfig, ref: TeacherRef, corpus: CachedCorpus) -> dict[str, Any]:
    """All that a capture depends on; equal facts mean equal sampled points."""
    return {
        "teacher": ref.fingerprint,
        "corpus": corpus.fingerprint,
        "seq_len": config.seq_len,
        "sequences": min(config.capture_sequences, len(corpus.train)),
        "n_points": config.n_points,
        "seed": config.seed[0],
        "feature_heads": config.feature_heads,
        "centered": config.center_keys,
        "dtype": config.dtype,
    }


def spectrum_options(config: SweepConfig) -> dict[str, Any]:
    """What a spectrum depends on besides the capture.

    The bracket of N is certified from λ = 2^-10 up, or from the smallest λ asked for.
    """
    lam_min = min(LAM_MIN, *config.lam)
    return {"gram_scale": config.gram_scale, "kernel": config.kernel, "lam_min": lam_min}


def content_key(facts: dict[str, Any]) -> str:
    """Short hash of facts."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def plan_for(
    config: SweepConfig, ref: TeacherRef, trial: TrialSpec, spectra: Sequence[HeadSpectrum]
) -> Plan:
    """Plan of one trial.

    Args:
        spectra: of every layer and feature head; not looked at where the trial has no λ.
    Raises:
        PlanError: the budget cannot be met.
    """
    assert trial.budget is not None
    dof = None if trial.lam is None else dof_table(spectra, [trial.lam])[0]
    return make_plan(
        "fix" if trial.strategy == "untrained" else trial.strategy,
        n_layers=ref.shape.n_layers,
        n_heads=feature_head_count(ref.shape, config.feature_heads),
        budget=trial.budget,
        head_dim=ref.shape.head_dim,
        dof=dof,
        min_dim=config.min_dim,
        multiple_of=config.multiple_of,
        rounding=config.rounding,
    )


def window_for(config: SweepConfig, ref: TeacherRef, trial: TrialSpec) -> Window:
    """Keys that every layer of a trial sees exactly.

    `sink_window` gets the window that costs what C features and the trial's own window cost.

    Raises:
        StudentError: those bytes hold no window.
    """
    given = Window(trial.window, config.sinks if trial.window else 0)
    if trial.strategy != "sink_window":
        return given
    plan = plan_for(config, ref, replace(trial, strategy="fix"), ())
    return equal_window(student_state_bytes(plan, ref.shape, given), ref.shape, config.sinks)


def initial_student(
    config: SweepConfig, ref: TeacherRef, trial: TrialSpec, plan: Plan | None, capture: Capture
) -> Student:
    """A student before training.

    Args:
        plan: of the trial; None for `sink_window`, which has no features.
    """
    window = window_for(config, ref, trial)
    if plan is None:
        return sink_window_student(window, ref.shape, capture.scales)
    means = capture.key_mean
    if not config.center_keys:
        means = [torch.zeros_like(mean) for mean in means]
    assert trial.feature_map is not None
    assert trial.seed is not None
    assert trial.init is not None
    return build_student(
        trial.feature_map,
        plan,
        ref.shape,
        feature_heads=config.feature_heads,
        scales=capture.scales,
        key_means=means,
        init=trial.init,
        seed=trial.seed,
        window=window,
    )
