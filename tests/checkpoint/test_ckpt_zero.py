# SPDX-License-Identifier: Apache-2.0
"""ZeroRedundancyOptimizer: each rank writes the state of its parameters, and any world size, or none, takes it."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, equal
from processes import free_port, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accel
from accel.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

Make = Callable[[nn.Module], torch.optim.Optimizer]
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "plain": (torch.optim.SGD, {"lr": 0.05}),
}


def network(seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    weights, biases = ([p for name, p in named if name.endswith(end)] for end in ("weight", "bias"))
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


def build(kind: str, world: int, seed: int = 1, **options: Any) -> dict[str, Any]:
    """A model and its optimizer: on one rank without a wrapper, else by ZeRO."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, (maker, given) = network(seed), KINDS[kind]
    if world == 1:
        return {"model": model, "optimizer": maker(groups(model), **given)}
    return {"model": model, "optimizer": ZeroRedundancyOptimizer(groups(model), maker, **given, **options)}


def train(items: dict[str, Any], rank: int, world: int, start: int, count: int, group: Any) -> None:
    """Steps on twelve samples that all ranks share; the rate changes, as a scheduler would."""
    model = DistributedDataParallel(items["model"], process_group=group) if world > 1 else items["model"]
    for step in range(start, start + count):
        rows = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        items["optimizer"].zero_grad()
        model(rows.chunk(world)[rank]).square().mean().backward()
        for place in items["optimizer"].param_groups:
            place["lr"] = 0.05 / (1 + step)
        items["optimizer"].step()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("worlds", [(2, 1, 4), (1, 3, 2)], ids=str)
def test_other_world_sizes_go_on_as_the_uninterrupted_run(
    worlds: tuple[int, ...], kind: str, ranks: Any, tmp_path: Path
) -> None:
    for place, world in enumerate(worlds):

        def body(ctx: accel.DistContext, place: int = place, world: int = world) -> dict[str, torch.Tensor]:
            items = build(kind, world, seed=place + 1, parameters_as_bucket_view=place == 2)
            if place:
                accel.load_state(ctx, tmp_path / f"step-{2 * place:08d}", items)
            train(items, ctx.rank, world, 2 * place, 2, ctx.comm.group)
            accel.save_state(ctx, tmp_path, items, step=2 * (place + 1), keep=1)
            return {name: each.detach().clone() for name, each in items["model"].named_parameters()}

        results = ranks.run(body, world, default_group=True)
        assert all(equal(result, results[0]) for result in results)
    alone = build(kind, 1)
    train(alone, 0, 1, 0, 2 * len(worlds), None)
    for name, parameter in alone["model"].named_parameters():
        torch.testing.assert_close(results[0][name], parameter.detach(), rtol=1e-10, atol=1e-12)
    plain = build(kind, 1, seed=9)  # what ZeRO wrote is the state of the optimizer inside
    accel.load_state(CPU, tmp_path / "step-00000006", plain)
    for one, other in zip(plain["model"].parameters(), alone["model"].parameters(), strict=True):
        found, expected = plain["optimizer"].state.get(one, {}), alone["optimizer"].state.get(other, {})
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)
    assert [group["lr"] for group in plain["optimizer"].param_groups] == [0.05 / 6] * 2


