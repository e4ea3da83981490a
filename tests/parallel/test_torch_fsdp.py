# SPDX-License-Identifier: Apache-2.0
"""Each function of `accel.parallel._torch_fsdp` on the installed torch: what it reads is there, what it replaces
runs."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import accel
from accel.parallel import _torch_fsdp as inside
from accel.testing import Simulator


class Net(nn.Module):
    """Two layers, of which a call can leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, *, both: bool = True) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def _run(ranks: Simulator, body: Callable[[Any, accel.DistContext], None], make: Callable[[], nn.Module] = Net) -> None:
    """Shard a model on two ranks by torch alone, and give it to a function."""

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2")
        torch.manual_seed(0)
        body(fully_shard(make(), mesh=ctx.mesh["dp"]), ctx)

    ranks.run(rank, 2, default_group=True)


ROWS = torch.ones(2, 4, dtype=torch.float64)


def test_shards_have_whole_parameters_and_gradients_that_wait(ranks: Simulator) -> None:
    def body(model: Any, _ctx: accel.DistContext) -> None:
        assert [each.whole for each in inside.shards_of(model)] == [None] * 4
        model.set_requires_gradient_sync(False)
        model(ROWS).sum().backward()
        for shards, parameter in zip(inside.shards_of(model), model.parameters(), strict=True):
            assert shards.parameter.shape == parameter.shape
            assert shards.whole is not None
            assert shards.whole.shape == parameter.shape
            assert [grad.shape for grad in shards.held] == [parameter.shape]

    _run(ranks, body)


def test_a_unit_is_within_its_hooks_in_calls_and_backwards(ranks: Simulator) -> None:
    def body(model: Any, _ctx: accel.DistContext) -> None:
        seen: list[bool] = []
        model.first.register_forward_hook(lambda *_: seen.append(inside.is_within_hooks(model)))
        seen.append(inside.is_within_hooks(model))
        output = model(ROWS)
        seen.append(inside.is_within_hooks(model))
        output.register_hook(lambda _: seen.append(inside.is_within_hooks(model)))
        output.sum().backward()
        seen.append(inside.is_within_hooks(model))
        assert seen == [False, True, False, True, False]

    _run(ranks, body)


def test_meshes_name_each_owner_of_a_tied_weight(ranks: Simulator) -> None:
    def tied() -> nn.Module:
        model = Net()
        model.second.weight = model.first.weight
        return model

    def body(model: Any, ctx: accel.DistContext) -> None:
        found = {(owner, name): mesh for owner, name, mesh in inside.meshes_of(model)}
        owners = [(each, name) for each in (model.first, model.second) for name in ("weight", "bias")]
        assert set(found) == set(owners)
        assert {mesh.get_local_rank() for mesh in found.values()} == {ctx.rank}

    _run(ranks, body, tied)


def test_gradients_that_wait_are_dropped(ranks: Simulator) -> None:
    def body(model: Any, _ctx: accel.DistContext) -> None:
        model.set_requires_gradient_sync(False)
        model(ROWS).sum().backward()
        parameters = inside.drop_unsharded(model)
        assert [each.shape for each in parameters] == [each.shape for each in model.parameters()]
        assert all(not each.held for each in inside.shards_of(model))

    _run(ranks, body)


def test_parameters_of_another_dtype_are_gathered_anew_with_the_gradients_that_wait(ranks: Simulator) -> None:
    def body(model: Any, _ctx: accel.DistContext) -> None:
        model.set_requires_gradient_sync(False)
        model(ROWS).sum().backward()
        held = [each.held[0] for each in inside.shards_of(model)]
        _ = model.float()
        inside.gather_in_new_dtype(model)
        for each, grad in zip(inside.shards_of(model), held, strict=True):
            torch.testing.assert_close(each.held, [grad.float()])
        model.set_requires_gradient_sync(True)
        assert model(ROWS.float()).dtype == torch.float32
        model(ROWS.float()).sum().backward()
        for each, grad in zip(model.parameters(), held, strict=True):
            torch.testing.assert_close(each.grad.full_tensor(), 2 * grad.float())

    _run(ranks, body)


def test_unused_parameters_get_zeros(ranks: Simulator) -> None:
    def body(model: Any, ctx: accel.DistContext) -> None:
        inside.sum_unused(model)
        model(ROWS, both=ctx.rank == 0).sum().backward()
        assert model.second.bias.grad.full_tensor().tolist() == [1.0] * 4  # the mean of two and of none

    _run(ranks, body)


