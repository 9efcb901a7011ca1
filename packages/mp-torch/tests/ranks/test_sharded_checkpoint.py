"""Checkpoints of many ranks: any layout reads what any other wrote, and a broken save costs nothing."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from layouts import LAYOUTS, Training, batches, loss_of
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from mp_torch import AmpEngine, CheckpointError, LossScale
from mp_torch.ranks import checkpoint
from mp_torch.stages import merged

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


class Deep(nn.Module):
    """Four layers and what only some parts of a pipeline have: a buffer in the second, a frozen bias in the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(place): nn.Linear(4, 4) for place in range(4)})
        self.layers["1"].register_buffer("shift", torch.arange(4) / 8.0)
        self.layers["3"].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
            x = x + getattr(layer, "shift", 0.0)
        return x


class Piped:
    """``Deep`` on one process or cut into as many stages as there are ranks; names stay the whole model's."""

    def __init__(self, stages, precision, shifts=True, **settings):
        self.net, self.rank = Deep(), 0 if stages == 1 else distributed.get_rank()
        if not shifts:
            del self.net.layers["1"].shift
        share = 4 // stages
        for place in range(4):
            if place // share != self.rank:
                del self.net.layers[str(place)]
        trained = [one for one in self.net.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-2)
        settings.setdefault("loss_scale", LossScale(init_scale=2.0**4, growth_interval=3))
        self.engine = AmpEngine(self.net, optimizer, precision, update="exact", **settings)
        self.schedule = None
        if stages > 1:
            stage = PipelineStage(self.net, self.rank, stages, torch.device("cpu"))
            self.schedule = ScheduleGPipe(stage, 2, loss_fn=self.engine.scale_fn(loss_of))
        self.last = self.rank == stages - 1

    def run(self, x):
        with self.engine.autocast():
            if self.schedule is None:
                loss = loss_of(self.net(x).float(), x)
            else:
                self.schedule.step(*([x] if self.rank == 0 else []), **({"target": x} if self.last else {}))
        if self.schedule is None:
            self.engine.backward(loss)
        return self.engine.step()

    def carried(self):
        """By the whole model's names: parameters and buffers, masters, moments; and the loss scale and counters."""
        found = {f"model {name}": one.clone() for name, one in self.net.state_dict().items()}
        for part in self.engine.assembly.parts:
            for kind in (part.weight.state(), self.engine.optimizers[0].state[part.weight.trained]):
                found |= {f"{slot} {part.weight.name}": torch.as_tensor(one).clone() for slot, one in kind.items()}
        state = self.engine.state_dict()
        return found, state["loss_scale"], state["update_index"]


def pipe_and_save(stages, precision, folder):
    piped = Piped(stages, precision)
    for x in batches(4):
        piped.run(x)
    piped.engine.save_sharded(folder)
    return piped.carried()


def pipe_and_resume(stages, precision, folder):
    piped = Piped(stages, precision)
    piped.engine.load_sharded(folder)
    state = piped.carried()
    return state, piped.run(batches(1)[0]).applied


def together(states):
    """What all stages carry, in one; the scale and counters are everybody's."""
    tensors = {}
    for one, scale, index in states:
        assert (scale, index) == states[0][1:]
        tensors |= one
    return tensors, *states[0][1:]


@pytest.mark.parametrize("saving", [4, 2, 1])
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-true", "bf16-kahan"])
def test_stages_resume_on_any_other_number_of_stages_with_the_same_bits(pool, tmp_path, precision, saving):
    folder = str(tmp_path)
    alone = saving == 1
    saved = (
        [pipe_and_save(1, precision, folder)] if alone else pool.run(pipe_and_save, saving, saving, precision, folder)
    )
    for stages in (4, 2, 1):
        if stages == 1:
            resumed = [pipe_and_resume(1, precision, folder)]
        else:
            resumed = pool.run(pipe_and_resume, stages, stages, precision, folder)
        assert_same_state(together([state for state, _ in resumed]), together(saved))
        assert all(applied for _, applied in resumed)


