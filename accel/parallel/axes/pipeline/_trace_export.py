# SPDX-License-Identifier: Apache-2.0
"""A model exported without memory: from a copy whose tensors are fake, for one kind of batch.

Zachary DeVito et al. 2022, torch.fx, arXiv:2112.08429; torch.export.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from accel.errors import AccelError, StageError
from accel.mixins import add_mixin
from accel.parallel._blocks import groups_of
from accel.parallel._modules import KeepsParameters, copied_model, has_parameters, named_modules
from accel.parallel._private import GET_DATA, SET_DATA, fake_mode, is_fake, saves_otherwise
from accel.parallel._sharded import GatheredFormat
from accel.parallel.axes.pipeline._stage_module import MicroBatch
from accel.parallel.axes.pipeline._trace_blocks import Kept, OwnBackwards, leave_whole, with_blocks
from accel.parallel.axes.pipeline._trace_cut import (
    Crossing,
    TracedStage,
    begins_of,
    choose_stages,
    cut_program,
    model_line,
)
from accel.parallel.axes.pipeline._trace_program import read_program
from accel.parallel.axes.tensor import Division
from accel.tensors import emptied_caches

WHERE = 'Plan(cut="trace")'
_PYTHON, _NUMPY = "Python's module random", "numpy.random"
_ELSEWHERE = "A model that cannot be exported trains by the strategy fsdp along dp."


class Ghost(NamedTuple):
    """A copy of a model with fake tensors.

    Attributes:
        model: the copy, in the model's own classes.
        mode: the mode of its tensors.
        device: of its tensors.
        division: of it among ranks along tp; None without tp.
        modules: its modules by path, as they were copied.
        gathered: dtype of parameters that are gathered in the format of autocast; None for their own.
    """

    model: nn.Module
    mode: Any
    device: torch.device
    division: Division | None = None
    modules: Mapping[str, nn.Module] = {}
    gathered: torch.dtype | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast in which a stage with such parameters always runs; nothing within another."""
        if self.gathered is None or torch.is_autocast_enabled(self.device.type):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.gathered)

    def check(self) -> None:
        """Raise `StageError` for a forward that has replaced, added or removed modules."""
        now = dict(named_modules(self.model))
        other = [path for path in {**self.modules, **now} if now.get(path) is not self.modules.get(path)]
        if other:
            kinds = [type(each[other[0]]).__name__ if other[0] in each else "none" for each in (self.modules, now)]
            raise StageError(
                "the forward changes the modules of the model, whose graph would be that of other modules",
                expected="the same modules at every call",
                got=f"{other[0]}, before {kinds[0]} and now {kinds[1]}",
                where=WHERE,
                fix=f"Make the change before prepare_model, as by set_attention_type of BigBird. {_ELSEWHERE}",
            )


def ghost_of(
    model: nn.Module,
    device: torch.device,
    division: Division | None = None,
    gathered: GatheredFormat | None = None,
) -> Ghost:
    """Copy a model without the memory of its parameters and buffers; other attributes are copied as they are.

    With a `division`, the copy computes on this rank's parts; with a `gathered`, as shards that are gathered in it.
    """
    mode = fake_mode()
    memo: dict[int, Any] = {}
    with mode:
        for each in (*model.parameters(), *model.buffers()):
            dtype = gathered.dtype if gathered is not None and id(each) in gathered.parameters else each.dtype
            made = torch.empty_strided(each.shape, each.stride(), dtype=dtype, device=device)
            is_parameter = isinstance(each, nn.Parameter)
            memo[id(each)] = nn.Parameter(made, each.requires_grad) if is_parameter else made
    found = copied_model(model, memo)
    for module in found.modules():
        vars(module).pop("_compiled_call_impl", None)  # regions that torch would compile inside of its own trace
        leave_whole(module)
    add_mixin(filter(has_parameters, found.modules()), KeepsParameters)
    if gathered is not None:
        gathered.adapt(found)
    if division is not None:
        with mode:
            division.divide(found)
    kept = None if gathered is None else gathered.dtype
    return Ghost(found, mode, device, division, dict(named_modules(found)), kept)


class Mode(NamedTuple):
    """The mode of a module.

    Attributes:
        training: whether it trains.
        kept: operators whose outputs it keeps while its others run again in backward; None for all.
    """

    training: bool
    kept: Kept | None


