# SPDX-License-Identifier: Apache-2.0
"""Stages of a traced model: what each rank holds of it, and graphs that run in the place of its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.comm import peer_error
from accel.errors import AccelError, PrepareError, StageError
from accel.parallel._modules import COMPILES, named_modules, named_tensors, shallow_copy
from accel.parallel._private import is_compiled, is_view, module_hooks
from accel.parallel._sharded import GatheredFormat
from accel.parallel.axes.pipeline._boundaries import Boundary
from accel.parallel.axes.pipeline._stage_module import MicroBatch, Work
from accel.parallel.axes.pipeline._trace_blocks import recomputed
from accel.parallel.axes.pipeline._trace_cut import TracedStage
from accel.parallel.axes.pipeline._trace_export import (
    WHERE,
    BatchForm,
    Ghost,
    Mode,
    StageGraphs,
    export_stages,
    form_of,
    ghost_of,
    sizes_at,
)
from accel.parallel.axes.tensor import Division
from accel.tensors import is_dtensor

_MOST_TRACES = 16
_HARMLESS = "make_inputs_require_grads"  # of transformers, for checkpoints of another kind than a stage's


class Holdings(NamedTuple):
    """Names of the parameters and buffers that each stage holds; one that two stages read is in both."""

    names: tuple[frozenset[str], ...]

    def stages_of(self, aliases: Sequence[str]) -> tuple[int, ...]:
        """Return the stages that hold a tensor, by its names."""
        return tuple(at for at, names in enumerate(self.names) if not names.isdisjoint(aliases))


def holdings_of(model: nn.Module, stages: Sequence[TracedStage]) -> Holdings:
    """Return what each stage holds: what its graph reads, under all names; and what no graph reads beside the tensors
    of the same module."""
    aliases: dict[int, list[str]] = {}
    for name, each in named_tensors(model):
        aliases.setdefault(id(each), []).append(name)
    readers: dict[str, set[int]] = {}
    for names in aliases.values():
        read = {at for at, stage in enumerate(stages) if not set(names).isdisjoint(stage.held)}
        for name in names:
            readers[name] = read
    found: list[set[str]] = [set() for _ in stages]
    for names in aliases.values():
        read = readers[names[0]] or {_nearest(names[0], readers)}
        for at in read:
            found[at].update(names)
    return Holdings(tuple(map(frozenset, found)))


def _nearest(name: str, readers: Mapping[str, set[int]]) -> int:
    """The last stage that reads tensors of the innermost module around an unread one."""
    while name:
        name = name.rpartition(".")[0]
        beside = [max(read) for other, read in readers.items() if read and (not name or other.startswith(f"{name}."))]
        if beside:
            return max(beside)
    return 0


def drop_others(model: nn.Module, kept: frozenset[str]) -> list[nn.Parameter]:
    """Take all tensors but some out of a model; return the parameters among them, in order. Mutates the model."""
    before = list(model.parameters())
    for path, module in named_modules(model):
        own = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        own += [name for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)]
        for name in own:
            if (f"{path}.{name}" if path else name) not in kept:
                setattr(module, name, None)
    live = {id(each) for each in model.parameters()}
    return [each for each in before if id(each) not in live]


def view_of(model: nn.Module, kept: frozenset[str]) -> nn.Module:
    """Return a copy of a model with some of its parameters, which it shares; it is not pipelined itself.

    A module with parameters of its own inside and outside of `kept` is a `PrepareError`.
    """

    def view(path: str, module: nn.Module) -> nn.Module:
        prefix = f"{path}." if path else ""
        if path and all(f"{prefix}{name}" in kept for name, _ in named_tensors(module)):
            return module
        found: Any = shallow_copy(module)
        children = cast("Mapping[str, nn.Module | None]", found._modules)
        found._parameters = _part(found._parameters, prefix, kept)
        found._modules = {
            key: None if child is None else view(f"{prefix}{key}", child) for key, child in children.items()
        }
        return found

    return view("", model)


def _part(tensors: dict[str, torch.Tensor | None], prefix: str, kept: frozenset[str]) -> dict[str, torch.Tensor | None]:
    """The tensors of a module where all are kept, else nothing; whatever replaces one replaces it in the model."""
    held = {f"{prefix}{name}" for name, each in tensors.items() if each is not None}
    if held <= kept:
        return tensors
    if held.isdisjoint(kept):
        return {}
    raise PrepareError(
        "two stages of one rank read different parameters of one module, and cannot be sharded apart",
        expected="stages of one rank without modules in common",
        got=f"{prefix.rstrip('.') or 'the model'}: {', '.join(sorted(held & kept))} and {min(held - kept)}",
        where=WHERE,
        fix="Leave stages_per_rank out, or begin the stages at other modules: Plan(stages=[[...], [...]]).",
    )


def modes_of(model: nn.Module) -> dict[str, Mode]:
    """Return the mode of each module, by path; raise `StageError` for a module with hooks that are not accel's."""
    found: dict[str, Mode] = {}
    for path, module in named_modules(model):
        found[path] = Mode(module.training, recomputed(module))
        for hook in module_hooks(module):
            source = getattr(hook, "__module__", "") or ""
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            if not source.startswith("accel.") and not name.endswith(_HARMLESS):
                raise StageError(
                    "a module has a hook, which does not run in a graph",
                    expected="modules without hooks",
                    got=f"{name} of {path or 'the model'}",
                    where=WHERE,
                    fix="Remove it, or do its work in the module's forward.",
                )
    return found


