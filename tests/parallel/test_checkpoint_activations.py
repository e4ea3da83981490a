# SPDX-License-Identifier: Apache-2.0
"""Recomputed blocks: the same gradients, less kept, and no trace in names."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Block, Stack
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.errors import ConfigError
from accel.testing import Simulator


def gradients(model: nn.Module, seed: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    model(torch.randn(4, 8, dtype=torch.float64)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def kept_elements(model: nn.Module) -> int:
    """How many elements forward keeps for backward, beside the parameters."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = model(torch.randn(4, 8, dtype=torch.float64)).sum()
    return sum(kept.values())


@settings(max_examples=share(0.24), deadline=None)
@given(depth=st.integers(2, 4), dropout=st.sampled_from([0.0, 0.3]), train=st.booleans(), how=st.integers(0, 3))
def test_gradients_are_the_same(depth: int, dropout: float, train: bool, how: int) -> None:
    plain = Stack(depth, dropout).train(train)
    model = copy.deepcopy(plain)
    select = ("repeated", Block, (Block, nn.Linear), lambda name, _module: name == "blocks.1")[how]
    assert accel.checkpoint_activations(model, select) is model
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(model), strict=True))


def test_blocks_keep_less() -> None:
    model = Stack(6)
    before = kept_elements(model)
    accel.checkpoint_activations(model)
    assert kept_elements(model) < before / 2


def test_names_types_and_copies_are_as_before() -> None:
    model = Stack(3)
    names, listed = list(model.state_dict()), [name for name, _ in model.named_modules()]
    accel.checkpoint_activations(model)
    accel.checkpoint_activations(model)  # a second time changes nothing
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == listed
    assert all(isinstance(block, Block) and type(block).__name__ == "Block" for block in model.blocks)
    assert len({type(block) for block in model.blocks}) == 1
    assert type(model.blocks[0]).__mro__.count(Block) == 1
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(other), strict=True))


def test_without_gradients_nothing_is_recomputed() -> None:
    model = accel.checkpoint_activations(Stack(2))
    calls: list[int] = []
    model.blocks[0].linear.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.float64))
    assert calls == [1]
    gradients(model)
    assert calls == [1, 1, 1]


def test_prepared_models_train_alike_and_checkpoints_know_nothing_of_it(tmp_path: Path) -> None:
    def rank(ctx: accel.DistContext, after: bool | None) -> list[torch.Tensor]:
        model = Stack(3)
        if after is False:
            accel.checkpoint_activations(model)
        prepared = accel.prepare_model(ctx, model)
        if after:
            accel.checkpoint_activations(prepared)
        found = accel.save_state(ctx, tmp_path / str(after), {"model": prepared}, step=0)
        accel.load_state(ctx, found, {"model": accel.prepare_model(ctx, Stack(3))})
        return [gradient.clone() for gradient in gradients(prepared, seed=ctx.rank)]

    with Simulator() as simulator:
        plain, before, after = (simulator.run(lambda ctx, w=when: rank(ctx, w), 2) for when in (None, False, True))
    for expected, first, second in zip(plain, before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, first, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(expected, second, strict=True))


@pytest.mark.parametrize("select", ["blocks", nn.Conv2d, lambda _name, _module: False, 3])
def test_a_choice_of_nothing_is_refused(select: object) -> None:
    with assert_raises(ConfigError, problem="no part of the model is chosen|cannot choose by this"):
        accel.checkpoint_activations(Stack(2), select)  # type: ignore[arg-type]


def _products_in_backward(model: nn.Module) -> int:
    """Matrix products that backward runs for outputs, which have a bias here, and not for gradients."""

    class Counted(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    loss = model(torch.randn(4, 8, dtype=torch.float64)).square().sum()
    with Counted() as counted:
        loss.backward()
    return counted.products


@settings(max_examples=share(0.16), deadline=None)
@given(depth=st.integers(2, 4), dropout=st.sampled_from([0.0, 0.3]), copied=st.booleans())
def test_products_can_be_kept(depth: int, dropout: float, copied: bool) -> None:
    plain = Stack(depth, dropout)
    forgets = accel.checkpoint_activations(copy.deepcopy(plain), Block)
    keeps = accel.checkpoint_activations(copy.deepcopy(plain), Block, keep="products")
    if copied:
        keeps = pickle.loads(pickle.dumps(keeps))
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(keeps), strict=True))
    assert _products_in_backward(forgets) >= depth  # torch stops early, before the last product of a block
    assert _products_in_backward(keeps) == _products_in_backward(plain) == 0


class Experts(nn.Module):
    """Two experts whose products torch computes together, each on half of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)
        self.first, self.second = (nn.Parameter(torch.randn(2, 8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
        inner = nn.functional.grouped_mm(self.scale(x), self.first, offs=ends)
        return nn.functional.grouped_mm(torch.tanh(inner), self.second, offs=ends).sin()


@pytest.mark.parametrize(("keep", "again"), [((), 2), ("products", 0)])
def test_products_of_experts_can_be_kept(keep: Any, again: int) -> None:
    forward: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # products of gradients have a transposed weight, or no third dimension
            if "grouped_mm" in func.__name__ and args[1].dim() == 3 and args[1].is_contiguous():
                forward.append(func.__name__)
            return func(*args, **(kwargs or {}))

    model = accel.checkpoint_activations(Experts(), Experts, keep=keep)
    loss = model(torch.randn(4, 8)).sum()
    with Counted():
        loss.backward()
    assert len(forward) == again


def test_operators_are_kept_by_name() -> None:
    model = accel.checkpoint_activations(Stack(3), keep=("aten.tanh.default", "aten.addmm.default"))
    assert _products_in_backward(model) == 0


@pytest.mark.parametrize("keep", ["product", ["aten.mm"], ["aten.mn.default"], [torch.ops.aten.mm.default]])
def test_what_is_no_operator_is_refused(keep: Any) -> None:
    model = Stack(2)
    with assert_raises(ConfigError, problem="no such operator", expected="'products', or names"):
        accel.checkpoint_activations(model, keep=keep)
    assert type(model.blocks[0]) is Block


def test_a_block_keeps_what_the_first_call_said() -> None:
    model = accel.checkpoint_activations(Stack(2), keep="products")
    accel.checkpoint_activations(model, keep="products")
    with assert_raises(ConfigError, problem="keeps the outputs of other operators already", fix="select="):
        accel.checkpoint_activations(model)
