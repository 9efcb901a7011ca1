"""Each session is a question, and its docstring is the question; ``nox`` alone asks those of ``nox.options``."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "reference", "repo", "torch", "conformance"]

REFERENCE = ("-e", "packages/mp-reference[lab]")
EVERYTHING = (*REFERENCE, "-e", "packages/mp-torch[report]", "-e", "packages/mp-conformance")
PYTEST = ("pytest", "pytest-cov", "hypothesis")
# Berkeley's own code as a third opinion, where it comes as a wheel: nothing here may need a compiler.
SOFTFLOAT = "softfloatpy; sys_platform == 'linux' and platform_machine == 'x86_64' and python_version < '3.13'"
HERE = Path(__file__).parent


def install(session: nox.Session, *what: str) -> None:
    """Install everything in ONE command, the pinned versions in front.

    One command, because an editable ``mp-torch`` alone would ask the index for ``mp-reference``.
    """
    session.install("-c", "constraints.txt", *what)
    # Two OpenMP threads on a busy machine can be forty times slower than one: tests take one, the quickstart measures.
    session.env.setdefault("OMP_NUM_THREADS", "1")


@nox.session
def quickstart(session: nox.Session) -> None:
    """What does each precision do to the training of a small language model, and is every update exact?

    Takes about three minutes on two cores. ``nox -s quickstart -- --text FILE`` trains on a file of yours.
    """
    install(session, *EVERYTHING)
    del session.env["OMP_NUM_THREADS"]
    session.run("python", "-m", "examples.quickstart", *session.posargs)


@nox.session
def emulation(session: nox.Session) -> None:
    """What would an accelerator's 16 bits do to a GPT, a ResNet and an LSTM, and what helps?

    Takes half a minute. ``nox -s emulation -- --plot report.png`` draws what fp16 loses of the GPT.
    """
    install(session, *EVERYTHING, "scikit-learn")
    session.run("python", "-m", "examples.emulation", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """Do the reference, the engine and this machine's torch agree, claim by claim?

    Takes at most six minutes on two cores. ``nox -s conformance -- --deep`` draws more and longer.
    """
    install(session, *EVERYTHING, *PYTEST, "pytest-xdist", SOFTFLOAT)
    reports = ("--conformance-report=runs/conformance.html", "--conformance-json=runs/conformance.json")
    two = ("-n", "2", "--dist", "worksteal")  # who has nothing left takes from the other
    session.run("pytest", "packages/mp-conformance", *two, *reports, *session.posargs)


@nox.session
def reference(session: nox.Session) -> None:
    """Does the reference hold on its own, with NumPy and ml_dtypes but no torch, every branch taken?"""
    install(session, *REFERENCE, *PYTEST, "mpmath", SOFTFLOAT)
    session.run("python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None, 'torch is here'")
    coverage = ("--cov=mp_reference", "--cov-branch", "--cov-report=term:skip-covered", "--cov-fail-under=100")
    session.run("pytest", "packages/mp-reference", *coverage, *session.posargs)


@nox.session
def torch(session: nox.Session) -> None:
    """Does the engine do what its documentation says, on one device and on up to four ranks?"""
    install(session, *EVERYTHING, *PYTEST, "expecttest")
    coverage = ("--cov=mp_torch", "--cov-branch", "--cov-report=term:skip-covered", "--cov-fail-under=95")
    session.run("pytest", "packages/mp-torch", *coverage, *session.posargs)


@nox.session
def repo(session: nox.Session) -> None:
    """Do the arrows hold, and does every code block of README and docs run?"""
    install(session, *EVERYTHING, *PYTEST, "import-linter", "nox", "scikit-learn")
    session.run("pytest", "tests", *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """Do other emulators of tensor cores, which need torch, give the reference's bits?"""
    install(session, *EVERYTHING, *PYTEST, "mmaemu")
    session.run("pytest", "packages/mp-reference/tests/numerics/test_tensor_core_peers.py", *session.posargs)


@nox.session
def mutation(session: nox.Session) -> None:
    """Does a test notice each small change of rounding, of the codes and of the loss scale?

    Takes some hours. ``nox -s mutation -- "mp_reference.amp.loss_scale*"`` asks it of one module;
    docs/decisions/2026-11-30-mutation.md explains every change that none notices.
    """
    install(session, "numpy", "ml_dtypes", "mpmath", "mutmut", *PYTEST)
    session.chdir("packages/mp-reference")
    session.env["HYPOTHESIS_PROFILE"] = "ci"
    session.run("mutmut", "run", *session.posargs)
    session.run("mutmut", "results")


@nox.session
def lint(session: nox.Session) -> None:
    """Is the code written as STYLE asks, and does each module import only what it may?"""
    install(session, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.env["PYTHONPATH"] = os.pathsep.join(str(path) for path in sorted(HERE.glob("packages/*/src")))
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Do the types hold under ``mypy --strict``?"""
    install(session, *EVERYTHING, "mypy", "nox", "pytest", "import-linter")
    session.run("mypy", *session.posargs)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """How fast is it here? Each script of ``benchmarks/`` prints ``name: value unit``.

    ``nox -s benchmarks -- ranks`` runs ``benchmarks/ranks.py`` alone.
    """
    install(session, *EVERYTHING)
    names = session.posargs or sorted(path.stem for path in HERE.glob("benchmarks/[a-z]*.py"))
    for name in names:
        session.run("python", f"benchmarks/{name}.py")


@nox.session(venv_backend="none")
def device(session: nox.Session) -> None:
    """Which claims does the accelerator of this machine keep, with the torch that is installed here?"""
    session.run("bash", "scripts/device_check.sh", *session.posargs, external=True)
