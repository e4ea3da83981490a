# SPDX-License-Identifier: Apache-2.0
"""The gradients of optimizers: in-place passes, their total norm, plain or sharded; steps on master weights.

The passes use torch's private operations over lists of tensors, as torch.optim does: `torch.nn.utils.get_total_norm`
takes twice as long as `norms` for small models, and no public function multiplies a list by more than 1. A test
compares all with plain loops.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accel.comm import Comm, adopt, all_gather_flat, all_reduce_flat
from accel.errors import ConfigError
from accel.tensors import (
    dtensor_like,
    has_wide_gradient,
    is_dtensor,
    is_partial,
    local_part,
    local_parts,
    split_dims,
    summed,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_torch = cast(Any, torch)
_HALVES = (torch.float16, torch.bfloat16)


def parameters_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """List the optimizers' parameters, in their order."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """List the gradients of parameters that have one, in order, each once.

    Partial gradients, as tensor parallelism leaves some, are summed over ranks first: a collective where there are any.
    """
    found: dict[int, torch.Tensor] = {}
    for each in parameters:
        grad = each.grad
        if grad is None:
            continue
        if type(grad) is not torch.Tensor and is_partial(grad):  # the cheap question first: there are many
            each.grad = grad = summed(grad)
        found[id(each)] = grad
    return list(found.values())


def elements_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return dense gradients and, in the places of sparse ones, the rows that these hold, which share their memory.

    Sparse gradients are coalesced: one that is not holds some rows as several summands, of no use for norms and limits.
    """
    found: dict[int, torch.Tensor] = {}
    for each in parameters:
        grad = each.grad
        if grad is None:
            continue
        if grad.is_sparse:
            each.grad = grad = grad.coalesce()
        found[id(grad)] = grad.values() if grad.is_sparse else grad
    return list(found.values())


