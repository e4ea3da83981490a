# SPDX-License-Identifier: Apache-2.0
"""`summary`: a model's modules as a table, with the shapes and activations of a forward on a fake copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accel.errors import ConfigError
from accel.errors._checks import check_count, check_kind
from accel.estimate._fake_forward import Forward, Shape, modules_of, run_fake
from accel.tensors import is_dtensor, local_part, packed
from accel.terminal import show_size, show_table


class ModuleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A module of a summary. Its numbers include those of the modules inside.

    Attributes:
        path: name in the model; empty for the model itself.
        kind: name of its class.
        depth: number of modules around it.
        parameters: elements of parameters; one that several modules share counts in the first.
        trained: those of them with a gradient.
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
    check_kind(model, nn.Module, "not a model", expected="an nn.Module", where="summary")
    if depth is not None:
        check_count(depth, "not a depth", least=0, where="summary(depth=)")
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
    """A parameter or buffer.

    Attributes:
        owner: path of the first module that has it.
        elements: number of its elements.
        local: number of those that this rank holds.
        nbytes: their bytes.
        trained: whether it has a gradient.
    """

    owner: str
    elements: int
    local: int
    nbytes: int
    trained: bool


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
    """Return a row and those of the modules inside."""
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
