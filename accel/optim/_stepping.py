# SPDX-License-Identifier: Apache-2.0
"""How an optimizer steps: as it is, on float32 copies of its parameters, on parts of complex ones, or by a closure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.optim import Optimizer

from accel.comm import Comm
from accel.errors import AccelError, ConfigError, StepError
from accel.optim._gradients import parameters_of
from accel.tensors import dtensor_like, has_wide_gradient, is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_OF_SHARDS = ("DTensor", "placement", "sharding strategy")  # words in torch's errors
MASTER = "accel_master"  # name of the copy in a parameter's state
_SEEN = "accel_seen"  # attribute of a copy: versions of parameter and copy after the latest step


class _Pair(NamedTuple):
    """A parameter, the tensor that an optimizer steps in its place, such as a float32 copy, and the state of that."""

    parameter: torch.Tensor
    master: torch.Tensor
    state: dict[str, Any]


def step_masters(optimizer: Optimizer) -> None:
    """Step an optimizer on float32 copies of its 16-bit parameters, and round the copies into these. Mutates both.

    A copy adopts elements that something else has changed since the latest step; torch counts none through `.data`.
    """
    stepped = [each for each in parameters_of([optimizer]) if each.grad is not None and has_wide_gradient(each)]
    pairs = [_pair(each, optimizer.state) for each in stepped]
    for parameter, master, _ in pairs:
        master.grad = parameter.grad
    try:
        _step_instead(optimizer, pairs)
    finally:
        for parameter, master, _ in pairs:
            optimizer.state[parameter] = {**optimizer.state[parameter], MASTER: master}
    _round(pairs)


def _step_instead(optimizer: Optimizer, pairs: Sequence[_Pair]) -> None:
    """Step an optimizer on other tensors in the places of parameters. Mutates both.

    The parameters keep the state that the tensors then have; the gradients of the tensors are dropped.
    """
    others = {id(pair.parameter): pair.master for pair in pairs}
    own = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in own:
            group["params"] = [others.get(id(each), each) for each in params]
        for parameter, other, state in pairs:
            if state:  # optimizers begin where there is none
                optimizer.state[other] = state
            _ = optimizer.state.pop(parameter, None)
        _ = optimizer.step()
    finally:
        for group, params in own:
            group["params"] = params
        for parameter, other, state in pairs:
            other.grad = None
            optimizer.state[parameter] = optimizer.state.pop(other, state)


# They compute each element by itself, and view complex ones as pairs of real numbers: of an uneven shard of a DTensor
# torch makes a copy there, and what is changed in place is lost.
_PAIRING = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
)
_PARTS = "accel_parts"  # of an optimizer: whether it steps this rank's parts of complex parameters


def note_complex(optimizer: Optimizer) -> None:
    """Note on an optimizer of torch's whether it has complex parameters that ranks hold parts of. No communication."""
    parameters = parameters_of([optimizer])
    setattr(optimizer, _PARTS, isinstance(optimizer, _PAIRING) and any(map(_is_complex_part, parameters)))


def step_of(optimizer: Optimizer, *, masters: bool = False) -> Callable[[], object]:
    """Return the function that steps an optimizer: on `masters`, on parts of complex parameters, or as it is.

    It raises `StepError` if the optimizer cannot step sharded parameters.
    """
    if masters:
        return partial(_named, optimizer, partial(step_masters, optimizer))
    in_parts = getattr(optimizer, _PARTS, False)
    return partial(_named, optimizer, partial(_step_parts, optimizer) if in_parts else optimizer.step)


def _named(optimizer: Optimizer, step: Callable[[], object]) -> None:
    try:
        _ = step()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        text = str(error)
        of_shards = any(sign in text for sign in _OF_SHARDS) and any(map(is_dtensor, parameters_of([optimizer])))
        if isinstance(error, AccelError) or not of_shards:
            raise
        raise StepError(
            "the optimizer cannot step sharded parameters",
            expected="an optimizer whose operators torch can run on DTensors",
            got=f"{type(optimizer).__name__}: {text.splitlines()[0]}",
            where="optimizer_step",
            fix="Take one that steps each element by itself: torch.optim.AdamW(model.parameters()). Or take the "
            "strategy ddp without tp, whose parameters are plain tensors.",
        ) from error


