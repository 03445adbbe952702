"""dofsweep: linear-attention students whose feature dimension follows each layer's degrees of freedom."""

__version__ = "0.1.0"
