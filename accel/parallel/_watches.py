# SPDX-License-Identifier: Apache-2.0
"""Hooks of a model's first forwards: changes of parameters and buffers, and forwards without autocast."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - torch has no other name
from torch.overrides import TorchFunctionMode

from accel.context import DistContext
from accel.errors import ConfigError, PrepareError, StepError
from accel.parallel._modules import (
    has_parameters,
    named_modules,
    note_tensor,
    stage_modules,
    tensor_notes,
    unwrap_model,
)
from accel.parallel._private import GET_DATA, SET_DATA, flat_tensors, given_to_transform, is_compiled, mixes_dtensors
from accel.parallel._spread import ModelView
from accel.parallel.parts import PartTensor
from accel.parallel.parts._layout import refuse_transform
from accel.tensors import is_dtensor, local_part
from accel.terminal import show_names
from accel.topology import dimension_of

_LOOKUP = ("input", "weight", "", "max_norm")  # arguments of a lookup by position
_HARMLESS = ("requires_grad_", "share_memory_", "detach_", "retain_grad_")


class _ParameterChanges(TorchFunctionMode):
    """Notes parameters that are changed, without effect on what ranks keep of them. Refuses transforms of torch.func
    that are given a part, which asks no rule for them.

    Attributes:
        found: ways by the name of a parameter.
    """

    def __init__(self, model: nn.Module, kept: Collection[int]) -> None:
        super().__init__()
        self._model = model
        self._kept = kept
        self._views: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        self.found: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        first: Any = args[0] if args else None
        if name == "requires_grad_" and isinstance(given_to_transform(first), PartTensor):
            refuse_transform("a function that may reduce features")
        if name in ("embedding", "embedding_bag"):  # writes the rows that it bounds, within this one function
            given: dict[str, Any] = {**dict(zip(_LOOKUP, args, strict=False)), **(kwargs or {})}
            if given.get("max_norm") is not None:
                self._note(given["weight"], "max_norm")
        if name == "__set__" and func == SET_DATA and not _is_same(first, args[1]):
            self._note(first, "data", also_parts=True)
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if mixes_dtensors(error):
                raise computed_as_kept(error) from error
            self._refuse_computed(name, args)
            raise
        if name == "__set__":
            return result
        if isinstance(result, torch.Tensor) and is_dtensor(result) and torch.is_grad_enabled():
            self._refuse_computed(name, args)
        if (name == "__get__" and func == GET_DATA) or name == "detach":
            if isinstance(first, nn.Parameter):
                self._views[id(result)] = result, first
        elif name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS):
            for each in cast("list[Any]", first) if isinstance(first, list | tuple) else [first]:
                self._note(self._views[id(each)][1] if id(each) in self._views else each, name)
        return result

    def _refuse_computed(self, name: str, args: Any) -> None:
        """Raise `ConfigError` for a function of a parameter as ranks keep it and of a plain tensor with a gradient: its
        gradient would be a DTensor."""
        tensors = flat_tensors(args)
        if not any(each.requires_grad and not is_dtensor(each) for each in tensors):
            return
        names = {id(each): path for path, each in self._model.named_parameters() if is_dtensor(each)}
        path = next((names[id(each)] for each in tensors if id(each) in names), "")
        if path:
            raise ConfigError(
                "the forward computes with a parameter as ranks keep it, and not with its values",
                expected="parameters that are read as attributes of their modules, such as self.block.weight",
                got=f"{path.removeprefix('module.')} in {name}, as from named_parameters()",
                where="the first training forward of a prepared model",
                fix="Read it as an attribute of its module; or keep parameters whole, on a mesh of dp alone:"
                ' accel.replace(ctx, strategy="ddp").',
            )

    def _note(self, changed: Any, way: str, *, also_parts: bool = False) -> None:
        is_read = also_parts and isinstance(changed, torch.Tensor) and changed.requires_grad  # as a plain tensor
        if id(changed) in self._kept or not (is_read or isinstance(changed, nn.Parameter)):
            return
        if also_parts or not is_dtensor(changed):
            named = (name for name, each in self._model.named_parameters() if each is changed)
            _ = self.found.setdefault(next(named, "a parameter").removeprefix("module."), way)


def _is_same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a tensor is set to its own data, as by a `Module.to` that changes nothing."""
    own = local_part(tensor)
    other = local_part(data)
    return own.dtype == other.dtype and own.device == other.device and own.data_ptr() == other.data_ptr()