def test_gradients_of_a_window_are_summed_in_one_format(ranks: Simulator) -> None:
    def make() -> nn.Module:
        return Net().float()

    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2")
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = fully_shard(make(), mesh=ctx.mesh["dp"], mp_policy=policy)
        inside.sum_in_one_format(model.modules())
        inside.sum_unused(model)
        model.set_requires_gradient_sync(False)
        model(ROWS.bfloat16(), both=False).sum().backward()  # the second layer's gradient begins in the last
        model.set_requires_gradient_sync(True)
        model(ROWS.bfloat16()).sum().backward()
        assert model.second.bias.grad.full_tensor().tolist() == [2.0] * 4

    ranks.run(rank, 2, default_group=True)


def test_calls_that_wait_are_replaced_in_the_order_of_a_step(ranks: Simulator) -> None:
    def body(model: Any, _ctx: accel.DistContext) -> None:
        seen: list[str] = []

        def waits(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                seen.append(name)
                return call(*args)

            return run

        inside.around_calls(model, partial(seen.append, "begins"), waits)
        model(ROWS).sum().backward()
        forward = ["begins", *inside.GATHERS]
        assert seen[:3] == forward
        assert seen[-1] == inside.SUMS
        assert set(seen) == {*forward, inside.SUMS}

    _run(ranks, body)


class Hidden(Net):
    """Returns an iterator, in which torch finds no tensor."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return iter([super().forward(x)])


def test_the_gradient_of_a_hidden_output_gathers_the_parameters(ranks: Simulator) -> None:
    def body(model: Any, _ctx: accel.DistContext) -> None:
        (output,) = model(ROWS)
        inside.gather_at(model, output)
        output.sum().backward()
        assert model.second.bias.grad.full_tensor().tolist() == [2.0] * 4

    _run(ranks, body, Hidden)


def test_a_backward_that_reaches_a_whole_parameter_ends_with_the_sum(ranks: Simulator) -> None:
    def body(model: Any, _ctx: accel.DistContext) -> None:
        model.set_reshard_after_forward(False)
        (output,) = model(ROWS)
        for shards in inside.shards_of(model):
            assert shards.whole is not None
            inside.sum_at_end(model, shards.whole)
        output.sum().backward()
        assert model.second.bias.grad.full_tensor().tolist() == [2.0] * 4

    _run(ranks, body, Hidden)


def test_a_graph_of_a_backward_keeps_the_parameters_for_the_next_one(ranks: Simulator) -> None:
    def body(model: Any, _ctx: accel.DistContext) -> None:
        inside.keep_for_graphs([model])
        x = ROWS.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert inside.is_kept(model)
        assert [each.grad for each in model.parameters()] == [None] * 4
        slope.square().sum().backward()
        assert not inside.is_kept(model)
        assert model.first.weight.grad is not None
        assert model(ROWS).requires_grad
        model.reshard()
        assert not inside.is_kept(model)

    _run(ranks, body)


def test_the_drawing_of_hooks_has_the_order_of_torch_and_functions_of_accel(
    ranks: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    section = (root / "docs/design.md").read_text().split("## The hooks of FSDP2 over one step")[1].split("\n## ")[0]
    rows = [(line[4:37].strip(), line[37:]) for line in section.splitlines() if line.startswith(" ")]
    drawn = [method for method, _ in rows if re.fullmatch(r"\w+", method)]
    group = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group").FSDPParamGroup
    seen: dict[int, list[str]] = {}

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(group, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.setdefault(threading.get_ident(), []).append(name)
            return method(self, *args, **kwargs)

        return run

    for name in set(drawn):
        monkeypatch.setattr(group, name, noted(name))
    make = partial(nn.Linear, 4, 4, dtype=torch.float64)
    _run(ranks, lambda model, _ctx: model(ROWS).sum().backward(), make)
    assert len(seen) == 2
    assert all(each == drawn for each in seen.values()), seen
    named = {name for _, right in rows for name in re.findall(r"[a-z]+_[a-z_]+(?=[,:]|$)", right.strip())}
    sources = [*(root / "accel/parallel/axes/shard").glob("*.py"), root / "accel/parallel/_torch_fsdp.py"]
    defined = {name for path in sources for name in re.findall(r"^def (\w+)", path.read_text(), flags=re.M)}
    assert named >= {"note_units", "reach_outputs", "sum_unused", "see_plain"}
    assert named <= defined
