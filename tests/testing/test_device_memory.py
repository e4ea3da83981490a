# SPDX-License-Identifier: Apache-2.0
"""Pinned memory between two copies, and freed memory that is used again: right programs pass, wrong ones are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor

import accel
from accel.testing import STREAM_ORDERS, SimulatedDevice, StreamRace

ALL_ORDERS = [None, *STREAM_ORDERS]


def read(streams: Any, tensor: Tensor) -> list[float]:
    there = streams.pinned(tensor.shape, tensor.dtype)
    streams.copy(there, tensor)
    streams.synchronize(streams.current())
    return there.tolist()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


class Waits:
    """Waits by name; the one that is left out is not called."""

    def __init__(self, streams: Any, without: str) -> None:
        self.streams, self.without = streams, without

    def __call__(self, name: str, stream: Any, after: Any) -> None:
        if name != self.without:
            self.streams.wait(stream, self.streams.record(after))


def round_trip(streams: Any, *, without: str = "", times: int = 3) -> list[float]:
    """Copy values to pinned memory and back, several times through one pinned buffer, without a wait of the host."""
    waits, main, out, into = Waits(streams, without), streams.current(), streams.side(), streams.side()
    pinned = streams.pinned((8,), torch.float32)
    found = list[Tensor]()
    for at in range(times):
        values = streams.to(torch.arange(8.0)) * (at + 1)
        waits("values", out, main)
        waits("buffer", out, into)
        with streams.on(out):
            streams.copy(pinned, values)
        streams.last_use(values, out)
        back = streams.empty((8,), torch.float32)
        waits("memory", into, main)
        waits("pinned", into, out)
        with streams.on(into):
            streams.copy(back, pinned)
        waits("use", main, into)
        found.append(back * 2)
        del back, values
    return read(streams, torch.stack(found).sum(0))


def reused(streams: Any, *, without: str = "") -> list[float]:
    """Copy into memory on a side stream that the computing stream has had before, of a similar size."""
    waits, main, side = Waits(streams, without), streams.current(), streams.side()
    source = streams.pinned((30,), torch.float32)
    source.fill_(1.0)
    first = streams.to(torch.ones(32))
    total = (first * 3).sum()
    del first
    second = streams.empty((30,), torch.float32)
    waits("memory", side, main)
    with streams.on(side):
        streams.copy(second, source)
    waits("use", main, side)
    return read(streams, second.sum() + total)


PROGRAMS: dict[str, Callable[..., list[float]]] = {"round trip": round_trip, "reused": reused}


def runs(program: Callable[..., list[float]], order: Any, **options: Any) -> list[float]:
    device = SimulatedDevice(order=order)
    with device.active():
        return program(device, **options)


@pytest.mark.parametrize("order", ALL_ORDERS, ids=["in program order", *map(str, range(len(STREAM_ORDERS)))])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_their_waits_have_the_values_of_the_host_in_every_order(name: str, order: Any) -> None:
    assert runs(PROGRAMS[name], order) == PROGRAMS[name](accel.single("cpu").streams)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("round trip", "values"),
        ("round trip", "pinned"),
        ("round trip", "use"),
        ("reused", "memory"),
        ("reused", "use"),
    ],
)
def test_each_wait_that_is_left_out_is_a_race_and_wrong_in_some_order(name: str, without: str) -> None:
    program = partial(PROGRAMS[name], without=without)
    expected = PROGRAMS[name](accel.single("cpu").streams)
    with pytest.raises(StreamRace):
        _ = runs(program, None)
    orders = [*STREAM_ORDERS, *(SimulatedDevice(seed).order for seed in range(12))]
    assert any(runs(program, order) != expected for order in orders)


@pytest.mark.parametrize("without", ["buffer", "memory"])
def test_a_wait_that_others_imply_can_be_left_out(without: str) -> None:
    # the copy out waits for the stream that freed the memory, and for the last use of what was copied back
    for order in ALL_ORDERS:
        assert runs(round_trip, order, without=without) == round_trip(accel.single("cpu").streams)


def test_the_host_sees_what_a_copy_wrote_once_it_knows_and_no_later_copy_before() -> None:
    device = SimulatedDevice()
    with device.active():
        pinned, side = device.pinned((4,), torch.float32), device.side()
        ones, twos = device.to(torch.ones(4)), device.to(torch.full((2,), 2.0))
        device.wait(side, device.record(device.current()))
        device.copy(pinned, ones)
        first = device.record(device.current())
        device.wait(side, first)
        with device.on(side):
            device.copy(pinned[:2], twos)
        assert math.isnan(pinned.numpy().max())
        device.synchronize(first)
        assert math.isnan(pinned.numpy()[:2].min())
        assert pinned.numpy()[2:].tolist() == [1.0, 1.0]
        device.synchronize(side)
        assert pinned.numpy().tolist() == [2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("before", [True, False], ids=["before a copy to it", "before the host knows"])
def test_a_write_by_the_host_that_no_operator_sees_is_a_race_with_a_copy_from_pinned_memory(before: bool) -> None:
    device = SimulatedDevice()
    with assert_raises(StreamRace, problem="pinned memory was written to"), device.active():
        pinned = device.pinned((4,), torch.float32)
        pinned.fill_(1.0)
        there = device.to(pinned)
        pinned.numpy()[0] = 7.0
        if before:
            device.copy(pinned, there)
        device.synchronize(device.current())


class Step(NamedTuple):
    """An access of a drawn program: what it does, on which stream (0 for the host), and to which of the two tensors."""

    what: str
    stream: int
    one: int
    other: int


STEPS = st.builds(
    Step,
    st.sampled_from(["compute", "out", "in", "write", "read", "new"]),
    st.integers(1, 3),
    st.integers(0, 1),
    st.integers(0, 1),
)


def drawn_program(steps: list[Step], streams: Any) -> list[float]:
    """Run a program that waits for what each access needs, and for nothing else."""
    lanes = [streams.current(), streams.side(), streams.side()]
    on_device = [streams.to(torch.full((6,), 1.0 + at)) for at in range(2)]
    pinned = [streams.pinned((6,), torch.float32).fill_(3.0 + at) for at in range(2)]
    made = streams.record(streams.current())
    ends: dict[tuple[str, int], list[Any]] = {("device", at): [made] for at in range(2)}
    found = list[float]()

    def wait(stream: Any, *what: tuple[str, int]) -> None:
        for each in what:
            for event in ends.get(each, []):
                if stream is None:
                    streams.synchronize(event)
                else:
                    streams.wait(stream, event)

    def end(stream: Any, *what: tuple[str, int]) -> None:
        event = streams.record(stream)
        for each in what:
            ends.setdefault(each, []).append(event)

    for step in steps:
        lane, here, there = lanes[step.stream - 1], ("device", step.one), ("pinned", step.other)
        if step.what == "compute":
            wait(lane, here)
            with streams.on(lane):
                on_device[step.one].mul_(0.5).add_(1.0)
            end(lane, here)
        elif step.what in ("out", "in"):
            wait(lane, here, there)
            with streams.on(lane):
                pair = (pinned[step.other], on_device[step.one])
                streams.copy(*(pair if step.what == "out" else reversed(pair)))
            end(lane, here, there)
        elif step.what == "write":
            wait(None, there)
            pinned[step.other].add_(1.0)
        elif step.what == "read":
            wait(None, there)
            found += pinned[step.other].tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        else:  # free a tensor, whose memory the next one may get, on a stream of its own
            wait(streams.current(), here)
            on_device[step.one] = streams.empty((6,), torch.float32)
            wait(lane, here)
            streams.wait(lane, streams.record(streams.current()))
            with streams.on(lane):
                on_device[step.one].fill_(0.25)
            ends[here] = []
            end(lane, here)
    wait(streams.current(), ("device", 0), ("device", 1))
    wait(None, ("pinned", 0), ("pinned", 1))
    return found + read(streams, torch.cat(on_device)) + pinned[0].tolist() + pinned[1].tolist()  # pyright: ignore[reportUnknownMemberType]


@settings(max_examples=share(1.2))
@given(
    st.lists(STEPS, max_size=14), st.sampled_from([*ALL_ORDERS, *(SimulatedDevice(seed).order for seed in range(6))])
)
def test_drawn_programs_with_their_waits_compute_the_same_in_every_order(steps: list[Step], order: Any) -> None:
    expected = drawn_program(steps, accel.single("cpu").streams)
    device = SimulatedDevice(order=order)
    with device.active():
        assert drawn_program(steps, device) == expected
