# SPDX-License-Identifier: Apache-2.0
"""Layouts that a module's own gradients name: the rows of parameters that a chunk of a matmul's input depends on.

A matmul with a weight contracts some features. Rank r's chunk of them depends on some rows of the parameters before it,
and those rows have gradients. `fit` makes a layout of them; packs, groups of heads and segments need no names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from accel.compiling import uncompiled
from accel.parallel._fakes import NoMessages
from accel.parallel.parts import RowLayout, rows_of
from accel.parallel.parts._attention import written_out
from accel.parallel.parts._contractions import dotted, operands_first, terms_of
from accel.parallel.parts._layout import RowCut, cut_of, even, fit

Layouts = Mapping[str, RowLayout]


class NeededRows(NamedTuple):
    """Rows of a parameter that ranks need, where no layout has them."""

    dim: int  # of the rows
    rows: tuple[frozenset[int], ...]  # of each rank

    @property
    def problem(self) -> str:
        """Why they are no layout."""
        every = frozenset[int]().union(*self.rows)
        shared = {row for row in every if sum(row in own for own in self.rows) > 1}
        if not shared:
            return "its rows belong to ranks in another order"
        return f"several ranks need rows {min(shared)} to {max(shared)}"


Candidate = Mapping[str, RowLayout | NeededRows]
# Places of the activation and of the weight among arguments, and their contracted dimensions.
_MATMULS: Mapping[str, tuple[int, int, int, int]] = {
    "linear": (0, 1, -1, 1),
    "addmm": (1, 2, -1, 0),
    "baddbmm": (1, 2, -1, -2),
    "matmul": (0, 1, -1, -2),
    "__matmul__": (0, 1, -1, -2),
    "mm": (0, 1, -1, -2),
    "bmm": (0, 1, -1, -2),
    "grouped_mm": (0, 1, -1, -2),
    "conv1d": (0, 1, 1, 1),
    "conv2d": (0, 1, 1, 1),
}
_OPERATORS = frozenset({"matmul", "__matmul__", "bmm", "mm"})
_ADDED = frozenset({"addmm", "baddbmm"})  # to their first argument
_JOINS = frozenset({"cat", "concat", "concatenate"})
_WITH_DEAD = frozenset({"relu", "relu_", "relu6", "hardtanh", "clamp"})  # of units without a gradient
_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm"})
_STATISTICS = frozenset({"mean", "sum", "var", "std", "norm", "linalg_vector_norm", "max", "amax"})
_STEPS = 12  # of a way from parameters to a weight that is made of them


class _Matmul(NamedTuple):
    """A matmul of an activation and a weight."""

    input: Tensor  # as the module made it; the matmul itself took a copy, so that its gradient ends here
    weight: Tensor  # a parameter, or a tensor computed only from parameters
    dims: tuple[int, int]  # contracted dimensions of both


_Contraction = tuple[Sequence[_Matmul], RowCut]  # matmuls that are divided together, and the cut of what they contract
_Needed = dict[tuple[str, int], list[frozenset[int]]]  # by the name and dimension of a parameter, the rows of each rank


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class _MatmulRecorder(TorchFunctionMode):
    """Records the matmuls of a forward. A separate path of gradients begins at each of them."""

    def __init__(self, parameters: Mapping[int, str], size: int, *, passes_norms: bool) -> None:
        super().__init__()
        self._passes_norms = passes_norms
        self.matmuls: list[_Matmul] = []
        self.weights: list[Tensor] = []
        self.joined: dict[int, RowCut] = {}  # of tensors that were concatenated, by their length together
        self._parameters = parameters
        self._size = size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A checkpoint saves nothing here: computed again without this mode, its functions would be others.
        with saved_tensors_hooks(_itself, _itself):
            return self._recorded(func, args, kwargs or {})

    def _recorded(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            with self:
                return written_out(*args, **named)
        if name in _WITH_DEAD and args[0].is_floating_point():
            return functional.softplus(args[0])
        if self._passes_norms and name in _NORMS:
            return _scaled(*args, **named)
        keeps = named.get("keepdim") or any(each is True for each in args[2:])
        if self._passes_norms and name in _STATISTICS and keeps:
            return pytree.tree_map_only(Tensor, Tensor.detach, func(*args, **named))
        if name in _JOINS:
            self._note_joined(*args, **named)
        if name == "tensordot":
            dims = named.get("dims", args[2] if len(args) > 2 else 2)
            func, named = torch.einsum, {}
            name, args = "einsum", (dotted(args[0].dim(), args[1].dim(), dims), *args[:2])
        if name == "einsum" and len(args) > 1 and isinstance(args[0], str):
            operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
            return func(args[0], *self._einsum(args[0], [*operands]))
        if name in _MATMULS and (found := self._matmul(func, name, [*args], named)) is not None:
            return found
        return func(*args, **named)

    def _note_joined(self, tensors: Sequence[Tensor], dim: int = 0, *, axis: int | None = None) -> None:
        lengths = [each.shape[dim if axis is None else axis] for each in tensors if each.numel()]
        cut = cut_of(1, [(length, self._size) for length in lengths])
        if cut is not None and all(length % self._size == 0 for length in lengths):
            self.joined[sum(lengths)] = cut

    def _einsum(self, equation: str, tensors: list[Tensor]) -> list[Tensor]:
        """The operands, with copies of the ones that are contracted with a weight: along the first dimension that
        ranks can share, such as heads or experts."""
        terms, result = terms_of(equation, [each.dim() for each in tensors])
        self._note(*tensors)
        weights = [at for at, each in enumerate(tensors) if self._is_weight(each)]
        if len(weights) != 1:
            return tensors
        (own,) = weights
        for dim, letter in enumerate(terms[own]):
            others = [at for at, term in enumerate(terms) if at != own and letter in term]
            if others and letter not in result and tensors[own].shape[dim] % self._size == 0:
                for at in [at for at in others if tensors[at].requires_grad] or others[:1]:
                    self.matmuls.append(_Matmul(tensors[at], tensors[own], (terms[at].index(letter), dim)))
                    tensors[at] = tensors[at].detach().requires_grad_()
                return tensors
        return tensors

    def _matmul(self, func: Any, name: str, args: list[Any], named: dict[str, Any]) -> Any:
        """The result of a recorded matmul; None for another one."""
        first, second, of_input, of_weight = _MATMULS[name]
        args, named = operands_first(args, named, is_added=name in _ADDED)
        if not all(isinstance(each, Tensor) for each in args[first : second + 1]) or len(args) <= second:
            return None
        x, weight = args[first], args[second]
        if name in _OPERATORS and x.dim() == 2 and self._is_weight(x) and self._is_weight(weight):
            return None  # a weight that is made of two, as a merged low-rank correction
        if name.startswith("conv"):
            if named.get("groups", args[6] if len(args) > 6 else 1) != 1:
                self._note(weight, named.get("bias", args[2] if len(args) > 2 else None))
                return None
            of_input = x.dim() - weight.dim() + 1
        if self._is_weight(weight):
            bias = named.get("bias", args[0] if name in _ADDED else args[2] if len(args) > 2 else None)
            self._note(weight, bias)
            args[first] = x.detach().requires_grad_()
        elif name in _OPERATORS and self._is_weight(x):  # experts in one tensor
            self._note(x)
            args[second] = weight.detach().requires_grad_()
            x, weight = weight, x
            of_input, of_weight = -2 if x.dim() > 1 else -1, -1
        else:
            return None
        self.matmuls.append(_Matmul(x, weight, (of_input % x.dim(), of_weight % weight.dim())))
        return func(*args, **named)

    def _note(self, *tensors: Any) -> None:
        self.weights += [each for each in tensors if isinstance(each, Tensor) and self._is_weight(each)]

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or computed only from parameters."""
        if not tensor.requires_grad:
            return False
        if tensor.grad_fn is None:
            return id(tensor) in self._parameters
        seen: set[Any] = set()
        todo: list[Any] = [tensor.grad_fn]
        while todo:
            step = todo.pop()
            if step is None or step in seen:
                continue
            seen.add(step)
            leaf = getattr(step, "variable", None)
            if len(seen) > _STEPS or (leaf is not None and id(leaf) not in self._parameters):
                return False
            todo += [each for each, _ in step.next_functions]
        return True


