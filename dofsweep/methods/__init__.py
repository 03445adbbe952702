"""Ways of making a linear-attention student, one file each, behind one protocol (base.py)."""

from dofsweep.methods.base import Student
from dofsweep.methods.registry import (
    FEATURE_MAPS,
    build_student,
    load_student,
    save_student,
    sink_window_student,
)

__all__ = [
    "FEATURE_MAPS",
    "Student",
    "build_student",
    "load_student",
    "save_student",
    "sink_window_student",
]