def test_the_same_world_size_goes_on_bit_for_bit_and_each_rank_writes_its_own(ranks: Any, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> bool:
        items, other = build("adamw", 3), build("adamw", 3, seed=8)
        train(items, ctx.rank, 3, 0, 2, ctx.comm.group)
        path = accel.save_state(ctx, tmp_path, items, step=0)
        accel.load_state(ctx, path, other)
        for each in (items, other):
            train(each, ctx.rank, 3, 2, 2, ctx.comm.group)
        mine, its = (each["optimizer"].optim.state_dict() for each in (items, other))
        same = all(map(torch.equal, items["model"].parameters(), other["model"].parameters()))
        return same and equal(mine["state"], its["state"])

    assert ranks.run(body, 3, default_group=True) == [True] * 3
    manifest = msgspec.json.decode((tmp_path / "step-00000000" / "manifest.json").read_bytes())
    assert manifest["items"]["optimizer"]["type"] == "AdamW"
    written = {name: entry["pieces"] for name, entry in manifest["tensors"].items() if ".exp_avg" in name}
    assert len({name.removesuffix(".exp_avg") for name in written if name.endswith(".exp_avg")}) == 6
    assert all(len(pieces) == 1 for pieces in written.values())
    assert len({pieces[0]["file"] for pieces in written.values()}) == 3


def test_async_saves_hold_the_moment_of_the_call(ranks: Any, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> bool:
        items, other = build("adamw", 2), build("adamw", 2, seed=8)
        train(items, ctx.rank, 2, 0, 2, ctx.comm.group)
        saving = accel.save_state(ctx, tmp_path, items, step=0, mode="async")
        train(items, ctx.rank, 2, 2, 2, ctx.comm.group)
        accel.load_state(ctx, saving.result(), other)
        train(other, ctx.rank, 2, 2, 2, ctx.comm.group)
        return all(map(torch.equal, items["model"].parameters(), other["model"].parameters()))

    assert ranks.run(body, 2, default_group=True) == [True] * 2


class Refusing:
    """An object that refuses the first state that it is given, loaded after the optimizer."""

    def __init__(self) -> None:
        self.refused = False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.refused, refused = True, self.refused
        if not refused:
            raise ValueError("no")


def test_a_load_that_fails_later_leaves_the_optimizer_as_it_was(ranks: Any, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> bool:
        items, twin = build("adamw", 2), build("adamw", 2)
        path = accel.save_state(ctx, tmp_path, items | {"zz": Refusing()}, step=0)
        for each in (items, twin):
            train(each, ctx.rank, 2, 0, 2, ctx.comm.group)
        with assert_raises(CheckpointError, problem="refused its state"):
            accel.load_state(ctx, path, items | {"zz": Refusing()})
        for each in (items, twin):
            train(each, ctx.rank, 2, 2, 2, ctx.comm.group)
        return all(map(torch.equal, items["model"].parameters(), twin["model"].parameters()))

    assert ranks.run(body, 2, default_group=True) == [True] * 2


def test_one_that_follows_the_buckets_of_ddp_is_refused_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> str:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = network()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        with pytest.raises(CheckpointError) as caught:
            accel.save_state(ctx, tmp_path / "run", {"model": model, "optimizer": optimizer}, step=0)
        return str(caught.value)

    results = ranks.run(body, 2, default_group=True)
    assert len(set(results)) == 1
    assert "overlap_with_ddp=True cannot be saved" in results[0]
    assert os.listdir(tmp_path) == []


def test_a_state_that_is_not_finite_on_one_rank_only_is_refused_on_all(ranks: Any, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> str:
        items = build("adamw", 2)
        train(items, ctx.rank, 2, 0, 1, ctx.comm.group)
        if ctx.rank:
            next(iter(items["optimizer"].optim.state.values()))["exp_avg"].fill_(torch.nan)
        with pytest.raises(accel.errors.NonFiniteError) as caught:
            accel.save_state(ctx, tmp_path / "run", items, step=0)
        return str(caught.value)

    results = ranks.run(body, 2, default_group=True)
    assert len(set(results)) == 1
    assert "exp_avg" in results[0]


def worker(rank: int, out: str, port: int) -> None:
    torch.set_num_threads(1)
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with accel.session(environ, device="cpu", timeout_s=60) as ctx:
        items, other = build("adamw", 2), build("adamw", 2, seed=7)
        train(items, rank, 2, 0, 2, ctx.comm.group)
        path = accel.save_state(ctx, out, items, step=2)
        train(items, rank, 2, 2, 2, ctx.comm.group)
        accel.load_state(ctx, path, other)
        train(other, rank, 2, 2, 2, ctx.comm.group)
        assert all(map(torch.equal, items["model"].parameters(), other["model"].parameters()))
        torch.save([each.detach() for each in items["model"].parameters()], Path(out) / f"end-{rank}.pt")
        del items, other


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_real_processes_go_on_bit_for_bit_and_one_takes_over(tmp_path: Path) -> None:
    run_ranks(worker, str(tmp_path), free_port())
    plain = build("adamw", 1, seed=3)
    accel.load_state(CPU, tmp_path / "step-00000002", plain)
    train(plain, 0, 1, 2, 2, None)
    for rank, (name, parameter) in itertools.product((0, 1), enumerate(plain["model"].parameters())):
        end = torch.load(tmp_path / f"end-{rank}.pt", weights_only=True)[name]
        torch.testing.assert_close(end, parameter.detach(), rtol=1e-10, atol=1e-12)