def dense(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with all rows, also of an embedding with `sparse`."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _scaled(
    x: Tensor,
    over: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """The result of a norm over dimensions, or over groups of channels, but for its statistics."""
    del eps
    if isinstance(over, int):
        column = (-1, *[1] * (x.dim() - 2))
        weight, bias = (None if each is None else each.view(column) for each in (weight, bias))
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def dependent_layouts(
    whole: nn.Module, forward: Callable[[nn.Module], object], size: int, *, passes_norms: bool = False
) -> list[Candidate]:
    """Return layouts of parameters, by name, that each end in a matmul.

    Layouts with one pattern of paths are one mapping.
    `forward` runs a module with values, in evaluation mode; its gradients are left as they are.
    A norm of features makes each depend on all. With `passes_norms` statistics count as constants, so that layouts of
    the layers around a norm are found.
    """
    parameters = dict(whole.named_parameters())
    names = {id(each): name for name, each in parameters.items()}
    recorder = _MatmulRecorder(names, size, passes_norms=passes_norms)
    with uncompiled():
        with torch.enable_grad(), recorder:
            _ = forward(whole)
        found = _Search(parameters, names, recorder, size).found()
    merged: dict[str, dict[str, RowLayout | NeededRows]] = {}
    for row, layouts in found:
        group = merged.setdefault(pattern_of(row), {})
        if all(group.get(name, layout) == layout for name, layout in layouts.items()):
            group.update(layouts)
    return list(merged.values())


def pattern_of(path: str) -> str:
    """Return a path with `*` for the numbers between dots."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", path)


class _Search:
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        names: Mapping[int, str],
        recorder: _MatmulRecorder,
        size: int,
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._recorder = recorder
        self._size = size
        self._known: dict[object, _Needed] = {}
        self._draw = torch.Generator().manual_seed(5)
        self._of_matmuls = {name: None for each in recorder.weights for name in self._made_of(each)}
        others = (name for name, each in parameters.items() if each.requires_grad and each.dim() > 1)
        self._used = [*self._of_matmuls, *(name for name in others if name not in self._of_matmuls)]

    def _made_of(self, weight: Tensor) -> list[str]:
        """The names of the parameters that a weight is, or is made of."""
        if id(weight) in self._names:
            return [self._names[id(weight)]]
        return [name for name, each in self._gradients(weight, list(self._parameters)) if each is not None]

    def _gradients(self, tensor: Tensor, names: Sequence[str]) -> list[tuple[str, Tensor | None]]:
        """Gradients of a random function of a tensor."""
        if not tensor.requires_grad:
            return [(name, None) for name in names]
        weights = torch.randn(tensor.shape, generator=self._draw, dtype=tensor.dtype)
        leaves = [get_gradient_edge(self._parameters[name]) for name in names]
        total = (tensor * weights).sum()
        scalar = total.real if total.is_complex() else total
        edge = get_gradient_edge(scalar)
        seed = [torch.ones_like(scalar)]
        with NoMessages():
            found: Any = torch.autograd.grad([edge], leaves, seed, retain_graph=True, allow_unused=True)
        return list(zip(names, map(dense, found), strict=True))

    def found(self) -> list[tuple[str, Candidate]]:
        """The largest weight that is contracted, with the way of its cut, and all layouts, of each set of matmuls that
        are divided together."""
        found: list[tuple[str, Candidate]] = []
        even_ones: list[_Contraction] = []
        for matmuls in self._together():
            length = matmuls[0].weight.shape[matmuls[0].dims[1]]
            alike = all(each.input.shape[each.dims[0]] == length == each.weight.shape[each.dims[1]] for each in matmuls)
            if not alike or length % self._size:
                continue
            ways = {"": even(length, self._size)}
            if length in self._recorder.joined:  # features of several layers side by side
                ways["joined"] = self._recorder.joined[length]
            even_ones.append((matmuls, ways[""]))
            for way, cut in ways.items():
                candidate = self._layouts([(matmuls, cut)])
                found += self._named(way, candidate)
                found += self._named(f"{way} without readers", self._without_readers(candidate))
        for several in self._beside(even_ones):
            found += self._named("beside", self._layouts(several))
        return found

    def _named(self, way: str, candidate: tuple[Candidate, list[str]]) -> list[tuple[str, Candidate]]:
        """The layouts, that of the largest weight that is contracted first, with its name and the way; none where no
        other matrix is divided."""
        layouts, rows = candidate
        matrices = [name for name in layouts if self._parameters[name].dim() > 1]
        is_known = not way or all(isinstance(each, RowLayout) for each in layouts.values())
        if not rows or not is_known or not set(matrices) - set(rows):
            return []
        largest = max(rows, key=lambda name: self._parameters[name].numel())
        return [(f"{largest} {way}", {largest: layouts[largest], **layouts})]

    def _without_readers(self, candidate: tuple[Candidate, list[str]]) -> tuple[Candidate, list[str]]:
        """A candidate without layers that take divided features of others, as the gates of an attention that are
        computed from its queries and keys; nothing if it has none. Ranks sum the outputs of such layers."""
        layouts, rows = candidate
        names = layouts.keys() - {*rows}
        readers: set[str] = set()
        for each in self._recorder.matmuls:
            own = self._names.get(id(each.weight), "")
            others = sorted(names - {own})
            if own in names and self._depends(each.input, others):
                readers.add(own.rpartition(".")[0])
        left = {name: layout for name, layout in layouts.items() if name.rpartition(".")[0] not in readers}
        return (left, rows) if readers else ({}, [])

    def _depends(self, tensor: Tensor, names: Sequence[str]) -> bool:
        """Whether a tensor depends on one of these parameters, as far as its backward shows."""
        try:
            return any(gradient is not None for _, gradient in self._gradients(tensor, names))
        except RuntimeError:  # of a function with a backward for gradients of one layout
            return False

    def _beside(self, contractions: Sequence[_Contraction]) -> list[list[_Contraction]]:
        """Sets of matmuls, each with some rows of one parameter, as the fused layer of a parallel block has rows of the
        attention and of the MLP."""
        found: dict[str, list[_Contraction]] = {}
        for each in contractions:
            for (name, dim), ranks in self._before([each]).items():
                if (
                    dim == 0
                    and len(self._shape(name)) > 1
                    and len(frozenset[int]().union(*ranks)) < self._shape(name)[dim]
                ):
                    found.setdefault(name, []).append(each)
        return [several for several in found.values() if len(several) > 1]

    def _together(self) -> list[list[_Matmul]]:
        """Groups of matmuls that are divided together, because they have a weight or an input in common. A constant
        input, such as an identity matrix, can be divided in any way."""
        matmuls = [each for each in self._recorder.matmuls if each.input.requires_grad]
        head: dict[object, object] = {}

        def root(key: object) -> object:
            while head.get(key, key) != key:
                key = head[key]
            return key

        for each in matmuls:
            for name in self._made_of(each.weight):
                head[root(name)] = root(id(each.input))
        found: dict[object, list[_Matmul]] = defaultdict(list)
        for each in matmuls:
            found[root(id(each.input))].append(each)
        return list(found.values())

    def _before(self, contractions: Sequence[_Contraction]) -> _Needed:
        """Rows of the parameters behind the inputs of matmuls."""
        return _together_needed(
            self._needed([(each.input, each.dims[0]) for each in matmuls], chunks) for matmuls, chunks in contractions
        )

    def _layouts(self, contractions: Sequence[_Contraction]) -> tuple[Candidate, list[str]]:
        """Layouts of the parameters behind the inputs and of the weights, and the names of the latter."""
        before = self._before(contractions)
        contracted = _together_needed(
            self._needed([(each.weight, each.dims[1]) for each in matmuls], chunks) for matmuls, chunks in contractions
        )
        layouts: dict[str, RowLayout] = {}
        divided = {name for (name, dim), ranks in contracted.items() if fit(ranks, self._shape(name)[dim]) is not None}
        for each, chunks in ((each, chunks) for matmuls, chunks in contractions for each in matmuls):
            if id(each.weight) not in self._names:  # computed from a parameter of the same shape with coupled rows
                alike = [name for name in self._made_of(each.weight) if self._shape(name) == each.weight.shape]
                layouts |= {name: RowLayout(each.dims[1], chunks) for name in {*alike} - divided}
        rows = list(layouts)
        others: dict[str, NeededRows] = {}
        for needed, is_weight in ((before, False), (contracted, True)):
            for (name, dim), ranks in sorted(needed.items(), key=lambda item: item[0][1]):
                if name in layouts:
                    continue
                cut = fit(ranks, self._shape(name)[dim])
                # parameters that no matmul takes are cut where they meet parts
                is_needed = name in self._of_matmuls and len(self._shape(name)) > 1
                if cut is None and not is_weight and is_needed and len({*ranks}) > 1:
                    _ = others.setdefault(name, NeededRows(dim, tuple(ranks)))
                if cut is None or cut.total % self._size:
                    continue
                layouts[name] = RowLayout(dim, cut)
                rows += [name] * is_weight
        return {**others, **layouts}, rows

    def _shape(self, name: str) -> torch.Size:
        return self._parameters[name].shape

    def _needed(self, tensors: Sequence[tuple[Tensor, int]], chunks: RowCut) -> _Needed:
        """Rows of each parameter and dimension that each rank's chunk of tensors depends on."""
        key = (*((id(tensor), dim) for tensor, dim in tensors), chunks)
        if key not in self._known:
            self._known[key] = self._found_needed(tensors, chunks)
        return self._known[key]

    def _found_needed(self, tensors: Sequence[tuple[Tensor, int]], chunks: RowCut) -> _Needed:
        found: dict[tuple[str, int], list[set[int]]] = {}
        distinct = {id(tensor): (tensor, dim) for tensor, dim in tensors}
        for rank in range(self._size):
            chosen = rows_of(chunks, rank, self._size)
            for tensor, dim in distinct.values():
                chunk = tensor.index_select(dim, torch.tensor(chosen, device=tensor.device))
                for name, grad in self._gradients(chunk, self._used):
                    for axis, rows in enumerate([] if grad is None else _rows_in(grad)):
                        found.setdefault((name, axis), [set() for _ in range(self._size)])[rank].update(rows)
            if not any(len(rows[rank]) < self._shape(name)[axis] for (name, axis), rows in found.items()):
                return {}  # this rank needs all rows of all of them, as behind a norm of the sum of all blocks
        return {key: [frozenset(each) for each in rows] for key, rows in found.items()}


def _together_needed(several: Iterable[_Needed]) -> _Needed:
    """The rows that ranks need for one or another of several sets of matmuls."""
    found: _Needed = {}
    for each in several:
        for key, ranks in each.items():
            before = found.get(key, [frozenset[int]()] * len(ranks))
            found[key] = [one | other for one, other in zip(before, ranks, strict=True)]
    return found


def _rows_in(grad: Tensor) -> list[list[int]]:
    """Rows of a gradient that are not zero, along each dimension."""
    is_there: Any = grad != 0
    if is_there.all():
        return [list(range(length)) for length in grad.shape]
    dims = range(grad.dim())
    by_dim = [is_there.any(dim=[each for each in dims if each != dim]) if len(dims) > 1 else is_there for dim in dims]
    return [each.nonzero().flatten().tolist() for each in by_dim]
