"""Arithmetic on arrays of any format: each operation is the exact result, rounded once."""
