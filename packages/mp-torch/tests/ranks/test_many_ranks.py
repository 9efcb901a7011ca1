"""What many ranks promise besides being equal to one: precision beside precision, no hangs, bytes on the wire."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from layouts import Training, batches, loss_of, spoil
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mp_torch import AmpConfigError, AmpEngine, AmpStateError, LossScale, memory_estimate
from mp_torch.ranks.average import mean_


class Layer(nn.Module):
    """A norm in fp32 beside linears in 16 bits, and a rotation by positions that must stay fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert positions.dtype == torch.float32, "positions were cast"
        return x + self.down(torch.relu(self.up(self.norm(x)))) * torch.cos(positions)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.gain = nn.Parameter(torch.ones(1))  # on two ranks one of them holds none of it
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        positions = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None] * 257.0
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x * self.gain)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def train(how: str, precision: str, steps: int = 3, **settings):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    shard = settings.pop("shard", {})
    engine = AmpEngine(model, optimizer, precision, update="exact", **settings)
    call: nn.Module = model
    if how == "ddp":
        call = engine.replicate()
    else:
        engine.shard(**shard)
    generator = torch.Generator().manual_seed(3)
    reports = []
    for _ in range(steps):
        tokens = torch.randint(11, (4, 5), generator=generator).chunk(distributed.get_world_size())
        mine = tokens[distributed.get_rank()]
        with engine.autocast():
            loss = nn.functional.cross_entropy(call(mine).flatten(0, 1).float(), mine.flatten())
        engine.backward(loss)
        reports.append(repr(engine.step()))
    tensors = [parameter.detach() for parameter in model.parameters()]
    return reports, [(one.full_tensor() if isinstance(one, DTensor) else one).clone() for one in tensors]


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-mixed", "bf16-true", "fp16-true"])
def test_shards_that_travel_in_16_bits_train_as_replicas_that_do_not_bit_for_bit(pool, precision):
    replicas = pool.run(train, 2, "ddp", precision)
    shards = pool.run(train, 2, "fsdp", precision)
    assert replicas[0][0] == replicas[1][0] == shards[0][0] == shards[1][0]
    for one, other in zip(replicas[0][1], shards[0][1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reduce_dtype", ["fp16", "bf16"])
def test_gradients_on_a_16_bit_wire_are_the_same_for_shards_and_replicas_and_kept_in_fp32(pool, reduce_dtype):
    settings = {"reduce_dtype": reduce_dtype, "divide": "after", "loss_scale": LossScale(init_scale=1024.0)}
    replicas = run(pool, "ddp", settings)
    shards = run(pool, "fsdp", settings)
    assert replicas[0][0] == replicas[1][0] == shards[0][0] == shards[1][0]
    for one, other in zip(replicas[0][1], shards[0][1], strict=True):
        assert torch.equal(one, other)
    fp32 = run(pool, "ddp", {"loss_scale": LossScale(init_scale=1024.0)})
    assert replicas[0][0] != fp32[0][0], "the wire's dtype made no difference at all"


def run(pool, how, settings):
    return pool.run(train_with, 2, how, settings)


def train_with(how, settings):
    return train(how, "fp16-mixed", **settings)


def of_replicated_shards(values, reduce_dtype):
    """The gradient of a weight in shards of two ranks and two replicas, whose rank r computes ``values[r]``."""
    model = nn.Linear(4, 1, bias=False)
    engine = AmpEngine(
        model, torch.optim.SGD(model.parameters(), 1.0), "fp32", reduce_dtype=reduce_dtype, divide="after"
    )
    engine.shard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    engine.backward(model(torch.full((1, 4), values[distributed.get_rank()])).sum())
    (gradient,) = engine.gradients().values()
    return gradient.flatten().tolist()


@pytest.mark.parametrize("values", [[2048.0, 2048.0, 1.0, 1.0], [40000.0] * 4, [2.0**-24] * 4])
@pytest.mark.parametrize("reduce_dtype", ["fp16", "fp32"])
def test_replicas_of_shards_add_in_fp32_whatever_travels_within_a_replica(pool, values, reduce_dtype):
    found = pool.run(of_replicated_shards, 4, values, reduce_dtype)
    numbers = [one for gradient in found[:2] for one in gradient]  # what the two ranks of one replica hold together
    assert set(numbers) == {sum(values) / 4}
    assert len(numbers) == 4
    assert found[2:] == found[:2]


def offloaded():
    return train("fsdp", "bf16-mixed", shard={"offload": True})


def test_offloaded_shards_train_as_others_do(pool):
    reports, tensors = pool.run(offloaded, 2)[0]
    expected, others = pool.run(train, 2, "fsdp", "bf16-mixed")[0]
    assert reports == expected
    assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def users_own():
    """``fully_shard`` called by the user, beside a parameter that is left whole on every rank."""
    model = net()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params={model.gain})
    engine = AmpEngine(model, torch.optim.AdamW(model.parameters(), 1e-2), "bf16-mixed", update="exact")
    reports = []
    for place in range(3):
        torch.manual_seed(10 + place)
        mine = torch.randint(11, (4, 5)).chunk(2)[distributed.get_rank()]
        with engine.autocast():
            loss = nn.functional.cross_entropy(model(mine).flatten(0, 1).float(), mine.flatten())
        engine.backward(loss)
        if place == 1 and distributed.get_rank() == 1:
            assert model.gain.grad is not None
            model.gain.grad[0] = torch.nan
        reports.append(repr(engine.step()))
    return reports, model.gain.detach().clone()


def test_a_users_own_shards_and_a_whole_parameter_in_one_optimizer_take_one_decision(pool):
    (first, gain), (second, other) = pool.run(users_own, 2)
    assert first == second
    assert "NaN in gain" in first[1]
    assert torch.equal(gain, other)


def norm_of_replica_and_shards():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    model.replica = nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Replicate()]))
    model.shards = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 1.0), "fp32", update="exact", max_grad_norm=None)
    with engine.autocast():
        loss = (3.0 * model.replica.to_local()).sum()
        loss = loss + (model.shards.to_local() * (4.0 if distributed.get_rank() == 0 else 0.0)).sum()
    engine.backward(loss)
    return engine.step().grad_norm


