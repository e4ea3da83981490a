# SPDX-License-Identifier: Apache-2.0
"""Models and tensors without memory, random numbers for them, and the FLOPs and messages of operators."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from accel.comm import ThreadGroup, mark_recording
from accel.errors import StageError
from accel.fakes import fake_mode, is_fake
from accel.mixins import add_mixin
from accel.parallel._copies import copied_model
from accel.parallel._modules import KeepsParameters, has_parameters, named_modules, note_tensor
from accel.parallel._private import without_subclasses, written_arguments
from accel.parallel.parts._contractions import operands_first

_LARGE = 1 << 14  # bytes


def without_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy a model, with fake parameters on a device. Small buffers are real copies. Large ones, such as masks
    and rotations, are shared with the model if they are on the device: run the copy within `unchanged`. Buffers on the
    meta device become fake.

    No communication. The model may be on the meta device.
    """
    mode = fake_mode()
    mark_recording(mode)
    memo: dict[int, Any] = {}
    with mode:
        for each in model.parameters():
            made = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
            memo[id(each)] = nn.Parameter(made, each.requires_grad)
        for each in model.buffers():
            if each.is_meta:
                memo[id(each)] = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device)
    attributes = [each for module in model.modules() for each in vars(module).values()]
    for each in (*model.buffers(), *filter(torch.is_tensor, attributes)):
        if not each.is_meta:
            is_own = _is_large(each) and each.device == device
            _ = memo.setdefault(id(each), each if is_own else each.detach().to(device, copy=True))
    found = copied_model(model, memo)
    for module in found.modules():
        _ = vars(module).pop("_compiled_call_impl", None)
    add_mixin(filter(has_parameters, found.modules()), KeepsParameters)
    return found


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.nbytes > _LARGE and not is_fake(tensor)


def free_large_buffers(ghost: nn.Module, model: nn.Module) -> None:
    """Let a copy by `without_memory` have the large buffers of a model that has become a stage, and fake ones in the
    place of those that it lacks. Mutates the copy."""
    mode: Any = next(filter(None, (getattr(each, "fake_mode", None) for each in ghost.parameters())), None)
    if mode is None:
        return
    live = dict(model.named_buffers(remove_duplicate=False))
    for path, module in named_modules(ghost):
        for key, each in module.named_buffers(recurse=False):
            if _is_large(each):
                with mode:
                    fake = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
                own = live.get(f"{path}.{key}" if path else key)
                setattr(module, key, fake if own is None or own.device != each.device else own)


def random_like(value: Any) -> Any:
    """A real tensor of random numbers in place of a fake one."""
    if not isinstance(value, torch.Tensor) or not is_fake(value):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, dtype=value.dtype, device=value.device) * 0.1
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


class LikelyValues:
    """Values of fake tensors where Python reads them. They follow from random numbers in tensors of unknown origin, so
    that `isfinite(hidden).all()` is true, and `isnan(hidden).any()` is not."""

    def __init__(self) -> None:
        self._makers: dict[
            int, tuple[tuple[Any, Any, Any], int]
        ] = {}  # operators by tensor, and the place of its output
        self._values: dict[int, Any] = {}
        self._alive: list[object] = []  # so that no `id` is used twice

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note the operator that makes tensors."""
        for place, each in enumerate(pytree.tree_leaves(out)):
            if is_fake(each):
                self._makers[id(each)] = (func, args, kwargs), place
                self._alive.append(each)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on values."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for each in leaves:
            if is_fake(each) and id(each) not in self._values:
                made, place = self._makers.get(id(each), (None, 0))
                self._values[id(each)] = pytree.tree_leaves(self.run(*made))[place] if made else random_like(each)
                self._alive.append(each)
        args, kwargs = pytree.tree_unflatten([self._values.get(id(each), each) for each in leaves], spec)
        return func(*args, **kwargs)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """FLOPs of an operator by torch's formulas."""
    if func is torch.ops.aten._grouped_mm.default:  # torch has none for it
        return 2.0 * out.numel() * args[0].shape[-1]
    count = flop_registry.get(func.overloadpacket)
    if count is None and "flash_attention_for_cpu" in func.name():
        count = flop_registry.get(torch.ops.aten._scaled_dot_product_flash_attention)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def message_of(function: object) -> str:
    """Return the name of a function or operator that sends messages by torch.distributed; "" for any other."""
    module = getattr(function, "__module__", "")
    name = str(getattr(function, "__name__", "")).partition(".")[0]  # without the overload of an operator
    if module in _MESSAGE_OPERATORS:
        name = name.strip("_")
        return "" if name in _NO_MESSAGES else f"torch.distributed.{name}"
    return f"torch.distributed.{name}" if module == "torch.distributed.distributed_c10d" else ""


_MESSAGE_OPERATORS = ("torch._ops.c10d", "torch._ops._c10d_functional", "torch._ops._c10d_functional_autograd")
_NO_MESSAGES = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan")


