# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for modules of other stages, and the error of a forward that a chain of stages cannot serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn

from accel.errors import StageError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import named_modules, shallow_copy

_READS = "accel_reads"
EMBEDDINGS = "inputs_embeds"  # where models of Hugging Face take what an embedding would return
_MAIN = "hidden_states"  # name of a block's input in the models of Hugging Face


class Reads:
    """Reads of freed tensors and calls of stand-ins, for the error of a forward that needs their values.

    Attributes:
        latest: path of the tensor read last; None before.
        called: path of the stand-in called first; None before.
    """

    __slots__ = ("called", "latest")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget earlier calls of the forward."""
        self.latest: str | None = None
        self.called: str | None = None


class Freed(Mixin):
    """A module of another stage, or one below it: its parameters and buffers are None.

    Attributes:
        accel_freed: paths of these tensors, by name.
        accel_reads: a list that notes reads of them.
    """

    accel_freed: Mapping[str, str]
    accel_reads: Reads

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, and note the read of a freed tensor."""
        if (path := self.__dict__.get("accel_freed", {}).get(name)) is not None:
            self.accel_reads.latest = path
        return cast(Any, super()).__getattr__(name)

    def __repr__(self) -> str:
        """Return its class and place. Its own text may need the parameters."""
        return f"{type(self).__name__}(of another stage)"


class SkippedModule(Freed):
    """A module of another stage. It keeps its attributes, which the forward around it may read.

    Attributes:
        accel_place: its path.
    """

    accel_place: str

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the first input; 0 for indices, so that a skipped embedding of positions adds nothing."""
        self.accel_reads.called = self.accel_reads.called or self.accel_place
        first = inputs[0] if inputs else kwargs.get(_MAIN, next(iter(kwargs.values()), None))
        if first is None:  # an embedding that may take its own output
            first = kwargs.get(EMBEDDINGS)
        if isinstance(first, torch.Tensor) and not (first.is_floating_point() or first.is_complex()):
            return torch.zeros((), device=first.device)
        return first

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return nothing: the rank of its stage saves the module."""
        _ = prefix, keep_vars
        return {} if destination is None else destination


def is_skipped(module: nn.Module) -> bool:
    """Return whether a module stands in for one of another stage."""
    return isinstance(module, SkippedModule)


def remove_modules(model: nn.Module, paths: Iterable[str]) -> list[nn.Parameter]:
    """Replace modules of a model by stand-ins; return the removed parameters, in order. Mutates the model."""
    before = list(model.parameters())
    reads = reads_of(model)
    removed = tuple(paths)
    named = named_modules(model, every_path=True)
    shared = {id(each) for path, each in named if not f"{path}.".startswith(tuple(f"{other}." for other in removed))}
    for path in removed:
        module = model.get_submodule(path)
        if not shared.isdisjoint(map(id, module.modules())):  # those that stay keep what they hold
            above, _, key = path.rpartition(".")
            module = _shallow(module)
            setattr(model.get_submodule(above), key, module)
        _empty(module, path, reads)
    kept = {id(each) for each in model.parameters()}
    return [each for each in before if id(each) not in kept]


def stage_view(model: nn.Module, own: Sequence[str], others: Sequence[str]) -> nn.Module:
    """Return a model with the modules of one stage, which it shares with the model of all of this rank's stages."""
    return _view(model, "", frozenset(own), frozenset(others), reads_of(model))


def reads_of(model: nn.Module) -> Reads:
    """Return where reads of a model's freed tensors are noted, which its views share."""
    return vars(model).setdefault(_READS, Reads())


def _view(module: nn.Module, path: str, own: frozenset[str], others: frozenset[str], reads: Reads) -> nn.Module:
    if path in others:
        stand_in = _shallow(module)
        _empty(stand_in, path, reads)
        return stand_in
    if path and not any(each.startswith(f"{path}.") for each in own | others):
        return module
    view: Any = shallow_copy(module)
    children = cast("Mapping[str, nn.Module | None]", view._modules)
    view._modules = {
        key: None if child is None else _view(child, f"{path}.{key}" if path else key, own, others, reads)
        for key, child in children.items()
    }
    return view


def _shallow(module: nn.Module) -> nn.Module:
    """A copy of a module and those below it that shares their tensors."""
    copied: Any = shallow_copy(module)
    _without_hooks(copied)
    children = cast("Mapping[str, nn.Module | None]", copied._modules)
    copied._parameters = dict(copied._parameters)
    copied._buffers = dict(copied._buffers)
    copied._modules = {key: None if child is None else _shallow(child) for key, child in children.items()}
    return copied