def test_a_replicated_gradient_of_3_and_shards_of_4_and_0_have_norm_5(pool):
    assert pool.run(norm_of_replica_and_shards, 2) == [5.0, 5.0]


class Branches(nn.Module):
    """Two experts, of which each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[distributed.get_rank()](x)


def with_an_expert_each(bad_rank: int):
    model = Branches()
    engine = AmpEngine(
        model, torch.optim.SGD(model.parameters(), 1.0), "fp16-mixed", loss_scale=LossScale(init_scale=1024.0)
    )
    wrapped = engine.replicate(find_unused_parameters=True)
    reports = []
    for step in range(2):
        with engine.autocast():
            loss = wrapped(torch.ones(1, 2)).float().sum()
        engine.backward(loss)
        if step == 1 and distributed.get_rank() == bad_rank:
            spoil(model)
        reports.append(repr(engine.step()))
    return reports


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_overflow_in_one_rank_s_expert_skips_all_with_one_backoff(pool, bad_rank):
    first, second = pool.run(with_an_expert_each, 2, bad_rank)
    assert first == second
    assert "applied=True" in first[0]
    assert "skipped=True" in first[1]
    assert "loss_scale=1024.0, next_loss_scale=512.0" in first[1]


def with_a_frozen_stage():
    model = nn.Linear(2, 2)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 1.0), "fp32", update="exact")
    loss_fn = engine.scale_fn(lambda output, target: (output * target).sum())
    if distributed.get_rank() == 1:
        torch.autograd.backward(loss_fn(model(torch.ones(1, 2)), torch.ones(1, 2)))
    return repr(engine.step())


def test_no_rank_hangs_and_reports_agree_where_a_stage_has_no_gradient_at_all(pool):
    first, second = pool.run(with_a_frozen_stage, 2, timeout=30.0)
    assert first == second
    assert "applied=True" in first


def idle_with_shards(adds_output: bool):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 0.1), "fp32")
    engine.shard()
    reports = []
    for idle in (False, True, False):
        with engine.autocast():
            output = model(torch.ones(2, 6))
            loss = output.square().sum()
            if idle and distributed.get_rank() == 0:
                loss = torch.zeros(1, requires_grad=True).sum() + (0.0 * output.sum() if adds_output else 0.0)
        engine.backward(loss)
        reports.append(repr(engine.step()))
    return reports


def test_a_rank_whose_loss_touches_no_shard_says_so_to_all_and_its_way_out_trains(pool):
    (good, first), (other, second) = pool.answers(idle_with_shards, 2, False, timeout=14.0)
    assert not good
    assert not other
    assert "the loss touches no sharded parameter on this rank, whose part the others wait for" in first
    assert "backward() on rank 1 stops because rank 0 failed in backward(): AmpStateError: the loss touches" in second
    first, second = pool.run(idle_with_shards, 2, True)
    assert first == second
    assert all("applied=True" in report for report in first)


def nobody_has_a_gradient():
    model = nn.Linear(2, 2)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 1.0), "fp16-mixed")
    wrapped = engine.replicate()
    with engine.autocast():
        wrapped(torch.ones(1, 2))
        loss = torch.zeros(1, requires_grad=True).sum()
    engine.backward(loss)
    report = engine.step()
    return report.applied, report.skipped, report.reason, report.next_loss_scale


def test_a_step_without_any_gradient_on_any_rank_says_so_and_leaves_the_scale(pool):
    assert pool.run(nobody_has_a_gradient, 2) == [(False, False, "no gradients", 65536.0)] * 2


def without_the_wrapper():
    model = nn.Linear(2, 2)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 1.0), "fp32")
    engine.replicate()
    with engine.autocast():
        loss = model(torch.ones(1, 2)).sum()
    try:
        engine.backward(loss)
    except AmpStateError as error:
        return str(error)
    return "trained apart"


def test_replicas_whose_wrapper_was_thrown_away_are_refused_instead_of_training_apart(pool):
    for message in pool.run(without_the_wrapper, 2):
        assert message.startswith("the wrapped model is gone, and with it what exchanges gradients between ranks; keep")


def with_the_wrapper_kept_and_the_model_called():
    model = nn.Linear(2, 2, bias=False)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 1.0), "fp32")
    wrapped = engine.replicate()
    for _ in range(2):
        with engine.autocast():
            loss = wrapped.module(torch.full((1, 2), 1.0 + 2 * distributed.get_rank())).sum()
        engine.backward(loss)
        (gradient,) = (one.clone() for one in engine.gradients().values())
        engine.step()
    return gradient.flatten().tolist()


def test_gradients_of_a_model_that_is_called_beside_its_wrapper_are_averaged_all_the_same(pool):
    assert pool.run(with_the_wrapper_kept_and_the_model_called, 2) == [[2.0] * 4] * 2


def window_of(micro_steps: int):
    """Bytes that DDP's hook sends in a window."""
    training = Training("ddp", accumulate_steps=micro_steps, reduce_dtype="fp16")
    sent = []
    real = distributed.all_to_all_single
    distributed.all_to_all_single = lambda output, given, **options: (
        sent.append(given.nbytes), real(output, given, **options))[1]  # fmt: skip
    try:
        before = [parameter.grad is None for parameter in training.net.parameters()]
        for x in batches(micro_steps):
            report = training.step(x)
    finally:
        distributed.all_to_all_single = real
    return before, len(sent), report.applied, report.micro_steps


