"""Do the implementations agree? Claims of the spec, tested bit by bit."""

__version__ = "0.1.0"
