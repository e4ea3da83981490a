# SPDX-License-Identifier: Apache-2.0
"""`prepare`: models, optimizers, schedulers and loaders in one call; typed for up to five objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import TypeVar

from accel.comm import Call, agreed
from accel.context import DistContext, context_first
from accel.data import StreamLoader
from accel.data._loader import Loader, prepare_loader, unwrapped_loader
from accel.errors import DeviceError, PrepareError
from accel.errors._checks import check_kind, with_article
from accel.items._packed_state import is_zero
from accel.optim import guard_closures, note_complex, note_elsewhere, streamed_state
from accel.parallel._engines import engine_of
from accel.parallel._labels import current_parameter, has_state_on_host, heir_of, is_dropped, name_of
from accel.parallel._modules import unwrap_model
from accel.parallel._prepare_model import check_model, compile_as_set, prepare_view, refuse_plan, replaces_parameters
from accel.parallel._refused import check_sparse
from accel.parallel._spread import ModelView
from accel.precision import apply_precision
from accel.tensors import has_wide_gradient, is_dtensor, is_half, is_offloaded, parameters_of
from accel.topology import Plan
from accel.training._narrow import check_narrow


def drop_others(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Take parameters of other ranks' stages out of a group, with their state. Mutates both."""
    kept = [not is_dropped(each) for each in group["params"]]
    if all(kept):
        return
    for each in group["params"]:
        if is_dropped(each):
            note_elsewhere(optimizer, each)
            _ = optimizer.state.pop(each, None)
    for key in ("params", "param_names"):
        if key in group:
            group[key] = list(itertools.compress(cast("list[Any]", group[key]), kept))


def move_state(optimizer: Optimizer) -> None:
    """Move state to the devices of its parameters, as after a load before `prepare`. Mutates the state's containers.

    A "step" stays where it is, as torch keeps it on the CPU, unless its group is `capturable` or `fused`.
    """
    for group in optimizer.param_groups:
        counts_there = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                stays = key == "step" and not counts_there
                if isinstance(value, torch.Tensor) and value.device != parameter.device and not stays:
                    optimizer.state[parameter][key] = value.to(parameter.device)


def check_masters(optimizer: Optimizer) -> None:
    """Raise if an optimizer cannot step float32 copies of its 16-bit parameters."""
    for each in parameters_of([optimizer]):
        if each.requires_grad and is_half(each) and (is_dtensor(each) or not has_wide_gradient(each)):
            raise PrepareError(
                "this parameter cannot have master weights",
                expected="a replicated parameter with gradients in float32, as prepare makes them",
                got="one that is sharded" if is_dtensor(each) else f"gradients in {each.dtype}",
                where=f"prepare_optimizer, {name_of(each) or f'a parameter of shape {list(each.shape)}'}",
                fix="Prepare the model along with the optimizer. Keep sharded parameters in float32:"
                ' precision="bf16" gathers and computes in bf16.',
            )
    if is_zero(optimizer):
        raise PrepareError(
            "a ZeroRedundancyOptimizer steps its own parameters",
            expected="another optimizer, for Precision(master_weights=)",
            where="prepare_optimizer",
            fix='Pass strategy="fsdp" and precision="bf16": every rank then has a share of float32 parameters.',
        )


def _begins(state: Mapping[str, Any], shape: torch.Size) -> bool:
    """Return whether a state is the initial one, as Adagrad makes it: step 0, and one value for all elements."""
    tensors = [each for name, each in state.items() if name != "step"]
    if "step" not in state or not all(isinstance(each, torch.Tensor) and each.shape == shape for each in tensors):
        return False
    known = all(each.numel() and not each.is_meta for each in tensors)
    return known and float(state["step"]) == 0 and all(bool((each == each.flatten()[0]).all()) for each in tensors)


def _shard_state(optimizer: Optimizer) -> None:
    """Replace the first state of sharded parameters by the state of their shards. Mutates the optimizer."""
    for old in parameters_of([optimizer]):
        if (new := heir_of(old)) is not None and old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {
                name: each if name == "step" else torch.full_like(new, each.flatten()[0].item(), dtype=each.dtype)
                for name, each in state.items()
            }