def test_a_window_exchanges_gradients_once(pool):
    for _, exchanges, applied, micro_steps in pool.run(window_of, 2, 3):
        assert (exchanges, applied, micro_steps) == (1, True, 3)


def refuse(gradient: torch.Tensor) -> None:
    raise ValueError(f"bad sample 17, gradient {gradient.item()}")


def fails_in(place: str):
    training = Training("ddp")
    x = batches(1)[0].chunk(2)[training.rank]
    bad = training.rank == 1
    with training.engine.autocast():
        if bad and place == "the forward pass":
            raise ValueError("bad sample 17")
        loss = loss_of(training.call(x), x)
    if bad and place == "backward()":
        loss.register_hook(refuse)
    training.engine.backward(loss)
    if bad and place == "step()":
        training.engine.optimizers[0].param_groups[0]["params"].pop()
    training.engine.step()


@pytest.mark.parametrize("place", ["the forward pass", "backward()", "step()"])
def test_a_rank_that_fails_takes_the_other_down_at_once_with_its_own_words(pool, place):
    started = time.monotonic()
    (good, first), (other, second) = pool.answers(fails_in, 2, place, timeout=40.0)
    assert not good
    assert not other
    assert time.monotonic() - started < 30, "the ranks waited for a timeout"
    assert f"stops because rank 1 failed in {place}:" in first
    assert ("bad sample 17" in second) == (place != "step()")


