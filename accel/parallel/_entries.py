# SPDX-License-Identifier: Apache-2.0
"""Methods and submodules of a spread model that are called besides its forward.

Each of them runs inside a call of the prepared model, so that gathers of parameters, exchanges of gradients, buffers
and hooks work as in a forward. A submodule of a sharded model that is called otherwise raises an error with the line
to write.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel.errors import PrepareError
from accel.errors._checks import did_you_mean
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import named_modules, note_module, notes_of, written_class
from accel.parallel._private import contains_compiled, is_compiled, runs_in_backward
from accel.parallel._spread import ModelView
from accel.tensors import is_dtensor, mesh_of

_WHERE = "Plan.methods"


class _Gate:
    """The way into a spread model, shared by its entries.

    Attributes:
        is_open: whether a call of the model runs; its parts are called as they are then.
    """

    __slots__ = ("_needs_grad", "_outer", "is_open")

    def __init__(self) -> None:
        self._outer: weakref.ref[nn.Module] | None = None
        self._needs_grad = False
        self.is_open = False

    def lead_to(self, outer: nn.Module, *, needs_grad: bool) -> None:
        """Set the module to call for the model; `needs_grad`: forwards without gradients do not need it."""
        self._outer = weakref.ref(outer)
        self._needs_grad = needs_grad

    def outer(self) -> nn.Module | None:
        """Return the module to call; None where a part can be called as it is."""
        if self.is_open or self._outer is None or runs_in_backward():
            return None
        if self._needs_grad and not torch.is_grad_enabled():
            return None
        return self._outer()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        copied = _Gate()
        outer = None if self._outer is None else memo.get(id(self._outer()))
        if outer is not None:  # a separate copy of a part leads nowhere
            copied.lead_to(outer, needs_grad=self._needs_grad)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _Gate, ()


def _gate_of(module: nn.Module) -> _Gate:
    return cast(_Gate, notes_of(module).get("gate"))


class _Entered(Mixin, nn.Module):
    """Stands before the class of a model with entries; the keyword `accel_entry` of its call names one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _gate_of(self).is_open:
            return self.accel_again(*args, **kwargs)
        if "accel_entry" in kwargs and is_compiled(self):
            # torch compiles the forward; a method may be a whole loop
            return cast(Any, self)._call_impl(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def accel_again(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model within its call, as `generate` does; the outer call continues with gathered parameters."""
        try:
            return super().__call__(*args, **kwargs)
        finally:
            if hasattr(self, "unshard"):
                cast(Any, self).unshard()

    def forward(self, *args: Any, accel_entry: str | None = None, **kwargs: Any) -> Any:
        """Run the model's own forward, or the entry of a name."""
        gate = _gate_of(self)
        before = gate.is_open
        gate.is_open = True
        try:
            if accel_entry is None:
                return super().forward(*args, **kwargs)
            return attrgetter(accel_entry)(self)(*args, **kwargs)
        finally:
            gate.is_open = before


class _Part(Mixin, nn.Module):
    """Stands before the class of a submodule that is an entry.

    Attributes:
        accel_path: its path in the model.
    """

    accel_path = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = _gate_of(self).outer()
        if outer is None:
            return super().__call__(*args, **kwargs)
        return outer(*args, accel_entry=self.accel_path, **kwargs)


class _Method:
    """A method that is an entry. The class that has it as an attribute gets a function, which torch.compile follows.

    Args:
        path: of the method in the model.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __set_name__(self, owner: Any, name: str) -> None:
        path = self._path

        def entered(module: Any, *args: Any, **kwargs: Any) -> Any:
            outer = _gate_of(module).outer()
            if outer is None:
                return getattr(cast(Any, super(owner, module)), name)(*args, **kwargs)
            return outer(*args, accel_entry=path, **kwargs)

        kinds = cast(type, owner).__mro__[1:]
        behind: Any = next(vars(each)[name] for each in kinds if name in vars(each))
        setattr(owner, name, functools.wraps(behind)(entered))


class _Shown:
    """An attribute of a wrapper in the place of a method of the module inside of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, kind: type) -> Any:
        return self if wrapper is None else getattr(wrapper.module, self._name)


class _Shows(Mixin, nn.Module):
    """Stands before the class of a wrapper that has the methods of the module inside."""


def check_methods(model: nn.Module, methods: Sequence[str], axes: Sequence[str]) -> None:
    """Raise `PrepareError` for what `Plan.methods` cannot name. No communication.

    `axes`: axes of several ranks that run only parts of a forward.
    """
    for path in methods:
        if problem := _problem(model, path):
            known = _callables(model)
            raise PrepareError(
                "the plan names what is no method or submodule to call",
                expected="methods of the model, as 'encode'; paths of its submodules, as 'model.encoder'; or both",
                got=f"{path!r}: {problem}",
                where=_WHERE,
                fix=did_you_mean(path, known) if known else "Leave methods out: it has none besides model(...).",
            )
    if axes:
        raise PrepareError(
            "ranks along these axes divide only forwards of the full model",
            expected="no methods, or a mesh of dp and tp",
            got=f"{', '.join(map(repr, methods))}, and {', '.join(axes)}",
            where=_WHERE,
            fix="Let forward do it, by an argument; or leave the axis out of the mesh.",
        )


def _problem(model: nn.Module, path: str) -> str:
    """Return the reason that keeps an attribute from being an entry; empty if there is none."""
    try:
        found: Any = attrgetter(path)(model)
        owner: Any = attrgetter(path.rpartition(".")[0])(model) if "." in path else model
    except AttributeError:
        return "no such attribute"
    name = path.rpartition(".")[2]
    if isinstance(found, nn.Module):
        has_forward = type(found).forward is not nn.Module.forward
        return "" if has_forward else f"{type(found).__name__} has no forward"
    if not callable(found) or not isinstance(owner, nn.Module):
        return f"{type(found).__name__} is not a method of a module"
    if name in vars(owner):
        return "an attribute of the object, and no method of its class"
    if name == "forward":
        return "calls of a module run its forward"
    if hasattr(DistributedDataParallel, name):
        return "a method that modules of torch have, and no entry of the model"
    return "a generator, which runs after its call" if inspect.isgeneratorfunction(inspect.unwrap(found)) else ""


def _callables(model: nn.Module) -> list[str]:
    methods = (name for name, each in inspect.getmembers_static(type(model)) if callable(each))
    names = [name for name in methods if not name.startswith("_") and not hasattr(nn.Module, name)]
    return [*names, *(name for name, _ in named_modules(model) if name)]


def add_entries(model: nn.Module, methods: Sequence[str]) -> None:
    """Let methods and submodules of a model, and the encoder of an encoder-decoder, run in calls of it. Mutates the
    model, before it is spread; `lead_entries` ends it."""
    paths = dict.fromkeys([*methods, *_encoders(model)])
    if not paths or "gate" in notes_of(model):
        return
    gate = _Gate()
    owned: dict[nn.Module, dict[str, object]] = {}
    for path in paths:
        found = attrgetter(path)(model)
        if isinstance(found, nn.Module):
            note_module(found, gate=gate)
            add_mixin([found], _Part, accel_path=path)
        else:
            owner = attrgetter(path.rpartition(".")[0])(model) if "." in path else model
            owned.setdefault(owner, {})[path.rpartition(".")[2]] = _Method(path)
    note_module(model, gate=gate)
    add_mixin([model], _Entered)
    for owner, entries in owned.items():
        note_module(owner, gate=gate)
        add_mixin([owner], _HasMethods, **entries)


class _HasMethods(Mixin, nn.Module):
    """Stands before the class of a module with methods that are entries, which are its attributes."""


def lead_entries(model: nn.Module, prepared: nn.Module, methods: Sequence[str]) -> None:
    """Let entries of a model lead to what `prepare_model` returns: the model itself, or the wrapper around it, which
    shows the methods. Mutates both."""
    gate: _Gate | None = notes_of(model).get("gate")
    if gate is None:
        return
    is_wrapped = isinstance(prepared, DistributedDataParallel)
    # without gradients a replica has nothing to exchange, and a single rank may run
    gate.lead_to(prepared if is_wrapped else model, needs_grad=is_wrapped)
    shown = {each: _Shown(each) for each in methods if "." not in each}
    if is_wrapped and shown:
        add_mixin([prepared], _Shows, **shown)


def _encoders(model: nn.Module) -> Iterator[str]:
    """Yield the path of the encoder that an encoder-decoder of transformers has, which its `generate` calls first."""
    config: Any = getattr(model, "config", None)
    find: Any = getattr(model, "get_encoder", None)
    if find is None or not getattr(config, "is_encoder_decoder", False):
        return
    try:
        encoder = find()
    except (AttributeError, NotImplementedError, TypeError):  # of another meaning
        return
    for name, module in named_modules(model):
        if name and module is encoder:
            yield name


class _ShardedCall:
    """A hook of a submodule that raises for a call of it while its parameters are shards.

    Args:
        model: the module that `fully_shard` gathers first.
        sharded: dimensions of the meshes of the module's own parameters that are gathered with the model, by name.
        methods: entries of the model's plan.
    """

    def __init__(self, model: nn.Module, sharded: Mapping[str, int], methods: Sequence[str]) -> None:
        self._model = weakref.ref(model)
        self._sharded = sharded
        self._methods = methods

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # arguments that are DTensors compute with shards
        if any(_shards_in(module, self._sharded)) and not any(map(is_dtensor, (*args, *kwargs.values()))):
            raise self._error(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ShardedCall:
        model = self._model()
        return _ShardedCall(memo.get(id(model), model), self._sharded, self._methods)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ShardedCall, (nn.Module(), {}, ())  # what is read from a file is not sharded

    def _error(self, module: nn.Module) -> PrepareError:
        model = self._model() or module
        paths = {id(each): name for name, each in named_modules(model)}
        path = _called(paths) or paths.get(id(module), "")
        is_forward = path == "forward"
        methods = ", ".join(f'"{each}"' for each in dict.fromkeys([*self._methods, path]))
        line = f"accel.prepare_model(ctx, model, plan=accel.parallel.Plan(methods=({methods},)))"
        return PrepareError(
            "a part of a sharded model is called outside the model, while its parameters are shards",
            expected="a call of the model, which gathers them, or of an entry that the plan names",
            got=f"a call of {path!r}, which runs {paths.get(id(module), '')!r}",
            where=f"{written_class(model).__name__}, {path}",
            fix="Call the model itself: model(...), not model.forward(...)." if is_forward else f"Name it: {line}",
        )


def refuse_parts(view: ModelView, gathered: Collection[int], methods: Sequence[str]) -> None:
    """Let submodules of a sharded model raise `PrepareError` when they are called alone. Mutates them by hooks.

    `gathered`: the `id` of each parameter that torch gathers with the model itself. Modules inside of other units have
    no hook, as their forwards are most of a step.
    """
    model = view.model
    for module in view.modules.values():
        own = ((name, each) for name, each in module.named_parameters(recurse=False) if id(each) in gathered)
        sharded = _sharded_dims(own)
        if sharded and module is not model:
            _ = module.register_forward_pre_hook(_ShardedCall(model, sharded, methods), with_kwargs=True)


def refuse_parts_of_units(units: Mapping[str, nn.Module]) -> None:
    """Let the first forward of a sharded model raise `PrepareError` where it calls a part of a unit outside of the
    unit's forward, which gathers. Mutates the units, by path and the model itself last, by hooks that go after it.

    An expert of a list is left out: the module that loops over the list collects its calls.
    """
    handles: list[tuple[nn.Module, Any]] = []

    def begin(*_: object) -> None:
        for unit, handle in handles:
            if unit is not root and contains_compiled(unit):  # whose graph would be of the first forward alone
                handle.remove()

    def end(*_: object) -> None:
        while handles:
            handles.pop()[1].remove()

    *inner, (_, root) = units.items()
    for unit_path, unit in inner:
        for path, module in named_modules(unit):
            sharded = _sharded_dims(module.named_parameters(recurse=False))
            is_expert = "expert" in notes_of(module)
            if path and sharded and not is_expert and f"{unit_path}.{path}" not in units:
                hook = partial(_refuse_part, unit_path, unit, path, sharded)
                handles.append((unit, module.register_forward_pre_hook(hook)))
    if handles:
        uncompiled: Any = cast(Any, torch.compiler).disable
        handles.append((root, root.register_forward_pre_hook(uncompiled(begin))))
        handles.append((root, root.register_forward_hook(uncompiled(end))))


def _refuse_part(
    unit_path: str, unit: nn.Module, path: str, sharded: Mapping[str, int], module: nn.Module, _inputs: Any
) -> None:
    if torch.compiler.is_compiling():
        return
    name = next(_shards_in(module, sharded), None)
    if name is None:
        return
    holder, _, key = unit_path.rpartition(".")
    around = ".".join(filter(None, (holder, "*" if key.isdigit() else key)))
    parts = [each for each, part in unit.named_children() if any(True for _ in part.parameters())]
    listed = "".join(f'"{around}.{each}", ' for each in parts).strip()
    raise PrepareError(
        "the forward calls a part of a unit outside of the unit's forward, which gathers its parameters",
        expected=f"a call of {unit_path}",
        got=f"a call of {path}, which holds {name}",
        where=f"{unit_path}.{path}",
        fix=f"Name the parts: accel.prepare_model(ctx, model, plan=accel.parallel.Plan(units=({listed}))).",
    )


def _sharded_dims(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """Return the number of mesh dimensions of each sharded parameter, by name."""
    return {name: mesh.ndim for name, each in named if (mesh := mesh_of(each)) is not None}


def _shards_in(module: nn.Module, sharded: Mapping[str, int]) -> Iterator[str]:
    """Yield names of parameters that are shards now. A gathered one is plain, or along tp a DTensor of fewer mesh
    dimensions."""
    for name, ndim in sharded.items():
        parameter = getattr(module, name)
        if type(parameter) is not nn.Parameter and is_dtensor(parameter) and parameter.device_mesh.ndim == ndim:
            yield name


def _called(paths: Mapping[int, str]) -> str:
    """Return the outermost method or submodule of a model that the caller's stack runs, by its path; the model's own
    forward as "forward"."""
    found = ""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, nn.Module) and (path := paths.get(id(first))) is not None:
            name = _method_name(type(first), frame.f_code)
            if name == "forward" and path:
                found = path
            elif name:
                found = f"{path}.{name}" if path else name
        frame = frame.f_back
    return found


def _method_name(kind: type, code: CodeType) -> str:
    """Return the name of a module's method by its code, "forward" for those that a call of it runs; empty for
    another's."""
    for each in kind.__mro__:
        for name, value in vars(each).items():
            if getattr(inspect.unwrap(value) if callable(value) else None, "__code__", None) is code:
                return "forward" if each is nn.Module or issubclass(each, Mixin) else name
    return ""
