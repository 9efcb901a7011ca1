"""Mixed-precision training on real tensors, through ``AmpEngine``."""

__version__ = "0.1.0"
