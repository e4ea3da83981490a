# SPDX-License-Identifier: Apache-2.0
"""Modules that run on parts of a sequence, one after the other, in forward and again in backward.

The parameters are inputs of one node of autograd. So each has one gradient, summed over the parts in fp32, and the
hooks of DDP and `fully_shard` run once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from accel.errors import ConfigError
from accel.mixins import Mixin, add_mixin
from accel.parallel._blocks import Select, selected
from accel.parallel._modules import named_modules, note_module, notes_of, unwrap_model, written_class
from accel.parallel._private import untraced, without_subclasses
from accel.parallel.parts._shapes import joined_chunks, row_chunks

M = TypeVar("M", bound=nn.Module)


class _Chunks(NamedTuple):
    """The division of a module's input: along a dimension, into so many parts."""

    dim: int
    parts: int

    def of(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the parts of a tensor; of one that ranks divide along the dimension, parts of each rank's rows."""
        return row_chunks(tensor, self.parts, self.dim)

    def joined(self, outputs: Sequence[Tensor], tensor: Tensor) -> Tensor:
        """Return the output for a tensor from the outputs for its parts."""
        return joined_chunks(outputs, tensor, self.dim)


class _Surroundings:
    """Random streams and autocast of a forward, for the run in backward.

    Args:
        x: input of the forward.
    """

    def __init__(self, x: Tensor) -> None:
        self._device = x.device
        self._state = torch.get_rng_state()
        self._devices, self._device_states = cast(Any, checkpoint).get_device_states(x)
        kinds = dict.fromkeys(("cpu", x.device.type))
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds if kind != "meta"
        ]

    @contextlib.contextmanager
    def again(self) -> Any:
        """Draw the same random numbers in a block, in the same autocast."""
        with contextlib.ExitStack() as stack:
            fork = cast(Any, torch.random).fork_rng
            kind = self._device.type if self._devices else "cpu"
            stack.enter_context(fork(self._devices, device_type=kind))
            _ = torch.set_rng_state(self._state)
            if self._devices:
                cast(Any, checkpoint).set_device_states(self._devices, self._device_states, device_type=kind)
            stack.enter_context(self.autocast())
            yield

    @contextlib.contextmanager
    def autocast(self) -> Any:
        """Compute in a block in the forward's autocast, without its copies of weights: one that was made without
        gradients would stay without."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class _ChunkedRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], chunks: _Chunks, x: Tensor, *params: Tensor) -> Tensor:
        ctx.run, ctx.chunks, ctx.params = run, chunks, params
        ctx.save_for_backward(x)
        ctx.around = _Surroundings(x)
        with ctx.around.autocast():
            return chunks.joined([run(each) for each in chunks.of(x)], x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - torch's own form
        (x,) = ctx.saved_tensors
        needs_x = bool(ctx.needs_input_grad[2])
        trained = [each for each in ctx.params if each.requires_grad]
        totals: list[Tensor | None] = [None] * len(trained)
        slopes = list[Tensor]()
        with torch.enable_grad(), ctx.around.again():
            for part, slope in zip(ctx.chunks.of(x), ctx.chunks.of(grad), strict=True):
                own = part.detach().requires_grad_(needs_x)
                wanted = [*([own] if needs_x else ()), *trained]
                output = ctx.chunks.joined([ctx.run(own)], own)  # with this rank's rows, as the slope
                found = torch.autograd.grad(output, wanted, slope, allow_unused=True)
                if needs_x:
                    first, *found = found
                    slopes.append(torch.zeros_like(part) if cast(Any, first) is None else first)
                with torch.no_grad():
                    totals = [_added(total, more) for total, more in zip(totals, found, strict=True)]
        sums = iter(totals)
        grads = [next(sums) if each.requires_grad else None for each in ctx.params]
        of_params = (
            None if total is None else total.to(each.dtype) for total, each in zip(grads, ctx.params, strict=True)
        )
        with without_subclasses():
            return None, None, torch.cat(slopes, ctx.chunks.dim) if needs_x else None, *of_params


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Add a part's gradient to the sum over the parts before, in fp32 at least."""
    if more is None:
        return total
    if total is None:
        return more.to(torch.promote_types(more.dtype, torch.float32), copy=True)
    return total.add_(more)


class Chunked(Mixin, nn.Module):
    """A module that runs on parts of its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on each part."""
        return _run_chunked(self, self.accel_whole, *args, **kwargs)

    def accel_whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        return super().forward(*args, **kwargs)


@untraced
def _run_chunked(module: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    chunks = cast(_Chunks, notes_of(module).get("chunks"))
    _check_call(module, args, kwargs)
    x: Tensor = args[0]

    def run(part: Tensor) -> Tensor:
        output = whole(part, *args[1:], **kwargs)
        if not isinstance(output, Tensor) or output.shape[chunks.dim] != part.shape[chunks.dim]:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise _refused(
                module, "one tensor with the length of its part", f"{got} for a part of shape {list(part.shape)}"
            )
        return output

    params = list(module.parameters())
    if torch.is_grad_enabled() and (x.requires_grad or any(each.requires_grad for each in params)):
        return cast(Any, _ChunkedRun).apply(run, chunks, x, *params)
    return chunks.joined([run(each) for each in chunks.of(x)], x)


def _check_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if not args or tensors != [args[0]]:
        raise _refused(module, "one tensor, as the first argument", f"{len(tensors)} tensors")
    unit = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    inside = [name for name, each in named_modules(module) if each is not module and isinstance(each, unit)]
    if inside:
        raise _refused(module, "a module without FSDP units inside", f"the unit {inside[0]}")


def _refused(module: nn.Module, expected: str, got: str) -> ConfigError:
    return ConfigError(
        "a module cannot run on parts of its input",
        expected=expected,
        got=got,
        where=f"chunk_sequence, {written_class(module).__name__}",
        fix="Leave the module out, by select=.",
    )


def chunk_sequence(model: M, select: Select, *, dim: int = 1, parts: int) -> M:
    """Run the chosen modules on parts of the sequence, one after the other. No communication. Mutates them.

    For modules that compute each position by itself, such as the MLP of a block: its wide activations then exist for
    one part at a time. Backward runs each part again, with the random numbers and autocast of the first time, and sums
    the gradient of each parameter over the parts in fp32. Nothing is wrapped.

    Args:
        model: plain, or from `prepare_model`.
        select: modules, as for `checkpoint_activations`. Each takes one tensor, and returns one of the same length.
        dim: dimension of the sequence.
        parts: number of parts.

    Returns:
        The model that was passed.

    Raises:
        ConfigError: nothing is chosen, or `parts` is below 1; in a forward, a module with other arguments or outputs,
            or with FSDP units inside.

    Reference: Liu and Abbeel 2023, "Blockwise parallel transformer for large context models", arXiv:2305.19370.
    """
    if parts < 1:
        raise ConfigError("no parts", expected="at least 1", got=str(parts), where="chunk_sequence, parts=")
    chosen = list(selected(unwrap_model(model), select, "chunk_sequence").values())
    add_mixin(chosen, Chunked)
    for each in chosen:
        note_module(each, chunks=_Chunks(dim, parts))
    return model