def save_half_a_window(folder):
    piped = Piped(2, "fp32", shifts=False, accumulate_steps=2)
    piped.run(batches(1)[0])
    piped.engine.save_sharded(folder)
    return {name: one.clone() for name, one in piped.engine.gradients().items()}


def test_half_a_window_of_two_stages_without_buffers_is_finished_by_one_process(pool, tmp_path):
    first, second = pool.run(save_half_a_window, 2, str(tmp_path))
    alone = Piped(1, "fp32", shifts=False, accumulate_steps=2)
    alone.engine.load_sharded(tmp_path)
    found = alone.engine.gradients()
    assert found.keys() == (first | second).keys()
    assert all(torch.equal(found[name], one) for name, one in (first | second).items())
    assert alone.run(batches(1)[0]).applied


def halves_of(engine):
    """What two stages would have said, each of half the parameters."""
    state = engine.state_dict()
    (optimizer,) = state["optimizers"]
    names = optimizer["groups"][0]["params"]
    parts = {"stage 0/": names[:4], "stage 1/": names[4:]}
    return {
        stage: state | {"optimizers": [optimizer | {"groups": [optimizer["groups"][0] | {"params": some}]}]}
        for stage, some in parts.items()
    }


def test_stages_that_say_different_scales_make_no_one_engine():
    engine = Piped(1, "fp32").engine
    said = halves_of(engine)
    assert merged(engine, said, set())[0] == engine.state_dict()
    said["stage 1/"]["loss_scale"] = said["stage 1/"]["loss_scale"] | {"scale": 2.0}
    with pytest.raises(CheckpointError, match=r"stage 0 saved loss_scale=.* and stage 1 loss_scale=.*'scale': 2\.0"):
        merged(engine, said, set())


def test_an_optimizer_too_many_is_left_for_the_check_of_their_number():
    engine = Piped(1, "fp32").engine
    said = halves_of(engine)
    for one in said.values():
        one["optimizers"] *= 2
    assert len(merged(engine, said, set())[0]["optimizers"]) == 2


class Same(nn.Module):
    """A stage whose names are not the whole model's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def save_same_names(folder):
    net = Same()
    engine = AmpEngine(net, torch.optim.SGD(net.parameters(), 1.0), "fp32")
    engine.scale_fn(loss_of)
    engine.save_sharded(folder)
    before = net.layer.weight.detach().clone()
    with torch.no_grad():
        net.layer.weight.zero_()
    engine.load_sharded(folder)
    return torch.equal(before, net.layer.weight)


def test_stages_of_the_same_names_resume_on_as_many_and_are_refused_elsewhere_with_the_way_out(pool, tmp_path):
    assert pool.run(save_same_names, 2, str(tmp_path)) == [True, True]
    net = Same()
    engine = AmpEngine(net, torch.optim.SGD(net.parameters(), 1.0), "fp32")
    with pytest.raises(
        CheckpointError, match=r"2 stages .* parameters of the same names.* keep the whole model's names"
    ):
        engine.load_sharded(tmp_path)


def save_within_a_window(folder):
    piped = Piped(2, "fp32", accumulate_steps=2)
    piped.run(batches(1)[0])
    piped.engine.save_sharded(folder)


def test_stages_that_saved_within_a_window_are_refused_where_the_model_is_cut_elsewhere(pool, tmp_path):
    pool.run(save_within_a_window, 2, str(tmp_path))
    alone = Piped(1, "fp32", accumulate_steps=2)
    before = alone.carried()
    with pytest.raises(CheckpointError, match=r"saved within a window by 2 stages.*or save after step\(\)"):
        alone.engine.load_sharded(tmp_path)
    assert_same_state(alone.carried(), before)


def save_with_two_rates(folder):
    piped = Piped(2, "fp32")
    piped.run(batches(1)[0])
    piped.engine.optimizers[0].param_groups[0]["lr"] = 0.5 + distributed.get_rank()
    piped.engine.save_sharded(folder)


def test_settings_that_stages_do_not_share_are_refused_where_they_would_become_one(pool, tmp_path):
    pool.run(save_with_two_rates, 2, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"stage 0 saved lr=0\.5 and stage 1 lr=1\.5, which here must be one"):
        Piped(1, "fp32").engine.load_sharded(tmp_path)


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
