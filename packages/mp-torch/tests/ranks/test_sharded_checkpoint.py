"""Checkpoints of many ranks: any layout reads what any other wrote, and a broken save costs nothing."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from layouts import LAYOUTS, Training, batches
from torch import distributed

from mp_torch import CheckpointError
from mp_torch.ranks import checkpoint

BEFORE, AFTER = 3, 3


def carried(training):
    """Everything that a resumed run must have: whole parameters, masters and moments, and the loss scale."""
    tensors = {f"parameter {name}": tensor for name, tensor in training.whole().items()}
    for part in training.engine.assembly.parts:
        for name, tensor in part.weight.state().items():
            tensors[f"{name} {part.weight.name}"] = gathered(part.weight.parameter, tensor)
        for name, tensor in training.engine.optimizers[0].state[part.weight.trained].items():
            tensors[f"{name} {part.weight.name}"] = gathered(part.weight.parameter, tensor)
    return tensors, training.engine.state_dict()["loss_scale"], training.engine.update_index


def gathered(parameter, tensor):
    from mp_torch.ranks import like, local

    if tensor.shape != local(parameter.detach()).shape:
        return tensor.clone()
    spread = like(parameter, tensor)
    return spread.full_tensor() if hasattr(spread, "full_tensor") else spread.clone()


def train_and_save(layout, precision, folder):
    training = Training(layout, precision)
    for place, x in enumerate(batches(BEFORE)):
        training.step(x, 0 if place == 1 else None)
    training.engine.save_sharded(folder)
    state = carried(training)
    reports = [repr(training.step(x)) for x in batches(AFTER, seed=8)]
    return state, reports, training.whole()


def resume(layout, precision, folder):
    training = Training(layout, precision)
    training.engine.load_sharded(folder)
    state = carried(training)
    reports = [repr(training.step(x)) for x in batches(AFTER, seed=8)]
    return state, reports, training.whole()


def assert_same_state(found, expected):
    tensors, scale, index = found
    assert (scale, index) == expected[1:]
    assert tensors.keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-true", "bf16-kahan"])
def test_four_ranks_save_and_two_and_one_resume_with_the_same_bits(pool, tmp_path, precision):
    folder = str(tmp_path)
    saved, reports, parameters = pool.run(train_and_save, 4, "fsdp4", precision, folder)[0]
    for layout in ("fsdp4", "fsdp", "ddp"):
        for state, later, ends in pool.run(resume, LAYOUTS[layout], layout, precision, folder):
            assert_same_state(state, saved)
            if layout == "fsdp4":
                assert later == reports
                assert all(torch.equal(ends[name], tensor) for name, tensor in parameters.items())
    state, _, _ = resume("one", precision, folder)
    assert_same_state(state, saved)


def test_one_process_saves_and_four_ranks_resume(pool, tmp_path):
    saved, _, _ = train_and_save("one", "bf16-true", str(tmp_path))
    for state, _, _ in pool.run(resume, 4, "fsdp4", "bf16-true", str(tmp_path)):
        assert_same_state(state, saved)


def test_stages_of_a_pipeline_save_and_resume(pool, tmp_path):
    first = pool.run(train_and_save, 2, "pp", "fp16-mixed", str(tmp_path))
    second = pool.run(resume, 2, "pp", "fp16-mixed", str(tmp_path))
    for (saved, reports, _), (state, later, _) in zip(first, second, strict=True):
        assert_same_state(state, saved)
        assert later == reports


def save_and_die(folder):
    """Rank 1 is killed while the second save is under way."""
    training = Training("fsdp", "bf16-true")
    training.step(batches(1)[0])
    training.engine.save_sharded(folder)
    training.step(batches(1)[0])
    if distributed.get_rank() == 1:
        checkpoint.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    training.engine.save_sharded(folder)


def test_a_save_that_is_killed_half_way_leaves_the_last_good_checkpoint(pool, tmp_path):
    with pytest.raises(AssertionError, match="rank 1:\\nthe process died"):
        pool.run(save_and_die, 2, str(tmp_path), timeout=20.0)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert "update-1" in left
    assert "update-2" not in left
    for (_, scale, index), _, _ in pool.run(resume, 2, "fsdp", "bf16-true", str(tmp_path)):
        assert index == 1
        assert scale["scale"] > 0


def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path):
    training = Training("one")
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint of many ranks .*save one first"):
        training.engine.load_sharded(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    train_and_save("one", "fp32", str(tmp_path))
    training = Training("one")
    training.net.extra = torch.nn.Linear(2, 2)
    before = training.whole()
    with pytest.raises(CheckpointError, match=r"'model/extra\.bias' is in the checkpoint or in the model, not in both"):
        training.engine.load_sharded(tmp_path)
    assert all(torch.equal(tensor, training.whole()[name]) for name, tensor in before.items())


def test_another_precision_is_refused_and_changes_nothing(tmp_path):
    train_and_save("one", "bf16-true", str(tmp_path))
    training = Training("one", "fp32")
    with pytest.raises(CheckpointError, match="precision='bf16-true' was saved"):
        training.engine.load_sharded(tmp_path)
