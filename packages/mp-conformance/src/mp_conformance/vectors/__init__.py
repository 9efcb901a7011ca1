"""Golden data: vectors in hex, written by the exact oracle, and recorded traces of the loss scalers of the field.

A vector file is plain text for readers in any language. Its first line says where it comes from; lines that begin with
``#`` are comments; every other line is operands, result and exception flags, in hex, separated by spaces, as Berkeley
TestFloat prints them.
"""

from __future__ import annotations

from mp_conformance.vectors.files import Vectors, check, described, names, read, write

__all__ = ["Vectors", "check", "described", "names", "read", "write"]
