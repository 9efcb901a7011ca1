"""Golden data: vectors in hex, written by the exact oracle, and recorded traces of the loss scalers of the field."""
