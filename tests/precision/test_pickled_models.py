# SPDX-License-Identifier: Apache-2.0
"""Models whose parts have a class of accel before their own: pickled, saved whole and copied, they do the same."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs).tanh()


class Reduced(nn.Linear):
    """A module that says itself what is pickled of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (self.in_features, self.out_features), self.__dict__


def with_outputs() -> nn.Module:
    precision = accel.precision.Precision(compute="bf16", outputs="fp32", fp32_modules=("1", "2"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Reduced(2, 2), nn.Linear(2, 2))
    return accel.precision.apply_precision(accel.single(precision=precision), model)


def recomputed() -> nn.Module:
    return accel.checkpoint_activations(nn.Sequential(Block(), Block(), nn.Linear(2, 2)))


def both() -> nn.Module:
    precision = accel.precision.Precision(compute="bf16", outputs="fp32", fp32_modules=("0",))
    return accel.precision.apply_precision(accel.single(precision=precision), recomputed())


def through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle, the oldest protocol": lambda model: pickle.loads(pickle.dumps(model, protocol=0)),
    "torch.save": through_torch,
    "deepcopy": copy.deepcopy,
    "twice": lambda model: pickle.loads(pickle.dumps(through_torch(model))),
}


@pytest.mark.parametrize("make", [with_outputs, recomputed, both])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_does_what_the_model_does(make: Callable[[], nn.Module], way: str) -> None:
    model = make()
    other = COPIES[way](model)
    inputs = torch.randn(3, 2, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        one, two = model(inputs), other(inputs)
    assert torch.equal(one, two)
    assert one.dtype == two.dtype
    assert [type(each).__qualname__ for each in other.modules()] == [
        type(each).__qualname__ for each in model.modules()
    ]
    assert list(other.state_dict()) == list(model.state_dict())
    fronts = [[kind.__name__ for kind in type(each).__mro__] for each in model.modules()]
    assert [[kind.__name__ for kind in type(each).__mro__] for each in other.modules()] == fronts


@pytest.mark.parametrize("way", COPIES)
def test_modules_of_one_class_stay_of_one_class(way: str) -> None:
    model = recomputed()
    assert type(model[0]) is type(model[1])
    other = COPIES[way](model)
    assert type(other[0]) is type(other[1])
