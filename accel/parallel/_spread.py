# SPDX-License-Identifier: Apache-2.0
"""A model described once, and the answer for one dimension of a mesh as a record; tensors that ranks have alike."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import msgspec
import torch
from torch import nn

from accel.comm import Call, Comm, adopt, all_reduce_flat, alone, broadcast_flat, call_site, exchange
from accel.context import DistContext, group_of
from accel.errors import AccelError, ConfigError
from accel.parallel._blocks import ModelBlock, blocks_of
from accel.parallel._modules import named_modules, sharded_roots, unwrap_model
from accel.parallel._private import tensors_of
from accel.tensors import Packed, is_dtensor, packed_weights
from accel.topology import Dimension, Plan, dimension_of

T = TypeVar("T", bound=torch.Tensor)


def average_(ctx: DistContext, tensors: Iterable[torch.Tensor]) -> None:
    """Replace plain tensors, alike in shape and dtype on every rank, by their mean over ranks. A collective of a
    message a dtype."""
    average_along_(ctx.comm, tensors)


def average_along_(comm: Comm, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by their mean over the ranks of a handle; see `average_`."""
    _in_flat(tensors, lambda flat: all_reduce_flat(comm, flat, "sum").div_(comm.size))


def stage_comm(ctx: DistContext) -> Comm:
    """Return a handle of the ranks of this rank's pipeline stage; of all without a pipeline. A collective at first."""
    names = ctx.mesh.mesh_dim_names if ctx.mesh is not None else None
    if names is None or all(dimension_of(name) != "pipeline" or ctx.axis(name).size == 1 for name in names):
        return ctx.comm
    group = group_of(ctx, *(name for name in names if dimension_of(name) != "pipeline"))
    return alone() if group is None else adopt(group, ctx.device)


def follow_first_(comm: Comm, tensors: Iterable[torch.Tensor]) -> None:
    """Replace plain tensors, alike in shape and dtype, by the first rank's of a handle. A collective of a message a
    dtype."""

    def receive(flat: torch.Tensor) -> torch.Tensor:
        broadcast_flat(comm, flat, source=0)
        return flat

    _in_flat(tensors, receive)


class _Awaited:
    """A backward that is to come; alive as long as the graph that it begins from."""

    __slots__ = ("__weakref__",)


class PendingForward:
    """Knows whether an earlier forward still awaits its backward: its saved tensors may be the model's buffers.

    Buffers are not replaced in place meanwhile: several calls of a model may share a backward.
    """

    __slots__ = ("_awaited",)

    def __init__(self) -> None:
        self._awaited: weakref.ref[_Awaited] | None = None

    def keeps_buffers(self) -> bool:
        """Return whether buffers must stay as they are."""
        return self._awaited is not None and self._awaited() is not None and torch.is_grad_enabled()

    def note(self, outputs: object) -> None:
        """Note the outputs of a forward."""
        tensor = next(iter(with_gradient(outputs)), None) if torch.is_grad_enabled() else None
        if tensor is not None:
            awaited = _Awaited()
            self._awaited = weakref.ref(awaited)
            _ = cast(Any, tensor).register_hook(functools.partial(self._end, awaited))

    def _end(self, _awaited: _Awaited, _gradient: torch.Tensor) -> None:
        self._awaited = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PendingForward, ()


def with_gradient(outputs: object) -> list[torch.Tensor]:
    """Return the tensors among outputs that a backward may begin from."""
    return [each for each in tensors_of(outputs) if each.requires_grad]