def check_state(optimizer: Optimizer, replaced: Iterable[torch.Tensor]) -> None:
    """Raise if shards cannot replace parameters of an optimizer."""
    listed = list(replaced)
    stateful = [each for each in listed if optimizer.state.get(each)]
    found = [each for each in stateful if not _begins(optimizer.state[each], current_parameter(each).shape)]
    if found or (listed and is_zero(optimizer)):
        raise PrepareError(
            "the optimizer's state does not fit the shards of its parameters",
            expected="one without state, as torch's are before their first step",
            got=with_article(type(optimizer).__name__) + (f" with state of {len(found)} of them" if found else ""),
            where="prepare, strategy fsdp",
            fix="Prepare the model first, and build the optimizer from the parameters that it has then; then load its"
            " state.",
        )


_REGISTER = 'A lone parameter belongs into a module, before prepare: model.register_parameter("scale", parameter)'

Net: TypeAlias = nn.Module  # not a type variable: on several ranks DDP's wrapper comes back
Data: TypeAlias = DataLoader[Any]
Kept: TypeAlias = Optimizer | LRScheduler | Loader | StreamLoader | None
# `A | Data` is A for an object that is kept. A DataLoader leaves A unsolved: its default, Loader, is the result.
A = TypeVar("A", bound=Kept, default=Loader)
B = TypeVar("B", bound=Kept, default=Loader)
C = TypeVar("C", bound=Kept, default=Loader)
D = TypeVar("D", bound=Kept, default=Loader)
E = TypeVar("E", bound=Kept, default=Loader)
O_ = TypeVar("O_", bound=Optimizer)
S = TypeVar("S", bound=LRScheduler)


# Models first, then the others in any order; tests/typing/check.py compares the list with this rule.
# fmt: off
@overload
def prepare(ctx: DistContext, a: Net, /, *, plan: Plan | None = None, example: Any = None) -> Net: ...
@overload
def prepare(ctx: DistContext, a: A | Data, /, *, plan: Plan | None = None, example: Any = None) -> A: ...
@overload
def prepare(ctx: DistContext, a: Net, b: Net, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: B | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, B]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: A | Data, b: B | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[A, B]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, Net]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: C | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, C]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: B | Data, c: C | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, B, C]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: A | Data, b: B | Data, c: C | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[A, B, C]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: Net, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, Net, Net]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: D | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, Net, D]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: C | Data, d: D | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, C, D]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: B | Data, c: C | Data, d: D | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, B, C, D]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: A | Data, b: B | Data, c: C | Data, d: D | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[A, B, C, D]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: Net, e: Net, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, Net, Net, Net]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: Net, e: E | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, Net, Net, E]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: Net, d: D | Data, e: E | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, Net, D, E]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: Net, c: C | Data, d: D | Data, e: E | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, Net, C, D, E]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: Net, b: B | Data, c: C | Data, d: D | Data, e: E | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[Net, B, C, D, E]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, a: A | Data, b: B | Data, c: C | Data, d: D | Data, e: E | Data, /, *, plan: Plan | None = None, example: Any = None) -> tuple[A, B, C, D, E]: ...  # noqa: E501
@overload
def prepare(ctx: DistContext, /, *objects: Net | Data | Kept, plan: Plan | None = None, example: Any = None) -> Any: ...
# fmt: on


