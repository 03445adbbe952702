"""Settings: one source of defaults, clear refusals, and the sweep they spell out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dofsweep.config import PRESETS, SweepConfig, make_config, parse_lam, read_config_file
from dofsweep.errors import ConfigError


@pytest.mark.parametrize("text", ["2^-8", "2**-8", "1/256", "0.00390625", " 2^-8 ", "2^(-8)"])
def test_lambda_as_people_write_it(text: str) -> None:
    assert make_config({"model": "m", "lam": text}).lam == [2**-8]


@pytest.mark.parametrize("value", ["", "two", "1/0", "2^", "nan", "inf", "-1", "0", "2^-9999", 0])
def test_lambda_that_is_none(value: object) -> None:
    with pytest.raises(ConfigError, match="^lam="):
        make_config({"model": "m", "lam": value})


@given(st.text(max_size=20))
@settings(deadline=None, max_examples=200)
def test_any_text_is_a_positive_lambda_or_refused(text: str) -> None:
    try:
        (lam,) = make_config({"model": "m", "lam": text}).lam
    except ConfigError:
        return
    assert 0 < lam < math.inf


def test_a_lambda_that_is_a_number_stays() -> None:
    assert parse_lam(0.5) == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budgt": 3}, "unknown setting 'budgt': did you mean 'budget'"),
        ({"budget": 0}, r"budget=0 is not allowed: input should be greater than or equal to 1"),
        ({"strategy": "best"}, "strategy='best' is not allowed: input should be 'fix'"),
        ({"seq_len": "long"}, "seq_len='long' is not allowed"),
        ({"strategy": []}, "strategy="),
        ({"name": "../etc"}, "name='../etc' is not allowed"),
    ],
)
def test_refusals_name_the_setting_and_the_rule(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"model": "m"} | values)


def test_without_a_model() -> None:
    with pytest.raises(ConfigError, match="model is missing: pass --model"):
        make_config({})


def test_all_faults_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"budget=0 .*; seq_len=1 "):
        make_config({"model": "m", "budget": 0, "seq_len": 1})


def test_the_sweep_is_the_product() -> None:
    config = make_config(
        {"model": "m", "budget": [32, 64], "lam": ["2^-8", "2^-10"], "seed": [0, 1]}
    )
    trials = config.trials()
    assert [t.number for t in trials] == list(range(len(trials)))
    assert [t.strategy for t in trials[:3]] == ["teacher", "untrained", "untrained"]
    counts = {s: sum(t.strategy == s for t in trials) for s in ("fix", "dof", "dof_clip")}
    assert counts == {"fix": 4, "dof": 8, "dof_clip": 8}  # fix does not depend on λ
    assert all(t.lam is None for t in trials if t.strategy == "fix")


def test_repeated_values_are_one_trial() -> None:
    once = make_config({"model": "m", "lam": "2^-8", "budget": 64})
    twice = make_config({"model": "m", "lam": ["2^-8", "1/256"], "budget": [64, 64]})
    assert once.trials() == twice.trials()


def test_stored_config_makes_the_same_config() -> None:
    config = make_config({"model": "m", "lam": "2^-9"}, preset="paper")
    assert SweepConfig(**config.model_dump()) == config
    assert SweepConfig.model_validate_json(config.model_dump_json()) == config


def test_preset_paper_and_what_wins_over_it() -> None:
    config = make_config({"model": "m", "seq_len": 256}, preset="paper")
    assert (config.feature_heads, config.center_keys, config.lr_features) == (
        "query",
        False,
        [0.02],
    )
    assert config.seq_len == 256
    assert set(PRESETS["paper"]) <= set(SweepConfig.model_fields)
    with pytest.raises(ConfigError, match="did you mean 'paper'"):
        make_config({"model": "m"}, preset="papre")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'model = "m"\nbudget = [32, 64]\nlam = "2^-8"\n'),
        ("a.yaml", "model: m\nbudget: [32, 64]\nlam: 2^-8\n"),
    ],
)
def test_config_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    config = make_config(read_config_file(tmp_path / name))
    assert config.budget == [32, 64]
    assert config.lam == [2**-8]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{}", "ends in .yaml, .yml or .toml"),
        ("a.toml", b"model = ", "cannot be parsed"),
        ("a.yaml", b"model: [", "cannot be parsed"),
        ("a.yaml", b"- model", "settings by name"),
        ("a.yaml", b"\xff\xfe", "cannot be parsed"),
        ("a.yaml", b"a: &a [x]\nb: [*a, *a]", "aliases are not supported"),
        ("a.yaml", b"!!python/object/apply:os.system ['true']", "cannot be parsed"),
        ("a.yaml", b"#" * 1_000_001, "at most 1000000"),
        ("a.yaml", b"[" * 100_000, "cannot be parsed"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config_file(tmp_path / name)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(tmp_path / "none.yaml")


def test_windows_are_an_axis_and_the_baseline_has_one_row_for_each() -> None:
    config = make_config(
        {"model": "m", "strategy": ["fix", "dof", "sink_window"], "window": [0, 28], "seed": [0, 1]}
    )
    trials = config.trials()
    assert [(t.strategy, t.window) for t in trials[:3]] == [
        ("teacher", 0),
        ("untrained", 0),
        ("untrained", 28),
    ]
    baseline = [t for t in trials if t.strategy == "sink_window"]
    assert [(t.window, t.loss, t.seed, t.lam) for t in baseline] == [
        (0, None, None, None),
        (28, None, None, None),
    ]
    assert sum(t.strategy == "dof" for t in trials) == 4


def test_initialisation_and_learning_rates_are_axes_and_a_loss_takes_only_its_own() -> None:
    config = make_config(
        {
            "model": "m",
            "strategy": "fix",
            "init": ["gaussian", "orthogonal"],
            "lr_features": [0.1, 0.2],
            "loss": ["softmax", "direct"],
            "untrained": False,
            "polish_steps": 5,
        }
    )
    found = [(t.loss, t.init, t.lr_features, t.lr_weights) for t in config.trials()[1:]]
    plain = [
        ("softmax", "gaussian", 0.1, 0.1),
        ("softmax", "gaussian", 0.2, 0.1),
        ("softmax", "orthogonal", 0.1, 0.1),
        ("softmax", "orthogonal", 0.2, 0.1),
        ("direct", "gaussian", 0.02, 0.02),
        ("direct", "orthogonal", 0.02, 0.02),
    ]
    assert found == plain + [(f"{loss}+polish", *rest) for loss, *rest in plain]
    bases = [t.before_polish() for t in config.trials() if t.kind == "polish"]
    assert [(t.loss, t.init, t.lr_features, t.lr_weights) for t in bases] == plain
