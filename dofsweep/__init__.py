"""dofsweep: linear-attention students that give every layer the features it needs."""

__version__ = "0.1.0"