def _without_hooks(module: nn.Module) -> None:
    """Leave a stand-in none of the hooks of the module itself."""
    own = vars(module)
    hooks = [name for name, held in own.items() if "_hooks" in name and isinstance(held, dict)]
    own |= {name: type(own[name])() for name in hooks}


def _empty(module: nn.Module, path: str, reads: Reads) -> None:
    _without_hooks(module)
    for below, each in named_modules(module):
        own = [name for name, _ in each.named_parameters(recurse=False, remove_duplicate=False)]
        own += [name for name, _ in each.named_buffers(recurse=False, remove_duplicate=False)]
        for name in own:
            setattr(each, name, None)
        freed: Any = each
        freed.accel_freed = {name: ".".join(filter(None, (path, below, name))) for name in own}
        freed.accel_reads = reads
    vars(module)["accel_place"] = path
    add_mixin([module], SkippedModule)
    add_mixin(module.modules(), Freed)


_CHAIN = "a chain: every stage runs the whole forward, in which the modules of other stages only pass their inputs on"
_LABELS = ("labels", "label")


def stage_failure(
    error: Exception,
    module: nn.Module,
    stages: Sequence[Sequence[str]],
    at: int,
    hidden: torch.Tensor,
    kwargs: Mapping[str, Any],
    *,
    where: str,
) -> StageError:
    """Return the error of a stage's forward, by the exception that it raised and its inputs."""
    problem = f"a pipeline stage failed: {type(error).__name__}: {str(error).strip()}"
    found = _reason(error, module, stages, at, hidden, kwargs)
    if found is None:
        return StageError(problem, where=where)
    return StageError(problem, expected=_CHAIN, got=found[0], where=where, fix=found[1])


def _reason(
    error: Exception,
    module: nn.Module,
    stages: Sequence[Sequence[str]],
    at: int,
    hidden: torch.Tensor,
    kwargs: Mapping[str, Any],
) -> tuple[str, str] | None:
    """The reason why a chain cannot serve the forward, and the way out; None for errors of other code."""
    trace, own = error.__traceback__, [module.get_submodule(path) for path in stages[at]]
    if at and _shares_tokens(module) and _is_inside(trace, [module]):
        part = f"this rank's part of the tokens as hidden states, {list(hidden.shape)}"
        return f"{part}, from which the forward makes positions or a mask", "Leave sequence out of the plan."
    if not _is_inside(trace, [module]):
        return None
    reads = reads_of(module)
    if _is_inside(trace, own):
        if at or reads.called is None:
            return None
        called = f"{reads.called}, a module of stage {_owner(reads.called, stages)}, before those of stage 0"
        fix = "Name the modules of each stage as the forward calls them, not as the model has them"
        return f"a forward that calls {called}", f"{fix}: Plan(stages=[[...], [...]])."
    if reads.latest is not None and "NoneType" in str(error):
        return (
            f"a forward that reads {reads.latest} itself, a tensor of stage {_owner(reads.latest, stages)} alone",
            "Call a module that has it, and that one stage has, instead of reading the tensor.",
        )
    if labels := [name for name in _LABELS if name in kwargs]:
        return (
            f"an input {labels[0]!r}, from which every stage computes a loss of its own activations",
            f"Leave {labels[0]} out of the inputs: forward_backward(..., targets=labels, loss_fn=...).",
        )
    if not at:
        if reads.called is None:
            return None
        owner = _owner(reads.called, stages)
        return (
            f"a forward that computes with the output of {reads.called}, a module of stage {owner}, before it ends",
            "Name it among the modules of the stage that needs its output: Plan(stages=[[...], [...]]).",
        )
    got = f"hidden states of shape {list(hidden.shape)} in the place of the first input, which the forward uses itself"
    return got, take_hidden(module)


def _shares_tokens(module: nn.Module) -> bool:
    """Whether ranks along tp have parts of the tokens between the layers of a stage."""
    layers = [cast(Any, vars(each).get("accel_layer")) for each in module.modules()]
    return any("sequence" in each.rule.style for each in layers if each is not None)


def _owner(path: str, stages: Sequence[Sequence[str]]) -> int:
    """The stage of a module or tensor."""
    return next(n for n, paths in enumerate(stages) if f"{path}.".startswith(tuple(f"{each}." for each in paths)))


def take_hidden(module: nn.Module) -> str:
    """Return the way out of a forward that uses the stand-in for its first input."""
    peft = " Of a peft model: give its config a task_type." if hasattr(module, "peft_config") else ""
    return (
        "Let the forward give its first input to the first module alone, or take an argument inputs_embeds in its"
        f" place.{peft}"
    )


def _is_inside(trace: TracebackType | None, modules: Sequence[nn.Module]) -> bool:
    """Whether an error was raised in a call of one of some modules."""
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module) and any(own is each for each in modules):
            return True
        trace = trace.tb_next
    return False
