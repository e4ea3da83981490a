# SPDX-License-Identifier: Apache-2.0
"""Lists and dicts of modules with None in the place of a module, as x-transformers writes them, under every verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel
from accel.errors import PrepareError
from accel.parallel import Plan
from accel.testing import Simulator

DATA = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Pairs(nn.Module):
    """Layers of a list each, some of whose norms are not there."""

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.LayerNorm(8), None, nn.LayerNorm(8))
        self.layers = nn.ModuleList(nn.ModuleList([norm, None, _mlp()]) for norm in norms)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for before, after, inner in self.layers:
            hidden = inner(before(inputs) if before is not None else inputs)
            inputs = inputs + (after(hidden) if after is not None else hidden)
        return inputs


class Blocks(nn.Module):
    """Blocks of a list in which some are left out, beside an attribute that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([None, _mlp(), None, _mlp()])
        self.register_module("gone", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs if block is None else block(inputs)
        return inputs


class Named(nn.Module):
    """Blocks of a dict, one of them None."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": _mlp(), "b": None, "c": _mlp()})  # pyright: ignore

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            inputs = inputs if block is None else inputs + block(inputs)
        return inputs


class Nothing(nn.Module):
    """A list of None alone, and a Sequential of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.ModuleList([None, None])
        self.blocks = nn.Sequential(_mlp(), _mlp())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.blocks(inputs)


class Holed(nn.Sequential):
    """A Sequential that steps over None."""

    def __init__(self) -> None:
        super().__init__(_mlp(), _mlp())
        self.add_module("hole", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for each in self._modules.values():
            inputs = inputs if each is None else each(inputs)
        return inputs


def _loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).square().sum()


LAYOUTS = [Pairs, Blocks, Named, Nothing, Holed]


def _trained(ctx: accel.DistContext, make: type[nn.Module], how: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Two micro-batches and a step, under a mesh or on one process."""
    torch.manual_seed(0)
    net = make().double()
    model, sgd = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1), **how)
    state = accel.train_state(ctx, accumulation=2)
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(DATA, batch_size=2), global_batch=2)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        _, state = accel.forward_backward(ctx, model, state, batch.data, loss_fn=_loss, targets=batch.data)
        if state.sync:
            state = accel.optimizer_step(ctx, sgd, state)
    return accel.get_state_dict(ctx, model, dst=None)


MESHES: dict[str, dict[str, Any]] = {
    "dp_shard=2": {},
    "tp=2": {},
    "pp=2": {},
    "pp=2, traced": {"example": (DATA[:1],), "plan": Plan(micro_batches=2)},
}


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize(
    "mesh", [pytest.param(each, marks=[] if each == "dp_shard=2" else [pytest.mark.slow]) for each in MESHES]
)
def test_a_model_with_none_trains_as_one_process_does(ranks: Simulator, make: type[nn.Module], mesh: str) -> None:
    if mesh == "pp=2" and make in (Pairs, Named):
        pytest.skip("no chain of modules that are called one after another")

    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        ctx = accel.replace(ctx, mesh=mesh.partition(",")[0], strategy="fsdp")
        return _trained(ctx, make, MESHES[mesh])

    alone = _trained(accel.single(), make, {})
    for found in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def _mapped(model: nn.Module) -> Any:
    skeleton = accel.bigmodel.describe(model)
    return accel.infer_device_map(skeleton, {"cpu": 5 * 2**10, "disk": 2**30})


def _select(model: nn.Module) -> Any:
    return nn.Sequential if isinstance(model, Named) else "repeated"  # which looks at lists


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "describe": accel.bigmodel.describe,
    "infer_device_map": _mapped,
    "compile": lambda model: accel.compile_model(model, _select(model), backend="eager")(DATA.float()),
    "recompute": lambda model: accel.checkpoint_activations(model, _select(model))(DATA.float()).sum().backward(),
    "summary": lambda model: str(accel.estimate.summary(model, DATA.float())),
}


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_a_model_with_none(make: type[nn.Module], verb: str) -> None:
    VERBS[verb](make())


@pytest.mark.parametrize("make", LAYOUTS)
def test_an_empty_model_with_none_is_made(make: type[nn.Module]) -> None:
    assert all(each.is_meta for each in accel.init_empty_weights(make).parameters())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([_mlp(), None, _mlp(), _mlp()])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum((each(inputs) for each in self.experts if each is not None), inputs)


def test_experts_that_are_none_are_refused_along_ep(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp_shard=2,ep=2", strategy="fsdp")
        accel.prepare(ctx, Experts(), plan=Plan(experts={"experts": "dispatch"}))

    with assert_raises(PrepareError, got="experts: has None in the place of experts"):
        ranks.run(rank, 2, default_group=True)
