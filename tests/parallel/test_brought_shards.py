# SPDX-License-Identifier: Apache-2.0
"""Models that their users have divided: the line of the error gives ranks with parts of one tensor the same samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import PrepareError
from accel.parallel._brought_shards import check_divided
from accel.testing import Simulator

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.Tanh()).double()


def _divide(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


Trained = tuple[list[int], list[float], dict[str, torch.Tensor]]


def _train(ctx: accel.DistContext, net: nn.Module) -> Trained:
    """Train on the loader's samples, clipped, in windows of two micro-batches; return sizes, norms and weights."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(X, Y), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, net, optimizer)
    state = accel.train_state(ctx, seed=0, accumulation=2)
    rows: list[int] = []
    norms: list[float] = []
    for batch in accel.batches(ctx, loader, state):
        x, y = batch.data
        rows.append(len(x))
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            state = accel.backward(ctx, nn.functional.mse_loss(model(x), y), state)
        if state.sync:
            norms.append(float(accel.clip_grad_norm_(ctx, model.parameters(), 0.1, state)))
            state = accel.optimizer_step(ctx, optimizer, state)
    return rows, norms, {name: each.clone() for name, each in accel.get_state_dict(ctx, model, dst=None).items()}


def _along(name: str | None) -> Callable[[], nn.Module]:
    names = None if name is None else (name,)
    return lambda: _divide(_net(), init_device_mesh("cpu", (2,), mesh_dim_names=names))


def _buffers() -> nn.Module:
    net = _net()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net.register_buffer("table", distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    return net


def _frozen() -> nn.Module:
    net = _along("tp")()
    return nn.Sequential(net[0].requires_grad_(False), *net[1:])


def _beside(*names: str) -> Callable[[], nn.Module]:
    """Tensor parallelism along the second dimension, `fully_shard` along the first."""

    def make() -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        return fully_shard(_divide(_net(), mesh[names[1]]), mesh=mesh[names[0]])

    return make


def _in_part(at: int, *names: str) -> Callable[[], nn.Module]:
    """Tensor parallelism along one dimension; nobody has spread the model along the other."""

    def make() -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        return _divide(_net(), mesh[names[at]])

    return make


def _on_all_dims() -> nn.Module:
    net = _net()
    mesh = init_device_mesh("cpu", (2, 2))
    for layer, dims in ((net[0], (0, 0)), (net[2], (1, None))):
        for name, dim in zip(("weight", "bias"), dims, strict=True):
            placed = [Replicate(), Replicate() if dim is None else Shard(dim)]
            setattr(layer, name, nn.Parameter(distribute_tensor(getattr(layer, name).detach(), mesh, placed)))
    net.register_forward_pre_hook(lambda _, args: DTensor.from_local(args[0], mesh, [Replicate()] * 2, run_check=False))
    net.register_forward_hook(lambda _module, _args, out: out.full_tensor())
    return net


DIVIDED: dict[str, tuple[Callable[[], nn.Module], int, int, str]] = {
    # makes the model, on so many ranks, of which so many have samples of their own; strategy
    "tp": (_along("tp"), 2, 1, "ddp"),
    "tp, fsdp": (_along("tp"), 2, 1, "fsdp"),
    "of a user's name": (_along("model"), 2, 1, "ddp"),
    "of a data dimension's name": (_along("dp"), 2, 1, "ddp"),
    "without a name": (_along(None), 2, 1, "ddp"),
    "without a name, fsdp": (_along(None), 2, 1, "fsdp"),
    "two dimensions without names": (_on_all_dims, 4, 1, "ddp"),
    "fsdp x tp": (_beside("fsdp", "tp"), 4, 2, "fsdp"),
    "dp x tensor": (_beside("dp", "tensor"), 4, 2, "ddp"),
    "of users' names, both": (_beside("outer", "inner"), 4, 2, "fsdp"),
    "dp x dp_shard": (_beside("dp", "dp_shard"), 4, 2, "fsdp"),
    "tp, nothing along dp": (_in_part(1, "dp", "tp"), 4, 2, "ddp"),
    "tp, nothing along dp, fsdp": (_in_part(1, "dp", "tp"), 4, 2, "fsdp"),
    "of a user's name, nothing along dp": (_in_part(1, "dp", "model"), 4, 2, "ddp"),
    "without neighbours": (_in_part(0, "tp", "dp"), 4, 2, "fsdp"),
}


DEFAULT = ("of a user's name", "fsdp x tp", "tp, nothing along dp")


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if each in DEFAULT else [pytest.mark.slow]) for each in DIVIDED]
)
def test_the_errors_line_makes_training_equal_one_process(ranks: Simulator, case: str, tmp_path: Path) -> None:
    make, size, own, strategy = DIVIDED[case]
    _, norms, weights = _train(accel.single("cpu"), _net())

    def rank(ctx: accel.DistContext) -> Trained:
        ctx = accel.replace(ctx, strategy=strategy)
        model = make()
        before = list(model.parameters())
        with assert_raises(PrepareError, problem="would get different samples") as caught:
            _ = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(each is old for each, old in zip(model.parameters(), before, strict=True))
        line = caught.value.fix.partition("ctx = ")[2]
        found: accel.DistContext = eval(
            line, {"accel": accel, "init_device_mesh": init_device_mesh, "model": model, "ctx": ctx}
        )
        assert found.data_parallel[1] == own
        trained = _train(found, model)
        accel.save_state(found, tmp_path, {"model": model}, step=1)
        return trained

    for rows, seen, trained in ranks.run(rank, size, default_group=True):
        assert rows == [4 // own] * 4
        assert seen == pytest.approx(norms, rel=1e-9)
        torch.testing.assert_close(trained, weights)
    saved = _net()
    accel.load_state(accel.single(), accel.latest_checkpoint(tmp_path), {"model": saved})
    torch.testing.assert_close({**saved.state_dict()}, weights)


def _one_rank() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    return _divide(_net(), mesh["tp"])


def _replicated() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    net = _net()
    for layer in (net[0], net[2]):
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Replicate()]), requires_grad=False)
    return net


