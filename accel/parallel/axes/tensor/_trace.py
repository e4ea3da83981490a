# SPDX-License-Identifier: Apache-2.0
"""One forward of a model without values, recorded: operations, layers and calls of modules, as plain numbers."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from accel.fakes import emptied_caches, fake_mode
from accel.mixins import Mixin, add_mixin
from accel.parallel._copies import copied_model
from accel.parallel._fakes import MessageError, exchanges_rows, message_of, run_operator
from accel.parallel._modules import KeepsParameters, has_parameters, named_modules, written_class
from accel.parallel._private import flat_tensors, forward_hooks, forward_pre_hooks, tensors_of
from accel.parallel.axes.tensor._styles import is_adapted, is_linear


class Node(NamedTuple):
    """An operation on tensors, or the call of a layer that is taken as one."""

    name: str  # of torch's function; "linear layer" or "embedding" of a layer
    path: str  # of the layer; "" of a function
    inputs: tuple[int, ...]  # numbers of the tensors that it reads
    outputs: tuple[int, ...]  # numbers of those that it gives, or changes in place
    text: str  # its other arguments, and the shapes of its outputs


class ModuleCall(NamedTuple):
    """A call of a module."""

    path: str  # of the module
    args: tuple[Any, ...]  # positional arguments, tensors without values
    kwargs: Mapping[str, Any]  # arguments by name
    inputs: tuple[int, ...]  # numbers of its tensors, in the order of the leaves of `(args, kwargs)`
    outputs: tuple[int, ...]  # numbers of the tensors that it returned
    nodes: range  # its operations, a slice of the trace's
    given: Mapping[int, Tensor] = {}  # integers of the example among its tensors, by their number


class ForwardTrace(NamedTuple):
    """A recorded forward."""

    nodes: Sequence[Node]  # in the order of their run
    calls: Sequence[ModuleCall]  # in the order of their end
    outputs: tuple[int, ...]  # numbers of the tensors that the model returned
    read: frozenset[str] = frozenset()  # paths of modules with parameters that another module read
    readers: Mapping[str, set[str]] = {}  # paths of the modules that read them, by their path
    has_unseen: bool = False  # whether modules, with all in them, are recorded as one operation

    def signature(self, call: ModuleCall) -> str:
        """Return a text that is equal for calls of equal operations on equal shapes, whatever the layers' paths."""
        numbers: dict[int, int] = {}
        learns = [each.requires_grad for each in flat_tensors((call.args, call.kwargs))]
        inputs = [numbers.setdefault(each, len(numbers)) for each in call.inputs]
        digest = hashlib.sha256(repr((inputs, learns)).encode())
        for at in call.nodes:
            node = self.nodes[at]
            places = [numbers.setdefault(each, len(numbers)) for each in (*node.inputs, *node.outputs)]
            path = node.path[len(call.path) :] if node.path.startswith(call.path) else node.path
            digest.update(repr((node.name, path, places, node.text)).encode())
        digest.update(repr([numbers.get(each, -1) for each in call.outputs]).encode())
        return digest.hexdigest()


class ReplacedModulesError(Exception):
    """The forward replaces modules, so that its record says nothing of the model's own."""


def trace(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any], *, with_values: bool = False) -> ForwardTrace:
    """Run a copy of a model on fake tensors, in eval, and record it. The model and torch's streams are unchanged.

    Modules with control flow that depends on values, such as experts that ask which tokens chose them, are recorded as
    one operation, with an output like their first tensor. If that is not enough, or `with_values`, a copy with values
    runs. Any other error of a forward without values is raised, `ReplacedModulesError` for a forward that replaces
    modules, and `MessageError` for one that calls torch.distributed.
    """
    kinds: list[type] = []
    first: Exception | None = None
    while not with_values:
        recorder = _Recorder()
        try:
            return recorder.traced(_run_blank(model, inputs, recorder, tuple(kinds)), has_unseen=bool(kinds))
        except Exception as error:
            kind = recorder.failed
            asks = type(error).__name__ in _OF_VALUES
            first = first or error
            if not asks or kind in (None, type(model), *kinds):
                if type(first).__name__ not in _OF_VALUES or any(each.is_meta for each in model.parameters()):
                    raise first from None
                break
            kinds.append(kind)
    recorder = _Recorder()
    try:
        return recorder.traced(_run_valued(model, inputs, recorder))
    except Exception as error:  # whatever a forward says of small inputs
        raise error if isinstance(error, MessageError) else first or error from None


_OF_VALUES = ("DynamicOutputShapeException", "DataDependentOutputException")  # of torch's fake tensors