def dies():
    training = Training("ddp")
    training.step(batches(1)[0])
    if training.rank == 1:
        raise SystemExit("gone without a word")
    training.step(batches(1)[0])


def test_a_rank_that_leaves_without_a_word_is_reported_as_gone(pool):
    (good, first), _ = pool.answers(dies, 2, timeout=30.0)
    assert not good
    assert "another rank went away without saying why" in first


def differently_told():
    model = nn.Linear(2, 2)
    interval = 10 + distributed.get_rank()
    engine = AmpEngine(
        model, torch.optim.SGD(model.parameters(), 1.0), "fp16-mixed", loss_scale=LossScale(growth_interval=interval)
    )
    try:
        engine.replicate()
    except AmpConfigError as error:
        return str(error)
    return "accepted"


def test_ranks_that_were_told_different_things_are_refused_everywhere(pool):
    for message in pool.run(differently_told, 2):
        assert "loss_scale=" in message
        assert "ranks that decide together need the same settings" in message


def refusals():
    """What cannot be honoured, asked for in turn; the messages."""
    found = {}

    def asked(name, what):
        try:
            what()
        except (AmpConfigError, AmpStateError) as error:
            found[name] = str(error)

    def engine(model, precision="bf16-mixed", **settings):
        return AmpEngine(model, torch.optim.SGD(model.parameters(), 1.0), precision, **settings)

    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    asked("ddp", lambda: engine(wrapped, "bf16-true"))
    sharded = net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    asked("fsdp", lambda: engine(sharded, "bf16-true"))
    hooked = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, allreduce_hook)
    asked("hook", lambda: engine(hooked))
    asked("dtype", lambda: engine(nn.Linear(2, 2)).shard(param_dtype="fp16"))
    asked("blocks", lambda: engine(net()).shard(blocks=["layer.0"]))
    trained = engine(nn.Linear(2, 2))
    with trained.autocast():
        loss = trained.model(torch.ones(1, 2)).sum()
    trained.backward(loss)
    trained.step()
    asked("late", trained.shard)
    return found


def test_what_cannot_be_honoured_is_refused_with_the_way_out(pool):
    found = pool.run(refusals, 2)[0]
    assert "DistributedDataParallel has made its buckets; give the plain model to the engine" in found["ddp"]
    assert "FSDP has made its shards; give the plain model to the engine and call engine.shard()" in found["fsdp"]
    assert "has a communication hook of its own" in found["hook"]
    assert "param_dtype='fp16' with precision='bf16-mixed'" in found["dtype"]
    assert "blocks: 'layer.0' names no module of Net; its modules are token, layers" in found["blocks"]
    assert "shard() after 1 updates: masters and moments are laid out already" in found["late"]


