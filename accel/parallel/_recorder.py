# SPDX-License-Identifier: Apache-2.0
"""The forward that makes a record: labels of storages under a mode of torch's operators, on fake parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accel.errors import StageError
from accel.fakes import emptied_caches, is_fake
from accel.parallel._calls import (
    NUMBERS,
    ChangedStates,
    GivenCaches,
    Plain,
    State,
    answer_of,
    attributes_of,
    identity_of,
    let_answer,
    let_watch,
    take_apart,
    tapped,
    tensors_in,
    unchanged,
)
from accel.parallel._containers import change_items, changeable_in, changed_items, items_of, new_items, set_items
from accel.parallel._fakes import LikelyValues, flops_of, random_like, reads_values, run_operator, value_read
from accel.parallel._modules import named_modules, named_tensors
from accel.parallel._private import asks_for_values, forward_hooks, runs_in_reentrant_checkpoint, written_arguments
from accel.parallel._record import (
    Argument,
    ContainerChange,
    Decision,
    ForwardRecord,
    Label,
    Labels,
    Leaf,
    RunningCall,
    Stash,
    Tap,
    Write,
    held_tensors,
    is_differentiable,
)
from accel.random import host_streams, isolated_rng
from accel.tree._walk import Containers

WHERE = "a record of the model's forward"
_NOTHING: Labels = frozenset()
_SEVERAL_VIEWS = ("Unbind", "Split", "Chunk")  # autograd refuses to write into one of them
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size)


def record_forward(
    model: nn.Module,
    units: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    containers: Containers = (),
) -> ForwardRecord:
    """Run a model once on a batch, and return the record. No communication.

    The model, which may be one `without_memory`, keeps its buffers and its classes; the random streams stay.

    Args:
        units: paths of the modules to record, such as `units_of` returns.
        args, kwargs: of the model; real tensors.
        containers: kinds of containers besides those that `take_apart` knows.

    Raises:
        StageError: the model does what another stage could not play back; the module and the reason are named.
    """
    recorder = Recorder(model, units, containers)
    devices = sorted({each.device for each in model.buffers() if each.device.type not in ("cpu", "meta")}, key=str)
    with recorder.answering(), emptied_caches(), unchanged(model), isolated_rng(*devices):
        _ = cast(Any, torch).manual_seed(0)
        before = host_streams()
        with recorder:
            output = model(*args, **kwargs)
        record = recorder.finish(output, recorder.states.found())
        return msgspec.structs.replace(record, draws_on_host=host_streams() != before)


class Recorder(TorchDispatchMode):
    """Labels each storage with the outputs of calls, and the parameters, that it comes from since the last call."""

    def __init__(self, model: nn.Module, units: Sequence[str], containers: Containers = ()) -> None:
        cast(Any, super()).__init__()
        self._model = model
        self._units = tuple(units)
        self._containers = containers
        self._calls: list[RunningCall] = []
        self._now: RunningCall | None = None
        self._decisions: list[Decision] = []
        self._between = [0.0]
        self._read_flops: dict[str, float] = {}
        self._draws, self._branches = False, list[object]()
        self._watched: dict[nn.Module, dict[str, str]] = {}  # units by the names of the numbers that they set
        self._buffers: dict[int, str] = {}  # outside of units, by storage
        self._updates: set[str] = set()
        self._labels: dict[int, Labels] = {}  # by storage
        self._own: dict[int, Labels] = {}  # by tensor: arguments, and views of them
        self._outputs: dict[int, tuple[RunningCall, int]] = {}  # by storage
        self._constant: set[int] = set()  # storages that a call makes of nothing
        self._alive: list[object] = []  # so that no `id` is used twice
        self._values = LikelyValues()
        self._handed: list[tuple[RunningCall, int, torch.Tensor]] = []
        self._names: dict[int, str] = {}  # by storage
        within = tuple(f"{path}." for path in units)
        for name, each in named_tensors(model):
            is_own = isinstance(each, nn.Parameter) or name.startswith(within)
            _ = (self._names if is_own else self._buffers).setdefault(self._key(each), name)
        self.states = ChangedStates(
            {path: each for path, each in named_modules(model) if not f"{path}.".startswith(within)}
        )

    @contextlib.contextmanager
    def answering(self) -> Generator[None]:
        """Record the calls of the units within a block."""
        modules = {path: self._model.get_submodule(path) for path in self._units}
        before = {path: answer_of(module) for path, module in modules.items()}
        for path, module in modules.items():
            let_answer(module, partial(self.call, path))
        for module in self.states.modules:
            let_watch(module, lambda at, name, is_write: self.states.note(len(self._calls), at, name, is_write))
        try:
            yield
        finally:
            for module in (*self._watched, *self.states.modules):
                let_watch(module, None)
            for path, module in modules.items():
                let_answer(module, before[path])

    # --- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and label what it makes and what it changes."""
        kwargs = kwargs or {}
        self._draws |= torch.Tag.nondeterministic_seeded in func.tags
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        sources = _NOTHING.union(*map(self._sources, given))
        written = written_arguments(func, args, kwargs)
        out = self._run(func, args, kwargs, sources)
        made = [each for each in pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]
        self._note_flops(flops_of(func, args, kwargs, out), sources)
        if self._now is not None:
            sources = self._within(self._now, func, given, made, sources)
        for each in written:
            self._note_write(each, sources)
        if self._now is None and sources and not written:
            self._values.note(func, args, kwargs, out)
        known = {self._key(each): each for each in given}
        for each in made:
            base = known.get(self._key(each))
            if base is None:
                self._labels[self._key(each)] = sources
            elif id(base) in self._own and id(each) not in self._own:  # a view of an argument
                self._keep_own(each, self._own[id(base)])
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sources: Labels) -> Any:
        reads = reads_values(func)
        if reads and self._now is not None:
            self._now.reads_values = True
        elif reads and sources:
            self._decisions.append(Decision(len(self._calls), sources))
        try:
            out = run_operator(func, args, kwargs)
            if reads and self._now is None and not sources:
                self._branches.append(value_read(out))
            return out
        except Exception as error:
            if self._now is not None or not asks_for_values(error):
                raise
            return self._values.run(func, args, kwargs)

    def _note_flops(self, flops: float, sources: Labels) -> None:
        if self._now is not None:
            self._now.flops += flops
        elif flops:
            self._between[-1] += flops
            for each in sources:
                if each.kind == "tensor":
                    self._read_flops[each.name] = self._read_flops.get(each.name, 0.0) + flops

    def _within(
        self,
        now: RunningCall,
        func: Any,
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        sources: Labels,
    ) -> Labels:
        """Note what a call reads; return the label of what it makes."""
        inside = Label("inside", now.number)
        now.needs |= sources - {inside}
        if func.name().startswith("aten::lift_fresh"):  # torch.tensor([...])
            self._constant |= {self._key(each) for each in given}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws or not all(self._key(each) in self._constant for each in given):
            return frozenset({inside})
        self._constant |= {self._key(each) for each in made}  # as a function caches tables, which any stage can make
        return _NOTHING

    def _note_write(self, tensor: torch.Tensor, sources: Labels) -> None:
        key = self._key(tensor)
        self._labels[key] = self._labels.get(key, _NOTHING) | sources
        if id(tensor) in self._own:
            self._own[id(tensor)] |= sources
        if self._now is not None and key not in self._names:
            self._now.written.update(self._now.places.get(key, ()))
        elif key in self._buffers:
            self.states.note_change(len(self._calls), self._buffers[key])
            self._updates |= {self._buffers[key]} if sources else set()
        if key in self._outputs:
            call, leaf = self._outputs[key]
            call.leaves[leaf] = msgspec.structs.replace(call.leaves[leaf], changed=True)

    def _key(self, tensor: torch.Tensor) -> int:
        """Identity of a tensor's storage, which stays alive with the record."""
        held: object = tensor.untyped_storage() if tensor.layout == torch.strided else tensor
        self._alive.append(held)
        return id(held)

    def _keep_own(self, tensor: torch.Tensor, labels: Labels) -> None:
        self._own[id(tensor)] = labels
        self._alive.append(tensor)

    def _sources(self, tensor: torch.Tensor) -> Labels:
        if id(tensor) in self._own:
            return self._own[id(tensor)]
        key = self._key(tensor)
        found = self._labels.get(key, _NOTHING)
        return found | {Label("tensor", name=self._names[key])} if key in self._names else found

    # --- calls

    def call(self, path: str, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a unit; a unit within a unit belongs to it."""
        if self._now is not None:
            return plain(*args, **kwargs)
        now = RunningCall(len(self._calls), path, module)
        now.reentrant = runs_in_reentrant_checkpoint()
        self._calls.append(now)
        self._between.append(0.0)
        now.given = take_apart((args, kwargs), self._containers).leaves
        for number, each in enumerate(now.given):
            if isinstance(each, torch.Tensor):
                now.needs |= self._take_argument(now, number, each)
                now.places.setdefault(self._key(each), []).append(number)
        now.caches = GivenCaches(now.given)
        before = attributes_of(module)
        now.given_items = [(each, items_of(each)) for each in changeable_in(args, kwargs)]
        self._now = now
        try:
            with tapped({p: each for p, each in named_modules(module) if forward_hooks(each)}) as taps:
                output = self._call_somehow(module, plain, args, kwargs)
        finally:
            self._now = None
        now.returned, now.tree = True, take_apart(output, self._containers)
        new = [self._hand_out(now, each) for each in now.tree.leaves]
        now.cached = now.caches.growths()
        self._note_attributes(now, before)
        for number in sorted(now.written):
            self._note_written(now, number)
        self._note_changes(now)
        self._note_taps(now, taps)
        return now.tree.rebuild(new)

    def _take_argument(self, now: RunningCall, number: int, tensor: torch.Tensor) -> Labels:
        """The sources of an argument: itself, if it may be sent in place of what it comes from."""
        sources = self._sources(tensor)
        key = self._key(tensor)
        call, leaf = self._outputs.get(key, (None, -1))
        is_output = call is not None and tuple(tensor.shape) == call.leaves[leaf].shape
        if (
            not sources
            or is_output
            or isinstance(tensor, nn.Parameter)
            or key in self._names  # a write would change the parameter
            or type(tensor.grad_fn).__name__.startswith(_SEVERAL_VIEWS)
            or 0 in tensor.stride()
            or tensor.nbytes < tensor.untyped_storage().nbytes()  # code behind may read the other part
            or not tensor.is_floating_point()
            or (not tensor.requires_grad and (now.reentrant or is_differentiable(sources, self._calls)))  # detached
            or any(each.kind == "argument" and each.call == now.number for each in sources)
        ):
            return sources
        base = None if call is None else Label("output", call.number, leaf)
        now.arguments[number] = Argument(Leaf.of(tensor), sources, base)
        found = frozenset({Label("argument", now.number, number)})
        self._labels[key] = found
        self._keep_own(tensor, found)
        return found

    def _call_somehow(self, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module; one that does not run without values runs on random ones."""
        assert self._now is not None
        try:
            return plain(*args, **kwargs)
        except Exception as error:
            parameters = [each for each in module.parameters() if is_fake(each)]
            if not parameters:
                raise
            try:
                return self._call_on_values(module, parameters, args, kwargs)
            except Exception as other:
                raise other from error

    def _call_on_values(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        now = self._now
        assert now is not None
        now.caches.undo()
        for held, before in now.given_items:
            set_items(held, before)
        mode = cast(Any, parameters[0]).fake_mode
        flat = take_apart((args, kwargs), self._containers)
        grads = torch.is_grad_enabled() and any(each.requires_grad for each in (*parameters, *tensors_in(flat.leaves)))
        values = [random_like(each) for each in flat.leaves]
        for number, each in enumerate(values):
            if isinstance(each, torch.Tensor):
                now.places.setdefault(self._key(each), []).append(number)
        new_args, new_kwargs = flat.rebuild(values)
        real = {name: random_like(each) for name, each in module.named_parameters()}
        items = [(each, items_of(each)) for each in changeable_in(new_args, new_kwargs)]
        with torch.no_grad():
            output = torch.func.functional_call(module, real, new_args, new_kwargs)

        def fake(each: Any) -> Any:
            if not isinstance(each, torch.Tensor) or is_fake(each):
                return each
            return mode.from_tensor(each).requires_grad_(grads and each.is_floating_point())

        for (own, before), (held, held_before) in zip(now.given_items, items, strict=True):
            if (changed := changed_items(held_before, held)) is not None:
                made = take_apart(new_items(held, changed), self._containers)
                change_items(own, before, changed, made.rebuild(list(map(fake, made.leaves))))
        tree = take_apart(output, self._containers)
        given = {id(new): old for old, new in zip(flat.leaves, values, strict=True) if isinstance(new, torch.Tensor)}
        return tree.rebuild([given.get(id(each), fake(each)) for each in tree.leaves])

    def _hand_out(self, now: RunningCall, value: Any) -> Any:
        """Note a leaf that a call returns; return it under a new label, or the argument that it is."""
        at = len(now.leaves)
        if not isinstance(value, torch.Tensor):
            same = None if isinstance(value, _PLAIN) else _place(now.given, value)
            if same is None:
                self._check_value(now, value)
            now.leaves.append(Leaf(value=value, same=same))
            return value
        same = self._same_argument(now, value)
        now.leaves.append(msgspec.structs.replace(Leaf.of(value), same=same))
        if same is not None:
            return now.given[same]
        with torch.enable_grad() if value.requires_grad else contextlib.nullcontext():
            new = value.clone()
        key = self._key(new)
        self._labels[key] = frozenset({Label("output", now.number, at)})
        self._outputs[key] = now, at
        self._handed.append((now, at, new))
        return new

    def _check_value(self, now: RunningCall, value: Any) -> None:
        if not isinstance(value, _PLAIN):
            raise StageError(
                "a module returns an object with unknown tensors",
                expected="tensors, numbers, and containers of them",
                got=f"{type(value).__qualname__} of {now.path}",
                where=WHERE,
                fix="Describe its class: accel.replace(ctx, containers=[accel.tree.Container(...)]).",
            )
        if isinstance(value, int | float) and now.reads_values:
            raise StageError(
                "a module returns a Python number that it reads from a tensor, which other stages do not have",
                expected="the number as a tensor",
                got=f"{value!r} of {now.path}",
                where=WHERE,
                fix="Return the tensor, without .item() or float().",
            )

    def _same_argument(self, now: RunningCall, value: torch.Tensor) -> int | None:
        """The number of the argument that a result is, unchanged."""
        exact = _place(now.given, value)
        if exact is not None and exact not in now.written:
            return exact
        if Label("inside", now.number) in self._sources(value):
            return None
        for number in now.places.get(self._key(value), ()):
            each = now.given[number]
            facts = (each.shape, each.stride(), each.storage_offset(), each.dtype)
            is_same = facts == (value.shape, value.stride(), value.storage_offset(), value.dtype)
            if number not in now.written and is_same and self._key(each) == self._key(value):
                return number
        return None

    def _note_attributes(self, now: RunningCall, before: Mapping[tuple[str, str], object]) -> None:
        for path, module in named_modules(now.module):
            for name, value in list(vars(module).items()):
                if before.get((path, name)) == identity_of(value):
                    continue
                if type(value) in NUMBERS:
                    self._watched.setdefault(module, {})[name] = now.path
                    let_watch(module, self._look)
                elif tensors_in(value, self._containers):
                    tree = take_apart(value, self._containers)
                    first = len(now.leaves)
                    vars(module)[name] = tree.rebuild([self._hand_out(now, each) for each in tree.leaves])
                    now.stashes.append(Stash(path, name, tree.rebuild, tuple(range(first, len(now.leaves)))))

    def _look(self, module: nn.Module, name: str, is_write: bool) -> None:
        """Refuse a read, outside of calls, of a number that a call has set."""
        path = self._watched[module].get(name)
        if self._now is None and path is not None and not is_write:
            raise StageError(
                "code outside of a module reads a number that the module sets in its forward, which other stages lack",
                expected="a tensor in the attribute, or a result of the module",
                got=f"{name} of {path}",
                where=WHERE,
                fix=f"Set a tensor: self.{name} = value.detach(), without .item() or float().",
            )

    def _note_written(self, now: RunningCall, number: int) -> None:
        tensor = now.given[number]
        leaf = len(now.leaves)
        now.writes.append(Write(number, leaf))
        now.leaves.append(Leaf.of(tensor))
        label = frozenset({Label("output", now.number, leaf)})
        self._labels[self._key(tensor)] = label
        if id(tensor) in self._own:
            self._own[id(tensor)] = label

    def _note_changes(self, now: RunningCall) -> None:
        for number, (held, before) in enumerate(now.given_items):
            items = changed_items(before, held)
            if items is not None:
                tree = take_apart(new_items(held, items), self._containers)
                first = len(now.leaves)
                change_items(held, before, items, tree.rebuild([self._hand_out(now, leaf) for leaf in tree.leaves]))
                now.changes.append(ContainerChange(number, items, tree.rebuild, tuple(range(first, len(now.leaves)))))

    def _note_taps(self, now: RunningCall, taps: Sequence[tuple[str, Any]]) -> None:
        """Label what hooks have seen: a result of the call, or another leaf."""
        known = {id(each): at for at, each in enumerate(now.tree.leaves) if isinstance(each, torch.Tensor)}
        for path, output in taps:
            tree = take_apart(output, self._containers)
            for each in tree.leaves:
                if id(each) not in known or not isinstance(each, torch.Tensor):
                    known[id(each)] = len(now.leaves)
                    _ = self._hand_out(now, each)
                self._alive.append(each)
                at = known[id(each)]
                if isinstance(each, torch.Tensor) and now.leaves[at].same is None:
                    self._labels[self._key(each)] = frozenset({Label("output", now.number, at)})
            now.taps.append(Tap(path, tree.rebuild, tuple(known[id(each)] for each in tree.leaves)))

    # --- the end

    def finish(self, output: Any, states: tuple[State, ...] = ()) -> ForwardRecord:
        """Return the record of the forward that has returned `output`; raise `StageError` for a tensor that a call has
        made and left somewhere else."""
        end = _NOTHING.union(*map(self._sources, tensors_in(output, self._containers)))
        for call, leaf, tensor in self._handed:
            call.note_gradient(leaf, tensor)
        arguments = [each.sources for call in self._calls for each in call.arguments.values()]
        read = [*(each.needs for each in self._calls), *(each.sources for each in self._decisions), *arguments, end]
        for label in sorted(set[Label]().union(*read)):
            if label.kind == "inside":
                raise StageError(
                    "a tensor that a module makes reaches code outside by another way than its result, an attribute of"
                    " the module, or an item of a list, dictionary or dataclass that it is given",
                    expected="a tensor that it returns",
                    got=self._calls[label.call].path,
                    where=WHERE,
                    fix="Return the tensor, or let an attribute of the module hold it.",
                )
        calls = tuple(each.frozen() for each in self._calls)
        held = held_tensors(self._model)
        between = tuple(self._between)
        updates = tuple(sorted(self._updates))
        facts = (self._read_flops, self._units, self._draws, updates, tuple(self._branches), states)
        return ForwardRecord(calls, end, tuple(self._decisions), held, between, *facts)


def _place(given: Sequence[Any], value: object) -> int | None:
    return next((number for number, each in enumerate(given) if each is value and value is not None), None)
