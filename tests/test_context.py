# SPDX-License-Identifier: Apache-2.0
"""A context is a value: where it comes from, what it says, and that it refuses when it is closed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from catching import assert_raises
from processes import patience
from steps import begin_batch
from torch import nn
from torch.utils.data import DataLoader

import accel
from accel.comm import Call, agreed_values
from accel.errors import ConfigError, ContextClosedError, DeviceError, EnvError
from accel.formats import precision
from accel.testing import simulate, simulate_groups

COLLECTIVES = {
    "gather": lambda ctx: accel.gather(ctx, torch.zeros(2)),
    "gather of much": lambda ctx: accel.gather(ctx, torch.zeros(4000)),
    "gather of nothing": lambda ctx: accel.gather(ctx, {}),
    "reduce": lambda ctx: accel.reduce(ctx, torch.zeros(2)),
    "reduce of much": lambda ctx: accel.reduce(ctx, torch.zeros(4000)),
    "wait_for_everyone": accel.wait_for_everyone,
    "agreed": lambda ctx: agreed_values(ctx.comm, Call("test"), lambda: 1, int),
    "main_process_first": lambda ctx: _whole(ctx),
    "gather_for_metrics": lambda ctx: accel.gather_for_metrics(ctx, torch.zeros(1), _batch(ctx)),
}


def _whole(ctx: accel.DistContext) -> None:
    with accel.main_process_first(ctx):
        pass


def _batch(ctx: accel.DistContext) -> accel.Batch:
    loader = accel.prepare_loader(ctx, DataLoader(range(ctx.world_size)))
    return next(accel.batches(ctx, loader, accel.Cursor()))


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_collective_refuses_a_closed_context(name, world_size):
    def rank(ctx):
        open_copy = accel.replace(ctx, precision="bf16")
        COLLECTIVES[name](ctx)
        accel.close(ctx)
        accel.close(ctx)
        for each in (ctx, open_copy):  # copies share the handle
            with assert_raises(ContextClosedError, problem="closed"):
                COLLECTIVES[name](each)
        return True

    assert simulate(rank, world_size) == [True] * world_size
    assert rank(accel.single())


def test_a_closed_context_trains_no_more():
    ctx = accel.single()
    model = accel.prepare_model(ctx, nn.Linear(1, 1))
    optimizer, loader = torch.optim.SGD(model.parameters()), accel.prepare_loader(ctx, DataLoader([1]))
    loss = model(torch.ones(1, 1)).mean()
    state = begin_batch(ctx)
    ended = msgspec.structs.replace(state, accum=state.accum.add(scale=1.0, unit=1.0, world=1.0))
    weight = model.weight.detach().clone()
    accel.close(ctx)
    for call in (
        lambda: accel.prepare(ctx, nn.Linear(1, 1)),
        lambda: accel.prepare_model(ctx, nn.Linear(1, 1)),
        lambda: accel.prepare_optimizer(ctx, optimizer),
        lambda: accel.prepare_loader(ctx, DataLoader([1])),
        lambda: next(accel.batches(ctx, loader, accel.Cursor())),
        lambda: accel.accumulate(ctx, state, model),
        lambda: accel.backward(ctx, loss, state),
        lambda: accel.optimizer_step(ctx, optimizer, ended),
        lambda: accel.clip_grad_norm_(ctx, model.parameters(), 1.0, ended),
    ):
        with assert_raises(ContextClosedError, expected="session"):
            call()
    assert model.weight.grad is None
    assert torch.equal(model.weight, weight)


def test_a_backend_that_torch_does_not_have_is_refused_before_anybody_waits():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    with assert_raises(ConfigError, got="'glooo'"):
        accel.from_env(environ, device="cpu", backend="glooo")
    with assert_raises(ConfigError, where="ACCEL_BACKEND"):
        accel.from_env(environ | {"ACCEL_BACKEND": "tcpp"}, device="cpu")


def test_nothing_set_and_nothing_passed_is_one_process_on_the_default_device():
    ctx = accel.from_env({})
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    assert ctx == dataclasses.replace(accel.single(device), comm=ctx.comm)
    assert (ctx.rank, ctx.world_size, ctx.precision.name, ctx.timeout_s, ctx.backend) == (0, 1, "fp32", 300.0, "none")
    assert ctx.is_main_process
    assert ctx.is_local_main_process
    assert ctx.is_last_process


@pytest.mark.parametrize(
    ("field", "variable", "in_environment", "as_argument"),
    [
        ("device", "ACCEL_DEVICE", "meta", "cpu"),
        ("precision", "ACCEL_PRECISION", "bf16", "fp16"),
        ("precision", "ACCEL_PRECISION", "bf16", "fp32"),  # the default's own value still beats the environment
        ("accumulation", "ACCEL_ACCUMULATION", "4", 1),
        ("strategy", "ACCEL_STRATEGY", "fsdp", "ddp"),
        ("timeout_s", "ACCEL_TIMEOUT_S", "12.5", 300.0),
    ],
)
def test_an_argument_beats_the_environment_which_beats_the_default(
    monkeypatch, field, variable, in_environment, as_argument
):
    monkeypatch.setattr("accel.context._make._check_present", lambda device, where: device)
    environ = {variable: in_environment}
    kinds = {"device": torch.device, "precision": precision, "accumulation": int, "timeout_s": float}
    read = kinds.get(field, str)
    assert getattr(accel.from_env(environ), field) == read(in_environment)
    assert getattr(accel.from_env(environ, **{field: as_argument}), field) == read(as_argument)


def test_the_backend_of_a_group_follows_argument_then_environment_then_device(monkeypatch):
    seen = []

    def init_process_group(backend, *, timeout, **rest):
        seen.append((backend, timeout.total_seconds()))

    monkeypatch.setattr("accel.comm._group.open_store", lambda env, timeout_s: None)
    monkeypatch.setattr("torch.distributed.init_process_group", init_process_group)
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: True)
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", "ACCEL_DEVICE": "cpu"}
    accel.from_env(environ)
    accel.from_env(environ | {"ACCEL_BACKEND": "mpi", "ACCEL_TIMEOUT_S": "7"})
    chosen = accel.from_env(environ | {"ACCEL_BACKEND": "mpi"}, backend="ucc", timeout_s=9)
    assert seen == [("gloo", 300.0), ("mpi", 7.0), ("ucc", 9)]
    assert (chosen.backend, chosen.timeout_s) == ("ucc", 9)


def test_wrong_arguments_are_refused_before_a_group_is_opened(monkeypatch):
    monkeypatch.setattr("accel.context._make.connect", lambda *args: pytest.fail("a group was opened"))
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    wrongs = [{"precision": "fp4"}, {"timeout_s": 0}, {"timeout_s": float("nan")}, {"strategy": "fsdp2"}]
    wrongs += [{"accumulation": count} for count in (0, True, 2.0, "4")]
    wrongs += [{"mesh": text} for text in ("dp=3", "dp=-1,tp=4", "2,2", (2, 2))]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            accel.from_env(environ, device="cpu", **wrong)
    with assert_raises(DeviceError, got="'gpu'", where="device="):
        accel.from_env(environ, device="gpu")
    with assert_raises(DeviceError, got="'gpu'", where="ACCEL_DEVICE"):
        accel.from_env(environ | {"ACCEL_DEVICE": "gpu"})
    with assert_raises(DeviceError, problem="rank 0 has no GPU", expected="GPU 99"):
        accel.from_env(environ, device="cuda:99")
    with pytest.raises(DeviceError):  # torch takes this for a negative index
        accel.from_env(environ, device="cuda:999")
    with pytest.raises(EnvError):
        accel.from_env({"RANK": "0"})


def test_an_unknown_setting_and_one_without_effect_are_no_keywords():
    for call in (
        lambda: accel.from_env({}, precison="bf16"),
        lambda: accel.single(backend="gloo"),
        lambda: accel.replace(accel.single(), precison="bf16"),
    ):
        with pytest.raises(TypeError, match=r"unexpected keyword argument '(precison'. Did you mean `precision`|back)"):
            call()


def test_a_context_holds_the_settings_of_its_run():
    ctx = accel.replace(accel.single(timeout_s=5), accumulation=2)
    assert msgspec.structs.asdict(ctx.settings) == msgspec.structs.asdict(accel.single().settings) | {
        "device": "cpu",
        "precision": precision("fp32"),
        "accumulation": 2,
        "strategy": "ddp",
        "compile": "off",
        "backend": "none",
        "timeout_s": 5.0,
    }
    assert accel.replace(ctx, device="cpu", mesh="").settings == ctx.settings


def test_a_context_is_frozen_and_its_handle_is_no_part_of_the_value():
    ctx, other = accel.single(), accel.single()
    with pytest.raises(dataclasses.FrozenInstanceError):
        ctx.rank = 1
    assert ctx == other
    assert hash(ctx) == hash(other)
    assert ctx.comm is not other.comm
    assert ctx != accel.single(precision="bf16")
    assert "comm" not in repr(ctx).lower()
    accel.close(other)
    assert ctx == other


def test_replace_gives_a_changed_copy():
    ctx = accel.single()
    changed = accel.replace(ctx, precision="bf16", device="cpu:0")
    assert (changed.precision.name, changed.device) == ("bf16", torch.device("cpu"))
    assert changed.comm is ctx.comm
    assert ctx == accel.single()
    assert accel.replace(ctx) == ctx


@pytest.mark.parametrize(
    ("changes", "error", "fields"),
    [
        ({"precision": "half"}, ConfigError, {"expected": "fp32, bf16, fp16"}),
        ({"device": "meta"}, DeviceError, {"problem": "the device cannot compute"}),
        ({"device": "nowhere"}, DeviceError, {"got": "nowhere"}),
    ],
)
def test_replace_refuses_what_cannot_be(changes, error, fields):
    with assert_raises(error, **fields):
        accel.replace(accel.single(), **changes)


@pytest.mark.parametrize(
    "make",
    [
        accel.single,
        lambda device: accel.from_env({}, device=device),
        lambda device: accel.from_env({"ACCEL_DEVICE": device}),
        lambda device: accel.replace(accel.single(), device=device),
    ],
)
@pytest.mark.parametrize("device", ["hpu", "npu", "ipu", "mtia", "privateuseone"])
def test_a_device_that_torch_has_no_module_for_is_not_there(make, device):
    fields = {"fix": "import that package first"} if device != "mtia" else {"expected": "of this machine"}
    with assert_raises(DeviceError, **fields):
        make(device)


def test_contexts_live_side_by_side():
    first, second = accel.single(precision="bf16"), accel.single()
    with accel.session({}, precision="fp16") as third:
        precisions = []
        for ctx in (first, second, third):
            with accel.autocast(ctx):
                precisions.append(nn.Linear(2, 2)(torch.zeros(1, 2)).dtype)
        assert precisions == [torch.bfloat16, torch.float32, torch.float16]
    with pytest.raises(ContextClosedError):
        accel.wait_for_everyone(third)
    accel.close(first)
    accel.wait_for_everyone(second)


def test_a_session_closes_when_its_block_fails():
    def fail():
        with accel.session({}) as ctx:
            kept.append(ctx)
            raise KeyError("inside")

    kept = []
    with pytest.raises(KeyError, match="inside"):
        fail()
    with assert_raises(ContextClosedError, expected=r"with accel.session\(\)"):
        accel.wait_for_everyone(kept[0])


def test_an_adopted_group_outlives_its_contexts():
    def rank(group):
        first, second = accel.from_group(group, device="cpu"), accel.from_group(group, device="cpu", precision="bf16")
        accel.close(first)
        with pytest.raises(ContextClosedError):
            accel.wait_for_everyone(first)
        total = accel.reduce(second, torch.tensor(group.rank() + 1))
        return int(total), (second.rank, second.world_size, second.is_main_process, second.is_last_process)

    results = simulate_groups(rank, 3)
    assert [total for total, _ in results] == [6, 6, 6]
    assert [place for _, place in results] == [(0, 3, True, False), (1, 3, False, False), (2, 3, False, True)]


def test_ranks_of_an_adopted_group_on_nodes():
    def rank(group):
        ctx = accel.from_group(group, device="cpu", local_world_size=2)
        return ctx.local_rank, ctx.local_world_size, ctx.node_rank, ctx.num_nodes, ctx.is_local_main_process

    assert simulate_groups(rank, 4) == [
        (0, 2, 0, 2, True),
        (1, 2, 0, 2, False),
        (0, 2, 1, 2, True),
        (1, 2, 1, 2, False),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"local_world_size": 3},
        {"local_world_size": 0},
        {"local_rank": 4},
        {"local_rank": -1},
        {"precision": "fp4"},
        {"timeout_s": 0},
    ],
)
def test_an_adopted_group_that_does_not_fit_is_refused(wrong):
    def rank(group):
        with pytest.raises(ConfigError):
            accel.from_group(group, device="cpu", **wrong)
        return True

    assert simulate_groups(rank, 4) == [True] * 4


PROGRAM = """
import json, sys
import torch, torch.distributed as dist
import accel