def test_many_ranks_without_torch_distributed_are_refused():
    model = nn.Linear(2, 2)
    engine = AmpEngine(model, torch.optim.SGD(model.parameters(), 1.0), "fp32")
    for action in (engine.shard, engine.replicate, lambda: engine.scale_fn(loss_of)):
        with pytest.raises(AmpStateError, match=r"needs torch.distributed to run; start the program with torchrun"):
            action()
    assert copy.deepcopy(engine.config) == engine.config


SENT = {"all_reduce": 1.0, "all_to_all_single": 0.5, "all_gather_single": 1.0, "all_gather_into_tensor": 1.0}
"""What each of two ranks sends of the bytes that it hands to a collective."""


def bytes_on_the_wire(wire: str) -> float:
    """What one average of 4096 numbers sends, counted at the collectives."""
    sent = 0.0
    real = {name: getattr(distributed, name) for name in SENT if hasattr(distributed, name)}

    def counted(name):
        def call(*tensors, **options):
            nonlocal sent
            splits = options.get("input_split_sizes")  # of bytes; what stays here is none of them
            sent += SENT[name] * tensors[-1].nbytes if splits is None else sum(splits)
            return real[name](*tensors, **options)

        return call

    for name in real:
        setattr(distributed, name, counted(name))
    try:
        mean_(torch.ones(4096), distributed.group.WORLD, getattr(torch, wire), "after")
    finally:
        for name, function in real.items():
            setattr(distributed, name, function)
    return sent


def test_a_16_bit_wire_carries_half_the_bytes(pool):
    assert pool.run(bytes_on_the_wire, 2, "float32") == [4096 * 4.0] * 2
    for wire in ("float16", "bfloat16"):
        assert pool.run(bytes_on_the_wire, 2, wire) == [4096 * 2.0] * 2


def held_bytes(precision: str):
    """Measured on the tensors of this rank: weights, masters, gradients, moments."""
    model = net()
    engine = AmpEngine(model, torch.optim.AdamW(model.parameters()), precision)
    engine.shard()
    tokens = torch.randint(11, (4, 5))
    with engine.autocast():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    engine.backward(loss)
    parts = [part.weight for part in engine.assembly.parts]
    gradients = sum(gradient.nbytes for gradient in engine.gradients().values())
    engine.step()
    state = [one for row in engine.optimizers[0].state.values() for name, one in row.items() if name != "step"]
    carried = [one for weight in parts for one in weight.state().values()]
    return {
        "weights": sum(weight.held.nbytes for weight in parts),
        "masters": sum(one.nbytes for one in carried),
        "gradients": gradients,
        "moments": sum(one.nbytes for one in state),
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_fullest_rank_holds_the_bytes_that_memory_estimate_says(pool, precision, world):
    measured = pool.run(held_bytes, world, precision)[0]  # the first rank's shards are the largest
    estimate = memory_estimate(net(), precision, "adamw", ranks=world, sharding="fsdp")
    assert measured == {role: getattr(estimate, role) for role in measured}


def overflow_on_stage(rank: int):
    training = Training("pp", "fp16-mixed")
    bits = {name: tensor.clone() for name, tensor in training.whole().items()}
    training.step(batches(1)[0], rank)
    same = all(torch.equal(tensor, training.whole()[name]) for name, tensor in bits.items())
    spoil(training.model)
    return same, training.engine.loss_scale, training.engine.update_index


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_stage_changes_no_bit_on_any_and_backs_off_once(pool, rank):
    assert pool.run(overflow_on_stage, 2, rank) == [(True, 8.0, 0)] * 2
