# SPDX-License-Identifier: Apache-2.0
"""`prepare`: everything a loop needs, in one call, checked against each other; typed for up to five objects."""

from __future__ import annotations

from typing import Any, TypeAlias, overload

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import TypeVar

from accel.context import DistContext, context_first
from accel.data import Loader, StreamLoader
from accel.training._prepare import prepare_objects

Net: TypeAlias = nn.Module  # not a type variable: on several ranks DDP's wrapper comes back
Data: TypeAlias = DataLoader[Any]
Kept: TypeAlias = Optimizer | LRScheduler | Loader | StreamLoader | None
# `A | Data` is A for an object that is kept. A DataLoader leaves A unsolved, so that its default, Loader, is the result.
A = TypeVar("A", bound=Kept, default=Loader)
B = TypeVar("B", bound=Kept, default=Loader)
C = TypeVar("C", bound=Kept, default=Loader)
D = TypeVar("D", bound=Kept, default=Loader)
E = TypeVar("E", bound=Kept, default=Loader)


# Models first, then the others in any order; tests/typing/check.py compares the list with this rule.
# fmt: off
# ruff: noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, /) -> Net: ...
@overload
def prepare(ctx: DistContext, a: A | Data, /) -> A: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, /) -> tuple[Net, Net]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: B | Data, /) -> tuple[Net, B]: ...
@overload
def prepare(ctx: DistContext, a: A | Data, b: B | Data, /) -> tuple[A, B]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, /) -> tuple[Net, Net, Net]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: C | Data, /) -> tuple[Net, Net, C]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: B | Data, c: C | Data, /) -> tuple[Net, B, C]: ...
@overload
def prepare(ctx: DistContext, a: A | Data, b: B | Data, c: C | Data, /) -> tuple[A, B, C]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: Net, /) -> tuple[Net, Net, Net, Net]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: D | Data, /) -> tuple[Net, Net, Net, D]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: C | Data, d: D | Data, /) -> tuple[Net, Net, C, D]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: B | Data, c: C | Data, d: D | Data, /) -> tuple[Net, B, C, D]: ...
@overload
def prepare(ctx: DistContext, a: A | Data, b: B | Data, c: C | Data, d: D | Data, /) -> tuple[A, B, C, D]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: Net, e: Net, /) -> tuple[Net, Net, Net, Net, Net]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: Net, e: E | Data, /) -> tuple[Net, Net, Net, Net, E]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: D | Data, e: E | Data, /) -> tuple[Net, Net, Net, D, E]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: C | Data, d: D | Data, e: E | Data, /) -> tuple[Net, Net, C, D, E]: ...
@overload
def prepare(ctx: DistContext, a: Net, b: B | Data, c: C | Data, d: D | Data, e: E | Data, /) -> tuple[Net, B, C, D, E]: ...
@overload
def prepare(ctx: DistContext, a: A | Data, b: B | Data, c: C | Data, d: D | Data, e: E | Data, /) -> tuple[A, B, C, D, E]: ...
@overload
def prepare(ctx: DistContext, /, *objects: Net | Data | Kept) -> Any: ...
# fmt: on


@context_first
def prepare(ctx: DistContext, /, *objects: Any) -> Any:
    """Prepare models, optimizers, schedulers and loaders, and return them in the order given. A collective.

    Under the strategy `fsdp` the optimizers go on with the shards that took the place of the models' parameters.

    Args:
        ctx: the context.
        objects: modules, torch optimizers, torch schedulers and DataLoaders, in any order and number; and loaders that
            `prepare_loader` has prepared, which stay as they are. None is given back.

    Returns:
        One object for one, a tuple for several: models as from `prepare_model`, loaders as from `prepare_loader`,
        optimizers and schedulers themselves. A model's type is `nn.Module`, since on several ranks it is DDP's
        wrapper; call its own methods on the module that was passed, or on `unwrap_model`'s. Optimizers and schedulers
        keep their types. Models after other objects, or more than five objects, come back as `Any`.

    Raises:
        PrepareError: an object of another kind; an optimizer whose parameters belong to none of the models, or that has
            state of parameters that are to be sharded; a scheduler of none of the optimizers. Nothing has been changed
            then.
        DeviceError, PrepareError, DataError: as `prepare_model` and `prepare_loader`.
        ContextClosedError: the context is closed.

    Example:
        >>> net = nn.Linear(4, 1)
        >>> adam = torch.optim.Adam(net.parameters())
        >>> model, optimizer, loader = accel.prepare(ctx, net, adam, DataLoader(dataset, batch_size=4))
        >>> optimizer is adam, loader.samples
        (True, 10)
    """
    prepared = prepare_objects(ctx, objects)
    return prepared[0] if len(prepared) == 1 else prepared
