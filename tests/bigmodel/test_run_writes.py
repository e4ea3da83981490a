# SPDX-License-Identifier: Apache-2.0
"""Writes to weights that are not in memory, or that lie on a slot: refused or noticed, never lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from streamed import Net, make_net, streamed_map, token_ids
from torch import nn

import accel
from accel.bigmodel.run import dispatch_model

Writes = Callable[[list[nn.Parameter]], object]


def absent(net: Net) -> list[nn.Parameter]:
    """The parameters of the streamed blocks."""
    return [each for name, each in net.named_parameters() if name.startswith("blocks")]


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> Writes:
    """Return a step of an optimizer on gradients of ones."""

    def step(weights: list[nn.Parameter]) -> None:
        for each in weights:
            each.grad = torch.ones(each.shape)
        kind(weights, lr=0.1, **options).step()  # type: ignore[call-arg]

    return step


@pytest.mark.parametrize(
    "write",
    [
        lambda weights: torch._foreach_mul_(weights, 2.0),
        lambda weights: torch._foreach_copy_(weights, [torch.zeros(each.shape) for each in weights]),
        lambda weights: torch._foreach_zero_(weights),
        lambda weights: nn.init.zeros_(weights[0].chunk(2)[1]),
        lambda weights: torch._foreach_mul_(weights[0].unbind(), 2.0),
        lambda weights: weights[0].detach().split(1)[0].view(-1)[0].fill_(1.0),
        lambda weights: torch._foreach_lerp_([torch.zeros(each.shape) for each in weights] + weights, weights * 2, 0.5),
        stepped(torch.optim.SGD, foreach=True),
        stepped(torch.optim.SGD, fused=True),
        stepped(torch.optim.AdamW, foreach=True),
        stepped(torch.optim.AdamW, fused=True),
        stepped(torch.optim.AdamW, foreach=False),
    ],
)
def test_writes_by_lists_of_tensors_are_refused(write: Writes) -> None:
    net = make_net()
    with dispatch_model(net, streamed_map(net, "cpu")) as run:
        with torch.no_grad(), assert_raises(accel.errors.StreamError, problem="changed in place", where=r"blocks\.0\."):
            write(absent(run.model))
        torch.testing.assert_close(run.model(token_ids()), make_net()(token_ids()))


def test_reads_by_lists_of_tensors_pass() -> None:
    net, twin = make_net(), make_net()
    with dispatch_model(net, streamed_map(net, "cpu")) as run, torch.no_grad():
        here, there = absent(run.model), absent(twin)
        for read in (lambda each: torch._foreach_norm(each), lambda each: torch._foreach_add(each, 1.0)):
            assert all(map(torch.equal, read(here), read(there)))
        for own, values in zip(here, there, strict=True):
            for parts in (lambda each: each.chunk(2), lambda each: each.unbind(), lambda each: each.t().split(1)):
                assert all(map(torch.equal, parts(own), parts(values)))
        copies = [torch.empty(each.shape) for each in there]
        torch._foreach_copy_(copies, here)
        assert all(map(torch.equal, copies, there))
        for each, wanted in zip(here, there, strict=True):
            each.grad, wanted.grad = torch.ones(each.shape), torch.ones(each.shape)
        assert torch.equal(*(nn.utils.clip_grad_norm_(each, 1.0, foreach=True) for each in (here, there)))
        resident = [torch.optim.AdamW(net.embed.parameters(), foreach=True) for net in (run.model, twin)]
        for net, optimizer in zip((run.model, twin), resident, strict=True):
            net.embed.weight.grad = torch.ones(net.embed.weight.shape)
            optimizer.step()
        assert torch.equal(run.model(token_ids()), twin(token_ids()))


@pytest.mark.parametrize("turned", [False, True])
def test_absent_weights_are_not_swapped(turned: bool) -> None:
    net = make_net()
    with dispatch_model(net, streamed_map(net, "cpu")) as run, torch.no_grad():
        pair = (run.model.blocks[1].up.weight, nn.Parameter(torch.zeros(32, 16)))
        with assert_raises(accel.errors.StreamError, problem="cannot be swapped", where=r"blocks\.1\.up\.weight"):
            torch.utils.swap_tensors(*(reversed(pair) if turned else pair))
        assert torch.equal(run.model(token_ids()), make_net()(token_ids()))
    assert torch.equal(net(token_ids()), make_net()(token_ids()))


def other_memory(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(weight.shape)


def swapped(weight: nn.Parameter) -> None:
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(weight.shape), requires_grad=False))


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("change", [other_memory, swapped, lambda weight: weight.mul_(2)])
def test_a_block_that_gives_its_weights_other_values_is_told(
    change: Callable[[nn.Parameter], object], slots: int
) -> None:
    net = make_net()
    expected = net(token_ids())
    with dispatch_model(net, streamed_map(net, "cpu", slots)) as run, torch.no_grad():
        block = run.model.blocks[0]
        for _ in range(2):
            handle = block.up.register_forward_pre_hook(lambda module, args: (change(module.weight), None)[1])
            with assert_raises(accel.errors.StreamError, problem="changed its own weights", where=r"blocks\.0"):
                run.model(token_ids())
            handle.remove()
            for _ in range(2):
                assert torch.equal(run.model(token_ids()), expected)


def test_a_block_may_read_its_data_and_assign_it_to_itself() -> None:
    net = make_net()
    expected = net(token_ids())

    def look(module: nn.Module, args: object) -> None:
        weight = module.get_parameter("weight")
        weight.data = weight.data
        assert weight.data.sum().isfinite()

    with dispatch_model(net, streamed_map(net, "cpu")) as run, torch.no_grad():
        run.model.blocks[0].up.register_forward_pre_hook(look)
        for _ in range(2):
            assert torch.equal(run.model(token_ids()), expected)


def test_collectives_read_absent_weights_and_fill_none() -> None:
    net, twin = make_net(), make_net()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with dispatch_model(net, streamed_map(net, "cpu")) as run, torch.no_grad():
            weight, values = run.model.blocks[0].scale, twin.blocks[0].scale
            found = torch.empty(values.shape)
            dist.broadcast(weight, src=0)  # of the rank that sends
            dist.all_gather([found], weight)
            assert torch.equal(found, values)
            for fill in (lambda: dist.all_reduce(weight), lambda: dist.reduce(weight, dst=0)):
                with assert_raises(
                    accel.errors.StreamError, problem="changed in place", got="c10d", where=r"blocks\.0\.scale"
                ):
                    fill()
    finally:
        dist.destroy_process_group()


CASTS: list[Callable[[nn.Module], object]] = [
    lambda net: net.half(),
    lambda net: net.double(),
    lambda net: net.to("meta"),
    lambda net: net.to(torch.bfloat16),
    lambda net: net.to_empty(device="cpu"),
    lambda net: net.type(torch.float64),
    lambda net: net.share_memory(),
    lambda net: net._apply(lambda tensor: tensor.clone()),
]


@pytest.mark.parametrize("cast", CASTS)
def test_a_refused_cast_changes_nothing(cast: Callable[[nn.Module], object]) -> None:
    net = nn.Sequential(make_net(), nn.RNN(16, 16))  # resident weights before absent ones, and after them
    net[0].register_buffer("steps", torch.zeros(3))
    resident = {"0.embed.weight", "1.weight_hh_l0", "0.steps"}
    expected = net[0](token_ids())
    device_map = streamed_map(net, "cpu", keep=["0.embed", "1"])
    with dispatch_model(net, device_map) as run, torch.no_grad():
        before = {name: (each, each.dtype, each.device, each.data_ptr()) for name, each in named(net, resident)}
        for part in (run.model, run.model[0], run.model[0].blocks[1]):
            with assert_raises(accel.errors.StreamError, problem="cannot be moved or cast|no address|in place"):
                cast(part)
        for name, each in named(net, resident):
            assert (each.dtype, each.device, each.data_ptr()) == before[name][1:]
            assert each is before[name][0]
        assert torch.equal(run.model[0](token_ids()), expected)
        assert run.model[1].half().weight_hh_l0.dtype == torch.float16  # all of it is on its device
        assert run.model.cpu() is run.model
    assert net.double()[0].embed.weight.dtype == torch.float64
    assert not any("_apply" in vars(module) for module in net.modules())


def named(net: nn.Module, names: set[str]) -> list[tuple[str, torch.Tensor]]:
    return [(name, each) for name, each in (*net.named_parameters(), *net.named_buffers()) if name in names]


@pytest.mark.parametrize(
    "share",
    [
        torch.from_dlpack,
        np.from_dlpack,
        lambda weight: torch.from_dlpack(weight[1:3]),
        np.asarray,
        lambda weight: weight.numpy(),
        lambda weight: weight.tolist(),
    ],
)
def test_memory_that_is_not_there_is_not_shared(share: Callable[[torch.Tensor], Any]) -> None:
    net, twin = make_net(), make_net()
    with dispatch_model(net, streamed_map(net, "cpu")) as run:
        weight = run.model.blocks[0].up.weight.detach()
        with assert_raises(accel.errors.StreamError, fix=r"weight\.detach\(\)\.clone\(\)"):
            share(weight)
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(weight)
        copied = torch.from_dlpack(run.model.blocks[0].up.weight.detach().clone())  # as the error says
        assert torch.equal(copied, twin.blocks[0].up.weight)
