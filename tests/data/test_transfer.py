# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to a device: what is moved, and in which order reading, copying and giving happen."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from catching import assert_raises

import accel
from accel.comm._streams import DeviceStreams
from accel.data._transfer import moved, one_ahead, pin, to_device
from accel.errors import TreeError

CPU, META = torch.device("cpu"), torch.device("meta")  # "meta" stands for a device: `.to` is all that is asked of it


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Data:
    inputs: Any


class Record(msgspec.Struct):
    inputs: Any


class Encoding(UserDict):
    """As tokenizers return: no container of ours, but it moves itself."""

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.data.items()})


def test_every_tensor_of_any_nesting_is_moved_and_the_rest_kept():
    batch = {
        "pair": Pair(torch.ones(2), "text"),
        "data": [Data(torch.ones(3)), (Record(torch.ones(4)), 7, None)],
        "tokens": Encoding(ids=torch.ones(5)),
    }
    got = to_device(batch, META)
    devices = [
        got["pair"].left,
        got["data"][0].inputs,
        got["data"][1][0].inputs,
        got["tokens"]["ids"],
    ]
    assert [tensor.device.type for tensor in devices] == ["meta"] * 4
    assert [len(tensor) for tensor in devices] == [2, 3, 4, 5]
    assert got["pair"].right == "text"
    assert got["data"][1][1:] == (7, None)
    assert batch["pair"].left.device == CPU
    assert to_device(Encoding(ids=torch.ones(5)), META)["ids"].device.type == "meta"


def test_an_object_that_looks_up_every_name_itself_is_moved_if_it_finds_how():
    class Fields:
        def __init__(self, **fields):
            self.__dict__["fields"] = fields

        def __getattr__(self, name):
            return self.fields[name]

    plain = Fields(ids=torch.ones(5))
    assert to_device([plain], META) == [plain]
    assert pin([plain]) == [plain]
    assert to_device([Fields(to=torch.ones(5).to)], META)[0].device == META


def test_on_the_cpu_a_batch_is_the_very_one_that_was_read():
    batch = {"x": torch.ones(1), "odd": deque()}
    assert next(moved(iter([(batch, 3)]), accel.single("cpu").streams, ahead=True)) == (batch, 3)
    assert to_device(batch, CPU) is batch


def test_what_cannot_be_taken_apart_nor_moves_itself_is_named():
    with assert_raises(TreeError, got="deque", where=r"\$\.x"):
        to_device({"x": deque()}, META)


def test_pinning_leaves_alone_what_it_cannot_take_apart():
    class Pinnable:
        def pin_memory(self):
            return "pinned"

    assert pin([Pinnable(), 1]) == ["pinned", 1]
    assert pin(Pinnable()) == "pinned"
    odd = [deque()]
    assert pin(odd) is odd


def test_moves_are_waited_for_wherever_that_is_the_only_safe_way():
    """On other devices than CUDA each batch is read, moved, and given before the next one is read."""
    log = []
    for data, other in moved(_reading(log, 3), DeviceStreams(META), ahead=True):
        assert data.device == META
        log.append(f"use {other}")
    assert log == ["read 0", "use 0", "read 1", "use 1", "read 2", "use 2"]


def _reading(log, count, error=None):
    for i in range(count):
        log.append(f"read {i}")
        yield torch.ones(i), i
    if error is not None:
        raise error


class Recorded(DeviceStreams):
    """Streams that take what torch's can: it registers record_stream for the keys of dense tensors alone."""

    is_pinnable = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.used = list[torch.Tensor]()

    def last_use(self, tensor: torch.Tensor, stream: object) -> None:
        if tensor.layout is not torch.jagged and (tensor.layout is not torch.strided or tensor.is_nested):
            raise NotImplementedError(f"aten::record_stream of {tensor.layout}")
        self.used.append(tensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ahead", [True, False])
def test_sparse_and_nested_tensors_of_a_batch_arrive_too(ahead):
    dense = torch.eye(3)
    nested = {
        kind: torch.nested.nested_tensor([dense, dense[:2]], layout=kind) for kind in (torch.strided, torch.jagged)
    }
    batch = {
        "dense": dense,
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "nested": nested[torch.strided],
        "jagged": nested[torch.jagged],
    }
    streams = Recorded(torch.device("cpu"))
    ((arrived, _),) = moved(iter([(batch, 0)]), streams, ahead=ahead)
    assert arrived["coo"].to_dense().equal(dense)
    assert arrived["csr"].to_dense().equal(dense)
    assert [each.layout for each in streams.used] == [torch.strided, torch.jagged]
    assert streams.used[0] is arrived["dense"]


def test_the_first_is_given_at_once_and_later_ones_are_started_one_ahead():
    log = []

    def start(data):
        log.append(f"start {len(data)}")
        return data

    for _, other in one_ahead(_reading(log, 4), start):
        log.append(f"use {other}")
    first, second = ["read 0", "start 0", "use 0"], ["read 1", "start 1", "read 2", "start 2", "use 1"]
    assert log == [*first, *second, "read 3", "start 3", "use 2", "use 3"]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_an_error_in_reading_ahead_comes_after_what_was_read_before(count):
    given, error = [], OSError("gone")
    with pytest.raises(OSError, match="gone"):
        given.extend(other for _, other in one_ahead(_reading([], count, error), len))
    assert list(one_ahead(_reading([], count), len)) == [(i, i) for i in range(count)]
    items = one_ahead(_reading([], count, error), len)
    assert [next(items)[1] for _ in range(count)] == list(range(count))
