"""Experiments over precision policies: a grid of cells as data, run in parallel, resumable, with tables and plots.

``python -m mp_reference.lab run loss-scaling`` runs a shipped experiment, ``plot`` and ``compare`` read its results.
"""