said = {}
with accel.session(device="cpu") as ctx:
    said["place"] = [ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.backend]
    said["sum"] = int(accel.reduce(ctx, torch.tensor(ctx.rank + 1)))
    said["rows"] = accel.gather(ctx, torch.full((ctx.rank + 1, 2000), float(ctx.rank)))[:, 0].tolist()
    try:
        accel.gather(ctx, torch.zeros(2)) if ctx.rank else accel.reduce(ctx, torch.zeros(2))
    except accel.errors.CollectiveMismatch as error:
        said["mismatch"] = str(error)
    adopted = accel.from_group(dist.group.WORLD, device="cpu")
    said["adopted"] = [adopted.rank, adopted.world_size, adopted.backend]
    accel.close(adopted)
    both = accel.from_env(device="cpu")  # the group is open: adopted, not opened again
    accel.close(both)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.group.WORLD)
    said["still"] = tensor.item()
said["after"] = dist.is_initialized()
late = accel.from_env(device="cpu")
dist.destroy_process_group()  # by somebody else, who then opens a group of their own
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=ctx.rank, world_size=2)
accel.close(late)
said["other"] = dist.is_initialized()
dist.destroy_process_group()
with open(f"{sys.argv[2]}-{ctx.rank}", "w") as file:
    json.dump(said, file)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torchrun_says_how_many_ranks_there_are(tmp_path: Path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path / "store"), str(tmp_path / "said")],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        said = json.loads((tmp_path / f"said-{rank}").read_text())
        mismatch = said.pop("mismatch")
        assert "rank 0: reduce at program.py" in mismatch
        assert "rank 1: gather at program.py" in mismatch
        assert said == {
            "place": [rank, 2, rank, 2, "gloo"],
            "sum": 3,
            "rows": [0.0, 1.0, 1.0],
            "adopted": [rank, 2, "gloo"],
            "still": 2.0,
            "after": False,
            "other": True,
        }


@pytest.mark.slow
def test_a_compiled_function_reads_an_axis_without_a_warning() -> None:
    ctx = accel.single()
    compiled = torch.compile(lambda value: value * ctx.axis("tp").size, backend="eager", fullgraph=True)
    assert compiled(torch.tensor(3)) == 3  # a warning is an error here
