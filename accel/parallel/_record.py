# SPDX-License-Identifier: Apache-2.0
"""A record of one forward of a model: its calls of modules, and from which of them each tensor comes.

The forward runs on parameters without memory, so that no rank holds the whole model. Inputs and buffers are real, so
that masks, positions and branches on inputs have their values. Pipelines cut the record into stages.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import nn
from torch.autograd.graph import Node

from accel.comm._units import users_line
from accel.errors import StageError
from accel.parallel._calls import CacheGrowth, GivenCaches, State, take_apart
from accel.parallel._containers import HeldItem
from accel.parallel._modules import aliases_of, named_modules

# --- the record -------------------------------------------------------------------------------------------------------


class Label(NamedTuple):
    """A source of a tensor. Labels sort alike on all ranks."""

    # "output" of a call, "argument" of a call, "tensor" for a parameter or buffer, "inside" for a tensor that a
    # call makes and does not return.
    kind: Literal["output", "argument", "tensor", "inside"]
    call: int = -1  # number of the call, by the order of the record; -1 for a parameter or buffer
    leaf: int = -1  # number of the output or argument of that call; -1 for the other kinds
    name: str = ""  # first name of the parameter or buffer; "" for the other kinds


Labels = frozenset[Label]


class Leaf(msgspec.Struct, frozen=True):
    """A leaf of what a call returns or leaves behind, or an argument of a call."""

    dtype: torch.dtype | None = None  # None for a value that is no tensor
    shape: tuple[int, ...] = ()  # sizes of the tensor
    stride: tuple[int, ...] = ()  # its strides
    device: str = "cpu"  # type of its device
    differentiable: bool = False  # whether gradients flow into it
    value: Any = None  # the value that is no tensor
    # Number of the argument that this leaf is, of the leaves of (args, kwargs); None for a new tensor.
    same: int | None = None
    changed: bool = False  # whether code between calls changes the tensor in place

    @staticmethod
    def of(tensor: torch.Tensor) -> Leaf:
        """Return the facts of a tensor."""
        shape = tuple(tensor.shape)
        return Leaf(tensor.dtype, shape, tuple(tensor.stride()), tensor.device.type, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return 0 if self.dtype is None else torch.Size(self.shape).numel() * self.dtype.itemsize


class Argument(msgspec.Struct, frozen=True):
    """An argument of a call that may be sent in place of what it is computed from."""

    leaf: Leaf  # the tensor
    sources: Labels  # labels that it is computed from, since the last calls
    base: Label | None = None  # the output that it is a view of; None for no view


class Stash(NamedTuple):
    """A value with tensors that a call leaves in an attribute."""

    path: str  # of the module with the attribute, from the called module; "" for that one
    name: str  # of the attribute
    rebuild: Callable[[Sequence[Any]], Any]  # returns the value from its leaves
    leaves: tuple[int, ...]  # their numbers among the leaves of the call


class Write(NamedTuple):
    """An argument that a call changes in place."""

    argument: int  # number among the leaves of (args, kwargs)
    leaf: int  # number, among the leaves of the call, of its value after the call


class ContainerChange(NamedTuple):
    """The items of a list, dictionary or dataclass that a call is given, and changes."""

    container: int  # its number, in the order of `changeable_in`
    items: tuple[HeldItem, ...]  # after the call
    rebuild: Callable[[Sequence[Any]], Any]  # returns the new items from their leaves
    leaves: tuple[int, ...]  # their numbers among the leaves of the call


class Tap(NamedTuple):
    """A result that the forward hooks of a module within a call are given."""

    path: str  # of the module, from the called one; "" for that one
    rebuild: Callable[[Sequence[Any]], Any]  # returns the result from its leaves
    leaves: tuple[int, ...]  # their numbers among the leaves of the call


class UnitCall(msgspec.Struct, frozen=True):
    """A call of a unit."""

    path: str  # of the module
    rebuild: Callable[[Sequence[Any]], Any]  # returns the result from its leaves, the first `width` of `leaves`
    width: int  # number of leaves of the result
    leaves: tuple[Leaf, ...]  # of the result; then of attributes, arguments, lists and hooks
    arguments: Mapping[int, Argument]  # by number of the leaf of (args, kwargs), those that may be sent
    needs: Labels  # sources of its inputs, and of all other tensors that it reads, such as parameters
    stashes: tuple[Stash, ...] = ()  # values with tensors that it leaves in attributes
    writes: tuple[Write, ...] = ()  # arguments that it changes in place
    changes: tuple[ContainerChange, ...] = ()  # of the containers that it is given
    taps: tuple[Tap, ...] = ()  # results that hooks within it are given
    flops: float = 0.0  # of its forward
    reentrant: bool = False  # whether it runs in a reentrant checkpoint, which has no gradient in its first run
    hidden: frozenset[int] = frozenset()  # numbers of the leaves that such a checkpoint keeps without a gradient
    cached: tuple[CacheGrowth, ...] = ()  # growths of the caches of keys and values that it is given

    def has_numbers(self) -> bool:
        """Return whether a number is among the leaves."""
        return any(isinstance(each.value, int | float) for each in self.leaves)

    def check_number(self, leaf: int, value: Any) -> None:
        """Raise `StageError` if a leaf that is a number in the record has another value now: stages that answer the
        call return the recorded one."""
        expected = f"{len(self.leaves)} values, as in the record"
        if leaf < len(self.leaves):
            known = self.leaves[leaf].value
            if not isinstance(known, int | float) or value == known or (value != value and known != known):
                return
            expected = f"{known}, which does not depend on what code counts or draws"
        raise StageError(
            "a module returns another number than in the record of the forward, with which later stages compute",
            expected=expected,
            got=f"{value} of {self.path}",
            fix="Return a tensor in the place of the number, which stages send: torch.as_tensor(number).",
        )


class RunningCall:
    """A call while it runs, and what is known of it."""

    def __init__(self, number: int, path: str, module: nn.Module) -> None:
        self.number = number
        self.path = path
        self.module = module
        self.leaves: list[Leaf] = []
        self.arguments: dict[int, Argument] = {}
        self.needs: set[Label] = set()
        self.stashes: list[Stash] = []
        self.writes: list[Write] = []
        self.given_items: list[tuple[Any, Mapping[Any, Any]]] = []  # containers, and their items before it
        self.changes: list[ContainerChange] = []
        self.taps: list[Tap] = []
        self.tree = take_apart(None)
        self.returned = False
        self.flops = 0.0
        self.reads_values = False
        self.reentrant = False
        self.hidden: set[int] = set()
        self.given: list[Any] = []  # leaves of (args, kwargs)
        self.places: dict[int, list[int]] = {}  # numbers of the given tensors, by storage
        self.written: set[int] = set()  # numbers of the given tensors that are changed in place
        self.caches = GivenCaches(())
        self.cached: list[CacheGrowth] = []

    def note_gradient(self, leaf: int, tensor: torch.Tensor) -> None:
        """Note after the forward whether a gradient reaches a tensor that the call has made."""
        if tensor.requires_grad and not tensor.is_leaf and not self.leaves[leaf].differentiable:
            self.leaves[leaf] = msgspec.structs.replace(self.leaves[leaf], differentiable=True)
            self.reentrant = True
        elif self.reentrant and tensor.is_floating_point() and not tensor.requires_grad:
            self.hidden.add(leaf)

    def frozen(self) -> UnitCall:
        """Return what is known of the call; raise `StageError` for a call that ended in an error."""
        if not self.returned:
            raise StageError(
                "a module's call raises an error, which the forward catches; other stages would not raise it",
                expected="modules that are called with arguments that they take",
                got=f"an error in the call of {self.path}",
                where="a record of the model's forward",
                fix="Choose the arguments before the call by the module's class or signature, without try and except.",
            )
        return UnitCall(
            self.path,
            self.tree.rebuild,
            len(self.tree.leaves),
            tuple(self.leaves),
            self.arguments,
            frozenset(self.needs),
            tuple(self.stashes),
            tuple(self.writes),
            tuple(self.changes),
            tuple(self.taps),
            self.flops,
            self.reentrant,
            frozenset(self.hidden),
            tuple(self.cached),
        )


def is_differentiable(sources: Iterable[Label], calls: Sequence[RunningCall]) -> bool:
    """Return whether a gradient flows into one of the outputs and arguments that a tensor comes from."""
    given = [calls[each.call].arguments[each.leaf].leaf for each in sources if each.kind == "argument"]
    made = [calls[each.call].leaves[each.leaf] for each in sources if each.kind == "output"]
    return any(leaf.differentiable for leaf in (*given, *made))


class Decision(NamedTuple):
    """A place between calls where Python reads values of tensors, as `if` and `nonzero` do."""

    call: int  # number of the calls before it
    sources: Labels  # of the values


class HeldTensor(NamedTuple):
    """A parameter or buffer of the model."""

    names: tuple[str, ...]  # all its names; the first one is the name in labels
    bytes: int  # its size
    is_parameter: bool  # whether it is one


class ForwardRecord(msgspec.Struct, frozen=True):
    """One forward of a model."""

    calls: tuple[UnitCall, ...]  # of units, in order
    end: Labels  # sources of what the forward returns
    decisions: tuple[Decision, ...]  # values that Python reads between calls
    held: tuple[HeldTensor, ...]  # parameters and buffers of the model
    between: tuple[float, ...] = ()  # FLOPs of the code before each call, and of that behind the last one
    outside: Mapping[str, float] = {}  # FLOPs of the code between calls by the names of the parameters that it reads
    units: tuple[str, ...] = ()  # paths of the units
    draws: bool = False  # whether it draws random numbers of torch
    updates: tuple[str, ...] = ()  # names of buffers that the code between calls changes by values of calls
    # What Python reads between calls from tensors that no call has made, such as the inputs. The flow follows from it.
    branches: tuple[object, ...] = ()
    states: tuple[State, ...] = ()  # attributes and buffers that it changes
    draws_on_host: bool = False  # whether it draws from the global streams of python or numpy

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return self.draws or self.draws_on_host

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the called modules, in order."""
        return tuple(each.path for each in self.calls)

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        return sum(each.flops for each in self.calls) + sum(self.between)

    def leaf(self, label: Label) -> Leaf:
        """Return the tensor of an output or argument."""
        call = self.calls[label.call]
        return call.leaves[label.leaf] if label.kind == "output" else call.arguments[label.leaf].leaf


