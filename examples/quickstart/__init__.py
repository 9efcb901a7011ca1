"""One small language model, trained once per precision, and every update of it checked bit by bit in NumPy."""
