# SPDX-License-Identifier: Apache-2.0
"""The answer for one dimension of a mesh: how a model is spread along it, as a record of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from accel.comm import Call, call_site, exchange
from accel.context import DistContext
from accel.parallel._replicas import stage_comm
from accel.topology import Dimension


class SpreadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one dimension: fields of `Plan` and keywords of `prepare_model`, by their names; see there."""

    def check(self) -> None:
        """Raise `ConfigError` for values out of range, or that contradict each other."""

    def describe(self) -> str:
        """Return the options as text that is the same on ranks with the same options."""
        return repr(self)


class SpreadFunction(Protocol):
    """A function that spreads a model."""

    def __call__(self, ctx: DistContext, model: nn.Module, options: Any, /, *, is_empty: bool) -> nn.Module:
        """Spread a model and return what to call in the loop.

        Args:
            ctx: the context.
            model: on the CPU or on the context's device; parts of it may be on the meta device. Mutated.
            options: of the dimension.
            is_empty: whether no rank has values of the parameters, so that nothing is sent and they stay empty.
        """
        ...


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A way to spread a model over the ranks along one dimension.

    Attributes:
        dimension: the dimension that this is the answer for.
        options: class of its options.
        is_done: whether the model is spread along it already. No communication.
        check: raises for a model that cannot be spread with these options. No communication, and nothing is changed.
        spread: spreads a model, from rank 0's values if there are some. A collective that mutates the model.
        replaces: whether the model has other parameters afterwards.
    """

    dimension: Dimension
    options: type[SpreadOptions]
    is_done: Callable[[DistContext, nn.Module], bool]
    check: Callable[[DistContext, nn.Module, Any], None]
    spread: SpreadFunction
    replaces: bool


def compare_models(ctx: DistContext, options: SpreadOptions, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `CollectiveMismatch` where ranks prepare models of other parameters, or in another way. A collective.

    Ranks of other pipeline stages may, as their models are other parts.
    """
    shapes = (f"{name}: {each.dtype} {list(each.shape)}" for name, each in parameters.items())
    facts = "\n".join([f"strategy {ctx.strategy}", options.describe(), *shapes])
    _ = exchange(stage_comm(ctx), Call("prepare_model", facts, call_site()), torch.empty(0, dtype=torch.uint8))