class Traces:
    """The graphs of a model's stages on this rank, one for each kind of batch.

    Args:
        ghost: copy of the whole model.
        stages: paths of the modules of each stage.
    """

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        device: torch.device,
        batch: MicroBatch,
        stages: Sequence[Sequence[str]] | int,
        division: Division | None = None,
        gathered: GatheredFormat | None = None,
    ) -> tuple[Traces, StageGraphs]:
        """Return the graphs of a whole model, with those for an example; `stages` may be a number of stages.

        A `division` gives graphs of this rank's parts, a `gathered` format graphs of its dtype.
        """
        modes = modes_of(model)
        ghost = ghost_of(model, device, division, gathered)

        def export(form: BatchForm) -> StageGraphs:
            return export_stages(ghost, batch, form, stages, modes, contextlib.nullcontext())

        rows = batch.rows.size
        first = _either(export, form_of(batch, rows), form_of(batch, rows, fixed=True))
        found = cls(ghost, first.paths)
        key = found.key(model, batch, contextlib.nullcontext)
        found._keep(key, first)
        return found, first

    def __init__(self, ghost: Ghost, stages: Sequence[Sequence[str]]) -> None:
        self._ghost = ghost
        self._stages = stages
        self._known: dict[object, StageGraphs] = {}
        self._fixed: set[object] = set()

    def key(self, model: nn.Module, batch: MicroBatch, around: Callable[[], Any]) -> object:
        """Return what a graph depends on: the batch's form, the mode of each module, gradient and autocast."""
        modes = tuple(modes_of(model).values())
        with around():
            kinds = dict.fromkeys(("cpu", self._ghost.device.type))
            cast_to = tuple(
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds
            )
        return form_of(batch, batch.rows.size), modes, torch.is_grad_enabled(), cast_to

    def find(self, key: object, rows: int) -> StageGraphs | None:
        """Return the graphs for a kind of batch; None if they are to be made."""
        general = self._known.get(key)
        if general is not None and general.fits(rows):
            return general
        return self._known.get((key, rows))

    def make(self, key: object, model: nn.Module, batch: MicroBatch, around: Callable[[], Any]) -> StageGraphs:
        """Export the graphs for a kind of batch; `StageError` if the model cannot be exported or cut."""
        rows = batch.rows.size
        modes = modes_of(model)

        def export(form: BatchForm) -> StageGraphs:
            return export_stages(self._ghost, batch, form, self._stages, modes, around())

        # a graph for any number of rows has been made, and does not hold for this one
        again = key in self._known or key in self._fixed
        trace = _either(export, form_of(batch, rows, fixed=again), form_of(batch, rows, fixed=True))
        self._keep(key, trace)
        return trace

    def _keep(self, key: object, trace: StageGraphs) -> None:
        if trace.rows:
            self._fixed.add(key)
        self._known[(key, trace.rows) if trace.rows else key] = trace
        while len(self._known) > _MOST_TRACES:
            _ = self._known.pop(next(iter(self._known)))


def _either(export: Callable[[BatchForm], StageGraphs], form: BatchForm, fixed: BatchForm) -> StageGraphs:
    """Export for any number of rows; where the forward makes sizes of it that hold for one alone, for that one."""
    try:
        return export(form)
    except StageError:
        if form == fixed:
            raise
        return export(fixed)