def _sharded(*names: str, units: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        size = (2,) if len(names) < 2 else (1, 2)
        mesh = init_device_mesh("cpu", size, mesh_dim_names=names or None)
        net = _net()
        if units:
            fully_shard(net[0], mesh=mesh)
        return fully_shard(net, mesh=mesh)

    return make


ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "a mesh of one rank": _one_rank,
    "replicated": _replicated,
    "fsdp": _sharded("fsdp"),
    "fsdp, units": _sharded("fsdp", units=True),
    "fsdp along tp": _sharded("tp"),
    "fsdp, a user's name": _sharded("mine"),
    "fsdp, no name": _sharded(),
    "hsdp": _sharded("dp_replicate", "fsdp"),
    "plain": _net,
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_parts_that_fully_shard_gathers_and_replicas_are_accepted(ranks: Simulator, case: str) -> None:
    def rank(ctx: accel.DistContext) -> int:
        check_divided(ctx, ACCEPTED[case]())
        check_divided(accel.replace(ctx, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))), ACCEPTED[case]())
        return ctx.data_parallel[1]

    assert ranks.run(rank, 2, default_group=True) == [2, 2]


def test_parameters_that_a_load_replaces_stay_those_of_fully_shard(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        net = _sharded("fsdp")()
        for layer in (net[0], net[2]):
            for name, each in list(layer.named_parameters(recurse=False)):
                layer.register_parameter(name, nn.Parameter(each.detach().clone()))
        check_divided(ctx, net)

    _ = ranks.run(rank, 2, default_group=True)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp_replicate=2,dp_shard=2", "dp=2,cp=2", "dp=4", "tp=4"])
def test_what_prepare_has_divided_is_accepted_again(ranks: Simulator, mesh: str) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
        model = accel.prepare_model(ctx, _net())
        assert accel.prepare_model(ctx, model) is model

    _ = ranks.run(rank, 4, default_group=True)


def test_ranks_outside_of_the_context_are_not_judged(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = fully_shard(_divide(_net(), mesh["tp"]), mesh=mesh["dp"])
        own = accel.from_mesh(mesh["dp"], strategy="fsdp")
        check_divided(own, net)
        with assert_raises(PrepareError, fix=r"init_device_mesh|device_mesh\)"):
            check_divided(ctx, net)
        return own.data_parallel

    assert ranks.run(rank, 4, default_group=True) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_a_mesh_that_is_no_part_of_one_of_all_ranks_is_told(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        mesh = DeviceMesh("cpu", [0, 1] if ctx.rank < 2 else [2, 3], mesh_dim_names=("tp",))
        told = r'divide the model along a part of one mesh of all ranks.*\("dp", "tp"\)'
        with assert_raises(PrepareError, fix=told):
            check_divided(ctx, _divide(_net(), mesh))

    _ = ranks.run(rank, 4, default_group=True)


def test_a_dimension_of_one_rank_needs_a_meaning_too(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("mine", "tp"))
        model = fully_shard(_divide(_net(), mesh["tp"]), mesh=mesh["mine"])
        with assert_raises(PrepareError, problem="different samples") as caught:
            check_divided(ctx, model)
        line = caught.value.fix.partition("ctx = ")[2]
        found: accel.DistContext = eval(line, {"accel": accel, "model": model, "ctx": ctx})
        check_divided(found, model)
        return found.data_parallel

    assert ranks.run(rank, 2, default_group=True) == [(0, 1), (0, 1)]


class _Gathers(nn.Module):
    def forward(self, part: DTensor) -> torch.Tensor:
        return part.redistribute(placements=[Replicate()]).to_local()


def _parametrized() -> nn.Module:
    net = _net()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh, [Shard(0)]))
    parametrize.register_parametrization(net[0], "weight", _Gathers(), unsafe=True)
    return net


def _by_property() -> nn.Module:
    net = _net()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh, [Shard(0)]))
    gathers = property(lambda layer: layer._parameters["weight"].full_tensor())
    net[0].__class__ = type("Gathered", (nn.Linear,), {"weight": gathers})
    return net