class BatchForm(NamedTuple):
    """The form of a micro-batch's arguments, on which a graph depends.

    Attributes:
        spec: their nesting.
        leaves: of a tensor its dtype, sizes and whether dimension 0 is rows; of other values themselves.
        rows: number of rows where a graph is for these alone; 0 for any number from 2.
    """

    spec: Any
    leaves: tuple[Any, ...]
    rows: int


def form_of(batch: MicroBatch, rows: int, *, fixed: bool = False) -> BatchForm:
    """Return the form of a micro-batch with so many rows; `fixed` for a graph of this number alone."""
    listed, spec = pytree.tree_flatten((batch.args, dict(batch.kwargs)))
    found: list[Any] = []
    for each in listed:
        if isinstance(each, torch.Tensor):
            has_rows = each.ndim > 0 and each.shape[0] == rows
            sizes = tuple(each.shape[1:]) if has_rows else tuple(each.shape)
            found.append((each.dtype, sizes, has_rows))
        else:
            found.append((type(each), each if each.__hash__ is not None else repr(each)))
    return BatchForm(spec, tuple(found), rows if fixed or rows == 1 else 0)


class StageGraphs(NamedTuple):
    """A model cut into stages for one kind of batch.

    Attributes:
        paths: modules at which the stages begin.
        stages: their graphs.
        result: nesting of the model's output.
        constants: tensors that the graphs hold and the model has in no module, by name.
        guards: conditions of the number of rows, as expressions of sympy.
        rows: number of rows that the graphs are for; 0 for any that meets the guards.
    """

    paths: tuple[tuple[str, ...], ...]
    stages: tuple[TracedStage, ...]
    result: Any
    constants: Mapping[str, torch.Tensor]
    guards: tuple[Any, ...]
    rows: int

    def fits(self, rows: int) -> bool:
        """Return whether the graphs are right for a number of rows."""
        return all(bool(_at_rows(each, rows)) for each in self.guards)


def sizes_at(passed: Crossing, rows: int) -> tuple[int, ...]:
    """Return the shape of a passed tensor for a number of rows."""
    sizes: tuple[Any, ...] = tuple(passed.value.shape)  # or symbols
    return tuple(each if isinstance(each, int) else int(_at_rows(each.node.expr, rows)) for each in sizes)


def _at_rows(expression: Any, rows: int) -> Any:
    return expression.subs(dict.fromkeys(expression.free_symbols, rows))


def export_stages(
    ghost: Ghost,
    batch: MicroBatch,
    form: BatchForm,
    stages: Sequence[Sequence[str]] | int,
    modes: Mapping[str, Mode],
    around: AbstractContextManager[object],
) -> StageGraphs:
    """Export a ghost for a kind of batch, and cut it; what cannot be exported is a `StageError`.

    `stages`: paths of the modules of each stage, or a number of stages. `modes`: of each module, by path. `around`:
    autocast of the run.
    """
    ghost.check()  # one that a first export has changed is tried again
    for path, module in ghost.modules.items():
        module.training = modes[path].training
    listed, spec = pytree.tree_flatten((batch.args, dict(batch.kwargs)))
    fakes: list[Any] = []
    shapes = cast(Any, torch.export).ShapesCollection()
    with ghost.mode:
        for each, facts in zip(listed, form.leaves, strict=True):
            if not isinstance(each, torch.Tensor):
                fakes.append(each)
                continue
            # contiguous, as at each run: operators depend on strides
            fakes.append(torch.empty(each.shape, dtype=each.dtype, device=ghost.device))
            if facts[2] and not form.rows:
                shapes[fakes[-1]] = {0: torch.export.Dim.DYNAMIC}
    args, kwargs = pytree.tree_unflatten(fakes, spec)
    seen = _Watch(ghost.model)
    own = OwnBackwards()
    try:
        with emptied_caches(), _quiet(), ghost.mode, around, ghost.autocast(), seen:
            dynamic = None if form.rows else shapes
            program = torch.export.export(ghost.model, args, kwargs, dynamic_shapes=dynamic, strict=False)
        with emptied_caches(), _quiet(), ghost.mode, around, ghost.autocast():
            _check_python(ghost.modules, lambda: own.look(ghost.model(*args, **kwargs)), own)
    except AccelError:
        raise
    except Exception as error:
        raise _failure(error) from error
    ghost.check()
    own.check()
    seen.check()
    data = {key: name for key, each in program.constants.items() for made, name in seen.data if made is each}
    read = read_program(program, data)
    constants = _constants(ghost, {key: each for key, each in program.constants.items() if key not in data})
    if isinstance(stages, int):
        stages = choose_stages(read, stages, (path for group in groups_of(ghost.model) for path, _ in group.entries))
    cuts = cut_program(read, begins_of(read, stages))
    _check_sizes(cuts)
    blocks = {path: mode.kept for path, mode in modes.items() if mode.kept is not None}
    fresh = frozenset(node.name for node in read.fresh)
    if ghost.division is not None:
        ghost.division.bind(each.graph for each in cuts)
    cuts = tuple(each._replace(graph=with_blocks(each.graph, blocks, fresh, ghost.division)) for each in cuts)
    guards = _guards([node.meta.get("val") for node in read.inputs])
    paths = tuple(map(tuple, stages))
    return StageGraphs(paths, cuts, program.call_spec.out_spec, constants, guards, form.rows)