def boundaries_at(trace: StageGraphs, rows: int) -> tuple[tuple[Boundary, ...], ...]:
    """Return dtypes and shapes of what each stage passes on, the last one a loss."""
    found = [
        tuple(
            Boundary(str(each.value.dtype).removeprefix("torch."), sizes_at(each, rows), each.differentiable)
            for each in stage.gives
        )
        for stage in trace.stages[:-1]
    ]
    return (*found, (Boundary("float32", ()),))


class TracedModule(nn.Module):
    """One stage of a traced model, as torch's schedules call it.

    Attributes:
        module: the model with the tensors of this rank.
        index, count: place among all stages.
        rank: of the context, for errors.
        work: the current computation; None between calls.
        trace: the graphs of the current computation; None between calls.
        before_batch: run once before the micro-batches of a batch; None for nothing.
        division: of the model among ranks along tp; None without tp.
    """

    work: Work | None = None
    trace: StageGraphs | None = None
    before_batch: Callable[[], None] | None = None

    def __init__(self, module: nn.Module, index: int, rank: int, count: int, division: Division | None = None) -> None:
        super().__init__()
        self.division = division
        self.module = module
        self.index = index
        self.count = count
        self.rank = rank
        vars(self)[COMPILES] = None

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.index == self.count - 1

    def forward(self, *given: torch.Tensor, micro: torch.Tensor) -> Any:
        """Run the stage's graph on a micro-batch, by its number on the CPU; the first stage ignores `given`."""
        work, trace = self.work, self.trace
        assert work is not None
        assert trace is not None
        at = int(micro.item())
        batch = work.micro_batches[at]
        stage = trace.stages[self.index]
        with self._named(f"micro-batch {at + 1} of {len(work.micro_batches)}"):
            inputs = pytree.tree_leaves((batch.args, dict(batch.kwargs)))
            with work.around(), contextlib.nullcontext() if self.division is None else self.division.running():
                held = [self._tensor(name, trace) for name in stage.held]
                held = [each.data if place in stage.bare else each for place, each in enumerate(held)]
                read = [_contiguous(inputs[number]) for number in stage.inputs]
                options = vars(self)[COMPILES]
                if options is not None and not is_compiled(stage.graph):
                    cast(Any, stage.graph).compile(**options)
                found = stage.graph(*held, *read, *(given if self.index else ()))
                if self.is_last:
                    return work.finish(pytree.tree_unflatten(list(found), trace.result), batch)
            return tuple(map(_detachable, found))
        raise AssertionError

    def check(self, trace: StageGraphs) -> None:
        """Raise `StageError` for a tensor of the stage that this rank does not hold."""
        for name in trace.stages[self.index].held:
            _ = self._stored(name, trace)

    def _tensor(self, name: str, trace: StageGraphs) -> torch.Tensor:
        found = self._stored(name, trace)
        if self.division is not None and is_dtensor(found):
            return self.division.own(name, found)
        return found

    def _stored(self, name: str, trace: StageGraphs) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        found = trace.constants.get(name)
        if found is None:
            found = getattr(self.module.get_submodule(path), leaf)
        if found is None:
            raise StageError(
                f"stage {self.index} reads a tensor for this batch that it does not hold",
                expected="the parameters and buffers that it read for the example",
                got=name,
                where=f"stage {self.index} of {self.count}, rank {self.rank}",
                fix="Prepare the model with an example like this batch.",
            )
        return cast(torch.Tensor, found)

    @contextlib.contextmanager
    def _named(self, micro: str) -> Generator[None]:
        """Name stage, micro-batch and rank in errors of the block."""
        try:
            yield
        except (AccelError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            lost = peer_error(error, f"the forward of stage {self.index}")
            where = f"stage {self.index} of {self.count}, {micro}, rank {self.rank}"
            problem = f"a pipeline stage failed: {type(error).__name__}: {str(error).strip()}"
            raise lost or StageError(problem, where=where) from error


class _Alias(torch.autograd.Function):
    """A tensor of its own in the memory of another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - torch's own way
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


def _detachable(output: torch.Tensor) -> torch.Tensor:
    """Return an output that schedules may detach in place, while operators of the stage need it for gradients of
    weights."""
    if is_view(output):
        return output.clone()
    return cast(Any, _Alias).apply(output) if output.requires_grad else output


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def tracing(stages: Sequence[TracedModule], trace: StageGraphs) -> Generator[None]:
    """Give stages their graphs for the time of a block."""
    for each in stages:
        each.trace = trace
    try:
        yield
    finally:
        for each in stages:
            each.trace = None