@context_first
def prepare(ctx: DistContext, /, *objects: Any, plan: Plan | None = None, example: Any = None) -> Any:
    """Prepare models, optimizers, schedulers and loaders, and return them in the order given. A collective.

    Under the strategy `fsdp` the optimizers take the shards of the models' parameters. Optimizers step float32
    parameters. Those in fp16 are refused. Those in bf16 that the precision does not ask for are logged once, by the
    logger `accel.training`, with both fixes. An optimizer with float32 copies or stochastic rounding may step either.

    Args:
        ctx: the context.
        objects: modules, torch optimizers, torch schedulers and DataLoaders, in any order and number. Loaders from
            `prepare_loader` and None are returned as they are.
        plan: plan of every model, None for `ctx.plan`; see `prepare_model`.
        example: a batch as every model takes it, for stages along pp, and to find styles along tp by; see
            `prepare_model`.

    Returns:
        One object for one, a tuple for several: models as from `prepare_model`, loaders as from `prepare_loader`,
        optimizers and schedulers themselves. A model's type is `nn.Module`, since on several ranks it is DDP's
        wrapper; call its own methods on the module that was passed, or on `unwrap_model`'s. Optimizers and schedulers
        keep their types. Models after other objects, or more than five objects, come back as `Any`.

    Raises:
        PrepareError: an object of another kind; an optimizer of other parameters than the models', with state of
            parameters to be sharded, or of parameters in fp16; a scheduler of another optimizer. Nothing has been
            changed then.
        DeviceError, PrepareError, DataError: as `prepare_model` and `prepare_loader`.
        ContextClosedError: the context is closed.

    Examples:
        >>> net = nn.Linear(4, 1)
        >>> adam = torch.optim.Adam(net.parameters())
        >>> model, optimizer, loader = accel.prepare(ctx, net, adam, DataLoader(dataset, batch_size=4))
        >>> optimizer is adam, loader.samples
        (True, 10)
    """
    plan = ctx.plan if plan is None else plan
    engine = engine_of(ctx)
    views: dict[int, ModelView] = {}
    with agreed(ctx.comm, Call("prepare", ordered=False)):  # else a rank that refuses leaves the others waiting
        # All checks of all objects before the first change, so that an error leaves every one of them as it was.
        objects = tuple(each if isinstance(each, _TRAINED) else unwrapped_loader(each) for each in objects)
        _check_kinds(objects)
        _check_optimizers(objects)
        _check_schedulers(objects)
        if engine is None:
            views = _convert_models(ctx, objects, plan, example)
        else:
            refuse_plan(ctx, plan)
            for each in objects:
                if isinstance(each, nn.Module):
                    check_sparse(ModelView(each), {f"the engine {ctx.settings.strategy}": True}, "prepare")
                    compile_as_set(ctx, each)
    # Loaders first: one may be refused, and preparing it changes nothing.
    loaded = [prepare_loader(ctx, cast(Any, each)) if isinstance(each, DataLoader) else each for each in objects]
    if engine is not None:
        prepared = engine.prepare(ctx, loaded)
    else:
        # Models before optimizers, which then take the parameters that the models have now.
        models = [
            prepare_view(ctx, views[id(each)].after(), plan) if isinstance(each, nn.Module) else each for each in loaded
        ]
        prepared = [_prepare_stepped(ctx, each) for each in models]
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


@context_first
def prepare_optimizer(ctx: DistContext, optimizer: O_) -> O_:
    """Return the optimizer, after a check that its parameters are on the context's device. No communication.

    State that was loaded before the model moved follows its parameters to their device. Parameters that were sharded
    after it was built are replaced by their shards; parameters of other ranks' pipeline stages are taken out.

    Args:
        ctx: the context.
        optimizer: optimizer of a prepared model's parameters. Mutated if they were sharded since.

    Raises:
        DeviceError: a parameter on another device.
        PrepareError: the optimizer has state of parameters that were sharded since, or steps weights in fp16.
    """
    ctx.comm.check_open()
    check_state(optimizer, (each for each in parameters_of([optimizer]) if heir_of(each) is not None))
    _check_narrow(ctx, [optimizer])
    _shard_state(optimizer)
    for group in optimizer.param_groups:
        drop_others(optimizer, group)
        # In place: whoever else holds the group's list gets the parameters of now, too.
        group["params"][:] = [current_parameter(each) for each in group["params"]]
    for group_at, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if parameter.device != ctx.device and not is_offloaded(parameter, ctx.device):
                raise DeviceError(
                    "the optimizer's parameters are not on this rank's device",
                    expected=str(ctx.device),
                    got=str(parameter.device),
                    where=f"param_groups[{group_at}]['params'][{i}], shape {list(parameter.shape)}",
                    fix="Prepare the model before the optimizer.",
                )
    if ctx.precision.master_weights is not None:
        check_masters(optimizer)
    if has_state_on_host(optimizer):
        _ = streamed_state(optimizer, ctx.streams)
    else:
        move_state(optimizer)
    guard_closures(ctx.comm, optimizer)
    note_complex(optimizer)
    return optimizer


@context_first
def prepare_scheduler(ctx: DistContext, scheduler: S) -> S:
    """Return the scheduler, after a check of its optimizer. `optimizer_step(scheduler=)` steps it.

    Args:
        ctx: the context.
        scheduler: scheduler of a prepared optimizer.

    Raises:
        DeviceError: as `prepare_optimizer`.
    """
    prepare_optimizer(ctx, scheduler.optimizer)
    return scheduler


