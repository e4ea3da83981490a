# SPDX-License-Identifier: Apache-2.0
"""Pairs that a plan finds in an nn.Sequential train as one process does, however the model calls their layers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

import accel
from accel.errors import PrepareError
from accel.tensors import full_tensor
from accel.testing import Simulator

Use = Callable[[nn.Sequential, torch.Tensor], torch.Tensor]
ROWS = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Block(nn.Module):
    def __init__(self, use: Use, *, named: bool) -> None:
        super().__init__()
        layers = OrderedDict(up=nn.Linear(4, 6), act=nn.GELU(), drop=nn.Dropout(0.0), down=nn.Linear(6, 4))
        self.s = nn.Sequential(layers) if named else nn.Sequential(*layers.values())
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.use(self.s, x)


class Net(nn.Module):
    """Blocks of a pair each, and a declared one that is called by parts, as its own model knows how."""

    def __init__(self, use: Use, *, named: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.b = nn.ModuleList(Block(use, named=named) for _ in range(2))
            self.other = Declared()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = block(x)
        return self.other(x)


class Declared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    @property
    def tp_plan(self) -> dict[str, str]:
        return {"m.0": "colwise", "m.2": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.m[2](self.m[0](x).tanh())


def whole(s: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return s(x)


def by_index(s: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return s[3](s[0](x).softmax(-1))


def by_slice(s: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    hidden = s[:2](x)
    return s[2:](hidden / hidden.norm(dim=-1, keepdim=True))


def by_last(s: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return s(x) + s[3](x.repeat(1, 2)[:, :6])


def elementwise(s: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return s[3](s[0](x).sin())


def recomputed(s: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(s, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


def forward_itself(s: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return s.forward(x)


def gradients(ctx: accel.DistContext, model: nn.Module) -> dict[str, torch.Tensor]:
    model(ROWS).square().sum().backward()
    return {name: _full(each.grad).clone() for name, each in model.named_parameters()}


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_tp(ranks: Simulator, rank: Callable[[accel.DistContext], Any], mesh: str = "tp=2", **options: Any) -> list[Any]:
    size = 4 if "dp" in mesh else 2
    return ranks.run(lambda ctx: rank(accel.replace(ctx, mesh=mesh, **options)), size, default_group=True)


@pytest.mark.parametrize("use", [by_slice, by_last, elementwise])
@pytest.mark.parametrize("named", [False, True])
def test_layers_that_run_one_by_one_train_as_one_process(ranks: Simulator, use: Use, named: bool) -> None:
    """Functions between them see the whole shape, and sum over ranks where they need all features."""

    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        model = accel.prepare_model(ctx, Net(use, named=named))
        assert model.get_parameter("b.1.s.up.weight" if named else "b.1.s.0.weight").to_local().shape == (3, 4)
        return gradients(ctx, model)

    expected = gradients(accel.single(), Net(use, named=named))
    for got in on_tp(ranks, rank):
        torch.testing.assert_close(got, expected)


def test_a_function_between_that_needs_all_features_is_refused_and_the_line_to_write_is_right(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        model = accel.prepare_model(ctx, Net(by_index))
        with assert_raises(PrepareError, got="softmax") as error, torch.no_grad():
            model(ROWS)
        model = Net(by_index)
        line = error.value.fix.partition("plan=")[2].removesuffix(".")
        plan = eval(line, {"accel": accel, "model": model, "batch": [ROWS]})
        return gradients(ctx, accel.prepare_model(ctx, model, plan=plan))

    expected = gradients(accel.single(), Net(by_index))
    for got in on_tp(ranks, rank):
        torch.testing.assert_close(got, expected)


def _reads(module: nn.Module, *_: Any) -> None:
    assert isinstance(module, nn.Module)


HOOKS: dict[str, Callable[[nn.Sequential, Any], Any]] = {
    "outputs of the first": lambda s, see: s[0].register_forward_hook(lambda _m, _args, output: see(output)),
    "outputs of the middle": lambda s, see: s[1].register_forward_hook(lambda _m, _args, output: see(output)),
    "inputs of the middle": lambda s, see: s[2].register_forward_pre_hook(lambda _m, args: see(*args)),
    "inputs of the last": lambda s, see: s[3].register_forward_pre_hook(lambda _m, args: see(*args)),
}


@pytest.mark.parametrize("at", HOOKS)
def test_a_hook_between_sees_a_part_with_the_whole_shape(ranks: Simulator, at: str) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        seen: list[Any] = []
        model = accel.prepare_model(ctx, Net(whole)) if ctx.world_size > 1 else Net(whole)
        handle = HOOKS[at](model.b[1].s, lambda each: seen.append((each.shape, float(each.detach().square().sum()))))
        found = gradients(ctx, model)
        handle.remove()
        return seen, found

    expected = rank(accel.single())
    assert expected[0][0][0] == (3, 6)
    for got in on_tp(ranks, rank):
        torch.testing.assert_close(got, expected)


def _ends_hooked(model: Net) -> nn.Module:
    s = model.b[1].s
    for each in (s, s[3], model.other.m[1]):
        each.register_forward_hook(_reads)
    s.register_forward_pre_hook(_reads)
    s[0].register_forward_pre_hook(_reads)
    s[0].register_full_backward_hook(_reads)
    return model


def _wrapped(model: Net) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, nn.Linear))
    return model


def _compiled(model: Net) -> nn.Module:
    torch.compiler.reset()
    return accel.compile_model(model, nn.Sequential, backend="aot_eager")


RIGHT: dict[str, tuple[Use, Callable[[Net], nn.Module]]] = {
    "a call": (whole, lambda model: model),
    "its forward": (forward_itself, lambda model: model),
    "one that torch computes again": (recomputed, lambda model: model),
    "hooks at the ends": (whole, _ends_hooked),
    "layers that are computed again": (whole, lambda model: accel.checkpoint_activations(model, nn.Linear)),
    "layers that torch's wrapper computes again": (whole, _wrapped),
    "blocks that are computed again": (whole, accel.checkpoint_activations),
    "a copy": (whole, copy.deepcopy),
    "a compiled one": (whole, _compiled),
}


@pytest.mark.filterwarnings("ignore")  # torch makes an autograd function while it traces one, and warns of it
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "compiled" in name else []) for name in RIGHT]
)
def test_what_goes_through_the_sequential_passes(ranks: Simulator, name: str) -> None:
    use, change = RIGHT[name]

    def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
        model = change(accel.prepare_model(ctx, Net(use)))
        return list(gradients(ctx, model).values())

    expected = list(gradients(accel.single(), Net(use)).values())
    for got in on_tp(ranks, rank):
        torch.testing.assert_close(got, expected)


def test_layers_that_are_computed_again_may_be_chosen_before_prepare(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        return gradients(ctx, accel.prepare_model(ctx, accel.checkpoint_activations(Net(whole), nn.GELU)))

    expected = gradients(accel.single(), Net(whole))
    for got in on_tp(ranks, rank):
        torch.testing.assert_close(got, expected)


def test_units_of_fully_shard_stand_between(ranks: Simulator) -> None:
    """Its hooks on the layers of a pair know of parts."""
    plan = accel.parallel.Plan(units=("b.*.s.0", "b.*.s.3"))

    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        return gradients(ctx, accel.prepare_model(ctx, Net(whole), plan=plan))

    expected = gradients(accel.single(), Net(whole))
    for got in on_tp(ranks, rank, "dp=2,tp=2", strategy="fsdp"):
        torch.testing.assert_close(got, expected)


class Sliced(nn.Module):
    """Calls its blocks by slices of a list that is an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4))
            self.blocks = nn.Sequential(*blocks)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[:2](x)
        for block in self.blocks[2:]:
            x = x + block[1:](block[:1](x))
        return x


@pytest.mark.parametrize("shares", [False, True])
def test_a_model_may_call_slices_of_its_blocks(ranks: Simulator, shares: bool) -> None:
    x = torch.randn(2, 6, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0))

    def trained(ctx: accel.DistContext, model: nn.Module) -> dict[str, torch.Tensor]:
        model(x).square().sum().backward()
        return {name: full_tensor(each.grad) for name, each in model.named_parameters()}

    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        plan = accel.parallel.Plan(sequence=shares)
        ctx = accel.replace(ctx, mesh="tp=2")
        return trained(ctx, accel.prepare_model(ctx, Sliced(), plan=plan, example=x))

    expected = trained(accel.single(), Sliced())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected)
