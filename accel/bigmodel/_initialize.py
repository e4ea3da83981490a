# SPDX-License-Identifier: Apache-2.0
"""`initialize_weights`: first values for a model that was built empty, made part by part where each rank needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from accel.checkpoint import held_box
from accel.comm import all_reduce_flat
from accel.context import DistContext, context_first
from accel.errors import PrepareError
from accel.mixins import Mixin
from accel.parallel import is_unknown, unwrap_model
from accel.parallel.pipeline import pipeline_of
from accel.random import Key
from accel.seeding import seeded
from accel.tensors import local_part

_OWN = ("reset_parameters", "_reset_parameters")  # of torch's layers; the second of attention and transformers
_WHERE = "initialize_weights"


@context_first
def initialize_weights(
    ctx: DistContext, model: nn.Module, key: Key, *, init: Callable[[nn.Module], object] | None = None
) -> nn.Module:
    """Give a model that was built empty its first values, and return it. Mutates it.

    Module after module is made whole on the context's device, initialised, and cut to what this rank holds, so a rank
    needs memory for its part and for one module's own tensors. Random numbers come from the key and the module's path
    alone: values are the same on any mesh, and on one process, for one kind of device. What has values stays.

    Args:
        ctx: the context.
        model: from `prepare` or `prepare_model`, built on the meta device; perhaps filled in part by a load.
        key: the source of random numbers; equal on every rank.
        init: fills the parameters and buffers of the module that it is given, and not those of modules below it, such
            as `_init_weights` of a model of transformers. None for the module's own `reset_parameters`.

    Returns:
        The model that was passed. Communicates along `pp` where stages share a tied parameter, and else not at all.

    Raises:
        PrepareError: modules without `reset_parameters`, or values that the function did not give; named.

    Example:
        >>> with torch.device("meta"):
        ...     net = nn.Linear(4, 2)
        >>> net = accel.initialize_weights(ctx, accel.prepare_model(ctx, net), accel.Key(0))
        >>> bool(net.weight.isfinite().all())
        True
    """
    ctx.comm.check_open()
    inner = unwrap_model(model)
    modules = dict(_children_first(inner, ""))
    waiting = {path: module for path, module in modules.items() if any(map(is_unknown, _own(module).values()))}
    if init is None:
        _check_initialisers(waiting)
    for path, module in waiting.items():
        empty = {name: each for name, each in _own(module).items() if is_unknown(each) or not each.is_floating_point()}
        if not any(map(is_unknown, empty.values())):
            continue  # tied to a parameter of a module before
        made = _stand_in(module, ctx.device)
        with seeded(ctx, key.fold_in("weights", path)), torch.no_grad():
            _ = _initialise(made) if init is None else init(made)
        _fill(path, empty, _own(made))
    _follow_first_stage(inner)
    return model


def _children_first(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules in the order in which a constructor ends: those below a module before it."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module itself."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def _bare(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a module without those that spreading has put before it."""
    for each in kind.__mro__:
        if issubclass(each, nn.Module) and not issubclass(each, Mixin) and not _is_of_fsdp(each):
            return each
    return kind


def _is_of_fsdp(kind: type[nn.Module]) -> bool:
    return hasattr(kind, "set_requires_gradient_sync")


def _own_initialiser(kind: type[nn.Module]) -> Callable[[nn.Module], object] | None:
    return next((getattr(kind, name) for name in _OWN if hasattr(kind, name)), None)


def _initialise(module: nn.Module) -> object:
    own = _own_initialiser(type(module))
    assert own is not None  # checked before
    return own(module)


def _check_initialisers(modules: Mapping[str, nn.Module]) -> None:
    missing = [path or "the model" for path, each in modules.items() if _own_initialiser(_bare(type(each))) is None]
    if missing:
        raise PrepareError(
            "modules do not know their first values",
            expected="reset_parameters in each module with parameters of its own",
            got=", ".join(missing),
            where=_WHERE,
            fix="Give their classes one, or pass init=, a function of a module that fills its parameters.",
        )


def _stand_in(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module, of its own class, with whole plain tensors, NaN, in the place of its parameters."""
    kind = _bare(type(module))
    made = object.__new__(kind)
    own = vars(made)
    own.update(vars(module))
    for held, wrap in (("_parameters", True), ("_buffers", False)):
        tensors = cast("Mapping[str, Tensor | None]", own[held])
        own[held] = {name: None if each is None else _whole(each, device, wrap=wrap) for name, each in tensors.items()}
    return made


def _whole(tensor: Tensor, device: torch.device, *, wrap: bool) -> Tensor:
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    if made.is_floating_point():
        _ = made.fill_(float("nan"))
    return nn.Parameter(made, tensor.requires_grad) if wrap else made


def _fill(path: str, empty: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> None:
    """Copy this rank's parts of initialised tensors. Mutates the empty ones."""
    for name, tensor in empty.items():
        where = f"{path}.{name}" if path else name
        if is_unknown(made[name]):
            raise PrepareError(
                "an initialisation left values out", got=where, where=_WHERE, fix="Let init fill all of the module."
            )
        box = held_box(tensor, where)
        if box is not None:
            at = tuple(slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))
            _ = local_part(tensor).copy_(made[name].detach()[at])


def _follow_first_stage(model: nn.Module) -> None:
    """Give copies of a tied parameter in other stages the values of its first module's. A collective of their ranks."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        return
    first = {name: names[0] for names in pipeline.names for name in names}
    held = dict(model.named_parameters(remove_duplicate=False))
    for tie in pipeline.ties:
        part = local_part(held[tie.name])
        mine = part if first[tie.name] in held else torch.zeros_like(part)
        _ = part.copy_(all_reduce_flat(tie.comm, mine.contiguous(), "sum").view_as(part))
