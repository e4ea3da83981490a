# SPDX-License-Identifier: Apache-2.0
"""A batch that is handed to another rank arrives as it was; its structure travels once."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share

from accel.data.stream._dispatch import BatchPacker, BatchUnpacker, PackedBatches

relaxed = settings(deadline=None, max_examples=share(1.6))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Data:
    one: Any
    two: Any = None


class Record(msgspec.Struct, frozen=True):
    one: Any
    two: Any = None

    class Inner(msgspec.Struct):
        value: Any


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
values = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.arange(torch.Size(shape).numel()).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return made.T if made.ndim == 2 and draw(st.booleans()) else made


trees = st.recursive(
    values | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.integers(-5, 5) | st.booleans() | st.binary(max_size=2), inner)
        | st.dictionaries(st.text(max_size=2), inner).map(OrderedDict)
        | st.dictionaries(st.text(max_size=2), inner).map(UserDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Data, inner, inner)
        | st.builds(Record, inner, inner)
        | st.builds(Record.Inner, inner)
    ),
    max_leaves=8,
)


def _equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict | UserDict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if dataclasses.is_dataclass(one) or isinstance(one, msgspec.Struct):
        names = one.__annotations__
        return all(_equal(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


@relaxed
@given(parcels=st.lists(st.lists(trees, max_size=3), min_size=1, max_size=3))
def test_batches_arrive_as_they_were(parcels):
    sender, receiver = BatchPacker(), BatchUnpacker()
    for batches in parcels:
        parcel = sender.pack(batches)
        assert parcel.buffer.dtype == torch.uint8
        large = [tensor.clone() for tensor in parcel.large]
        assert _equal(receiver.unpack(PackedBatches(parcel.header_bytes, parcel.buffer.clone(), large)), batches)


@relaxed
@given(
    shapes=st.lists(st.sampled_from([(0,), (3,), (40_000,), (150, 200), (16_384,)]), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bool, torch.complex64]),
    turned=st.booleans(),
    whole=st.booleans(),
)
def test_large_tensors_travel_beside_the_others_uncopied(shapes, dtype, turned, whole):
    batch = {f"{at}": torch.arange(math.prod(shape)).view(shape).to(dtype) for at, shape in enumerate(shapes)}
    batch = {name: tensor.mT if turned and tensor.ndim == 2 else tensor for name, tensor in batch.items()} | {"n": 1}
    parcel = BatchPacker().pack([batch], whole=whole)
    tensors = [tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor)]
    large = [] if whole else [tensor for tensor in tensors if tensor.nbytes >= 65_536]
    assert [tensor.numel() for tensor in parcel.large] == [tensor.nbytes for tensor in large]
    for mine, theirs in zip(parcel.large, large, strict=True):
        assert (mine.data_ptr() == theirs.data_ptr()) == theirs.is_contiguous()
    arrived = [tensor.clone() for tensor in parcel.large]
    assert _equal(BatchUnpacker().unpack(PackedBatches(parcel.header_bytes, parcel.buffer.clone(), arrived)), [batch])


def test_the_structure_travels_when_it_changes_and_only_then():
    sender, receiver = BatchPacker(), BatchUnpacker()
    longest = "a" * 300
    shapes = [{longest: torch.ones(n, 2), "n": n} for n in (4, 4, 3)] + [{longest: [torch.ones(1)], "n": 0}] * 2
    labels = []
    for batch in shapes:
        parcel = sender.pack([batch])
        labels.append(parcel.header_bytes)
        assert _equal(receiver.unpack(parcel), [batch])
    assert [label > 300 for label in labels] == [True, False, False, True, False]
    assert max(labels[1:3]) < 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_arrives_can_be_written_to(dtype):
    (received,) = BatchUnpacker().unpack(BatchPacker().pack([[torch.zeros(3, dtype=dtype), torch.zeros(2)]]))
    received[0].fill_(1)
    assert received[1].tolist() == [0, 0]