def _experts() -> nn.Module:
    net = _net()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh, [Shard(0)]))
    return net


def _stages() -> nn.Module:
    left_out = type(
        "PipelineIdentityLayer", (nn.Identity,), {"__module__": "transformers.distributed.pipeline_parallel"}
    )
    return nn.Sequential(*_net()[:2], left_out())


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "frozen": (_frozen, {"problem": "different samples", "where": r"prepare_model, 0\.weight"}),
    "a buffer": (
        _buffers,
        {"problem": "different samples", "fix": r'mesh=model\.get_buffer\("table"\)\.device_mesh\)$'},
    ),
    "a parametrization": (_parametrized, {"problem": "a parametrization computes", "fix": 'strategy="fsdp"'}),
    "a property": (_by_property, {"problem": "a parametrization computes", "fix": 'strategy="fsdp"'}),
    "experts": (_experts, {"problem": "another library has divided experts", "fix": "mesh='dp=2,ep=2'"}),
    "stages": (_stages, {"problem": "stages of a pipeline", "fix": "without pp_size=.*mesh='pp=2'"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_line_makes_right_is_refused_by_name(ranks: Simulator, case: str) -> None:
    make, fields = REFUSED[case]

    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(PrepareError, **fields):
            _ = accel.prepare_model(ctx, make())

    _ = ranks.run(rank, 2, default_group=True)


def test_a_parametrization_that_gathers_nothing_is_right_by_the_line(ranks: Simulator) -> None:
    class Doubled(nn.Module):
        def forward(self, part: torch.Tensor) -> torch.Tensor:
            return part * 2

    def doubled(net: nn.Module) -> nn.Module:
        parametrize.register_parametrization(net[0], "weight", Doubled(), unsafe=True)
        return net

    _, norms, _ = _train(accel.single("cpu"), doubled(_net()))

    def rank(ctx: accel.DistContext) -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = doubled(_divide(_net(), mesh))
        with assert_raises(PrepareError, problem="a parametrization computes") as caught:
            check_divided(ctx, model)
        line = caught.value.fix.partition("ctx = ")[2]
        return _train(eval(line, {"accel": accel, "model": model, "ctx": ctx}), model)[1]

    assert ranks.run(rank, 2, default_group=True) == [pytest.approx(norms, rel=1e-9)] * 2
