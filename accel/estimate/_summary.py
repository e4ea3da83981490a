# SPDX-License-Identifier: Apache-2.0
"""`summary`: a model's modules as a table, with shapes, calls and kept bytes of a forward of a copy on fake tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from accel.errors import ConfigError, PrepareError
from accel.errors._checks import check_count, check_kind
from accel.estimate._build import Input, as_on_gpus, quiet_fakes, storage_of, users_code
from accel.fakes import emptied_caches, fake_mode
from accel.random import isolated_rng
from accel.tensors import is_dtensor, local_part, packed
from accel.terminal import show_size, show_table
from accel.tree import map_tensors


class ModuleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A module of a summary. Its numbers include its submodules' numbers.

    Attributes:
        path: name in the model; empty for the model itself.
        kind: name of its class.
        depth: number of modules around it.
        parameters: elements of parameters; one that several modules share counts in the first.
        trained: elements of `parameters` with a gradient.
        shared: elements of parameters that count in an earlier module.
        local: elements of `parameters` that this rank holds.
        parameter_bytes: their bytes on this rank.
        buffer_bytes: bytes of buffers on this rank.
        outputs: shapes of the tensors in the output of its last call; None without inputs.
        activation_bytes: bytes of tensors that its calls keep for the backward; None without inputs.
        calls: number of calls; None without inputs.
    """

    path: str
    kind: str
    depth: int
    parameters: int
    trained: int
    shared: int
    local: int
    parameter_bytes: int
    buffer_bytes: int
    outputs: tuple[Shape, ...] | None = None
    activation_bytes: int | None = None
    calls: int | None = None

    @property
    def frozen(self) -> int:
        """Elements of parameters without a gradient."""
        return self.parameters - self.trained


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a table, which `str` and `print` show.

    Attributes:
        total: the whole model.
        rows: modules in the order of registration, the model first; those below `depth` are left out.
        tensors: number of parameters, as tensors.
    """

    total: ModuleRow
    rows: tuple[ModuleRow, ...]
    tensors: int

    def __str__(self) -> str:
        lines = [{"MODULE": label} | _cells(row, self.total) for label, row in _folded(self.rows)]
        table = show_table([list(lines[0]), *(list(each.values()) for each in lines)])
        return "\n".join([table, "", *self._totals()])

    def _totals(self) -> Iterator[str]:
        total = self.total
        frozen = f", {total.frozen:,} of them frozen" if total.frozen else ""
        yield f"{total.parameters:,} parameters in {self.tensors:,} tensors{frozen}"
        local = f" for {total.local:,} parameters on this rank" if total.local != total.parameters else ""
        yield f"memory: {show_size(total.parameter_bytes)}{local}, {show_size(total.buffer_bytes)} for buffers"
        if total.activation_bytes is not None:
            yield f"activations that one forward keeps for the backward: {show_size(total.activation_bytes)}"


def _cells(row: ModuleRow, total: ModuleRow) -> dict[str, str]:
    """Return the cells of a row by their columns; a column that says nothing about the model is left out."""
    cells = {"KIND": row.kind}
    if row.outputs is not None:
        cells["OUTPUT"] = ", ".join("x".join(map(str, shape)) or "scalar" for shape in row.outputs) or "-"
    cells["PARAMETERS"] = f"{row.parameters:,}" + (f" ({row.shared:,} shared)" if row.shared else "")
    if total.frozen:
        cells["FROZEN"] = f"{row.frozen:,}"
    if total.local != total.parameters:
        cells["ON THIS RANK"] = f"{row.local:,}"
    cells["MEMORY"] = show_size(row.parameter_bytes)
    if total.buffer_bytes:
        cells["BUFFERS"] = show_size(row.buffer_bytes)
    if row.activation_bytes is not None:
        cells["ACTIVATIONS"] = show_size(row.activation_bytes)
    return cells


def summary(model: nn.Module, inputs: Any = None, *, depth: int | None = None) -> ModelSummary:
    """Return the layers, parameters and memory of a model; with inputs, its shapes and activations too.

    A forward runs on a copy without memory (fake tensors). The model does not change: neither its parameters, buffers,
    mode and hooks, nor random streams. Hooks do not run. No communication.

    Args:
        model: the model, on any device, "meta" included. A prepared one, or one with quantized weights, is counted as
            this rank holds it.
        inputs: input of the forward: a tensor; a tuple of the model's arguments; or a mapping of keyword arguments.
            Values of tensors are not read; `accel.estimate.Input((8, 512), "int64")` may replace one. The model's
            mode holds, so that dropout keeps its mask while it trains. None counts parameters and buffers alone.
        depth: largest number of modules around a row's module; 0 is the model alone, None is no limit.

    Returns:
        A record; `print` shows it as a table. Equal blocks in a row share one line there.

    Raises:
        ConfigError: no model; a negative depth; a lazy module without shapes; or a model that cannot be copied, or not
            called on these inputs without values. The error names the module.

    Examples:
        >>> print(accel.estimate.summary(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.ones(2, 4)))
        MODULE   KIND        OUTPUT  PARAMETERS  MEMORY  ACTIVATIONS
        (model)  Sequential  2x8     40          160 B   96 B
        0        Linear      2x8     40          160 B   32 B
        1        ReLU        2x8     0           0 B     64 B
        <BLANKLINE>
        40 parameters in 2 tensors
        memory: 160 B, 0 B for buffers
        activations that one forward keeps for the backward: 96 B
    """
    check_kind(model, nn.Module, "the model is not a module", expected="an nn.Module", where="summary")
    if depth is not None:
        check_count(depth, "the depth is not valid", least=0, where="summary(depth=)")
    model = _inside_wrappers(model)
    forward = None if inputs is None else run_fake(model, inputs)
    found = _Tensors(model, {} if forward is None else forward.tensors)
    rows = [found.row(path, module, forward) for path, module in modules_of(model)]
    shown = tuple(row for row in rows if depth is None or row.depth <= depth)
    return ModelSummary(total=rows[0], rows=shown, tensors=len(found.sizes))


def _inside_wrappers(model: nn.Module) -> nn.Module:
    """Return the model that DDP or torch.compile holds."""
    name = "module" if isinstance(model, nn.parallel.DistributedDataParallel) else "_orig_mod"
    inner: object = getattr(cast("object", model), name, None)
    return _inside_wrappers(inner) if isinstance(inner, nn.Module) else model


class _Size(NamedTuple):
    """A parameter or buffer."""

    owner: str  # path of the first module that has it
    elements: int  # number of its elements
    local: int  # number of those that this rank holds
    nbytes: int  # their bytes
    trained: bool  # whether it has a gradient


class _Tensors:
    """Sizes of the parameters and buffers of a model, by identity.

    Attributes:
        sizes: of parameters.
        buffers: of buffers.
    """

    def __init__(self, model: nn.Module, known: Mapping[str, torch.Tensor]) -> None:
        self.sizes: dict[int, _Size] = {}
        self.buffers: dict[int, _Size] = {}
        for path, module in modules_of(model):
            for key, tensor in module._parameters.items():
                if tensor is not None and id(tensor) not in self.sizes:
                    self.sizes[id(tensor)] = _size(path, module, key, tensor, known)
            for key, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in self.buffers:
                    self.buffers[id(tensor)] = _size(path, module, key, tensor, known)

    def row(self, path: str, module: Any, forward: Forward | None) -> ModuleRow:
        """Return the row of a module."""
        inner: list[Any] = list(module.modules())
        ids = {id(each) for part in inner for each in part._parameters.values() if each is not None}
        own = [self.sizes[each] for each in ids if _is_inside(self.sizes[each].owner, path)]
        stored = {id(each) for part in inner for each in part._buffers.values() if each is not None}
        return ModuleRow(
            path=path,
            kind=type(module).__name__,
            depth=path.count(".") + 1 if path else 0,
            parameters=sum(each.elements for each in own),
            trained=sum(each.elements for each in own if each.trained),
            shared=sum(self.sizes[each].elements for each in ids) - sum(each.elements for each in own),
            local=sum(each.local for each in own),
            parameter_bytes=sum(each.nbytes for each in own),
            buffer_bytes=sum(
                self.buffers[each].nbytes for each in stored if _is_inside(self.buffers[each].owner, path)
            ),
            outputs=None if forward is None else forward.outputs.get(path, ()),
            activation_bytes=None if forward is None else forward.kept.get(path, 0),
            calls=None if forward is None else forward.calls.get(path, 0),
        )


def _size(path: str, module: nn.Module, key: str, tensor: torch.Tensor, known: Mapping[str, torch.Tensor]) -> _Size:
    name = f"{path}.{key}" if path else key
    if is_lazy(tensor):
        tensor = known.get(name, tensor)
    if is_lazy(tensor):
        raise ConfigError(
            "a lazy module has no shape yet",
            expected="inputs, which its first call takes its shapes from",
            got=f"{type(module).__name__} without a call",
            where=f"summary, {name}",
            fix="Pass them: accel.estimate.summary(model, inputs).",
        )
    trained = bool(tensor.requires_grad)
    state = getattr(tensor, "quant_state", None)  # of bitsandbytes' weights of 4 bits, two in a byte
    elements = math.prod(getattr(state, "shape", tensor.shape))
    if (parts := packed(module, key, tensor)) is not None:
        nbytes = sum(each.numel() * each.element_size() for each in parts.parts.values())
        return _Size(path, elements, elements, nbytes, trained)
    local = local_part(tensor).numel() if is_dtensor(tensor) else elements
    nbytes = local * tensor.element_size() if state is None else tensor.numel() * tensor.element_size()
    return _Size(path, elements, local, nbytes, trained)


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _folded(rows: Sequence[ModuleRow]) -> Iterator[tuple[str, ModuleRow]]:
    """Yield the rows to show, with their labels: of equal modules in a row the first, such as "layers.0-31, each"."""
    at = 0
    while at < len(rows):
        block = _block(rows, at)
        last = end = at + len(block)
        while (after := _block(rows, last)) and _is_equal(block, after):
            last += len(after)
        if last == end or not block[0].path:
            yield block[0].path or "(model)", block[0]
            at += 1
            continue
        final = rows[last - len(block)].path.rpartition(".")[2]
        yield f"{block[0].path}-{final}, each", block[0]
        yield from _folded(block[1:])
        at = last


def _block(rows: Sequence[ModuleRow], at: int) -> Sequence[ModuleRow]:
    """Return a row and the rows of its submodules."""
    end = at + 1
    while end < len(rows) and rows[end].depth > rows[at].depth:
        end += 1
    return rows[at:end]


def _is_equal(one: Sequence[ModuleRow], other: Sequence[ModuleRow]) -> bool:
    """Whether two numbered neighbours differ by their paths alone."""
    first, second = one[0].path, other[0].path
    if len(one) != len(other) or one[0].depth != other[0].depth:
        return False
    if not (first.rpartition(".")[2].isdigit() and second.rpartition(".")[2].isdigit()):
        return False
    return all(
        msgspec.structs.replace(theirs, path=first + theirs.path[len(second) :]) == own
        for own, theirs in zip(one, other, strict=True)
    )


Shape = tuple[int, ...]


class Forward(NamedTuple):
    """Facts of a forward, by paths of modules."""

    outputs: dict[str, tuple[Shape, ...]]  # shapes in the output of the last call
    calls: dict[str, int]  # number of calls
    kept: dict[str, int]  # bytes of tensors kept for the backward, in the module and below
    tensors: dict[str, torch.Tensor]  # parameters and buffers after it, by their names


def run_fake(model: nn.Module, inputs: Any) -> Forward:
    """Call a copy of the model on fake tensors."""
    _check_inputs(inputs)
    mode = fake_mode()
    entered: list[str] = []
    with isolated_rng(), quiet_fakes():
        if any(map(_is_lazy, model.modules())):
            model = _shaped(model, inputs, entered)
        with emptied_caches(), mode:
            twin = _copied(model, _empty)
            with _refused("the model cannot be called on these inputs without values", _HOW, entered):
                args, options = _arguments(inputs, _empty)
                return _observed(twin, args, options, entered)


def _shaped(model: nn.Module, inputs: Any, entered: list[str]) -> nn.Module:
    """Return a copy on the meta device with shapes in its lazy modules, which take no fake tensors."""
    twin = _copied(model, _on_meta)
    with _refused("the model cannot be called on these inputs without values", _HOW, entered), torch.no_grad():
        args, options = _arguments(inputs, _on_meta)
        _ = twin(*args, **options)
    return twin


_HOW = (
    "Pass a tensor, a tuple of arguments or a mapping of keyword arguments; code that looks at a tensor's values cannot"
    " run."
)


def _observed(twin: nn.Module, args: Sequence[Any], options: Mapping[str, Any], entered: list[str]) -> Forward:
    """Call the copy, and note shapes and kept bytes; `entered` has the paths of the modules that are being called."""
    found = Forward({}, {}, {}, {})
    own = {storage_of(each)[0] for each in (*twin.parameters(), *twin.buffers()) if not is_lazy(each)}
    storages: dict[int, object] = {}  # kept alive, so that addresses stay unique

    def watch(path: str, module: nn.Module) -> None:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            entered.append(path)

        def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
            while entered.pop() != path:  # modules that an error has left
                pass
            found.outputs[path] = tuple(_shapes(output))
            found.calls[path] = found.calls.get(path, 0) + 1

        _ = module.register_forward_pre_hook(enter)
        _ = module.register_forward_hook(leave)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        key, storage = storage_of(tensor)
        if key not in own and key not in storages:
            storages[key] = storage
            inside = [*entered, *_around(entered[-1])] if entered else []
            for path in dict.fromkeys(inside):
                found.kept[path] = found.kept.get(path, 0) + storage.nbytes()
        return tensor

    for path, module in modules_of(twin):
        watch(path, module)
    with torch.enable_grad(), as_on_gpus(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = twin(*args, **options)
    return found._replace(tensors=dict([*twin.named_parameters(), *twin.named_buffers()]))


def _copied(model: nn.Module, empty: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of a model with empty tensors in place of its tensors, and without its hooks."""
    with _refused("the model cannot be copied", "Leave inputs out, or pass the plain model, before accel.prepare."):
        known: dict[int, Any] = {}
        for _, module in modules_of(model):
            attributes = cast("dict[str, object]", vars(module))  # tables of parameters and buffers among them
            for tensor in _tensors_in(attributes.values()):
                known[id(tensor)] = empty(tensor)
        try:
            twin = copy.deepcopy(model, known)
        except PrepareError as error:  # of a sharded model: the line to write here is another one
            raise ValueError(error.problem) from error
    for _, module in modules_of(twin):
        if _is_lazy(module):
            continue  # its hook makes its parameters
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return twin


