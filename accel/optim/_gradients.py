# SPDX-License-Identifier: Apache-2.0
"""The gradients of optimizers: in-place passes, their total norm, plain or sharded; and the steps that take them.

The passes use torch's private operations over lists of tensors, as torch.optim does: `torch.nn.utils.get_total_norm`
takes twice as long as `norms` for small models, and no public function multiplies a list by more than 1. A test
compares all with plain loops.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from accel.comm import Comm, adopt, all_gather_flat, all_reduce_flat
from accel.comm._streams import DeviceStreams
from accel.context import DistContext
from accel.errors import AccelError, ConfigError, StepError
from accel.optim._streamed_state import streamed_state
from accel.optim._substitutes import step_masters, step_parts
from accel.tensors import (
    full_tensor,
    is_dtensor,
    is_partial,
    local_part,
    local_parts,
    parameters_of,
    split_dims,
    summed,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_torch = cast(Any, torch)
_HALVES = (torch.float16, torch.bfloat16)


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

    Gradients on the CPU, such as an offloaded model's, wait for a factor on another device.
    """
    parts = local_parts(grads)
    if not parts:  # of a frozen stage
        return
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
    elif parts:
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
        """Return the former `id` of each gradient with a non-finite norm. Waits for the device."""
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
    parts = [_spread_norm(spread, here, norm_type, alone * 0.0, kept) for spread, here in spreads.items()]
    return _joined([*parts, alone] if whole else parts, norm_type)


def norms(tensors: Sequence[torch.Tensor], norm_type: float = 2.0) -> list[torch.Tensor]:
    """Return the norm of each tensor, of shape []; of 16-bit tensors in float32, for its range."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes.isdisjoint(_HALVES):
        if any(dtype.is_complex for dtype in dtypes):  # their norms accept no real dtype
            return [norm for tensor in tensors for norm in norms([tensor], norm_type)]
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        return list(_torch._foreach_norm(list(tensors), norm_type, dtype=wide))
    return list(_torch._foreach_norm(list(tensors), norm_type))


_ELSEWHERE = "accel_elsewhere"


def note_elsewhere(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    """Note the dtype of a parameter that a rank of another stage has instead. Mutates the optimizer's attributes."""
    setattr(optimizer, _ELSEWHERE, parameter.dtype)


def precision_of(grads: Sequence[torch.Tensor], optimizers: Sequence[Optimizer]) -> torch.dtype:
    """Return the dtype of a norm: float64 or float32, as the gradients have it.

    On a rank without gradients, such as a frozen stage's, the parameters of the optimizers decide, including those that
    were on other stages, so that all ranks report the norm alike.
    """
    if grads:
        return norm_dtype(grads)
    noted = {getattr(each, _ELSEWHERE, None) for each in optimizers}
    return torch.float64 if noted & _DOUBLES else norm_dtype(parameters_of(optimizers))


_DOUBLES = frozenset((torch.float64, torch.complex128))


def norm_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype of the norm of tensors: float64 or float32, as the first one has it."""
    return torch.float64 if tensors and tensors[0].dtype in _DOUBLES else torch.float32


def _local_norm(grads: Sequence[torch.Tensor], norm_type: float, kept: KeptNorms | None = None) -> float | torch.Tensor:
    keep = None if kept is None else kept.of(grads)
    return _norm_of_parts(local_parts(grads), norm_type, keep)


def _norm_of_parts(
    parts: Sequence[torch.Tensor], norm_type: float, keep: _Keep | None, dtype: torch.dtype | None = None
) -> float | torch.Tensor:
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
    return _torch.linalg.vector_norm(own, norm_type, dtype=dtype)


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


def wide_norm(grads: Sequence[torch.Tensor], norm_type: float, kept: KeptNorms | None = None) -> torch.Tensor:
    """Return the norm of this rank's parts of gradients in float64 on their device, shape []."""
    parts = local_parts(grads)
    norm = _norm_of_parts(parts, norm_type, None if kept is None else kept.of(grads), torch.float64)
    return torch.as_tensor(norm, dtype=torch.float64, device=parts[0].device)


def norm_over(comms: Iterable[Comm], own: torch.Tensor, norm_type: float) -> float | torch.Tensor:
    """Return the norm over ranks that each hold a part, from the norm of this rank's part. A collective of each."""
    largest = norm_type == math.inf
    power = own if largest else own**norm_type
    for comm in comms:
        # a reduction by max need not keep NaN
        power = all_gather_flat(comm, power.reshape(1)).amax() if largest else all_reduce_flat(comm, power, "sum")
    norm = power if largest else power ** (1 / norm_type)
    return norm.item() if norm.is_cpu else norm


def _spread_norm(
    spread: _MeshDims,
    grads: Sequence[torch.Tensor],
    norm_type: float,
    alone: float | torch.Tensor,
    kept: KeptNorms | None,
) -> float | torch.Tensor:
    """Return the norm of tensors that are split over the same dimensions of one mesh.

    `alone` is 0, or NaN where a plain gradient of this rank is not finite, which so reaches all ranks.
    """
    mesh, dims = spread
    mine = wide_norm(grads, norm_type, kept)
    device = mine.device
    if isinstance(alone, torch.Tensor) or alone != 0.0:
        # a number is not copied to the device, for which the host would wait
        mine = mine + (alone.to(device) if isinstance(alone, torch.Tensor) else alone)
    return norm_over((adopt(mesh.get_group(dim), device) for dim in dims), mine, norm_type)


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