def scale_(grads: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place by a number or a tensor of shape [], in one pass for each device. No communication.

    Gradients on the CPU, as those of an offloaded model, wait for a factor on another device.
    """
    parts = local_parts(grads)
    if not isinstance(factor, torch.Tensor):
        _torch._foreach_mul_(list(parts), factor)
        return
    places: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        places.setdefault(part.device, []).append(part)
    for device, here in places.items():
        # torch multiplies lists in one kernel only if dtypes are equal
        dtype = here[0].dtype if here[0].dtype in (torch.float32, torch.float64) else factor.dtype
        _torch._foreach_mul_(here, factor.to(device, dtype))


def clamp_(grads: Sequence[torch.Tensor], bound: float | torch.Tensor) -> None:
    """Clamp every element of gradients to [-bound, bound], in place. No communication."""
    parts = local_parts(grads)
    if isinstance(bound, torch.Tensor):
        for part in parts:
            limit = bound.to(part.device, part.dtype)
            _ = part.clamp_(-limit, limit)
    else:
        _torch._foreach_clamp_min_(list(parts), -bound)
        _torch._foreach_clamp_max_(list(parts), bound)


def first_nonfinite(parameters: Sequence[torch.Tensor]) -> int:
    """Return the index of the first parameter with inf or NaN in this rank's gradient; their number if none has."""
    for at, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        own = local_part(parameter.grad)
        if not bool(torch.isfinite(own.coalesce().values() if own.is_sparse else own).all()):
            return at
    return len(parameters)


_MeshDims = tuple["DeviceMesh", tuple[int, ...]]  # a mesh, and its dimensions along which elements are split


class Carried:
    """Figures of this rank that sums of norms take along, so that they need no message: once along each group.

    Attributes:
        own: the figures.
        sums: the figures, summed over the groups so far.
    """

    __slots__ = ("_groups", "own", "sums")

    def __init__(self, figures: torch.Tensor, groups: Iterable[dist.ProcessGroup | None]) -> None:
        self.own = self.sums = figures
        self._groups = [group for group in groups if group is not None]

    def reduce(self, comm: Comm, group: dist.ProcessGroup, power: torch.Tensor, *, largest: bool) -> torch.Tensor:
        """Return powers of norms, shape [1], as `reduce_power` does. A collective."""
        if not any(group is each for each in self._groups):
            return reduce_power(comm, power, largest=largest)
        self._groups = [each for each in self._groups if each is not group]
        both = torch.cat([power, self.sums.to(power.device, power.dtype)])
        if largest:
            rows = all_gather_flat(comm, both)
            self.sums = rows[:, 1:].sum(0)
            return rows[:, :1].amax(0)
        both = all_reduce_flat(comm, both, "sum")
        self.sums = both[1:]
        return both[:1]


def reduce_power(comm: Comm, power: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """Return the sum of norms' powers over ranks, or the largest. A collective."""
    # a reduction by max need not keep NaN
    return all_gather_flat(comm, power).amax(0) if largest else all_reduce_flat(comm, power, "sum")


class KeptNorms:
    """Norms of single gradients, as total norms compute them, to find what is not finite after the gradients are gone.

    They stay on their devices until somebody asks.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: list[tuple[tuple[int, ...], torch.Tensor | list[float]]] = []

    def of(self, grads: Sequence[torch.Tensor]) -> Callable[[torch.Tensor | list[float]], None]:
        """Return a function that keeps the norms of this rank's parts of some gradients, shape [gradients]."""
        places = tuple(map(id, grads))
        return lambda norms: self._found.append((places, norms))

    def nonfinite(self) -> set[int]:
        """Return the `id` that each gradient had whose norm is not finite. Waits for the device."""
        return {
            place
            for places, norms in self._found
            for place, norm in zip(places, norms if isinstance(norms, list) else _listed(norms), strict=True)
            if not math.isfinite(norm)
        }


_Keep = Callable[[torch.Tensor | list[float]], None]


def _listed(norms: torch.Tensor) -> list[float]:
    return cast(Any, norms).tolist()


def total_norm(
    grads: Sequence[torch.Tensor],
    norm_type: float = 2.0,
    carried: Carried | None = None,
    kept: KeptNorms | None = None,
) -> float | torch.Tensor:
    """Return the total p-norm of gradients; inf or NaN if one of them is not finite. A collective of DTensors' meshes.

    A number for gradients on the CPU, where reading does not wait; else a tensor of shape []. Equal on all ranks.
    """
    if not grads:
        return 0.0
    if not any(map(is_dtensor, grads)):
        return _local_norm(grads, norm_type, kept)
    whole: list[torch.Tensor] = []
    spreads: dict[_MeshDims, list[torch.Tensor]] = {}
    for grad in grads:
        if is_dtensor(grad):
            spreads.setdefault((grad.device_mesh, split_dims(grad)), []).append(grad)
        else:
            whole.append(grad)
    alone = _local_norm(whole, norm_type, kept) if whole else 0.0
    parts = [_spread_norm(spread, here, norm_type, alone * 0.0, carried, kept) for spread, here in spreads.items()]
    return _joined([*parts, alone] if whole else parts, norm_type)


def norms(tensors: Sequence[torch.Tensor], norm_type: float = 2.0) -> list[torch.Tensor]:
    """Return the norm of each tensor, of shape []; of 16-bit tensors in float32, for its range."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes.isdisjoint(_HALVES):
        if any(dtype.is_complex for dtype in dtypes):  # whose norms accept no real dtype
            return [norm for tensor in tensors for norm in norms([tensor], norm_type)]
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        return list(_torch._foreach_norm(list(tensors), norm_type, dtype=wide))
    return list(_torch._foreach_norm(list(tensors), norm_type))


def _local_norm(grads: Sequence[torch.Tensor], norm_type: float, kept: KeptNorms | None = None) -> float | torch.Tensor:
    keep = None if kept is None else kept.of(grads)
    return _norm_of_parts(local_parts(grads), norm_type, keep)


def _norm_of_parts(parts: Sequence[torch.Tensor], norm_type: float, keep: _Keep | None) -> float | torch.Tensor:
    if norm_type == math.inf:
        parts = [part if part.numel() else part.new_zeros(1) for part in parts]
    if all(part.is_cpu for part in parts):
        numbers = [norm.item() for norm in norms(parts, norm_type)]
        if keep is not None:
            keep(numbers)
        return _combined(numbers, norm_type)
    own = _stacked_norms(parts, norm_type)
    if keep is not None:
        keep(own)
    return _torch.linalg.vector_norm(own, norm_type)


def _stacked_norms(parts: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of each tensor on the first one's device, shape [tensors]."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}  # torch takes lists of one kind in one kernel
    for at, part in enumerate(parts):
        kinds.setdefault((part.device, part.dtype), []).append(at)
    if len(kinds) == 1:
        return torch.stack(norms(parts, norm_type))
    found = {
        at: norm.to(parts[0].device)
        for places in kinds.values()
        for at, norm in zip(places, norms([parts[at] for at in places], norm_type), strict=True)
    }
    return torch.stack([found[at] for at in range(len(parts))])


def wide_norm(
    grads: Sequence[torch.Tensor], norm_type: float, *, keepdim: bool = True, kept: KeptNorms | None = None
) -> torch.Tensor:
    """Return the norm of this rank's parts of gradients in float64 on their device, shape [1], or [] on some devices if
    asked."""
    parts = local_parts(grads)
    keep = None if kept is None else kept.of(grads)
    first = parts[0]
    if first.is_cpu or any(part.dtype != first.dtype for part in parts):
        norm = _norm_of_parts(parts, norm_type, keep)
        return torch.as_tensor(norm, dtype=torch.float64, device=first.device).reshape(1)
    own = torch.stack(norms(parts, norm_type))
    if keep is not None:
        keep(own)
    return _torch.linalg.vector_norm(own, norm_type, dim=0, keepdim=keepdim, dtype=torch.float64)


def _spread_norm(
    spread: _MeshDims,
    grads: Sequence[torch.Tensor],
    norm_type: float,
    alone: float | torch.Tensor,
    carried: Carried | None,
    kept: KeptNorms | None,
) -> float | torch.Tensor:
    """Return the norm of tensors that are split over the same dimensions of one mesh.

    `alone` is 0, or NaN where a plain gradient of this rank is not finite, which so reaches all ranks.
    """
    mesh, dims = spread
    mine = wide_norm(grads, norm_type, kept=kept)
    device = mine.device
    power = mine if norm_type == math.inf else mine**norm_type
    if isinstance(alone, torch.Tensor) or alone != 0.0:
        # a number is not copied to the device, for which the host would wait
        power = power + (alone.to(device) if isinstance(alone, torch.Tensor) else alone)
    for dim in dims:
        group = mesh.get_group(dim)
        comm, largest = adopt(group, device), norm_type == math.inf
        if carried is None:
            power = reduce_power(comm, power, largest=largest)
        else:
            power = carried.reduce(comm, group, power, largest=largest)
    norm = power if norm_type == math.inf else power ** (1 / norm_type)
    return norm.item() if norm.is_cpu else norm.reshape(())


def _joined(parts: Sequence[float | torch.Tensor], norm_type: float) -> float | torch.Tensor:
    """Return the norm of concatenated vectors from the norm of each."""
    if len(parts) == 1:
        return parts[0]
    tensors = [norm for norm in parts if isinstance(norm, torch.Tensor)]
    if not tensors:
        return _combined([norm for norm in parts if not isinstance(norm, torch.Tensor)], norm_type)
    device = tensors[0].device
    wide = [
        norm.to(device, torch.float64)
        if isinstance(norm, torch.Tensor)
        else torch.full((), norm, dtype=torch.float64, device=device)  # a copy of the number would wait
        for norm in parts
    ]
    return _torch.linalg.vector_norm(torch.stack(wide), norm_type)


def _combined(parts: Sequence[float], norm_type: float) -> float:
    if norm_type == 2.0:
        return math.hypot(*parts)
    if not all(map(math.isfinite, parts)):
        return math.nan if any(map(math.isnan, parts)) else math.inf
    largest = max(parts)
    if norm_type == math.inf or largest == 0.0:
        return largest
    return largest * math.fsum((norm / largest) ** norm_type for norm in parts) ** (1 / norm_type)


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
    """Return the function that steps an optimizer: on `masters`, on parts of complex parameters, or as it is."""
    if masters:
        return partial(step_masters, optimizer)
    return partial(_step_parts, optimizer) if getattr(optimizer, _PARTS, False) else optimizer.step


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
