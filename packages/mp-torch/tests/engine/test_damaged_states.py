"""A damaged state is refused whole: every leaf of it, dropped, replaced by another kind, misshapen or extended."""

import copy

import pytest
import torch
from torch import nn

from mp_torch import AmpEngine, CheckpointError, LossScale

DAMAGES = {
    "dropped": None,
    "nothing": lambda _: None,
    "text": lambda _: "x",
    "not a number": lambda one: float("nan") if is_number(one) else None,
    "negative": lambda one: -5 if is_number(one) else {"other": 1},
    "another shape": lambda one: torch.zeros(2, 9) if isinstance(one, torch.Tensor) else [one],
    "another dtype": lambda one: one.double() if isinstance(one, torch.Tensor) else 1e400,
    "extended": lambda one: {**one, "other": 1} if isinstance(one, dict) else object(),
}


def is_number(one):
    return isinstance(one, int | float) and not isinstance(one, bool)


def paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in items:
        yield from paths(one, (*path, key))


def at(value, path):
    return at(value[path[0]], path[1:]) if path else value


def damaged(state, path, damage):
    """A copy of the state with one place changed."""
    twin = copy.deepcopy(state)
    parent, key = at(twin, path[:-1]), path[-1]
    if isinstance(parent, tuple):
        whole = list(parent)
        whole[key : key + 1] = [] if damage is None else [damage(parent[key])]
        at(twin, path[:-2])[path[-2]] = tuple(whole)
    elif damage is None:
        del parent[key]
    else:
        parent[key] = damage(parent[key])
    return twin


def printed(value):
    """Everything in a state as something that compares, tensors by their bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return (value.dtype, tuple(value.shape), flat.view(torch.uint8).tolist() if flat.numel() else [])
    if isinstance(value, dict):
        return {key: printed(one) for key, one in value.items()}
    return [printed(one) for one in value] if isinstance(value, list | tuple) else repr(value)


def in_a_window(precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"loss_scale": LossScale(init_scale=64.0)} if precision.startswith("fp16") else {}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine = AmpEngine(model, optimizer, precision=precision, accumulate_steps=2, scheduler=scheduler, **settings)
    for _ in range(3):
        with engine.autocast():
            loss = model(torch.randn(4, 3)).float().square().mean()
        engine.backward(loss)
        engine.step()
    return engine


def refuses(engine, state):
    """Whether a state is refused with a typed error; any other error is the test's own failure."""
    try:
        engine.load_state_dict(state)
    except CheckpointError:
        return True
    return False


def is_legal(path, damage, value):
    """Changes that make another legal state: other settings, absent optional parts."""
    return (
        path[:2] == ("config", "loss_scale")  # a policy has defaults for its fields
        or (path[:1] == ("config",) and damage not in ("dropped", "text", "another shape", "extended"))
        or path[:1] == ("schedulers",)  # only the scheduler knows its values
        or path[-1] in ("foreach", "fused", "loss_dtype")
        or (damage == "dropped" and path[0] in ("gradients", "accumulated", "optimizers") and len(path) in (2, 4))
        or (path == ("buffers",) and damage in ("nothing", "not a number"))
        or (path[-1] == "hysteresis_tracker" and damage == "negative")
        or (value is None and damage in ("nothing", "not a number"))
    )


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("precision", ["fp16-true", "bf16-kahan", "bf16-mixed"])
def test_every_damage_to_every_leaf_is_refused_and_changes_nothing(precision, damage):
    engine = in_a_window(precision)
    good = engine.state_dict()
    before, refused = printed(good), 0
    for path in list(paths(good))[1:]:
        value = at(good, path)
        if is_legal(path, damage, value):
            continue
        assert refuses(engine, damaged(good, path, DAMAGES[damage])), f"{path} {damage} was accepted"
        refused += 1
    assert printed(engine.state_dict()) == before
    assert refused >= 40


def test_the_damages_are_told_from_a_state_that_is_whole():
    engine = in_a_window("bf16-mixed")
    good = engine.state_dict()
    engine.load_state_dict(copy.deepcopy(good))
    assert printed(engine.state_dict()) == printed(good)


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_a_state_that_is_no_dict_is_refused(state):
    with pytest.raises(CheckpointError, match=r"the engine state is .*, which must be a dict"):
        in_a_window("bf16-mixed").load_state_dict(state)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("loss_scale", "scale"), 0.0, r"loss_scale=0\.0 was saved, which must be above 0 and finite"),
        (
            ("loss_scale", "growth_tracker"),
            -2,
            r"growth_tracker'\]=-2 was saved, which must be finite and not below -1",
        ),
        (("update_index",), -1, r"update_index=-1 was saved, which must be finite and not below 0"),
        (("update_index",), True, r"update_index=True was saved, which must be a int"),
        (("config", "master_weights"), "none", r"the saved config is none: master_weights='none' concerns the -true"),
        (("config", "precision"), "fp32", r"precision='fp32' was saved, precision='bf16-mixed' runs; build the engine"),
        (("phase", "loss_dtype"), "float64", r"loss_dtype='float64' of the checkpoint must be one of"),
        (("gradients",), {"other": torch.zeros(1)}, r"gradients\['other'\] fits no parameter of this model"),
        (("buffers",), [], r"the saved snapshot holds no 3 buffers, which the model has"),
        (("optimizers",), [], r"0 optimizers were saved, 1 run; build as many"),
        (("optimizers", 0, "kind"), "SGD", r"SGD was saved, AdamW runs; build the saved one"),
        (("optimizers", 0, "groups"), [], r"AdamW was not saved with its 1 parameter groups"),
        (("optimizers", 0, "groups", 0, "lr"), -1.0, r"lr=-1\.0 was saved for a parameter group of AdamW"),
        (("optimizers", 0, "groups", 0, "params"), ["other"], r"saved with the parameters \['other'\], it runs with"),
        (
            ("optimizers", 0, "state", "other"),
            {},
            r"AdamW has state of 'other', which is no parameter that trains here",
        ),
        (("optimizers", 0, "state", "0.bias", "other"), 1, r"AdamW keeps step, .*state of '0\.bias' has .*other"),
        (("optimizers", 0, "state", "0.bias", "step"), -1.0, r"step of '0\.bias' is -1\.0, which must be a number of"),
    ],
)
def test_the_message_names_what_is_wrong_and_what_was_saved(path, value, message):
    engine = in_a_window("bf16-mixed")
    state = engine.state_dict()
    at(state, path[:-1])[path[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        engine.load_state_dict(state)


def test_state_of_an_optimizer_that_only_it_understands_is_taken_as_it_is():
    model = nn.Linear(2, 2)
    engine = AmpEngine(model, torch.optim.Rprop(model.parameters()), precision="fp32")
    engine.backward(model(torch.ones(1, 2)).sum())
    assert engine.step().applied
    state = engine.state_dict()
    engine.load_state_dict(copy.deepcopy(state))
    assert printed(engine.state_dict()) == printed(state)