def refuse_to_world(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise `StageError` if the forward of a pipelined model sends a message to all ranks: one stage runs it."""
    name = message_of(function)
    if name and _is_to_world(function, args, kwargs):
        raise StageError(
            "a forward sends a message to all ranks, but one stage runs it",
            expected=f"{name} with the group of ranks that have the same stage",
            got="all ranks",
            where="forward of a pipelined model",
            fix="Pass the group of the ranks along dp, from accel.group_of. Without such ranks, send nothing.",
        )


def exchanges_rows(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a message moves rows among all ranks, such as an all-gather. Its result depends on the number of
    ranks, even if they have equal rows."""
    alike = (
        "all_reduce", "allreduce", "all_reduce_coalesced", "allreduce_coalesced", "barrier", "broadcast",
        "monitored_barrier", "reduce",
    )  # fmt: skip
    name = message_of(function).removeprefix("torch.distributed.")
    return bool(name) and name not in alike and _is_to_world(function, args, kwargs)


def _is_to_world(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    world = dist.group.WORLD
    if world is None:
        return False
    given = [each for each in map(_group_of, (*args, *kwargs.values())) if each is not None]
    return world in given or world.group_name in given or (not given and isinstance(function, FunctionType))


class MessageError(Exception):
    """A model sends messages to other ranks, but one rank runs it.

    Attributes:
        exchanges: whether one moves rows among all ranks.
    """

    def __init__(self, problem: str, *, exchanges: bool = False) -> None:
        super().__init__(problem)
        self.exchanges = exchanges


class NoMessages(TorchFunctionMode):
    """Raises `MessageError` for a message to other ranks, but not for one among threads. A backward that begins at an
    edge of the graph stays in this mode: torch leaves modes for calls with tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = message_of(func)
        if name and not any(isinstance(each, ThreadGroup) for each in (*args, *kwargs.values())):
            raise MessageError(f"it calls {name}, so one rank cannot prove it")
        return func(*args, **kwargs)


def _group_of(argument: Any) -> object:
    """The group that an argument names, of an operator that has one; None for other arguments."""
    if isinstance(argument, torch.ScriptObject):
        with contextlib.suppress(TypeError, RuntimeError):  # another object, such as the kind of a reduction
            return cast(Any, dist.ProcessGroup).unbox(argument)
    return argument if isinstance(argument, str | dist.ProcessGroup) else None


def run_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator or a function of a recorded forward, on fake tensors or real ones.

    torch supports grouped matmuls of fake tensors only in bf16. Raises `StageError` for a message to all ranks.
    """
    refuse_to_world(func, args, kwargs)
    name = getattr(func, "__name__", "")
    if name.partition(".")[0] != "_grouped_mm":
        return func(*args, **kwargs)
    (rows, weights, *others), named = operands_first(args, kwargs)
    if not is_fake(rows):
        return func(*args, **kwargs)
    narrow = [each.to(torch.bfloat16) for each in (rows, weights)]
    return func(*narrow, *others, **named).to(rows.dtype)


def reads_values(func: Any) -> bool:
    """Return whether an operator gives Python values of tensors, or shapes that depend on them."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def value_read(out: Any) -> object:
    """Return what Python gets from the output of such an operator: a number as text, or the shape of a tensor."""
    return tuple(out.shape) if isinstance(out, torch.Tensor) else repr(out)


class ValuesRead(TorchDispatchMode):
    """Notes in `found` what Python reads from tensors within a block, in order."""

    def __init__(self) -> None:
        cast(Any, super()).__init__()
        self.found: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        out = func(*args, **(kwargs or {}))
        if reads_values(func):
            self.found.append(value_read(out))
        return out


class StandIn(torch.Tensor):
    """A tensor of another stage, without its memory. Code that changes it, or a view of it, in place leaves it as it
    is: the stage with the tensor changes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; views stay placeholders."""
        if not all(issubclass(each, StandIn) or each in (torch.Tensor, nn.Parameter) for each in types):
            return NotImplemented  # a subclass that computes with plain tensors decides
        with without_subclasses():
            given = pytree.tree_leaves((args, kwargs or {}))
            own = frozenset(_memory(each) for each in given if isinstance(each, StandIn))
            with _Unwritten(own):
                out = func(*args, **(kwargs or {}))
            return pytree.tree_map_only(torch.Tensor, lambda each: _again(each, own), out)

    def __deepcopy__(self, memo: object) -> StandIn:
        return self


class _Unwritten(TorchDispatchMode):
    """Leaves tensors in some memory as they are."""

    def __init__(self, memory: frozenset[int]) -> None:
        cast(Any, super()).__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, unless it would change such a tensor."""
        written = written_arguments(func, args, kwargs or {})
        if any(_memory(each) in self._memory for each in written):
            returned = len(func._schema.returns)
            return written[0] if returned == 1 else tuple(written[:returned]) or None
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(tensor: torch.Tensor, memory: frozenset[int]) -> torch.Tensor:
    is_view = not isinstance(tensor, StandIn) and _memory(tensor) in memory
    return tensor.as_subclass(StandIn) if is_view else tensor


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same shape and dtype in the memory of one element: NaN, or 0 for integers."""
    one = placeholder(tensor.dtype, tensor.shape, device)
    if type(one) is torch.Tensor:  # else the device's own class, which cannot be another one's too
        one = one.as_subclass(StandIn)
    made = nn.Parameter(one, requires_grad=False) if isinstance(tensor, nn.Parameter) else one
    note_tensor(made, placeholder=True)
    return made


def placeholder(dtype: torch.dtype, shape: Sequence[int], device: torch.device, *, dense: bool = False) -> torch.Tensor:
    """Return a tensor of NaN, or of 0 for integers, in the memory of one element and with a note; `dense` in memory of
    its own, to be filled."""
    is_number = dtype.is_floating_point or dtype.is_complex
    one = torch.full((), float("nan") if is_number else 0, dtype=dtype, device=device).expand(tuple(shape))
    if dense:
        return one.clone()
    note_tensor(one, placeholder=True)
    return one