def _empty(tensor: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """Return an empty tensor of the same form; a fake one inside of the fake mode."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if not is_lazy(tensor):
        return _empty(tensor, "meta")
    lazy: Any = UninitializedParameter if isinstance(tensor, nn.Parameter) else UninitializedBuffer
    return lazy(requires_grad=tensor.requires_grad, dtype=tensor.dtype, device="meta")


def _is_lazy(module: Any) -> bool:
    return isinstance(module, LazyModuleMixin) and cast(Any, module).has_uninitialized_params()


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors in plain containers."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors_in(cast("dict[object, object]", value).values())
        elif isinstance(value, list | tuple):
            yield from _tensors_in(cast("Sequence[object]", value))


def _check_inputs(inputs: object) -> None:
    """Raise `ConfigError` for a shape in the place of a tensor."""
    shape = cast("tuple[object, ...]", inputs) if isinstance(inputs, tuple) and not isinstance(inputs, Input) else ()
    if shape and all(isinstance(each, int) for each in shape):
        raise ConfigError(
            "a shape is no input",
            expected="a tensor, or accel.estimate.Input(shape, dtype)",
            got=repr(shape),
            where="summary(inputs=)",
            fix=f'Write accel.estimate.Input({shape}, "float32").',
        )


def _arguments(inputs: Any, empty: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments by position and by keyword, on empty tensors."""

    def emptied(value: Any) -> Any:
        if isinstance(value, Input):
            return empty(torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta"))
        is_tree = isinstance(value, torch.Tensor | Mapping | list | tuple)
        return map_tensors(empty, cast("object", value)) if is_tree else value

    if isinstance(inputs, Mapping):
        return (), {str(name): emptied(value) for name, value in cast("Mapping[Any, Any]", inputs).items()}
    if isinstance(inputs, tuple) and not isinstance(inputs, Input):
        return [emptied(each) for each in cast("tuple[Any, ...]", inputs)], {}
    return (emptied(inputs),), {}


def _shapes(output: object) -> Iterator[Shape]:
    """Yield the shapes of the tensors in an output."""
    values: Iterable[object] = cast(Any, output).values() if isinstance(output, Mapping) else [output]
    for tensor in _tensors_in(values):
        yield tuple(tensor.shape)


def _refused(problem: str, fix: str, entered: Sequence[str] = ()) -> AbstractContextManager[None]:
    """Raise `ConfigError` for an error of the model; it names the module that runs, the last of `entered`."""
    return users_code(problem, lambda: f"summary, module {entered[-1]}" if any(entered[-1:]) else "summary", fix)


def _around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around one; containers such as ModuleList are not called."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def modules_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules by their paths, each once."""
    return cast("Iterator[tuple[str, Any]]", model.named_modules())
