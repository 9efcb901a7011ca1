"""The optimizers: the code computes what the rows of the spec say, rounded after every single operation."""

from __future__ import annotations

import ast
import math
import operator
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_reference.amp.optimizers import SGD, Adam, AdamW, OptimizerState
from mp_reference.spec.optimizers import OPTIMIZERS, equations_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def f32(values: list[Any]) -> NDArray[np.float32]:
    """An array of float32."""
    return np.array(values, np.float32)


CLASSES = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def fp32(value: float) -> float:
    """Nearest fp32; float64 results of fp32 operands round to it as the exact results do (53 >= 2 * 24 + 2 bits)."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


OPERATIONS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}  # fmt: skip
FUNCTIONS: dict[str, Any] = {"sqrt": math.sqrt, "max": max}


def evaluated(node: ast.expr, names: dict[str, Any], rounds: bool) -> float:
    """The value of one side of an equation row; inside square brackets float64, outside fp32 after each operation."""
    result = fp32 if rounds else float
    match node:
        case ast.List(elts=[inner]):
            return fp32(evaluated(inner, names, False))
        case ast.Constant(value=(int() | float()) as value):
            return float(value)
        case ast.Name(id=name):
            return float(names[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluated(operand, names, rounds)
        case ast.Call(func=ast.Name(id=function), args=args):
            return result(FUNCTIONS[function](*(evaluated(arg, names, rounds) for arg in args)))
        case ast.BinOp(left=left, op=op, right=right):
            return result(OPERATIONS[type(op)](evaluated(left, names, rounds), evaluated(right, names, rounds)))
    raise AssertionError(ast.dump(node))


def update_by_rows(name: str, names: dict[str, Any]) -> None:
    """One update of one number, read off the equation rows alone; ``names`` holds settings, state, w, g and t."""
    for condition, equation in OPTIMIZERS[name].equations:
        if eval(condition or "True", {}, names):
            target, formula = equation.split(" = ")
            names[target] = evaluated(ast.parse(formula, mode="eval").body, names, True)


HYPERPARAMETERS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "sgd": st.sampled_from([
        {"momentum": 0.0, "dampening": 0.0, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.0, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.3, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.0, "nesterov": True},
    ]),
    "adam": st.fixed_dictionaries({
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.8, 0.0)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "amsgrad": st.booleans(),
    }),
}  # fmt: skip
SHARED = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, 3.0]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.7]),
        "maximize": st.booleans(),
    }
)
NUMBERS = st.floats(-1e4, 1e4, width=32)


@pytest.mark.parametrize("name", sorted(CLASSES))
@given(data=st.data())
def test_every_optimizer_computes_its_equation_rows_to_the_bit(name: str, data: st.DataObject) -> None:
    settings: dict[str, Any] = dict(data.draw(SHARED))
    settings |= data.draw(HYPERPARAMETERS["sgd" if name == "sgd" else "adam"])
    names = settings | {"w": data.draw(NUMBERS), "m": 0.0, "v": 0.0, "vmax": 0.0, "buffer": 0.0}
    names |= dict(zip(("beta1", "beta2"), settings.get("betas", (0, 0)), strict=True))
    optimizer = CLASSES[name](**settings)
    master, state = f32([names["w"]]), OptimizerState()
    for t, gradient in enumerate(data.draw(st.lists(NUMBERS, min_size=1, max_size=4)), start=1):
        names |= {"g": gradient, "t": t}
        update_by_rows(name, names)
        master, state = optimizer.update(master, f32([gradient]), state)
        assert master.tobytes() == f32([names["w"]]).tobytes()
        for slot, value in state.slots.items():
            assert value.tobytes() == f32([names[slot]]).tobytes(), slot
    assert state.step == t


def test_the_row_interpreter_notices_an_operation_rounded_elsewhere() -> None:
    names = {"a": 1.0, "b": 2.0**-24, "c": 2.0**-24}
    left = evaluated(ast.parse("(a + b) + c", mode="eval").body, names, True)
    right = evaluated(ast.parse("a + (b + c)", mode="eval").body, names, True)
    assert (left, right) == (1.0, 1.0 + 2.0**-23)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_defaults_are_those_of_the_row(name: str) -> None:
    assert {key: getattr(CLASSES[name](), key) for key in OPTIMIZERS[name].defaults} == dict(OPTIMIZERS[name].defaults)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_optimizer_keeps_the_tensors_of_its_row(name: str) -> None:
    optimizer = SGD(momentum=0.9) if name == "sgd" else CLASSES[name]()
    _, state = optimizer.update(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), OptimizerState())
    assert tuple(state.slots) == OPTIMIZERS[name].slots
    assert all(value.shape == (2, 3) and value.dtype == np.float32 for value in state.slots.values())


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9, nesterov=True, weight_decay=0.1), AdamW(amsgrad=True)])
def test_an_update_changes_none_of_its_arguments(optimizer: Any) -> None:
    master, gradient = f32([1.0, -2.0]), f32([0.5, 0.25])
    _, state = optimizer.update(master, gradient, OptimizerState())
    kept = {name: value.copy() for name, value in state.slots.items()}
    optimizer.update(master, gradient, state)
    assert master.tolist() == [1.0, -2.0]
    assert gradient.tolist() == [0.5, 0.25]
    assert all(np.array_equal(state.slots[name], value) for name, value in kept.items())


def test_a_zero_gradient_moves_nothing_under_adam() -> None:
    w, _ = Adam().update(f32([1.0]), f32([0.0]), OptimizerState())
    assert w.tolist() == [1.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SGD(lr=-1.0), r"lr=-1\.0 must be finite and at least 0; 0\.001 is the default"),
        (lambda: SGD(lr=math.nan), "lr=nan must be finite"),
        (lambda: SGD(momentum=-0.1), r"momentum=-0\.1 must be finite and at least 0"),
        (lambda: SGD(dampening=math.inf), r"dampening=inf must be finite; 0\.0 is usual"),
        (lambda: SGD(nesterov=True), r"nesterov=True needs momentum > 0 and dampening 0, got momentum=0\.0"),
        (lambda: SGD(nesterov=True, momentum=0.9, dampening=0.1), "set momentum=0"),
        (lambda: Adam(weight_decay=math.inf), "weight_decay=inf must be finite"),
        (lambda: Adam(betas=(0.9, 1.0)), r"betas=\(0\.9, 1\.0\) must be two numbers inside \[0, 1\)"),
        (lambda: AdamW(eps=0.0), r"eps=0\.0 must be finite and at least 1\.4\d*e-45"),
        (lambda: AdamW(eps=math.nan), "eps=nan must be finite"),
        (lambda: equations_of("lamb"), "optimizer 'lamb' is not one of sgd, adam, adamw"),
    ],
)
def test_a_hyperparameter_without_meaning_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_equations_are_printed_with_their_conditions() -> None:
    assert equations_of("adamw").splitlines()[:2] == ["if maximize: g = -g", "w = w * [1 - lr * weight_decay]"]
