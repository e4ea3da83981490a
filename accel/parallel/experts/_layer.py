# SPDX-License-Identifier: Apache-2.0
"""Forward passes of modules whose experts are spread: they see this rank's experts, as plain tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from accel.comm import gathered, own_part
from accel.errors import PrepareError
from accel.mixins import Mixin
from accel.parallel._private import is_view
from accel.parallel.experts._dispatch import combine_tokens, dispatch_tokens
from accel.parallel.experts._mesh import EP
from accel.tensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Run = Callable[[Any, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
COUNT = "num_experts"  # attribute by which modules of transformers know the number of their experts


class LocalExperts(Mixin):
    """A module whose forward sees this rank's experts alone, and brings tokens to others itself.

    Attributes:
        accel_run: `run_local`, hidden from torch.compile.
    """

    accel_run: Run

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module with this rank's parts of its parameters."""
        return self.accel_run(self, cast(Any, super()).forward, inputs, named)


class DispatchedExperts(Mixin):
    """A module whose forward is called with the tokens of this rank's experts, wherever they are from.

    Attributes:
        accel_run: `run_dispatched`, hidden from torch.compile.
        accel_alike: mesh of the ranks that hold the same tokens and dispatch a part of them each; None where no other
            rank holds them.
    """

    accel_run: Run
    accel_alike: DeviceMesh | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the experts of tokens on the ranks that hold them. A collective along `ep`, as its backward."""
        return self.accel_run(self, cast(Any, super()).forward, inputs, named)


def run_local(module: Any, run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Run a module's own forward with this rank's parts of its parameters.

    Args:
        module: with `LocalExperts`.
        run: its own forward.
        inputs, named: arguments of the call.
    """
    with _local_parts(module):
        return run(*inputs, **named)


def run_dispatched(module: Any, run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """Run a module's own forward with the tokens of this rank's experts; return the outputs of the rank's own tokens.

    Args:
        module: with `DispatchedExperts`.
        run: its own forward.
        inputs, named: arguments of the call.
    """
    tokens, indices, weights = _routed(run, inputs, named)
    rows = tokens.reshape(-1, tokens.shape[-1])
    indices = indices.reshape(rows.shape[0], indices.shape[-1])
    weights = weights.reshape(indices.shape)
    alike = None if module.accel_alike is None else module.accel_alike.get_group()
    outputs = _in_parts(lambda *part: _dispatched(module, run, *part), (rows, indices, weights), alike)
    shaped = outputs if tokens.ndim == 2 else outputs.view(*tokens.shape[:-1], outputs.shape[-1])
    return shaped.clone() if is_view(shaped) else shaped  # of which an operation in place would lose FSDP's hooks


def _dispatched(module: nn.Module, run: Callable[..., Any], rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    mesh, experts = _spread_of(module)
    sent = dispatch_tokens(rows, indices, experts=experts, group=mesh.get_group(EP))
    own = sent.experts[:, None]
    came = sent.rows
    with _local_parts(module):
        if came.shape[0]:
            outputs = run(came, own, weights.new_ones(own.shape))
        else:  # a row of ones, whose outputs are dropped: parameters take part in the backward, as on other ranks
            stand_in = came.sum(0, keepdim=True) + 1
            outputs = run(stand_in, own.new_zeros(1, 1), weights.new_ones(1, 1))[:0]
    return combine_tokens(outputs, sent, weights)


def _routed(run: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return tokens, indices and weights from a call of the module."""
    given = tuple(inspect.signature(run).bind(*inputs, **named).arguments.values()) if named else tuple(inputs)
    if len(given) != 3 or not all(isinstance(each, Tensor) for each in given) or given[1].is_floating_point():
        raise PrepareError(
            "experts to dispatch tokens to are called with something else",
            expected="forward(tokens, indices, weights), of shapes [tokens, width], [tokens, k] and [tokens, k]",
            got=", ".join(type(each).__name__ for each in given),
            where="Plan.experts",
            fix='Name another module, or take the style "local" for one that dispatches tokens itself.',
        )
    return given


def _in_parts(
    run: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor], alike: dist.ProcessGroup | None
) -> Tensor:
    """Run a function of tokens that several ranks have, each of them on its part."""
    if alike is None:
        return run(*inputs)
    count = inputs[0].shape[0]
    most = -(-count // alike.size())
    short = most * alike.size() - count
    padded = [nn.functional.pad(each, (0, 0, 0, short)) for each in inputs]
    own = min(most, max(count - most * alike.rank(), 0))
    rows, weights = (own_part(each, 0, alike)[:own] for each in (padded[0], padded[2]))
    indices = padded[1].chunk(alike.size())[alike.rank()][:own]
    outputs = run(rows, indices, weights)
    filled = nn.functional.pad(outputs, (0, 0, 0, most - own))
    return gathered(filled, 0, alike)[:count]


def _spread_of(module: nn.Module) -> tuple[DeviceMesh, int]:
    """Return the mesh and the number of a module's experts."""
    spread = next(each for each in module.parameters(recurse=False) if is_dtensor(each))
    return spread.device_mesh, spread.shape[0]


@contextlib.contextmanager
def _local_parts(module: nn.Module) -> Generator[None]:
    """Let a module find this rank's parts in the place of its parameters, and their number as that of its experts."""
    seen = vars(module)
    parts = {name: each.to_local() for name, each in module.named_parameters(recurse=False) if is_dtensor(each)}
    count = seen.get(COUNT)
    seen.update(cast("dict[str, Any]", parts))
    if isinstance(count, int) and parts:
        seen[COUNT] = next(iter(parts.values())).shape[0]
    try:
        yield
    finally:
        for name in parts:
            del seen[name]
        if count is not None:
            seen[COUNT] = count
