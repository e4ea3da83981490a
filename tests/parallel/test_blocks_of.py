# SPDX-License-Identifier: Apache-2.0
"""One answer to "what are the blocks of this model?": each layout gives every verb what a ModuleList gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from planned_parts import blocks_of, fsdp_units
from torch import Tensor, nn

import accel
from accel.bigmodel import describe
from accel.parallel._blocks import selected
from accel.testing import Simulator

DEPTH = 4


class Mix(nn.Module):
    """A block: a norm and an MLP, which is a Sequential of layers alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Scan(Mix):
    """A block of another class."""


class Numbered(nn.Module):
    """Blocks under attributes."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        for at, block in enumerate(blocks):
            setattr(self, f"block{at}", block)


class Net(nn.Module):
    """An embedding, the blocks of a layout, and a head."""

    def __init__(self, layout: Callable[[list[nn.Module]], nn.Module], kinds: tuple[type[Mix], ...] = (Mix,)) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.chain = [kinds[at % len(kinds)]() for at in range(DEPTH)]
        self.layers = layout(list(self.chain))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.chain:
            x = block(x)
        return self.head(x)


LAYOUTS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "list": nn.ModuleList,
    "sequential": lambda blocks: nn.Sequential(*blocks),
    "keys that are numbers": lambda blocks: nn.ModuleDict({str(at): each for at, each in enumerate(blocks)}),
    "keys with numbers": lambda blocks: nn.ModuleDict({f"layer_{at}": each for at, each in enumerate(blocks)}),
    "keys without numbers": lambda blocks: nn.ModuleDict(dict(zip("abcd", blocks, strict=True))),
    "attributes": Numbered,
    "lists in a list": lambda blocks: nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])]),
    "lists in a dict": lambda blocks: nn.ModuleDict({"0": nn.ModuleList(blocks[:1]), "1": nn.ModuleList(blocks[1:])}),
    "one in each list": lambda blocks: nn.ModuleList([nn.ModuleList([nn.LayerNorm(8), each]) for each in blocks]),
    "list with None": lambda blocks: nn.ModuleList([None, *blocks, None]),
    "lists with None": lambda blocks: nn.ModuleList([nn.ModuleList([None, each]) for each in blocks]),
}


def found(model: Net, paths: Iterator[str]) -> list[int]:
    """Return the numbers of the blocks at these paths, in the order of the paths."""
    numbers = {id(each): at for at, each in enumerate(model.chain)}
    modules = [model.get_submodule(path) for path in paths]
    return [numbers[id(each)] for each in modules if id(each) in numbers]


@pytest.mark.parametrize("kinds", [(Mix,), (Mix, Scan)], ids=["one class", "two classes"])
def test_each_layout_gives_every_verb_the_blocks_of_a_list(kinds: tuple[type[Mix], ...]) -> None:
    wrong: dict[str, object] = {}
    every = list(range(DEPTH))
    for name, layout in LAYOUTS.items():
        model = Net(layout, kinds)
        units = [unit for unit in fsdp_units(model) if unit]
        segments = [each.name for each in describe(model).segments if each.movable]
        plan = accel.parallel.stage_plan(model, 2)
        got = {
            "blocks_of": [model.chain.index(each.module) for each in blocks_of(model)],
            "regions": found(model, iter(selected(model, "repeated", "test"))),
            "units": found(model, iter(units)),
            "no other unit": every + [unit for unit in units if not found(model, iter([unit]))],
            "segments": found(model, iter(segments)),
            "stages": found(model, iter(plan[0] + plan[1])),
        }
        wrong |= {f"{name}, {verb}": each for verb, each in got.items() if each != every}
        assert len(found(model, iter(plan[0]))) == DEPTH // 2, name
    assert not wrong


def test_device_maps_move_blocks_of_each_layout() -> None:
    for name, layout in LAYOUTS.items():
        model = Net(layout)
        placed = accel.infer_device_map(describe(model), {"cuda:0": 10_000, "cpu": 100_000})  # two blocks at a time
        segments = [each.name for each in placed.skeleton.segments]
        assert found(model, iter(segments)) == list(range(DEPTH)), name


@pytest.mark.parametrize("layout", ["keys with numbers", "attributes", "lists with None"])
def test_recomputed_blocks_of_each_layout_train_alike(layout: str) -> None:
    def gradients(*, recompute: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net(LAYOUTS[layout])
        if recompute:
            model = accel.checkpoint_activations(model)
        model(torch.ones(2, 8)).square().mean().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    plain = gradients(recompute=False)
    assert plain
    assert all(map(torch.equal, plain, gradients(recompute=True)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mix() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def paths(model: nn.Module, *, nested: bool = False) -> list[str]:
    return [block.path for block in blocks_of(model, nested=nested)]


@pytest.mark.parametrize("names", [("text", "image"), ("tower1", "tower2")])
def test_blocks_of_two_towers_are_those_in_them(names: tuple[str, str]) -> None:
    expected = [f"{name}.blocks.{at}" for name in names for at in range(3)]
    attributes = nn.Module()
    for name in names:
        setattr(attributes, name, Tower())
    assert paths(attributes) == expected
    assert [[path[:-2] for path in stage] for stage in accel.parallel.stage_plan(attributes, 2)] == [
        [f"{name}.blocks"] * 3 for name in names
    ]
    assert paths(nn.ModuleDict({"text": Tower(), "image": Tower()})) == [
        f"{name}.blocks.{at}" for name in ("text", "image") for at in range(3)
    ]


def test_a_list_in_a_block_is_not_the_list_of_blocks() -> None:
    model = nn.ModuleList(Tower() for _ in range(2))
    assert paths(model) == ["0", "1"]
    inside = [f"{tower}.blocks.{at}" for tower in (0, 1) for at in range(3)]
    assert paths(model, nested=True) == ["0", *inside[:3], "1", *inside[3:]]


def test_holder_and_class_of_a_block() -> None:
    model = Net(LAYOUTS["one in each list"], (Mix, Scan))
    assert [(each.holder, each.kind) for each in blocks_of(model)] == [("layers", Mix), ("layers", Scan)] * 2
    assert {each.holder for each in blocks_of(Net(Numbered))} == {"layers"}


def test_layers_without_modules_and_single_ones_are_no_blocks() -> None:
    stages = nn.Module()
    stages.layer1, stages.layer2 = nn.Sequential(Mix(), Mix()), nn.Sequential(Mix(), Mix())  # as a ResNet has them
    assert paths(stages) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert paths(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert paths(nn.ModuleDict({"wte": nn.Embedding(2, 2), "h": nn.ModuleList([Mix()])})) == []
    assert paths(nn.TransformerEncoderLayer(8, 2)) == []


def test_a_block_that_a_list_repeats_is_one() -> None:
    block = Mix()
    assert paths(nn.ModuleList([block] * 3)) == ["0"]


class Methods(nn.Module):
    """Two matrices that others multiply by; it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(8, 8), nn.Linear(8, 8)


class Lanes(nn.Module):
    """Blocks, and lists of modules that only their methods compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(Mix() for _ in range(2))
        self.lanes = nn.ModuleList(nn.ModuleList(Methods() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for mix, lanes in zip(self.mixes, self.lanes, strict=True):
            for lane in lanes:
                x = x + lane.write(mix(torch.tanh(lane.read(x))))
        return x


@pytest.mark.parametrize("sequence", [False, True])
def test_modules_without_a_forward_are_no_units_on_a_mesh_with_tp(ranks: Simulator, sequence: bool) -> None:
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(2, 4, 8)

    def rank(ctx: accel.DistContext) -> Tensor:
        torch.manual_seed(0)
        model: nn.Module = Lanes().double()
        if ctx.world_size > 1:
            ctx = accel.replace(ctx, mesh="dp=2,tp=2")
            model = accel.prepare_model(ctx, model, example=[x], plan=accel.parallel.Plan(sequence=sequence))
        return model(x).detach()

    for got in ranks.run(rank, 4, default_group=True):
        torch.testing.assert_close(got, rank(accel.single()), rtol=0, atol=1e-12)
