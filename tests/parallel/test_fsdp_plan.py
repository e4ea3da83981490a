# SPDX-License-Identifier: Apache-2.0
"""The plans of the strategy fsdp, without ranks: which modules are sharded each by itself, along which dimensions."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from planned_parts import fsdp_units
from torch import nn

from accel.comm import merged_order
from accel.errors import PrepareError
from accel.parallel.axes.shard._options import shard_axes


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(inputs))


class Stack(nn.Module):
    """Blocks in a list, between an embedding and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Holder(nn.Module):
    """Modules without a forward around them."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "")


def test_repeated_blocks_are_units_and_the_model_is_the_last():
    assert fsdp_units(Stack()) == BLOCKS
    assert fsdp_units(Stack(1)) == ("",)
    assert fsdp_units(nn.Sequential(nn.Linear(2, 2), Block(), nn.Linear(2, 2), Block())) == ("1", "3", "")
    assert fsdp_units(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ("",)
    assert fsdp_units(nn.Identity()) == ("",)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_every_parameter_is_in_a_unit_and_inner_units_come_first(sizes: list[int]):
    model = nn.Sequential(*[Stack(size) for size in sizes])
    units = fsdp_units(model)
    assert units[-1] == ""
    assert len(set(units)) == len(units)
    for at, name in enumerate(units):
        assert not any(name.startswith(f"{outer}.") for outer in units[:at])


def test_what_models_declare_goes_before_what_is_repeated():
    model = nn.Sequential(Stack(), Stack(), nn.Linear(8, 1))
    assert fsdp_units(model) == ("0", "1", "")
    model[0]._no_split_modules = ["Block"]
    assert fsdp_units(model) == (*(f"{stack}.blocks.{block}" for stack in (0, 1) for block in range(3)), "")
    model[0]._no_split_modules = None
    model[1]._no_split_modules = "Stack"
    assert fsdp_units(model) == ("0", "1", "")


def test_lists_without_a_forward_leave_it_to_what_they_hold():
    lists = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    model = nn.Sequential(nn.Linear(4, 4))
    model.lists = lists
    assert fsdp_units(model) == ("lists.0.0", "lists.0.1", "lists.1.0", "lists.1.1", "")


def test_blocks_whose_parameters_are_used_elsewhere_stay_with_the_model():
    tied = Stack()
    tied.head.weight = tied.embed.weight
    assert fsdp_units(tied) == BLOCKS  # both ends are the model's own
    tied.blocks[1].inner.weight = tied.blocks[0].inner.weight
    assert fsdp_units(tied) == ("blocks.2", "")
    shared = Stack()
    shared.blocks[2].norm = shared.norm = shared.blocks[0].norm
    assert fsdp_units(shared) == ("blocks.1", "")
    twice = Stack()
    twice.first = twice.blocks[2] = twice.blocks[0]  # under three names
    assert fsdp_units(twice) == ("blocks.0", "blocks.1", "")
    before = nn.Module()
    before.first, before.stack = twice.blocks[0], twice
    before.forward = twice.forward
    assert fsdp_units(before) == ("stack.blocks.1", "first", "")
    same = Stack()
    same.blocks = nn.ModuleList([same.blocks[0]] * 4)
    assert fsdp_units(same) == ("blocks.0", "")


def test_modules_of_another_dtype_are_units_of_their_own():
    model = Stack().bfloat16()
    model.blocks[1].norm.float()
    model.head.float()
    assert fsdp_units(model) == ("blocks.1.norm", *BLOCKS[:-1], "head", "")
    frozen = Stack()
    frozen.blocks.bfloat16().requires_grad_(False)  # what has no gradient may have any dtype
    assert fsdp_units(frozen) == BLOCKS


def _mixed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    model[1].bias.data = model[1].bias.data.float()
    return model


def _hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad)
    return model


REFUSED = {
    "strides": (
        lambda: nn.Sequential(_with(nn.Linear(1, 1), torch.ones(2, 3).T)),
        {"got": r"strides \(1, 3\)", "where": r"0\.own"},
    ),
    "list": (lambda: nn.ModuleList([Block()]), {"got": "ModuleList", "fix": "one by one"}),
    "dict": (lambda: nn.ModuleDict({"a": Block()}), {"got": "ModuleDict"}),
    "no forward": (lambda: Holder(a=Block()), {"got": "Holder"}),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), {"got": "without a shape yet", "where": r"0\.weight"}),
    "two dtypes": (
        _mixed,
        {"expected": "torch.float32, as most of Sequential", "got": "torch.bfloat16", "where": r"1\.weight"},
    ),
    "hooks": (_hooked, {"got": "hooks", "where": "weight", "fix": "After prepare_model"}),
}


def _with(module: nn.Module, value: torch.Tensor) -> nn.Module:
    module.own = nn.Parameter(value)
    return module


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_named(name):
    make, fields = REFUSED[name]
    with assert_raises(PrepareError, **fields):
        fsdp_units(make())


LAYOUTS = {
    "dp": (("dp",), (4,), (), ((), (0,))),
    "no name": (None, (4,), (), ((), (0,))),
    "hsdp": (("dp_replicate", "dp_shard"), (2, 2), (), ((0,), (1,))),
    "a replica by its name": (("ddp", "dp"), (2, 2), (), ((0,), (1,))),
    "a shard by its name": (("dp", "fsdp"), (2, 2), (), ((0,), (1,))),
    "tensor parallel": (("dp", "tp"), (2, 2), ("tp",), ((), (0,))),
    "tensor parallel of another model": (("dp", "tp"), (2, 2), (), ((1,), (0,))),
    "all three": (("dp_replicate", "dp_shard", "tp"), (2, 2, 2), ("tp",), ((0,), (1,))),
    "sizes of one": (("dp_replicate", "dp_shard", "tp"), (1, 4, 1), (), ((), (1,))),
    "two that shard": (("dp", "ep"), (2, 2), (), ((), (0, 1))),
    "names of their own": (("hosts", "gpus"), (2, 2), (), ((), (0, 1))),
    "sequences": (("cp",), (4,), (), ((), (0,))),
    "dp and sequences": (("dp", "cp"), (2, 2), (), ((), (0, 1))),
    "hsdp and sequences": (("dp_replicate", "dp_shard", "cp"), (2, 2, 2), (), ((0,), (1, 2))),
    "replicas and sequences": (("dp_replicate", "cp", "tp"), (2, 2, 2), ("tp",), ((0,), (1,))),
    "a stage": (("pp", "dp_replicate", "dp_shard"), (2, 2, 2), (), ((1,), (2,))),
    "a stage of one rank": (("pp", "dp"), (4, 1), (), ((), ())),
    "replicas of parts": (("dp_replicate", "tp"), (2, 2), ("tp",), ((0,), ())),
    "parts alone": (("dp", "tp"), (1, 4), ("tp",), ((), ())),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_names_say_where_shards_and_replicas_lie(name):
    names, sizes, taken, expected = LAYOUTS[name]
    assert shard_axes(names, sizes, taken) == expected
    replicas, shards = expected
    assert shard_axes(names, sizes, taken, whole=True) == (tuple(sorted(replicas + shards)), ())


@pytest.mark.parametrize(("names", "sizes"), [(("ddp",), (4,)), (("dp_replicate", "dp_shard"), (4, 1))])
def test_a_mesh_without_a_dimension_to_shard_along_is_refused(names, sizes):
    with assert_raises(PrepareError, got=f"{names[0]}={sizes[0]}", fix='Name one "dp_shard"'):
        shard_axes(names, sizes)


ORDERS = {
    "none": (2, [(0, 1)], [(0, 1)]),
    "between others": (4, [(1,), (2, 3)], [(0,), (1,), (2, 3)]),
    "a part of this rank": (3, [(1,), ()], [(0,), (1,), (), (2,)]),
    "parts in their own order": (3, [(1,), (0, 2)], [(1,), (0, 2)]),
    "one that moves": (3, [(0, 2)], [(0, 2), (1,)]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_merged_dimensions_stand_together_and_others_stay(name):
    ndim, parts, expected = ORDERS[name]
    assert merged_order(ndim, parts) == expected