def _python_state(modules: Mapping[str, nn.Module]) -> dict[str, object]:
    """Numbers among the attributes of modules by path, and the states of Python's and numpy's random streams."""
    found: dict[str, object] = {
        f"{path}.{name}".lstrip("."): value
        for path, module in modules.items()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }
    found[_PYTHON] = random.getstate()
    if "numpy" in sys.modules:
        found[_NUMPY] = repr(cast(Any, sys.modules["numpy"]).random.get_state(legacy=False))
    return found


@contextlib.contextmanager
def _attributes_kept(modules: Iterable[nn.Module]) -> Generator[None]:
    """Put attributes and buffers of modules back behind a block."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for each in map(vars, modules):
        held += [(inner, {**inner}) for inner in each.values() if type(inner) is dict] + [(each, {**each})]
    try:
        yield
    finally:
        for own, values in held:
            own.clear()
            own.update(values)


def _check_python(modules: Mapping[str, nn.Module], forward: Callable[[], object], own: OwnBackwards) -> None:
    """Raise `StageError` where Python that a forward runs leaves another state after each call: a graph would hold that
    of one. Export puts attributes back, so these are calls without it."""
    states = [_python_state(modules)]
    with _attributes_kept(modules.values()):
        for _ in range(2):  # a size that is noted stays as it is in the second one, and a count does not
            with contextlib.suppress(Exception), torch.enable_grad(), own:
                _ = forward()
            states.append(_python_state(modules))
            if states[-1] == states[-2]:
                return
    before, after = states[1:]
    other = [name for name, value in after.items() if name in before and before[name] != value]
    drawn = [name for name in other if name in (_PYTHON, _NUMPY)]
    if not other:
        return
    raise StageError(
        f"the forward draws from {drawn[0]}, and a graph would hold one draw"
        if drawn
        else "the forward counts its calls, and a graph would hold the number of one",
        expected="a forward that runs the same operators at every call",
        got=f"other {'states' if drawn else 'values'} of {', '.join(other[:3])} after each call",
        where=WHERE,
        fix="Draw by torch, and choose by torch.where; or pass the choice as an argument of the forward."
        if drawn
        else "Keep the number in a buffer of the module that reads it, or pass it as an argument of the forward.",
    )


def _check_sizes(stages: Sequence[TracedStage]) -> None:
    """Raise `StageError` for a passed tensor with a size that depends on the values of another."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # takes long to import

    for at, stage in enumerate(stages):
        for each in stage.gives:
            if free_unbacked_symbols(each.value):
                raise StageError(
                    f"stage {at} passes on a tensor with a size that depends on the values of another",
                    expected="sizes that depend on the sizes of the inputs",
                    got=f"{each.name} of shape {list(each.value.shape)}",
                    where=WHERE,
                    fix="Begin the stage at another module: Plan(stages=[[...], [...]]).",
                )


def _guards(inputs: Sequence[object]) -> tuple[Any, ...]:
    """The conditions of sizes under which an export holds."""
    for each in inputs:
        if isinstance(each, torch.Tensor):
            env = cast(Any, each).fake_mode.shape_env
            return tuple(guard.expr for guard in env.guards) if env is not None else ()
    return ()


