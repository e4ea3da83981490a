# SPDX-License-Identifier: Apache-2.0
"""Models built empty: no memory for weights, true values for all that no checkpoint holds, and nothing patched."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from catching import assert_raises
from torch import nn

import accel
from accel.errors import ConfigError


class Model(nn.Module):
    """A model whose constructor does with tensors what constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1 << 20, 1 << 16)
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inverse", inverse, persistent=False)
        self.original = self.inverse
        mask = torch.triu(torch.full((3, 3), float("-inf")), 1)
        mask[0] = 5
        mask.view(-1)[4] = 7
        self.register_buffer("mask", mask, persistent=False)
        left, _right = (parts := torch.ones(4)).split(2)
        left.add_(1)
        self.register_buffer("views", parts, persistent=False)
        self.register_buffer("given", torch.tensor([1.0, 2.0]), persistent=False)
        self.register_buffer("persistent", torch.ones(3))
        self.rates = [each.item() for each in torch.linspace(0, 0.1, 3)]
        self.listed = torch.linspace(0, 1, 3).tolist()
        self.chosen = bool(torch.arange(3).sum() > 2)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.mean = self.weight.mean().item()


def test_all_but_the_weights_has_its_values() -> None:
    model = accel.init_empty_weights(Model)
    assert model.linear.weight.is_meta
    assert model.persistent.is_meta
    assert torch.equal(model.inverse, 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
    assert model.original is model.inverse
    assert torch.equal(model.mask, torch.tensor([[5, 5, 5], [0, 7, float("-inf")], [0, 0, 0]]))
    assert torch.equal(model.views, torch.tensor([2.0, 2.0, 1.0, 1.0]))
    assert torch.equal(model.given, torch.tensor([1.0, 2.0]))
    assert model.rates == torch.linspace(0, 0.1, 3).tolist()
    assert model.listed == [0.0, 0.5, 1.0]
    assert model.chosen is True


def test_values_of_parameters_are_not_invented() -> None:
    with assert_raises(ConfigError, problem="depends on a parameter", fix="init_on_device"):
        accel.init_empty_weights(Looking)
    assert accel.bigmodel.init_on_device(Looking, "cpu").mean == 1


def test_other_threads_build_as_ever() -> None:
    found: list[nn.Module] = []

    def make() -> nn.Module:
        thread = threading.Thread(target=lambda: found.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(3, 3)

    register = nn.Module.register_parameter
    model = accel.init_empty_weights(make)
    assert model.weight.is_meta
    assert not found[0].weight.is_meta
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


def test_ties_stay_and_models_are_built_where_asked() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model = accel.init_empty_weights(make)
    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 1
    assert accel.bigmodel.init_on_device(make, "meta")[0].weight.is_meta


@pytest.mark.parametrize("build", [accel.init_empty_weights, lambda make: accel.bigmodel.init_on_device(make, "cpu")])
def test_a_model_in_place_of_its_function_is_refused(build) -> None:
    with assert_raises(ConfigError, problem="the model exists already", fix=r"\(lambda: Linear\(\.\.\.\)\)"):
        build(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[x > 2],
        lambda x: x.masked_select(x > 2),
        lambda x: x.unique(),
        lambda x: torch.unique_consecutive(x // 2),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.bincount(x.long()),
        lambda x: torch.argwhere(x > 2) + 1,
        lambda x: x if torch.allclose(x, x) else x + 1,
        lambda x: x[torch.tensor([3, 1])] + 1,
    ],
)
def test_constructors_choose_by_values(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("chosen", make(torch.arange(6.0)), persistent=False)
            self.linear = nn.Linear(*self.chosen.shape[:1], 2)

    model = accel.init_empty_weights(Chosen)
    assert torch.equal(model.chosen, Chosen().chosen)
    assert model.linear.weight.is_meta


def test_a_choice_by_the_values_of_a_parameter_is_refused() -> None:
    with assert_raises(ConfigError, problem="depends on a parameter"):
        accel.init_empty_weights(lambda: torch.nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)))
