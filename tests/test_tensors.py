# SPDX-License-Identifier: Apache-2.0
"""DTensors are told from plain tensors, and asked for what a rank holds, without their import where there is none."""

from __future__ import annotations

import copy
import functools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accel.fakes import emptied_caches, fake_mode
from accel.tensors import (
    checksums,
    dtensor_like,
    full_tensor,
    is_dtensor,
    is_partial,
    local_part,
    local_parts,
    mesh_of,
    placements_of,
    split_dims,
    summed,
    word_layers,
)


@pytest.mark.parametrize("wrap", [torch.Tensor.clone, nn.Parameter, nn.Buffer])
def test_a_plain_tensor_is_held_whole_in_its_own_memory(wrap: Any) -> None:
    tensor = wrap(torch.zeros(3))
    assert not is_dtensor(tensor)
    assert not is_partial(tensor)
    assert (mesh_of(tensor), placements_of(tensor)) == (None, ())
    for part in (local_part(tensor), full_tensor(tensor)):
        assert type(part) is torch.Tensor
        assert not part.requires_grad
        part += 1
    assert tensor.tolist() == [2, 2, 2]


def test_a_plain_gradient_is_not_copied_or_wrapped() -> None:
    grads = [torch.ones(2), torch.ones(3)]
    assert local_parts(grads) is grads
    assert local_part(grads[0]) is grads[0]


@settings(deadline=None, max_examples=share(0.3))
@given(
    rows=st.integers(0, 7),
    shape=st.sampled_from([(1,), (2,), (3,), (2, 2)]),
    dims=st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from([None, 0, 1])),
    seed=st.none() | st.integers(0, 100),
)
def test_local_parts_and_the_whole_are_torchs(ranks, rows, shape, dims, seed):
    value = torch.arange(rows * 4.0).view(rows, 4)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims[: len(shape)]]

    def rank(_ctx):
        mesh = init_device_mesh("cpu", shape)
        live = nn.Parameter(distribute_tensor(value.clone(), mesh, placements, src_data_rank=None))
        part = local_part(live)
        assert is_dtensor(live)
        assert not is_partial(live)
        assert not part.requires_grad
        assert torch.equal(part, live.detach().to_local())
        assert torch.equal(full_tensor(live), value)
        assert (mesh_of(live), placements_of(live)) == (mesh, tuple(placements))
        assert split_dims(live) == tuple(
            at for at, dim in enumerate(dims[: len(shape)]) if dim is not None and shape[at] > 1
        )
        twin = dtensor_like(part.clone(), live, live.shape)
        assert torch.equal(twin.full_tensor(), value)
        assert twin.placements == live.placements
        part += 1
        return bool(torch.equal(full_tensor(live), value + 1))

    world_size = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
    assert ranks.run(rank, world_size, seed=seed, default_group=True) == [True] * world_size


def test_summands_are_summed(ranks):
    def rank(ctx):
        mesh = init_device_mesh("cpu", (2,))
        mine = torch.full((2,), float(ctx.rank + 1))
        tensor = DTensor.from_local(mine, mesh, [Partial()], run_check=False)
        assert is_partial(tensor)
        total = summed(tensor)
        assert not is_partial(total)
        return local_part(total).tolist()

    assert ranks.run(rank, 2, default_group=True) == [[3, 3]] * 2


def test_a_part_that_is_the_whole_lies_so_on_every_rank(ranks):
    def rank(_ctx):
        mesh = init_device_mesh("cpu", (2,))
        template = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        copied = dtensor_like(torch.ones(()), template)
        return copied.placements, float(copied.full_tensor())

    assert ranks.run(rank, 2, default_group=True) == [((Replicate(),), 1.0)] * 2


def test_parts_of_parts_are_made_whole_without_a_warning(ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`fully_shard` after tensor parallelism leaves parts that lie apart in the whole."""
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    whole = [each.detach().clone() for each in model.parameters()]

    def rank(ctx: Any) -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = copy.deepcopy(model)
        parallelize_module(mine, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(mine, mesh=mesh["dp"])
        return [torch.equal(full_tensor(each), its) for each, its in zip(mine.parameters(), whole, strict=True)]

    assert ranks.run(rank, 4, default_group=True) == [[True] * 4] * 4
    assert not [record for record in caplog.records if "redistributing" in record.getMessage()]


class ComparedClasses(type):
    """Classes that are compared by name: Python gives classes with `__eq__` and without `__hash__` no hash."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, ComparedClasses) and cls.__name__ == other.__name__


class Unhashable(metaclass=ComparedClasses):
    pass


def test_caches_are_emptied_past_objects_of_classes_without_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("of_a_user")
    vars(module)["held"] = Unhashable()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(TypeError):
        hash(Unhashable)
    with emptied_caches():
        pass


def test_caches_of_packages_are_read_again_with_new_names_and_those_of_users_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package may define functions after its import, as lazy modules do; a cell of a notebook replaces them."""

    def emptied(module: ModuleType) -> bool:
        """Whether a new cache of the module is emptied, under the name `mask`."""
        vars(module)["mask"] = functools.lru_cache(lambda: torch.ones(2))
        with emptied_caches(), fake_mode():
            module.mask()
        return module.mask.cache_info().currsize == 0

    package, user = ModuleType("a_package"), ModuleType("of_a_user")
    package.__file__ = "/lib/python3/site-packages/a_package.py"
    for module in (package, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with emptied_caches():
        pass
    assert emptied(package)
    package.__spec__ = ModuleSpec(package.__name__, None)  # as of a reload
    assert emptied(package)
    assert emptied(user)
    assert emptied(user)  # another function of that name


def test_word_layers_are_found_without_a_change_of_buffers() -> None:
    """The weight of a parametrized layer is computed where it is read, and a power iteration changes buffers."""
    net = nn.Sequential(nn.Embedding(8, 4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)))
    before = {name: each.clone() for name, each in net.named_buffers()}
    assert before
    assert list(word_layers(net).heads) == ["1"]
    assert all(torch.equal(each, before[name]) for name, each in net.named_buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("length", [1, 64, 5000, 9001])
def test_a_checksum_by_position_sees_a_bit_at_another_place(dtype: torch.dtype, length: int) -> None:
    places = torch.arange(length)[:: -(-length // 64)]
    size = dtype.itemsize
    for bit in range(0, 8 * size, 5):  # some of each byte
        tensors = {}
        for place in places.tolist():
            words = torch.full((length * size,), 0x3C, dtype=torch.uint8)
            words[place * size + bit // 8] ^= 1 << bit % 8
            tensors[str(place)] = words.view(dtype)
        assert len(set(checksums(tensors, by_position=True).values())) == len(places)