_OF_SHARDS = ("DTensor", "placement", "sharding strategy")  # words in torch's errors


# They compute each element by itself, and view complex ones as pairs of real numbers: of an uneven shard of a DTensor
# torch makes a copy there, and what is changed in place is lost.
_PAIRING = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
)
_PARTS = "accel_parts"  # of an optimizer: whether it steps this rank's parts of complex parameters


def note_complex(optimizer: Optimizer) -> None:
    """Note on an optimizer of torch's whether it has complex parameters that ranks hold parts of. No communication."""
    divided = any(each.is_complex() and is_dtensor(each) for each in parameters_of([optimizer]))
    setattr(optimizer, _PARTS, divided and isinstance(optimizer, _PAIRING))


def step_of(
    optimizer: Optimizer, *, masters: bool = False, streams: DeviceStreams | None = None
) -> Callable[[], object]:
    """Return the function that steps an optimizer: with `masters` on copies, with `streams` bucket by bucket."""
    if streams is not None:
        state = streamed_state(optimizer, streams)
        return partial(state.step, lambda: step_of(optimizer, masters=masters)())
    if masters:
        return partial(step_masters, optimizer, parameters_of([optimizer]))
    return (
        partial(step_parts, optimizer, parameters_of([optimizer]))
        if getattr(optimizer, _PARTS, False)
        else optimizer.step
    )


_aten = _torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default)  # two in inference mode


class _WholeNumbers(TorchDispatchMode):
    """Numbers that code reads of a DTensor, such as `float(p.norm())`: the whole tensor's. Torch reads a part."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that torch compiles run compiled: torch skips them within other modes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        if func in _READS:
            return func(full_tensor(args[0]))
        return func(*args, **(kwargs or {}))


def _whole_numbers(optimizer: Optimizer) -> contextlib.AbstractContextManager[object]:
    # They read none of a DTensor. Adafactor, which reads some, names its module "torch.optim", without a point.
    known = type(optimizer).__module__.startswith(("torch.optim.", "accel."))
    return contextlib.nullcontext() if known or not _has_shards(optimizer) else _WholeNumbers()


def _has_shards(optimizer: Optimizer) -> bool:
    return any(map(is_dtensor, parameters_of([optimizer])))


def take_step(optimizer: Optimizer, step: Callable[[], object]) -> None:
    """Call the function that steps an optimizer; raise `StepError` if the optimizer cannot step sharded parameters."""
    try:
        with _whole_numbers(optimizer):
            _ = step()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        text = str(error)
        of_shards = any(sign in text for sign in _OF_SHARDS) and _has_shards(optimizer)
        if isinstance(error, AccelError) or not of_shards:
            raise
        raise StepError(
            "the optimizer cannot step sharded parameters",
            expected="an optimizer of operators that torch can run on DTensors",
            got=f"{type(optimizer).__name__}: {text.splitlines()[0]}",
            where="optimizer_step",
            fix="Use accel.optim.Adafactor(model.parameters())."
            if isinstance(optimizer, torch.optim.Adafactor)
            else "Use one that steps each element by itself: torch.optim.AdamW(model.parameters()). Or take the "
            "strategy ddp without tp: its parameters are plain tensors.",
        ) from error


_PLAIN = (type(None), bool, int, float, str, list, tuple, torch.Tensor)


def begun_here(ctx: DistContext, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return, on the main rank, the optimizers that stepped for the first time, except torch's with plain options."""
    new = [each for each in optimizers if ctx.comm.marks.find(each, "stepped") is None]
    for each in new:
        ctx.comm.marks.put(each, "stepped")
    return [each for each in new if ctx.is_main_process and not _is_torchs(each)]


def _is_torchs(optimizer: Optimizer) -> bool:
    options = (value for group in optimizer.param_groups for value in group.values())
    return type(optimizer).__module__.startswith("torch.optim.") and all(isinstance(each, _PLAIN) for each in options)


CLOSURE_LINE = "state = accel.optimizer_step(ctx, optimizer, state, closure=closure)"


@contextlib.contextmanager
def within_closure(comm: Comm, call: str) -> Generator[None]:
    """Let `backward` know that it is called within a closure: of "closure=", or of "optimizer.step"."""
    before = comm.closure
    comm.closure = call
    try:
        yield
    finally:
        comm.closure = before


def guard_closures(comm: Comm, optimizer: Optimizer) -> None:
    """Let `optimizer.step(closure)` note that backward passes are a closure's. Mutates the optimizer: adds a hook."""

    def look(_optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first one is the optimizer
        if closure is None or comm.closure is not None:
            return None
        if comm.size > 1 and isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS would decide by the loss of one rank",
                expected="a closure that returns the mean loss over all ranks",
                got="optimizer.step(closure)",
                where=f"rank {comm.rank}",
                fix=CLOSURE_LINE,
            )
        guarded = partial(_called, comm, closure)
        if len(args) > 1:
            return (args[0], guarded, *args[2:]), kwargs
        return args, {**kwargs, "closure": guarded}

    with contextlib.suppress(AttributeError):  # a wrapper that is an Optimizer only by name
        _ = optimizer.register_step_pre_hook(cast(Any, look))


def _called(comm: Comm, closure: Callable[[], Any]) -> Any:
    with within_closure(comm, "optimizer.step"):
        return closure()