def check_hidden(record: ForwardRecord, sent: Iterable[Label]) -> None:
    """Raise `StageError` for a sent tensor without its gradient. `sent`: labels of the tensors between stages."""
    for each in sent:
        if each.kind == "output" and each.leaf in record.calls[each.call].hidden:
            raise StageError(
                "a later stage needs a tensor within a reentrant checkpoint, which keeps no gradient of it",
                expected="a checkpoint of the other kind",
                got=f"a result of {record.paths[each.call]}",
                fix="Pass it use_reentrant=False: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).",
            )


def check_states(record: ForwardRecord, ends: Sequence[int], *, several: bool) -> None:
    """Raise `StageError` for a value that the next forward reads in a stage that does not reach its change, and for a
    buffer that each stage of a rank would change.

    Args:
        record: of the forward.
        ends: number of the call at which each stage but the last one ends.
        several: whether ranks have several stages.
    """
    late = [each for each in record.states if any(each.read <= end < each.change for end in ends)]
    if late:
        raise StageError(
            "the forward changes a value that the next one reads, in a stage that ends before the change",
            expected=f"a change before the call of {record.paths[min(ends)]}",
            got=f"{late[0].name}, behind the call of {record.paths[late[0].change - 1]}",
            fix="Change it before the first module is called, or in the forward of a module that holds it.",
        )
    shared = [each.name for each in record.states if each.is_buffer and several]
    if shared:
        raise StageError(
            "code outside of modules changes a buffer, which each stage of a rank would change again",
            expected="one stage on each rank, or a change in the forward of a module with parameters",
            got=", ".join(shared),
            fix='Use Plan(schedule="1F1B"), or let a module with parameters hold the buffer and change it.',
        )