def _is_complex_part(parameter: torch.Tensor) -> bool:
    return parameter.is_complex() and is_dtensor(parameter)


def _step_parts(optimizer: Optimizer) -> None:
    """Step an optimizer on this rank's parts of complex parameters. Mutates both."""
    stepped = [each for each in parameters_of([optimizer]) if each.grad is not None and _is_complex_part(each)]
    pairs = [_Pair(each, local_part(each), _mapped(optimizer.state.get(each, {}), local_part)) for each in stepped]
    for parameter, part, _ in pairs:
        part.grad = local_part(cast(torch.Tensor, parameter.grad))
    try:
        _step_instead(optimizer, pairs)
    finally:
        for parameter, part, _ in pairs:
            whole = partial(_like_part, part, cast("DTensor", parameter))
            optimizer.state[parameter] = _mapped(optimizer.state[parameter], whole)


def _mapped(state: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {key: change(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _like_part(part: torch.Tensor, parameter: DTensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value of a state as a DTensor, if it has an element for each of the part's."""
    return dtensor_like(value, parameter, parameter.shape) if value.ndim and value.shape == part.shape else value


def _pair(parameter: torch.Tensor, states: Any) -> _Pair:
    state: dict[str, Any] = dict(states.get(parameter, {}))
    master = state.pop(MASTER, None)
    values = parameter.detach()
    if not isinstance(master, torch.Tensor) or master.dtype != torch.float32:
        wide = {key: value.float() for key, value in state.items() if _is_like(value, parameter)}
        return _Pair(parameter, values.float(), state | wide)
    if getattr(master, _SEEN, None) != _versions(parameter, master):
        _ = master.copy_(torch.where(values == master.to(values.dtype), master, values.float()))
    return _Pair(parameter, master, state)


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    """Return whether a value of a state has its parameter's shape and 16 bits."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype == parameter.dtype


def _round(pairs: Sequence[_Pair]) -> None:
    if pairs:
        parameters = [pair.parameter.detach() for pair in pairs]
        cast(Any, torch)._foreach_copy_(parameters, [pair.master for pair in pairs])  # of any dtype
    for parameter, master, _ in pairs:
        setattr(master, _SEEN, _versions(parameter, master))


def _versions(parameter: torch.Tensor, master: torch.Tensor) -> tuple[int, int]:
    """Return torch's counts of changes in place."""
    return parameter._version, master._version


CLOSURE_LINE = "state = accel.optimizer_step(ctx, optimizer, state, closure=closure)"


@contextlib.contextmanager
def within_closure(comm: Comm, whose: str) -> Generator[None]:
    """Let `backward` know that it is called within a closure: of "closure=", or of "optimizer.step"."""
    before = comm.closure
    comm.closure = whose
    try:
        yield
    finally:
        comm.closure = before


def guard_closures(comm: Comm, optimizer: Optimizer) -> None:
    """Let `optimizer.step(closure)` of a prepared optimizer note that backward passes are a closure's. Mutates it by a
    hook."""

    def look(_optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first one is the optimizer
        if closure is None or comm.closure is not None:
            return None
        if comm.size > 1 and isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS would decide by the loss of one rank",
                expected="a closure whose loss is the mean over all ranks",
                got="optimizer.step(closure)",
                where=f"rank {comm.rank}",
                fix=CLOSURE_LINE,
            )
        guarded = partial(_called, comm, closure)
        if len(args) > 1:
            return (args[0], guarded, *args[2:]), kwargs
        return args, {**kwargs, "closure": guarded}

    with contextlib.suppress(AttributeError):  # a wrapper that is an Optimizer by name alone
        _ = optimizer.register_step_pre_hook(cast(Any, look))


def _called(comm: Comm, closure: Callable[[], Any]) -> Any:
    with within_closure(comm, "optimizer.step"):
        return closure()
