# SPDX-License-Identifier: Apache-2.0
"""A simulated device: the same values in every order that events allow, and a name for each race."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import copy_to_host
from hypothesis import example, given, settings, strategies as st
from profiles import share
from simulated_reads import read
from slots import Block, DeviceTransfer, Slot, block_of, part
from streamed import make_net, streamed_map, token_ids
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.bigmodel.run._dispatch import _dispatch_by
from accel.bigmodel.run._slots import CastTransfer, make_slots
from accel.data._transfer import moved
from accel.errors import ConfigError
from accel.testing import STREAM_ORDERS, SimulatedDevice, StreamOrder, StreamRace, simulate
from accel.training._deferred import _begin_copy

HOST = accel.single("cpu").streams
ORDERS = st.builds(SimulatedDevice, st.integers(0, 2**32)) | st.sampled_from(STREAM_ORDERS).map(
    lambda order: SimulatedDevice(order=order)
)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# The users of streams, as small programs: each returns the values that every order must give.


def copied_batches(streams: Any, *, ahead: bool = True) -> Tensor:
    """Train on batches that are copied from pinned memory while the former one is in use."""
    weight = streams.to(drawn(8, 1)).requires_grad_()

    def read_batches() -> Iterator[tuple[Any, int]]:
        for at in range(5):
            pinned = streams.pinned((4, 8), torch.float32)
            pinned.copy_(drawn(4, 8, seed=at))
            yield {"x": pinned, "plain": drawn(4, 1, seed=at + 9)}, at

    for batch, _ in moved(read_batches(), streams, ahead=ahead):
        loss = (torch.tanh(batch["x"] @ weight) - batch["plain"]).square().mean()
        loss.backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        del batch, loss
    return read(streams, weight)


def streamed_blocks(streams: Any, *, dtype: torch.dtype = torch.float32, count: int = 5) -> Tensor:
    """Compute with blocks that pass through two slots, the next one under way."""
    blocks = list[Block]()
    for at in range(count):
        values = {f"{at}.{each}": drawn(8, 8, seed=2 * at + each, dtype=dtype) for each in range(2)}
        blocks.append(block_of(at, values, [0, 256]))
    slots = make_slots(2, 512, streams)
    transfer = DeviceTransfer(streams)
    x = streams.to(drawn(2, 8))
    order = [*blocks, *blocks]
    transfer.fill(slots[0], order[0])
    for at, block in enumerate(order):
        if at + 1 < len(order):
            transfer.fill(slots[(at + 1) % 2], order[at + 1])
        slot = slots[at % 2]
        transfer.arrived(slot)
        x = torch.tanh(x @ part(slot.memory, block.weights[0])) @ part(slot.memory, block.weights[1])
        x = x / (1 + x.abs().amax())
        transfer.left(slot)
    for slot, block in zip(slots, order, strict=False):
        transfer.fill(slot, block)
    del slots, slot  # the blocks are still on their way
    return read(streams, x)


def cast_blocks(streams: Any) -> Tensor:
    """Compute with blocks that the device keeps in a smaller dtype; one stream casts them, another computes."""
    values = [streams.to(drawn(8, 8, seed=at, dtype=torch.bfloat16)) for at in range(4)]
    blocks = [block_of(at, {str(at): value}, [0]) for at, value in enumerate(values)]
    memory = streams.empty((256,), torch.uint8)
    slot, transfer = Slot(memory, memory), CastTransfer(streams)
    x, outputs, casting, computing = streams.to(drawn(2, 8)), list[Tensor](), streams.side(), streams.side()
    streams.wait(casting, streams.record(streams.current()))
    streams.last_use(values[0], casting)  # which the last cast reads
    for block in blocks:
        with streams.on(casting):
            transfer.fill(slot, block)
        with streams.on(computing):
            transfer.arrived(slot)
            outputs.append(torch.tanh(x @ part(slot.memory, block.weights[0])))
            transfer.left(slot)
    with streams.on(casting):
        transfer.fill(slot, blocks[0])
    del memory, slot  # the block is still being cast
    streams.wait(streams.current(), streams.record(computing))
    return read(streams, torch.cat(outputs))


def snapshots(streams: Any) -> Tensor:
    """Copy parameters to the host while training goes on; the copies are read later."""
    weights = {str(at): streams.to(drawn(8, 8, seed=at)) for at in range(3)}
    taken, spare = list[Tensor](), dict[str, Tensor]()
    for step in range(4):
        for weight in weights.values():
            weight.mul_(1.01).add_(torch.tanh(weight), alpha=0.1)
        if step % 2:
            taken += [each.clone() for each in copy_to_host(weights, spare, streams).values()]
    return torch.cat([each.reshape(-1) for each in taken])


def dispatched(streams: Any, *, prefetch: bool) -> Tensor:
    """Run a dispatched model, whose blocks another thread copies to the device."""
    model = make_net()
    device_map = streamed_map(model, "cpu", keep=["embed"])
    with _dispatch_by(lambda device: streams, model, device_map, None, None, prefetch) as handle, torch.no_grad():
        if streams is not HOST:
            streams.take(model.embed)
        outputs = [handle.model(streams.to(token_ids())) for _ in range(2)]
        found = read(streams, torch.cat(outputs))
    del handle, model
    gc.collect()
    return found


def outcomes(streams: Any) -> Tensor:
    """Read the outcome of each deferred step while the device has work of the next."""
    ctx = dataclasses.replace(accel.single("cpu"), streams=streams)
    figures, found = streams.to(drawn(3)), list[Tensor]()
    for _ in range(3):
        outcome = _begin_copy(ctx, figures)
        figures = figures * 2
        found.append(torch.tensor(outcome()))
    return torch.cat(found)


USERS: dict[str, Callable[[Any], Tensor]] = {
    "batches": copied_batches,
    "batches one by one": partial(copied_batches, ahead=False),
    "blocks": streamed_blocks,
    "narrow blocks": partial(streamed_blocks, dtype=torch.bfloat16),
    "cast blocks": cast_blocks,
    "snapshots": snapshots,
    "dispatched blocks": partial(dispatched, prefetch=False),
    "dispatched blocks, ahead": partial(dispatched, prefetch=True),
    "outcomes": outcomes,
}


def run(user: str, device: SimulatedDevice) -> Tensor:
    with device.active():
        return USERS[user](device)


@pytest.mark.parametrize("user", USERS)
def test_users_of_streams_have_no_race_and_the_values_of_the_host(user: str) -> None:
    assert run(user, SimulatedDevice()).equal(USERS[user](HOST))


@pytest.mark.parametrize("order", range(len(STREAM_ORDERS)))
@pytest.mark.parametrize("user", USERS)
def test_users_of_streams_compute_the_same_in_each_of_the_six_orders(user: str, order: int) -> None:
    assert run(user, SimulatedDevice(order=STREAM_ORDERS[order])).equal(USERS[user](HOST))


@settings(max_examples=share(0.5))
@given(st.sampled_from(list(USERS)), ORDERS)
@example("dispatched blocks", SimulatedDevice(1))  # a thread that copies comes to matmuls
def test_users_of_streams_compute_the_same_in_drawn_orders(user: str, device: SimulatedDevice) -> None:
    assert run(user, device).equal(USERS[user](HOST))


WAITS: dict[str, tuple[Callable[[Tensor], object], list[str]]] = {
    "value": (lambda x: x[0].item(), ["aten._local_scalar_dense"]),
    "comparison": (lambda x: torch.equal(x, x), ["aten.equal"]),
    "close": (lambda x: torch.allclose(x, x), ["aten.allclose"]),
    "chosen": (lambda x: x[x > 2], ["aten.index.Tensor"]),
    "found": (lambda x: x.nonzero(), ["aten.nonzero"]),
    "different ones": (lambda x: x.unique(), ["aten._unique2"]),
    "copy": (lambda x: torch.empty(6).copy_(x), ["copy to the host"]),
    "sum": (lambda x: (x * 2).sum(), []),
    "at indices": (lambda x: x[torch.tensor([1, 2])], []),
    "filled": (lambda x: x.masked_fill(x > 2, 0.0), []),
    "put": (lambda x: x.__setitem__(x > 2, 0.0), []),
    "repeated": (lambda x: torch.repeat_interleave(x, (x > 2).long() + 1, output_size=9), []),
    "place": (lambda x: x.is_set_to(x), []),
}


@pytest.mark.parametrize("order", [None, STREAM_ORDERS[0]], ids=["in program order", "late"])
@pytest.mark.parametrize("what", WAITS)
def test_the_host_waits_for_values_and_for_shapes_that_depend_on_values(what: str, order: StreamOrder | None) -> None:
    device = SimulatedDevice(order=order)
    work, waits = WAITS[what]
    with device.active():
        x = device.to(torch.arange(6.0))
        _ = work(x)
        assert device.waits == waits


class Forgetful(SimulatedDevice):
    """Leaves out one call of a kind: that of a number.

    A stream's further waits for one event are superfluous, as the first orders all of its later work, and count as one
    with it.
    """

    def __init__(self, kind: str, number: int, order: StreamOrder | None = None) -> None:
        super().__init__(order=order)
        self.kind, self.left = kind, number
        self.waited = dict[tuple[int, int], tuple[bool, Any]]()  # with the event, whose id is its own while it lives

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # as memory that the allocator had before, which earlier work of the stream still uses
        return super().empty(shape, dtype).zero_()

    def _leaves_out(self, kind: str) -> bool:
        if kind != self.kind:
            return False
        self.left -= 1
        return self.left == -1

    def wait(self, stream: Any, event: Any) -> None:
        key = stream.number, id(event)
        if stream is not self._allocator and key not in self.waited:
            self.waited[key] = self._leaves_out("wait"), event
        if not self.waited.get(key, (False, None))[0]:
            super().wait(stream, event)

    def synchronize(self, what: Any) -> None:
        if not self._leaves_out("synchronize"):
            super().synchronize(what)

    def last_use(self, tensor: Tensor, stream: Any) -> None:
        if not self._leaves_out("last_use"):
            super().last_use(tensor, stream)


# Calls by number that do no harm if they are left out, as others order the same.
SUPERFLUOUS = {
    # the last cast follows all that was computed with the slot, and its own call is planted
    ("last_use", "cast blocks"): [2],
    # the stream that the slots belong to has waited for each copy; "blocks" has some that nobody waits for
    ("last_use", "dispatched blocks"): [0, 1],
}
PLANTED = [user for user in USERS if user != "dispatched blocks, ahead"]  # whose thread chooses what it calls


@pytest.mark.parametrize("kind", ["wait", "synchronize", "last_use"])
@pytest.mark.parametrize("user", PLANTED)
def test_each_call_that_is_left_out_is_found(kind: str, user: str) -> None:
    expected, unseen, number = USERS[user](HOST), list[int](), 0
    while True:
        device = Forgetful(kind, number)
        try:
            found = not run(user, device).equal(expected)
        except StreamRace:
            found = True
        if device.left >= 0:
            break
        unseen += [] if found else [number]
        number += 1
    assert unseen == SUPERFLUOUS.get((kind, user), [])


def test_a_race_names_both_operators_and_streams() -> None:
    def program(ctx: accel.DistContext) -> None:
        streams = ctx.streams
        side, target, source = (
            streams.side(),
            streams.empty((4, 4), torch.float32),
            streams.pinned((4, 4), torch.float32),
        )
        source.fill_(1)
        with streams.on(side):
            streams.copy(target, source)
        _ = target @ target

    with pytest.raises(StreamRace) as found:
        simulate(program, 1, streams=SimulatedDevice())
    assert "aten.mm on stream 1 reads, copy on stream 2 wrote: nothing between them (device memory)" in str(found.value)


def test_freed_memory_is_poison_for_those_who_did_not_wait() -> None:
    def program(streams: Any, *, keeps: bool) -> Tensor:
        side = streams.side()
        with streams.on(side):
            x = streams.to(drawn(4, 4))
        streams.wait(streams.current(), streams.record(side))
        y = x @ x
        if keeps:
            streams.last_use(x, streams.current())
        del x
        return read(streams, y)

    expected = drawn(4, 4) @ drawn(4, 4)
    for order in STREAM_ORDERS:
        device = SimulatedDevice(order=order)
        with device.active():
            assert program(device, keeps=True).equal(expected)
    values = list[bool]()
    for order in STREAM_ORDERS:
        device = SimulatedDevice(order=order)
        with device.active():
            values.append(program(device, keeps=False).equal(expected))
    assert not all(values)


def training(ctx: accel.DistContext, out: Path | None = None) -> tuple[list[float], list[Tensor]]:
    """Train with batches, clipping and asynchronous saving."""
    accel.seeding.set_seed(ctx, 0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    data = TensorDataset(drawn(22, 8), drawn(22, 4, seed=1).argmax(1))
    model = accel.prepare_model(ctx, net)
    optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = accel.prepare_loader(ctx, DataLoader(data, batch_size=4))
    state, losses = accel.train_state(ctx, seed=0, accumulation=2), list[Tensor]()
    while state.epoch < 2:
        for batch in accel.batches(ctx, loader, state):
            inputs, targets = batch.data
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                loss = functional.cross_entropy(model(inputs), targets)
                state = accel.backward(ctx, loss, state)
            losses.append(loss.detach())
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
                if out is not None and state.updates == 3:
                    accel.save_state(ctx, out, {"model": model, "optimizer": optimizer}, step=3, mode="async")
    return [each.item() for each in losses], [read(ctx.streams, each) for each in model.parameters()]


def same(left: tuple[list[float], list[Tensor]], right: tuple[list[float], list[Tensor]]) -> bool:
    return left[0] == right[0] and all(map(torch.equal, left[1], right[1]))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_training_loop_computes_the_same_on_a_device(world_size: int) -> None:
    expected = simulate(training, world_size, streams=SimulatedDevice())
    for order in STREAM_ORDERS[::2]:
        found = simulate(training, world_size, streams=SimulatedDevice(order=order))
        assert all(map(same, expected, found))


def test_a_save_in_the_background_holds_the_values_of_its_step(tmp_path: Path) -> None:
    def stored(name: str) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        items = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        found = accel.latest_checkpoint(tmp_path / name)
        assert found is not None
        accel.load_state(accel.single("cpu"), found, items)
        return model.state_dict()

    _ = simulate(partial(training, out=tmp_path / "watched"), 1, streams=SimulatedDevice())
    for at, order in enumerate(STREAM_ORDERS[1::2]):
        _ = simulate(partial(training, out=tmp_path / str(at)), 1, streams=SimulatedDevice(order=order))
        expected, found = stored("watched"), stored(str(at))
        assert all(found[name].equal(each) for name, each in expected.items())


def test_a_seed_and_an_order_are_one_too_many() -> None:
    with assert_raises(ConfigError, problem="an order given twice"):
        SimulatedDevice(3, order=STREAM_ORDERS[0])
    with assert_raises(ConfigError, problem="the value is not a simulated device"):
        simulate(lambda ctx: None, 1, streams=7)  # pyright: ignore[reportArgumentType]
