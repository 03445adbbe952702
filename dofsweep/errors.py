"""One tree of errors for everything a user can get wrong or meet.

Every message says three things: what was given, what is allowed, what to do next. The command
line prints the message alone and exits with ``exit_code``; it never shows a traceback for these.
Each class takes one string, so that an error survives the pickling that crosses a process border.
"""


class DofsweepError(Exception):
    """Base of all errors that are addressed to the user."""

    exit_code = 2


class ConfigError(DofsweepError):
    """A setting is unknown, of the wrong type, or out of range."""


class TeacherError(DofsweepError):
    """The teacher cannot be found, loaded, or is of a kind that is not supported."""


class CorpusError(DofsweepError):
    """The text corpus is missing, empty, unreadable, or too short for what was asked."""


class CaptureError(DofsweepError):
    """Queries and keys could not be captured, or hold values that are not finite."""


class SpectrumError(DofsweepError):
    """A spectrum is not what it must be, or cannot answer the question asked of it."""


class PlanError(DofsweepError):
    """A plan of feature dimensions cannot be made from what was given."""


class StudentError(DofsweepError):
    """A student cannot be built, loaded, or run in the way that was asked."""


class DistillError(DofsweepError):
    """Training cannot start or go on."""


class StoreError(DofsweepError):
    """The database cannot be reached, is of another version, or does not hold what was asked."""


class ClusterError(DofsweepError):
    """The Ray cluster does not answer, refuses, or lacks what the sweep needs."""


class SweepFailed(DofsweepError):
    """The sweep was started and did not finish; its state is in the database."""

    exit_code = 1