def place_of(error: Exception, model: nn.Module, unit_of: Callable[[Node | None], str] | None = None) -> str:
    """Return the path of the innermost module that raised an error in forward or backward, and the user's line.

    `unit_of`: maps a node of the graph to a path, and None to the text for an error with neither module nor node.
    """
    paths = {id(each): path or "the model" for path, each in named_modules(model)}
    found = unit_of(None) if unit_of else ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        first = frame.f_locals.get("".join(frame.f_code.co_varnames[:1]))
        found = paths.get(id(first)) or (unit_of(first) if unit_of and isinstance(first, Node) else "") or found
    return f"{found}{users_line(error)}".strip()


def check_replaced(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Raise `StageError` for parameters that a forward has replaced: optimizer and stages have those `before` it."""
    after = dict(model.named_parameters(remove_duplicate=False))
    if names := [name for name in {**before, **after} if before.get(name) is not after.get(name)]:
        raise StageError(
            "the forward replaces parameters of the model",
            expected="the parameters that prepare_model was given",
            got=", ".join(names),
            fix="Assign them in __init__: self.head.weight = self.embed.weight.",
        )


def held_tensors(model: nn.Module) -> tuple[HeldTensor, ...]:
    """Return the parameters and buffers of a model."""
    return tuple(
        HeldTensor(names, each.numel() * each.element_size(), isinstance(each, nn.Parameter))
        for each, names in aliases_of(model)
    )


def record_in_order(model: nn.Module, units: Sequence[str]) -> ForwardRecord:
    """Return a record of calls in the order of registration, for a model without an example. No tensor is known.

    The FLOPs of a unit count its matmuls for one token, without their factor of two. A parameter outside of
    units may be read by every call.

    Args:
        units: paths of the modules that are called, such as `units_of` returns.
    """
    held = held_tensors(model)
    inside = tuple(f"{path}." for path in units)
    outside = frozenset(
        Label("tensor", name=each.names[0])
        for each in held
        if each.is_parameter and not any(name.startswith(inside) for name in each.names)
    )
    nothing = take_apart(None)
    calls = tuple(
        UnitCall(path, nothing.rebuild, 1, (Leaf(),), {}, outside, flops=_weights(model.get_submodule(path)))
        for path in units
    )
    return ForwardRecord(calls, frozenset(), (), held, (0.0,) * (len(calls) + 1), units=tuple(units))


def _weights(module: nn.Module) -> float:
    """The number of elements of a module's weights that are no table of an embedding."""
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    rows = {id(each) for table in tables for each in table.parameters()}
    return float(sum(each.numel() for each in module.parameters() if each.ndim > 1 and id(each) not in rows))
