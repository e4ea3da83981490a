# SPDX-License-Identifier: Apache-2.0
"""The gradients of optimizers: in-place passes, their total norm, plain or sharded; steps on master weights.

The passes use torch's private operations over lists of tensors, as torch.optim does: `torch.nn.utils.get_total_norm`
takes twice as long as `norms` for small models, and no public function multiplies a list by more than 1. A test
compares all with plain loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accel.comm import Comm, adopt, all_gather_flat, all_reduce_flat
from accel.errors import AccelError, StepError
from accel.tensors import has_wide_gradient, is_dtensor, is_partial, local_part, local_parts, split_dims, summed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_torch = cast(Any, torch)
_HALVES = (torch.float16, torch.bfloat16)
_OF_SHARDS = ("DTensor", "placement", "sharding strategy")  # words in torch's errors


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
    """A parameter, its float32 copy, and its state without the copy."""

    parameter: torch.Tensor
    master: torch.Tensor
    state: dict[str, Any]


def step_parameters(optimizer: Optimizer, *, masters: bool) -> None:
    """Step an optimizer, on float32 copies if `masters`; raise `StepError` if it cannot step sharded parameters."""
    try:
        if masters:
            step_masters(optimizer)
        else:
            _ = optimizer.step()
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


def step_masters(optimizer: Optimizer) -> None:
    """Step an optimizer on float32 copies of its 16-bit parameters, and round the copies into these. Mutates both.

    A copy adopts elements that something else has changed since the latest step; torch counts none through `.data`.
    """
    stepped = [each for each in parameters_of([optimizer]) if each.grad is not None and has_wide_gradient(each)]
    pairs = [_pair(each, optimizer.state) for each in stepped]
    masters = {id(pair.parameter): pair.master for pair in pairs}
    own = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in own:
            group["params"] = [masters.get(id(each), each) for each in params]
        for parameter, master, state in pairs:
            if state:  # optimizers begin where there is none
                optimizer.state[master] = state
            _ = optimizer.state.pop(parameter, None)
            master.grad = parameter.grad
        _ = optimizer.step()
    finally:
        for group, params in own:
            group["params"] = params
        for parameter, master, state in pairs:
            master.grad = None
            optimizer.state[parameter] = {**optimizer.state.pop(master, state), MASTER: master}
    _round(pairs)


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