def begin_with_rank_0_(ctx: DistContext, tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors by rank 0's. A collective of one message for each, which needs no memory for a second copy."""
    for tensor in tensors:
        broadcast_flat(ctx.comm, tensor.detach(), source=0)


def replicated_tensors(view: ModelView) -> list[torch.Tensor]:
    """Return what replicas of a model begin with alike: parameters, parts of quantizers' weights, buffers."""
    weights = view.packed
    plain = [each for name, each in view.parameters.items() if name not in weights]
    parts = [part for weight in weights.values() for part in weight.parts.values()]
    small = [part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1 else part for part in parts]
    return [*plain, *small, *view.buffers.values()]


def _in_flat(tensors: Iterable[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change tensors as one flat tensor for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in kinds.values():
        changed = change(torch.cat([tensor.flatten() for tensor in same]))
        parts = torch.split(changed, [tensor.numel() for tensor in same])
        for tensor, values in zip(same, parts, strict=True):
            _ = tensor.copy_(values.view_as(tensor))


class ModelView:
    """A model described once: each fact is found when it is first asked for, and the modules are walked once.

    Parameters and buffers are found once, too. Code that replaces tensors continues with the view from `after`.

    Args:
        model: plain, wrapped or spread.
        example: a batch as the model takes it; None for none.
    """

    def __init__(self, model: nn.Module, example: Any = None) -> None:
        self.model = model
        self.example = example

    @cached_property
    def inner(self) -> ModelView:
        """The view of the module inside of wrappers; this one of a model without."""
        inner = unwrap_model(self.model)
        return self if inner is self.model else ModelView(inner, self.example)

    def after(self, model: nn.Module | None = None) -> ModelView:
        """Return the view of the model with the tensors that it has now; the modules stay the same.

        `model`: a wrapper that was put around the model.
        """
        view = ModelView(self.model if model is None else model, self.example)
        if view.model is self.model:
            view.paths = self.paths
            if self.inner is not self:
                view.inner = self.inner.after()
        elif unwrap_model(view.model) is self.inner.model:
            view.inner = self.inner.after()
        return view

    @cached_property
    def paths(self) -> tuple[tuple[str, nn.Module], ...]:
        """The modules, each under all of its paths."""
        return tuple(named_modules(self.model, every_path=True))

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The modules, each under its first path."""
        first = {id(module): path for path, module in reversed(self.paths)}
        return {path: module for path, module in self.paths if first[id(module)] == path}

    @cached_property
    def places(self) -> dict[int, tuple[str, ...]]:
        """All paths of each module, by its `id`."""
        found: dict[int, tuple[str, ...]] = {}
        for path, module in self.paths:
            found[id(module)] = (*found.get(id(module), ()), path)
        return found

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters, each under its first name."""
        return _first_names((path, module.named_parameters(recurse=False)) for path, module in self.modules.items())

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers, each under its first name."""
        return _first_names((path, module.named_buffers(recurse=False)) for path, module in self.modules.items())

    @cached_property
    def owners(self) -> dict[int, tuple[str, ...]]:
        """All names of each parameter, by its `id`; tied ones have several."""
        found: dict[int, tuple[str, ...]] = {}
        for path, module in self.paths:
            for name, each in module.named_parameters(recurse=False, remove_duplicate=False):
                found[id(each)] = (*found.get(id(each), ()), f"{path}.{name}" if path else name)
        return found

    @cached_property
    def packed(self) -> dict[str, Packed]:
        """The packed weights by all of their names."""
        return packed_weights(self.paths)

    @cached_property
    def tables(self) -> dict[str, nn.Parameter]:
        """The trainable weights of embeddings with sparse gradients."""
        return sparse_tables(self.modules.items())

    @cached_property
    def blocks(self) -> tuple[ModelBlock, ...]:
        """The blocks, also those within others."""
        return blocks_of(self.modules, nested=True)

    @cached_property
    def is_sharded(self) -> bool:
        """Whether somebody has spread the parameters over ranks."""
        return any(map(is_dtensor, self.parameters.values())) or bool(sharded_roots(self.model))

    @cached_property
    def holds_dtensors(self) -> bool:
        """Whether a parameter or a buffer is a DTensor."""
        return any(map(is_dtensor, (*self.parameters.values(), *self.buffers.values())))


def sparse_tables(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that DDP expects sparse gradients of, by path: tables with `sparse=True`."""
    found: dict[str, nn.Parameter] = {}
    for path, module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            own = module.named_parameters(path, recurse=False)
            found |= {name: each for name, each in own if each.requires_grad}
    return found


def _first_names(tables: Iterable[tuple[str, Iterator[tuple[str, T]]]]) -> dict[str, T]:
    found: dict[int, tuple[str, T]] = {}
    for path, tensors in tables:
        for name, each in tensors:
            _ = found.setdefault(id(each), (f"{path}.{name}" if path else name, each))
    return dict(found.values())


class SpreadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one dimension: fields of `Plan` and keywords of `prepare_model`; see there."""

    def check(self) -> None:
        """Raise `ConfigError` for values out of range, or that contradict each other."""

    def describe(self) -> str:
        """Return the options as text that is the same on ranks with the same options."""
        return repr(self)


class ReplicateOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of DistributedDataParallel, which are keywords of `prepare_model`."""

    find_unused_parameters: bool = False
    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = True
    comm_hook: Any = None

    @property
    def compresses(self) -> bool:
        """Whether a hook of this package converts gradients for the exchange."""
        return self.comm_hook is not None and not callable(self.comm_hook)

    def check(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""
        if self.find_unused_parameters and self.static_graph:
            raise ConfigError(
                "a static graph is searched for unused parameters once, at the first step",
                expected="find_unused_parameters or static_graph",
                got="both",
                where="prepare_model",
            )
        if not 0 < self.bucket_cap_mb < float("inf"):
            raise ConfigError("no bucket has that size", expected="MiB above 0", got=repr(self.bucket_cap_mb))

    def describe(self) -> str:
        """Return the options as text that is the same on ranks with the same options."""
        hook = self.comm_hook
        named = f"function {getattr(hook, '__qualname__', type(hook).__qualname__)}" if callable(hook) else hook
        return repr(msgspec.structs.replace(self, comm_hook=named))


class SpreadFunction(Protocol):
    """A function that spreads a model."""

    def __call__(self, ctx: DistContext, view: ModelView, options: Any, /, *, is_empty: bool) -> nn.Module:
        """Spread a model and return the object to call in the loop. Mutates the model; its modules stay in their
        places; with `is_empty`, no rank has values and nothing is sent."""
        ...


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A way to spread a model over the ranks along one dimension."""

    dimension: Dimension  # the dimension to spread along
    # Returns its options of a plan, of keywords of `prepare_model` and of a model. Pure.
    options_from: Callable[[Plan, ReplicateOptions, ModelView], SpreadOptions]
    keywords: tuple[str, ...] = ()  # keywords of `prepare_model` that it takes
    is_done: Callable[[DistContext, ModelView], bool]  # whether the model is spread along it already. No communication
    # Returns the errors of a model that cannot be spread with these options, all of them. No communication, and nothing
    # is changed.
    refusals: Callable[[DistContext, ModelView, Any], Sequence[AccelError]]
    # Spreads a model, from rank 0's values if there are some. A collective that mutates the model.
    spread: SpreadFunction
    # Returns the options that ranks decide on together, after all checks and before anything changes. A collective;
    # None for the options as they are.
    resolve: Callable[[DistContext, ModelView, Any], SpreadOptions] | None = None
    replaces: bool  # whether the model has other parameters afterwards
    takes_sparse: bool = False  # whether it exchanges sparse gradients


def compare_models(ctx: DistContext, options: SpreadOptions, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `CollectiveMismatch` where ranks of a stage prepare models of other parameters, or in another way. A
    collective."""
    shapes = (f"{name}: {each.dtype} {list(each.shape)}" for name, each in parameters.items())
    facts = "\n".join([f"strategy {ctx.strategy}", options.describe(), *shapes])
    _ = exchange(stage_comm(ctx), Call("prepare_model", facts, call_site()), torch.empty(0, dtype=torch.uint8))
