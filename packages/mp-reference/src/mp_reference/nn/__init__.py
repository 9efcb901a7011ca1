"""Training in NumPy with every rounding in the open: a tape, operations with stated roundings, layers."""
