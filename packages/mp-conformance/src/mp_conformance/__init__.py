"""Do they agree? Claims of the mixed-precision spec, tested bit by bit on any implementation.

A claim is a row: a sentence that can be false, its source, and how closely the sides must agree. A subject is whatever
can be asked: the reference, torch on a device, the engine, another library. The expected value comes from the exact
oracle or from recorded data, never from the subject.
"""

from __future__ import annotations

from mp_conformance.claims import Claim, Run, registered, select
from mp_conformance.compare import DisagreementError
from mp_conformance.implementations import Subject, subject_named, subjects_for
from mp_conformance.report import guarantees_table
from mp_conformance.runner import Result, ask, ask_all

__version__ = "0.1.0"
__all__ = [
    "Claim", "DisagreementError", "Result", "Run", "Subject", "ask", "ask_all", "guarantees_table", "registered",
    "select", "subject_named", "subjects_for",
]  # fmt: skip