def computed_as_kept(error: Exception) -> PrepareError:
    """Make the error for a forward that computes with a DTensor of `parameters()`, or asks `get_parameter` for one
    that is a plain tensor in the forward, with its line."""
    return PrepareError(
        "the forward computes with a parameter as ranks keep it, a DTensor",
        expected="parameters that are read as attributes of their modules",
        got=_line_of(error),
        where="forward of a prepared model",
        fix="Read it as an attribute, such as weight = self.block.weight, and not by get_parameter(), parameters(),"
        " named_parameters() or state_dict(). With the strategy fsdp, read it in the forward of the unit that holds it,"
        " which gathers it, or make the model one unit: plan=accel.parallel.Plan(units=()).",
    )


def computed_in_block(error: Exception) -> StepError:
    """Make the error for a line of a step's block that computes with a DTensor, with this line."""
    return StepError(
        "a line computes with a parameter as ranks keep it, a DTensor, and with a plain tensor",
        expected="outputs of the model, and terms that its forward returns",
        got=_line_of(error),
        where="accel.accumulate",
        fix="Return penalties, and learnt factors of losses, with the outputs from the forward of the module that has"
        " the parameter. If the line calls a module inside the model, put the call in a method of the model: model ="
        ' accel.prepare_model(ctx, model, plan=accel.parallel.Plan(methods=("encode",))).',
    )


def _line_of(error: Exception) -> str:
    """Return the user's line that raised an error."""
    within = traceback.extract_tb((error.__cause__ or error).__traceback__)  # a cause that ranks have shared
    others = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)
    own = [each for each in (*traceback.extract_stack(), *within) if not each.filename.startswith(others)]
    return f"line {own[-1].lineno} of {own[-1].filename}, {own[-1].line}" if own else str(error)