def _run_blank(
    model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any], recorder: _Recorder, kinds: tuple[type, ...]
) -> tuple[int, ...]:
    """Record a copy of the model; return the numbers of its outputs. Modules of these kinds run without their
    forward."""
    fake = fake_mode()

    def blank(each: Tensor) -> Tensor:
        with fake:
            return _blank(each)

    empty = copy_with(model, blank)
    with fake:
        add_mixin([each for each in empty.modules() if isinstance(each, kinds)], _Unseen)
        add_mixin(filter(has_parameters, empty.modules()), KeepsParameters)
        return _recorded(empty, inputs, recorder, _blank)


def _run_valued(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any], recorder: _Recorder) -> tuple[int, ...]:
    """Record a copy on the CPU with the model's values, and zeros for inputs without any."""
    copied = copy_with(model, lambda each: each.detach().to("cpu", copy=True))
    with cast(Any, torch.random).fork_rng(devices=[]):
        return _recorded(copied, inputs, recorder, _valued)


def _recorded(
    copied: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    recorder: _Recorder,
    given_as: Callable[[Tensor, torch.dtype | None], Tensor],
) -> tuple[int, ...]:
    """Record the forward of a copy; return the numbers of its outputs."""
    with emptied_caches(), ExitStack() as stack, torch.enable_grad():
        recorder.own(_owners(copied))
        dtype = next((each.dtype for each in copied.parameters() if each.is_floating_point()), None)
        leaves, spec = pytree.tree_flatten(inputs)
        values = [given_as(each, dtype) if isinstance(each, Tensor) else each for each in leaves]
        given: Any = pytree.tree_unflatten(values, spec)
        for leaf, value in zip(leaves, values, strict=True):
            if isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex() or leaf.is_meta):
                recorder.given[recorder.number(value)] = leaf
        for path, module in named_modules(copied):
            stack.callback(module.register_forward_pre_hook(partial(recorder.enter, path), with_kwargs=True).remove)
            leave = partial(recorder.leave, path)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True, always_call=True).remove)
        before = {path: module for path, module in named_modules(copied) if any(True for _ in module.parameters())}
        with recorder:
            output = copied(**given) if isinstance(given, Mapping) else copied(*given)
        behind = dict(named_modules(copied))
        if replaced := [path for path, module in before.items() if behind.get(path, module) is not module]:
            raise ReplacedModulesError(f"it replaces {replaced[-1]}")
    return tuple(map(recorder.number, tensors_of(output)))


