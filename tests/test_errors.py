"""Errors cross process borders whole."""

from __future__ import annotations

import pickle

import pytest

from dofsweep import errors

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.DofsweepError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_pickling_keeps_class_message_and_code(kind: type[errors.DofsweepError]) -> None:
    error = kind("budget=0 is too small; raise budget")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.exit_code in {1, 2}