class _FirstForward:
    """Looks at the first training forward of a model, by hooks that go after it.

    Args:
        model: the module.
        wrap: makes a hook of a method.
        prepend: whether to look before the module's other hooks.
    """

    def __init__(self, model: nn.Module, wrap: Callable[[Any], Any], *, prepend: bool = False) -> None:
        self._is_begun = self._is_over = False
        self._watched = model  # a copy of it has the same hooks, as stages of a pipeline have
        self._hooks = (
            model.register_forward_pre_hook(wrap(self._begin), prepend=prepend),
            model.register_forward_hook(wrap(self._end), always_call=True),
            model.register_forward_hook(wrap(self._judge)),
        )

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def begin(self, module: nn.Module) -> bool:
        """Begin to look; False if the model must not be watched."""
        raise NotImplementedError

    def end(self) -> None:
        """Cease to look, after an error of the forward too."""

    def judge(self, module: nn.Module) -> None:
        """Report what was seen in a forward without an error."""
        raise NotImplementedError

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling() or self._is_over or not module.training or not torch.is_grad_enabled():
            return
        if module is not self._watched:
            return
        self._is_begun = self.begin(module)
        if not self._is_begun:
            self._remove()

    def _end(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._is_begun:
            self.end()
            self._is_begun = False
            self._is_over = True

    def _remove(self) -> None:
        for each in self._hooks:
            each.remove()

    def _judge(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._is_over:
            self._remove()
            self.judge(module)


class _ChangesWatch(_FirstForward):
    """Looks at changes of parameters that ranks divide."""

    def __init__(self, view: ModelView) -> None:
        kept = frozenset(id(each) for each in view.parameters.values() if not is_dtensor(each))
        self._changes = _ParameterChanges(view.model, kept)
        super().__init__(view.model, cast(Any, torch.compiler).disable)

    def begin(self, module: nn.Module) -> bool:
        """Enter the mode, unless torch compiles a part of the model."""
        if any(is_compiled(each) for each in module.modules()):
            return False
        _ = self._changes.__enter__()
        return True

    def end(self) -> None:
        """Leave the mode."""
        cast(Any, self._changes).__exit__(None, None, None)

    def judge(self, module: nn.Module) -> None:
        """Raise for a change that is lost, and warn about bounds."""
        bounded = [name for name, way in self._changes.found.items() if way.startswith("clamp")]
        lost = {name: way for name, way in self._changes.found.items() if name not in bounded}
        if lost:
            raise ConfigError(
                "the forward changes sharded parameters, and the change is lost after it",
                expected="parameters that change only between steps",
                got=show_names([f"{name} by {way}" for name, way in lost.items()]),
                where="the first training forward of a prepared model",
                fix="Change them between steps, as accel.training.Ema does; or keep them whole, on a"
                ' mesh of dp alone: accel.replace(ctx, strategy="ddp").',
            )
        if bounded:
            text = "the forward bounds parameters (%s): ranks keep them as they were, and bound them at each forward"
            logging.getLogger("accel.parallel").warning(text, show_names(bounded))


def refuse_changes(view: ModelView) -> None:
    """Let the first training forward of a divided model raise `ConfigError` where it changes parameters and ranks would
    lose the change. Mutates the model, by hooks that go after it.

    A forward that bounds parameters, as Gemma 3n's, does so at each call, and is warned about. Models with regions that
    torch compiles are not changed.
    """
    _ = _ChangesWatch(view)


_MOVED = (
    "the forward changes buffers in training (%s). Like statistics of a batch norm, they change with each micro-batch, "
    "so accumulation and pipelines change them more often than one large batch does. Each rank changes them by its "
    "samples; rank 0's replace the others' before the next forward, unless prepare_model has broadcast_buffers=False."
)


class _BufferWatch(_FirstForward):
    """Looks at changes of buffers, for one log line."""

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[str, tuple[torch.Tensor, int]] = {}
        # Hooks of torch.nn.utils.spectral_norm change buffers too; hooks of a sharded model bring rank 0's. A graph
        # would break at a hook that is not traced.
        super().__init__(model, lambda hook: hook, prepend=not any(map(is_dtensor, model.parameters())))

    def begin(self, module: nn.Module) -> bool:
        """Note the buffers and their versions."""
        self._before = {name: (each, each._version) for name, each in _statistics(module)}
        return bool(self._before)

    def judge(self, module: nn.Module) -> None:
        """Log the buffers that the forward has changed, or replaced by others of other values."""
        moved: list[str] = []
        for name, each in _statistics(module):
            before, version = self._before.get(name, (each, each._version))
            is_same = each is before or (each.shape == before.shape and torch.equal(each, before))
            if before._version != version or not is_same:
                moved.append(name.removeprefix("module."))
        self._before = {}
        if moved:
            logging.getLogger("accel.parallel").warning(_MOVED, show_names(moved))


def _statistics(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's buffers but for counters and buffers of batch norms: everybody expects these to change."""
    for path, module in named_modules(model):
        if not isinstance(module, _BatchNorm):
            for name, each in module.named_buffers(path, recurse=False):
                if (each.is_floating_point() or each.is_complex()) and not each.is_inference():
                    yield name, each


def log_changed_buffers(ctx: DistContext, model: nn.Module) -> None:
    """Let the first training forward of a prepared model log which buffers it changes, once for each stage. Mutates the
    model, by hooks that go after it. A model that torch compiles as a whole is not changed."""
    others = (axis for name, axis in ctx.position.axes if dimension_of(name) != "pipeline")
    is_first = ctx.data_parallel[0] == 0 and all(axis.rank == 0 for axis in others)
    if is_first and any(each.requires_grad for each in model.parameters()):
        for each in stage_modules(unwrap_model(model)):
            if any(True for _ in _statistics(each)):
                _ = _BufferWatch(each)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Look:
    """A hook of all modules that hold parameters, until one of them has run with autocast on.

    torch.compile traces it: it neither breaks a graph nor takes itself away there.
    """

    def __init__(self, device_type: str) -> None:
        self.seen = [False, False]
        self.device_type = device_type
        self.handles: list[Any] = []

    def __call__(self, _module: nn.Module, _inputs: Any) -> None:
        on = torch.is_autocast_enabled(self.device_type)
        self.seen[0 if on else 1] = True
        if on and not torch.compiler.is_compiling():
            for handle in self.handles:
                handle.remove()


def watch_autocast(model: nn.Module, device_type: str, compute: str) -> None:
    """Note on a model's parameters whether its forward runs with autocast on, unless they have the compute dtype.
    Mutates it by hooks until then."""
    if all(each.dtype is _DTYPES[compute] for each in model.parameters() if each.is_floating_point()):
        return
    look = _Look(device_type)
    for module in model.modules():
        if has_parameters(module):
            look.handles.append(module.register_forward_pre_hook(look))
    for each in model.parameters():
        note_tensor(each, autocast=look.seen)


def runs_without_autocast(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether forwards of watched models have run, and none of them with autocast on."""
    without = False
    for each in parameters:
        seen = tensor_notes(each).get("autocast")
        if seen is not None:
            if seen[0]:
                return False
            without = without or seen[1]
    return without