class _Unseen(Mixin):
    """Gives a tensor like its first one, as its own forward asks for values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor without values."""
        return torch.empty_like(flat_tensors((args, kwargs))[0]).requires_grad_()


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Paths of the modules that have a parameter, by its `id`."""
    found: dict[int, list[str]] = {}
    for path, module in named_modules(model):
        for each in module.parameters(recurse=False):
            found.setdefault(id(each), []).append(path)
    return found


def _blank(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device="cpu")


def _valued(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The values of an input; zeros for one without any."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=kind, device="cpu")
    return tensor.detach().to("cpu", kind, copy=True)


def copy_with(model: nn.Module, values_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy in eval, with other values of its parameters and buffers. Tensors that are plain attributes keep
    theirs. It has no hooks but the ones by which torch computes weights, as `weight_norm`."""
    memo: dict[int, Any] = {}
    for each in (*model.parameters(), *model.buffers()):
        values = values_of(each)
        memo[id(each)] = nn.Parameter(values, values.is_floating_point()) if isinstance(each, nn.Parameter) else values
    copied = copied_model(model, memo)
    for module in copied.eval().modules():
        cast(Any, forward_hooks(module)).clear()
        before = cast("dict[int, Any]", forward_pre_hooks(module))
        for key, hook in [*before.items()]:
            if not type(hook).__module__.startswith("torch.nn.utils."):
                del before[key]
    return copied


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()
        self.readers: dict[str, set[str]] = {}
        self._owners: Mapping[int, list[str]] = {}
        self._within: list[tuple[str, nn.Module]] = []
        self.nodes: list[Node] = []
        self.calls: list[ModuleCall] = []
        self.given: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an `id` belongs to a tensor while it lives
        self._same_memory: dict[int, list[int]] = {}
        self._begun: list[tuple[int, tuple[Any, ...], Mapping[str, Any]]] = []
        self._layers = 0
        self.message: MessageError | None = None  # of a sum over ranks, behind which rows may be exchanged
        self._error: BaseException | None = None  # that ended the latest call which raised one
        self.failed: type | None = None  # the class of the innermost module that raised it

    def traced(self, outputs: tuple[int, ...], *, has_unseen: bool = False) -> ForwardTrace:
        """Return what is recorded, of a model with these outputs; raise the error of a message in it."""
        if self.message is not None:
            raise self.message
        return ForwardTrace(self.nodes, self.calls, outputs, frozenset(self.read), self.readers, has_unseen)

    def own(self, owners: Mapping[int, list[str]]) -> None:
        """Set the modules that have a parameter, by its `id`."""
        self._owners = owners

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
            self._same_memory.setdefault(_memory_of(tensor), []).append(len(self._kept) - 1)
        return self._numbers[id(tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name := message_of(func):
            problem = f"its forward calls {name}, so one rank cannot record it"
            found = MessageError(problem, exchanges=exchanges_rows(func, args, kwargs))
            self.message = self.message or found
            if found.exchanges or name != "torch.distributed.all_reduce" or kwargs.get("async_op"):
                raise found if found.exchanges else self.message
            return args[0] if str(getattr(func, "__module__", "")).startswith("torch._ops") else None
        result = run_operator(func, args, kwargs)
        if not self._layers:
            self._record(getattr(func, "__name__", str(func)), args, kwargs, result)
        return result

    def _record(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        inputs = tuple(map(self.number, flat_tensors((args, kwargs))))
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        outputs = flat_tensors(args[0] if name == "__setitem__" else result)
        if not outputs:
            return
        for each in flat_tensors((args, kwargs)):
            owners = self._owners.get(id(each), ())
            if owners and self._within and self._within[-1][0] not in owners:
                self.read.update(owners)
                for owner in owners:
                    self.readers.setdefault(owner, set()).add(self._within[-1][0])
        numbers = tuple(map(self.number, outputs))
        if changes:  # so do all views of it
            shared = tuple(each for out in outputs for each in self._same_memory[_memory_of(out)])
            inputs, numbers = (*inputs, *shared), tuple(dict.fromkeys((*numbers, *shared)))
        texts = [repr(each) for each in pytree.tree_leaves((args, kwargs)) if not isinstance(each, Tensor)]
        shapes = [(list(each.shape), each.requires_grad) for each in outputs]
        self.nodes.append(Node(name, "", inputs, numbers, f"{texts} {shapes}"))

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the call of a module."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given: Any = pytree.tree_unflatten(leaves, spec)  # lists and dicts as they are before the call
        self._begun.append((len(self.nodes), *given))
        self._within.append((path, module))
        self._layers += _kind_of(module) is not None

    def leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """End the call of a module, also of one that raises an error, which the code around it may catch."""
        begin, args, kwargs = self._begun.pop()
        _ = self._within.pop()
        kind = _kind_of(module)
        self._layers -= kind is not None
        error = sys.exc_info()[1]
        if error is not None and output is None:
            if error is not self._error:
                self._error, self.failed = error, written_class(module)
            return
        if self._layers:
            return
        inputs = tuple(map(self.number, flat_tensors((args, kwargs))))
        outputs = tuple(map(self.number, tensors_of(output)))
        if kind is not None:
            shapes = [list(each.shape) for each in (*module.parameters(), *tensors_of(output))]
            self.nodes.append(Node(kind, path, inputs, outputs, f"{type(module).__name__} {shapes}"))
        given = {number: self.given[number] for number in inputs if number in self.given}
        self.calls.append(ModuleCall(path, args, kwargs, inputs, outputs, range(begin, len(self.nodes)), given))


def _memory_of(tensor: Tensor) -> int:
    try:
        return cast(Any, tensor.untyped_storage())._cdata
    except NotImplementedError:  # torch.vmap batches it
        return id(tensor)


def _kind_of(module: nn.Module) -> str | None:
    """The name of a layer that is recorded as one node; None for other modules."""
    if isinstance(module, _Unseen):
        return "module that reads values"
    if is_adapted(module) or (is_linear(module) and not any(True for _ in module.children())):
        return "linear layer"
    return "embedding" if isinstance(module, nn.Embedding) else None


_INDEX = ("layer_idx", "layer_id", "layer_number", "block_idx", "idx", "index")


def facts_of(module: nn.Module) -> list[object]:
    """Return what distinguishes a module from others with equal calls: of each module in it the path, the class, the
    shapes of its parameters, and plain attributes without its place among others."""
    return [
        (path, type(each).__name__, [list(own.shape) for own in each.parameters(recurse=False)], _settings_of(each))
        for path, each in named_modules(module)
    ]


def _settings_of(module: nn.Module) -> list[tuple[str, object]]:
    """Return plain attributes of a module, without its place among others."""
    return [
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, int | float | str | None) and name not in _INDEX and name != "training"
    ]
