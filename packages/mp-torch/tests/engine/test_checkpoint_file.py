"""Checkpoint files: one safetensors file without code, whole or refused, and nothing changed by a refusal."""

import os
import re
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from torch import nn

from mp_torch import AmpEngine, CheckpointError
from mp_torch import checkpoint as checkpoint_module


def build(precision="bf16-true", seed=0, scheduler=None, sparse=False, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    )
    kind = torch.optim.SGD if sparse else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    schedulers = scheduler(optimizer) if scheduler else None
    return model, AmpEngine(model, optimizer, precision, accumulate_steps=2, scheduler=schedulers, **settings)


def micro_step(model, engine, at):
    x = torch.randint(0, 7, (6, 2), generator=torch.Generator().manual_seed(at))
    with engine.autocast():
        loss = model(x).float().square().mean()
    engine.backward(loss)
    return engine.step()


def bits(model, engine):
    weights = [one.detach().clone() for one in [*model.state_dict().values(), *engine.masters().values()]]
    return [one.reshape(-1).view(torch.uint8).tolist() for one in weights], engine.loss_scale, engine.update_index


SCHEDULERS = {
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 3]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    "several": lambda o: [torch.optim.lr_scheduler.StepLR(o, 2)],
}


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_run_that_goes_through_a_file_is_the_run_that_never_stopped(tmp_path, stop, scheduler):
    model, engine = build("fp16-mixed", scheduler=SCHEDULERS[scheduler])
    for at in range(stop):
        micro_step(model, engine, at)
    engine.save(tmp_path / "run.safetensors")
    other, resumed = build("fp16-mixed", seed=9, scheduler=SCHEDULERS[scheduler])
    resumed.load(tmp_path / "run.safetensors")
    for at in range(stop, 9):
        micro_step(model, engine, at)
        micro_step(other, resumed, at)
    assert bits(model, engine) == bits(other, resumed)
    assert [one.last_epoch for one in engine.schedulers] == [one.last_epoch for one in resumed.schedulers]


def test_a_sparse_gradient_within_a_window_goes_through_a_file(tmp_path):
    model, engine = build("fp32", sparse=True)
    micro_step(model, engine, 0)
    engine.save(tmp_path / "run")
    other, resumed = build("fp32", seed=4, sparse=True)
    resumed.load(tmp_path / "run")
    for each, running in ((model, engine), (other, resumed)):
        assert micro_step(each, running, 1).applied
    assert bits(model, engine) == bits(other, resumed)


def test_the_file_is_plain_safetensors_that_anybody_can_read(tmp_path):
    model, engine = build()
    engine.save(tmp_path / "run.safetensors")
    with safe_open(tmp_path / "run.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("/model/2.weight"), model[2].weight)
        assert set(file.metadata()) == {"format", "state", "sha256"}


@pytest.mark.parametrize("damage", ["truncate", "flip", "flip header", "empty", "missing", "other"])
def test_a_damaged_file_is_refused_whole_and_the_state_stays(tmp_path, damage):
    path = tmp_path / "run.safetensors"
    model, engine = build()
    for at in range(3):
        micro_step(model, engine, at)
    engine.save(path)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[{"flip": len(whole) - 3, "flip header": 200}.get(damage, 0)] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"truncate": whole[: len(whole) // 2], "empty": b"", "other": b"x" * 99}.get(damage, bytes(changed))
        )
    other, fresh = build(seed=5)
    before = bits(other, fresh)
    with pytest.raises(CheckpointError, match=r"run\.safetensors"):
        fresh.load(path)
    assert bits(other, fresh) == before


def test_a_bit_flipped_anywhere_in_the_file_is_noticed(tmp_path):
    path = tmp_path / "run"
    _, engine = build()
    engine.save(path)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(8, len(whole), (60,), generator=generator).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(changed))
        with pytest.raises(CheckpointError):
            engine.load(path)


def test_a_file_of_another_model_is_refused_naming_the_difference(tmp_path):
    _, engine = build()
    engine.save(tmp_path / "run")
    model = nn.Linear(2, 2)
    other = AmpEngine(model, torch.optim.AdamW(model.parameters()), "bf16-true")
    with pytest.raises(CheckpointError, match=r"the model's weights lacks the key 'weight'|has an unknown key"):
        other.load(tmp_path / "run")
    _, wider = build("fp32")
    with pytest.raises(CheckpointError, match=r"was saved as torch.bfloat16 .* here it is torch.float32"):
        wider.load(tmp_path / "run")


def test_a_safetensors_file_of_somebody_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"weights has format None, not 'mp_torch.checkpoint/1'; use engine.save"):
        build()[1].load(tmp_path / "weights")


def test_a_save_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "run"
    model, engine = build()
    engine.save(path)
    old = path.read_bytes()
    micro_step(model, engine, 0)

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        engine.save(path)
    assert path.read_bytes() == old
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_what_no_file_without_code_can_hold_is_refused_by_name(tmp_path):
    _, engine = build()
    engine.optimizers[0].param_groups[0]["note"] = object()
    with pytest.raises(
        CheckpointError, match=r"groups/0/note is a object, which no file without pickled code can hold"
    ):
        engine.save(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_counters_tuples_and_odd_floats_come_back_as_they_were():
    from mp_torch.checkpoint_file import _packed, _unpacked

    tree = {"a": (1, 2.5, None), 3: [Counter({2: 2}), float("inf"), True], "t": torch.tensor(1.5)}
    tensors = {}
    again = _unpacked(_packed(tree, "", tensors), tensors)
    assert again["t"].item() == 1.5
    del tree["t"], again["t"]
    assert again == tree
    assert isinstance(again[3][0], Counter)


# ---- versions ----


def test_an_older_state_comes_in_through_its_migration(monkeypatch):
    def from_zero(state):
        return state | {"version": 1, "schedulers": []}

    monkeypatch.setitem(checkpoint_module.MIGRATIONS, 0, from_zero)
    model, engine = build("fp32")
    micro_step(model, engine, 0)
    state = engine.state_dict()
    del state["schedulers"]
    state["version"] = 0
    _, other = build("fp32")
    other.load_state_dict(state)
    assert other.phase == engine.phase


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version=2 of the engine state is not known here, 1 is; upgrade mp-torch"),
        ({"version": 0}, "version=0 of the engine state is too old: no migration from it exists"),
        ({"format": "torch"}, "format='torch' is not 'mp_torch.engine'; states of other scalers come in through"),
    ],
)
def test_a_state_of_another_version_or_format_is_refused(change, message):
    _, engine = build("fp32")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        engine.load_state_dict(engine.state_dict() | change)


def test_a_state_of_another_precision_is_refused_with_the_way_out():
    state = build("fp32")[1].state_dict()
    with pytest.raises(
        CheckpointError, match=r"^precision='fp32' was saved, precision='bf16-true' runs; build the engine"
    ):
        build("bf16-true")[1].load_state_dict(state)