def _convert_models(
    ctx: DistContext, objects: tuple[Any, ...], plan: Plan | None, example: Any
) -> dict[int, ModelView]:
    """Check that models can be prepared, then give them the context's precision; return their views by `id`."""
    views = [ModelView(each, example) for each in objects if isinstance(each, nn.Module)]
    models = [each.model for each in views]
    for each in views:
        _ = check_model(ctx, each, plan)
    _check_replaced(ctx, objects, views)
    _check_narrow(ctx, [each for each in objects if isinstance(each, Optimizer)], models)
    for each in models:
        apply_precision(ctx, unwrap_model(each))
    _check_optimizers(objects)  # fp8 may have put other parameters into a model
    if ctx.precision.fp8 is not None or ctx.precision.qat is not None:  # layers were replaced
        views = [ModelView(each, example) for each in models]
    return {id(each.model): each for each in views}


def _check_narrow(ctx: DistContext, optimizers: Sequence[Optimizer], models: Sequence[nn.Module] = ()) -> None:
    if any(is_half(current_parameter(each)) for each in parameters_of(optimizers)):
        check_narrow(ctx, optimizers, models)


def _prepare_stepped(ctx: DistContext, each: Any) -> Any:
    if isinstance(each, Optimizer):
        return prepare_optimizer(ctx, each)
    if isinstance(each, LRScheduler):
        return prepare_scheduler(ctx, each)
    return each


_TRAINED = nn.Module | Optimizer | LRScheduler


def _check_kinds(objects: tuple[Any, ...]) -> None:
    if not objects:
        raise PrepareError(
            "there is nothing to prepare", expected="a model, optimizer, scheduler or loader", got="no arguments"
        )
    for at, each in enumerate(objects):
        check_kind(
            each,
            _TRAINED | DataLoader | Loader | StreamLoader | None,
            "cannot prepare this",
            expected="a module, torch optimizer, torch scheduler or DataLoader",
            where=f"prepare, argument {at + 1}",
            fix=_REGISTER
            if isinstance(each, nn.Parameter)
            else "Use it unprepared; only these four kinds need preparing.",
            error=PrepareError,
        )


def _check_optimizers(objects: tuple[Any, ...]) -> None:
    models = [each for each in objects if isinstance(each, nn.Module)]
    if not models:
        return
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for at, optimizer in enumerate(objects):
        if not isinstance(optimizer, Optimizer):
            continue
        for group_at, group in enumerate(optimizer.param_groups):
            strangers = [
                i for i, parameter in enumerate(group["params"]) if id(current_parameter(parameter)) not in known
            ]
            if strangers:
                raise PrepareError(
                    "the optimizer was built on other parameters than the model's",
                    expected="parameters of the models passed along",
                    got=f"{len(strangers)} of {len(group['params'])} that belong to none of them",
                    where=f"prepare, argument {at + 1}, param_groups[{group_at}]['params'][{strangers[0]}]",
                    fix="Build the optimizer from model.parameters() of the very model that is prepared. "
                    f"If a criterion holds them: model, criterion, optimizer = accel.prepare(ctx, model, criterion, "
                    f"optimizer). {_REGISTER}",
                )


def _check_replaced(ctx: DistContext, objects: tuple[Any, ...], views: Sequence[ModelView]) -> None:
    """Raise for models and optimizers that need the parameters replaced by shards."""
    replaced = {id(each.model): each for each in views if replaces_parameters(ctx, each)}
    listed = [id(parameter) for each in replaced.values() for parameter in each.parameters.values()]
    known = set(listed)
    if len(known) < len(listed):
        raise PrepareError(
            "two models share parameters, and only one would get the shards",
            expected="models with different parameters",
            where="prepare, strategy fsdp",
            fix="Put both into one module, and prepare that.",
        )
    for optimizer in objects:
        if isinstance(optimizer, Optimizer):
            check_state(optimizer, (each for each in parameters_of([optimizer]) if id(each) in known))


def _check_schedulers(objects: tuple[Any, ...]) -> None:
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    for at, scheduler in enumerate(objects):
        if not optimizers or not isinstance(scheduler, LRScheduler):
            continue
        if not any(scheduler.optimizer is each for each in optimizers):
            raise PrepareError(
                "the scheduler belongs to another optimizer",
                expected="one of the optimizers passed along",
                got=f"{with_article(type(scheduler).__name__)} of another {type(scheduler.optimizer).__name__}",
                where=f"prepare, argument {at + 1}",
            )