def _constants(ghost: Ghost, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a graph that are in no module; what has no values is a `StageError`."""
    own = {name for name, _ in ghost.model.named_buffers(remove_duplicate=False)}
    found: dict[str, torch.Tensor] = {}
    for name, each in given.items():
        if name in own:  # torch lists buffers that no checkpoint holds too
            continue
        value = getattr(each, "constant", each) if is_fake(each) else each
        if not isinstance(value, torch.Tensor):
            raise StageError(
                "the forward reads something that a graph cannot hold",
                expected="parameters, buffers, and tensors with values",
                got=f"{name}, {type(each).__name__}",
                where=WHERE,
                fix="Register it as a buffer of its module.",
            )
        found[name] = value
    return found


def _failure(error: Exception) -> StageError:
    """The error of an export, with the line of the model."""
    text = str(error)
    line = model_line(text)
    if "DataDependent" in type(error).__name__ or "data-dependent" in text:
        return StageError(
            "the path of the forward depends on the values of a tensor, so that no graph holds for all",
            expected="a forward that calls the same operators for all values",
            got=line or text.strip().splitlines()[0],
            where=WHERE,
            fix=f"Choose by torch.where, or by an argument of the forward. {_ELSEWHERE}",
        )
    return StageError(
        f"torch cannot export the model: {type(error).__name__}: {text.strip().splitlines()[0] if text else ''}",
        got=line,
        where=WHERE,
        fix=_ELSEWHERE,
    )


class _Watch(TorchFunctionMode):
    """Notes what a graph cannot hold, as torch's export leaves no trace of it.

    Attributes:
        checkpoint: a function that runs inside of a checkpoint.
        outside: a function that reads a tensor with a gradient that is in no module.
        data: the `data` of parameters that the forward reads, with the parameter's name.
        replaced: name of a parameter whose `data` the forward replaces.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.data: list[tuple[torch.Tensor, str]] = []
        self.checkpoint = ""
        self.outside = ""
        self.replaced = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        name = getattr(func, "__name__", str(func))
        if not self.checkpoint and saves_otherwise():
            self.checkpoint = name
        if not self.outside and any(isinstance(each, nn.Parameter) and not is_fake(each) for each in args):
            self.outside = name
        if name == "__set__" and func == SET_DATA and isinstance(args[0], nn.Parameter):
            named = self._model.named_parameters()
            self.replaced = next((own for own, each in named if each is args[0]), "a parameter")
        found = func(*args, **(kwargs or {}))
        if name == "__get__" and func == GET_DATA:
            # a change of a parameter with several names would reach the stage of one
            named = self._model.named_parameters(remove_duplicate=False)
            names = [name for name, each in named if each is args[0]]
            if len(names) == 1:
                self.data.append((found, names[0]))
        return found

    def check(self) -> None:
        """Raise `StageError` for what was noted."""
        if self.checkpoint:
            raise StageError(
                "the forward checkpoints activations by a call of its own, which a graph would keep",
                expected="accel.checkpoint_activations(model), or layers of transformers that checkpoint",
                got=f"{self.checkpoint} inside of a checkpoint",
                where=WHERE,
                fix="Turn it off, and checkpoint blocks: accel.checkpoint_activations(model).",
            )
        if self.replaced:
            raise StageError(
                "the forward replaces the data of a parameter, which a graph would drop",
                expected="parameters that the optimizer changes, or a change in place under torch.no_grad()",
                got=self.replaced,
                where=WHERE,
                fix="Change it in place: under torch.no_grad(), parameter.copy_(values).",
            )
        if self.outside:
            raise StageError(
                "the forward reads a parameter that is in none of the model's modules",
                expected="parameters of modules, which a copy of the model has too",
                got=f"one in {self.outside}",
                where=WHERE,
                fix="Make it an attribute of a module, and read it there.",
            )


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Drop what this thread writes to stderr: torch prints the whole graph of a failed export."""
    before = sys.stderr
    own = _Dropped(before)
    sys.stderr = own
    try:
        yield
    finally:
        own.drops = False  # another thread may put it back
        if sys.stderr is own:
            sys.stderr = before


class _Dropped(io.TextIOBase):
    """A stream that drops the lines of one thread."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()
        self.drops = True

    def write(self, text: str, /) -> int:
        """Write what other threads write."""
        if self.drops and threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()
