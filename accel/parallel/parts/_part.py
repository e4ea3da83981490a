# SPDX-License-Identifier: Apache-2.0
"""The part: a rank's rows of a tensor, reporting the whole shape; how tensors enter a region of parts and leave it.

A plain tensor has a complete gradient. It enters a region of parts by `copied`, which sums over ranks in its backward,
and is cut to the rows of the part that it meets. A region ends where the divided dimension is contracted or summed: the
result is summed over ranks, and is plain again. A part with a division of None is the same on all ranks, and its
gradient is a summand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from accel.comm import ThreadGroup, copied, gathered, summed
from accel.parallel._private import (
    Operator,
    alias,
    in_function_transform,
    map_kind,
    runs_in_backward,
    subclasses_are_on,
    tensors_of,
    without_subclasses,
)
from accel.parallel.parts._layout import (
    Alignment,
    NoRuleError,
    Pieces,
    Places,
    RowCut,
    RowLayout,
    TracedNoRuleError,
    alignment_of,
    kept,
    no_rule,
    places_of,
    refuse_transform,
    rows_of,
    runs_of,
    whole_of,
)
from accel.tensors import is_view, same_memory, weighted

if TYPE_CHECKING:
    import torch.distributed as dist

# Their rules call functions that have rules.
_CELLS = (torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.gru_cell, torch.lstm_cell)
_COMPOSED = (functional.multi_head_attention_forward, functional.pixel_shuffle, functional.pixel_unshuffle, *_CELLS)
_OF_KERNELS = ("data_ptr", "size")  # attributes that kernels ask for and that have rules; torch.vmap for a size
Args = Sequence[Any]
Named = Mapping[str, Any]
Rule = Callable[[Any, Args, Named], Any]
_Scope = Callable[[], contextlib.AbstractContextManager[object]]
# A tensor, what its users take, and the number of changes in place before it entered; by its `id`, which belongs to it
# while it is kept, and by its number in a trace.
Entered = dict[int, tuple[Tensor, Tensor, int]]


class Ranks:
    """The ranks that hold parts of the same tensors, and the plain tensors that have entered the region that runs.

    Attributes:
        group: of these ranks.
        rank: this rank in the group.
        size: of the group.
        in_rule: whether a rule of nested parts runs.
        nests: whether rows may be parts along another axis.
        overlaps: whether messages overlap with matmuls, where torch compiles nothing.
        shares_tokens: whether each rank holds its tokens between divided layers.
        keeps_rows: whether this rank's rows of outputs leave a model, and not all.
        gathers_inputs: whether a layer with outputs that ranks divide gathers an input that they divide too.
        given: numbers and layouts of the parts among the leaves of the arguments of a compiled call, and whether they
            are of these ranks; None inside.
    """

    nests = False
    overlaps = False
    shares_tokens = False
    keeps_rows = False

    __slots__ = ("_entered", "gathers_inputs", "given", "group", "in_rule", "rank", "size")

    def __init__(self, group: dist.ProcessGroup | ThreadGroup) -> None:
        self.group: Any = group
        self.gathers_inputs = True
        self.rank = group.rank()
        self.size = group.size()
        self.in_rule = False
        self._entered: Entered = {}
        self.given: tuple[tuple[int, RowLayout | None, bool], ...] | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a plain tensor for use inside: its backward sums gradients over ranks, once for all who take it."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        known = self.known(tensor)
        if known is None:
            known = copied(tensor, self.group)
            self.keep(tensor, known)
        return known

    def kept(self, part: PartTensor) -> Tensor:
        """Return what a buffer keeps of a part: the whole tensor. A collective."""
        return leave(part)

    def note_cut(self) -> None:
        """Note that a plain tensor with the rows of all ranks is cut to this rank's."""

    @property
    def of_region(self) -> Ranks:
        """The ranks of the regions in which these compute."""
        return self

    def keep(self, tensor: Tensor, inside: Tensor) -> None:
        """Let all who take a plain tensor have the same one inside."""
        is_traced = is_dynamo_compiling()
        changes = 0 if is_traced else tensor._version
        self._entered[len(self._entered) if is_traced else id(tensor)] = tensor, inside, changes

    def known(self, tensor: Tensor) -> Tensor | None:
        """The copy of a tensor that has entered before, unchanged since; None for none."""
        if not is_dynamo_compiling():
            found = self._entered.get(id(tensor))
            return None if found is None or found[2] != tensor._version else found[1]
        for own, inside, _ in self._entered.values():  # a graph that asks for an `id` would be of this tensor alone
            if own is tensor:
                return inside
        return None

    def total(self, summand: Tensor) -> Tensor:
        """Return the sum of the ranks' summands, a plain tensor. A collective."""
        return summed(summand, self.group)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's outputs of a layer with outputs that ranks divide, with messages that overlap with the
        matmuls."""
        raise NotImplementedError

    def product_of_rows(self, part: PartTensor, weight: PartTensor, bias: Tensor | None) -> Tensor | None:
        """Return this rank's outputs of a layer with outputs that ranks divide, if they come before all of its input;
        None elsewhere."""
        return None

    def ended_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sum of the outputs of a layer with inputs that ranks divide, with messages that overlap with the
        matmul. A collective."""
        raise NotImplementedError

    def ended(self, summand: Tensor) -> Tensor:
        """Return the sum of the summands of a matmul over the divided dimension. A collective."""
        return self.total(summand)

    def input_of_layer(self, part: PartTensor) -> PartTensor:
        """Return the input of a layer with a weight that ranks divide."""
        return part

    def joined(self, rows: Tensor, dim: int) -> Tensor:
        """Concatenate the rows of all ranks, a plain tensor. A collective."""
        return gathered(rows, dim, self.group)

    def nested(self, rows: Tensor, layout: RowLayout | None) -> PartTensor:
        """Return this rank's rows of a tensor, which may be parts along another axis, as a part."""
        raise NotImplementedError

    def from_module(self, output: Any) -> Any:
        """Return the output of a module in a model that computes with parts, inside of the model."""
        return output

    def in_graph(self, rows: Tensor, layout: RowLayout | None, *, is_own: bool) -> PartTensor:
        """Return this rank's rows of a tensor as a part, at a border of a graph of torch.compile. `is_own`: whether it
        was a part of these ranks, not of `tokens`."""
        return make(rows, layout, self)

    def without_rule(self, func: Any, args: Args, kwargs: Named, problem: str) -> Any:
        """Compute a function that has no rule for its arguments; raise `NoRuleError` where these ranks cannot."""
        name = name_of(func)
        may_be_kernel = problem == name or name in _OF_KERNELS
        raise no_rule(name if problem == name else f"{name}, {problem}", may_be_kernel=may_be_kernel)

    def in_region(self) -> contextlib.AbstractContextManager[None]:
        """Be in a region, as a module that torch compiles."""
        return contextlib.nullcontext()

    def begin(self) -> Any:
        """Begin a region, in which nothing has entered; return what `end` needs of the one around it."""
        outer, self._entered = self._entered, {}
        return outer

    def end(self, outer: Any) -> None:
        """Go on with the region around one that has ended."""
        self._entered = outer


_NO_RULE = (NoRuleError, TracedNoRuleError)
_NAMES: Mapping[str, str] = {"axis": "dim", "keepdims": "keepdim"}  # of NumPy, which torch takes for its own


def _method(name: str) -> Any:
    """A method that torch writes in Python, which torch.compile would take for an attribute."""

    def method(self: PartTensor, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(getattr(Tensor, name), (), (self, *args), kwargs)

    return method


class PartTensor(Tensor):
    """A rank's rows of a tensor. Inside of rules, where subclasses are off, it is a tensor of these rows."""

    takes_collectives = True  # of ranks along other axes, which share the rows of a rank

    # Layout of the rows; None for a tensor that all ranks hold, with a gradient that is a summand on each.
    division: RowLayout | None
    ranks: Ranks  # that hold the parts

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride, reportImplicitOverride]
        """The full shape; the shape of the rows if subclasses are off, as in the checks of checkpoints."""
        is_on = subclasses_are_on()
        with without_subclasses():
            return whole_shape(self) if is_on else self.size()

    def plain_rows(self) -> Tensor:
        """Return this rank's rows as a plain tensor."""
        with without_subclasses():
            if is_dynamo_compiling():  # it knows no way from a subclass to Tensor
                return alias(self)
            return self.as_subclass(Tensor)

    def remake(self) -> Callable[[Tensor], Tensor]:
        """Return a function that makes such a part of rows; it holds no tensor."""
        return partial(make, layout=self.division, ranks=self.ranks)

    split = _method("split")
    unflatten = _method("unflatten")
    norm = _method("norm")

    def __repr__(self, **_kwargs: object) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Part({list(whole_shape(self))}, {self.division}, rank {self.ranks.rank} of {self.ranks.size})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Args = (), kwargs: Named | None = None, scope: _Scope = without_subclasses
    ) -> Any:
        if not is_dynamo_compiling() and in_function_transform():
            refuse_transform(name_of(func))
        given: Named = {}
        try:
            rule = rule_of(func)
            if kwargs:
                given = {_NAMES.get(name, name): value for name, value in kwargs.items()}
                if (out := given.pop("out", None)) is not None:
                    from accel.parallel.parts._rules import written_into  # which imports this file

                    return written_into(out, func, args, given)
            if func in _COMPOSED:
                return rule(func, args, given)
            with scope():
                try:
                    return rule(func, args, given)
                except _NO_RULE as error:  # torch.compile does not leave a block that an error leaves
                    problem = error.args[2]
        except _NO_RULE as error:
            problem = error.args[2]
        if isinstance(func, Operator) and runs_in_backward():  # of a gradient, by a mode such as a counter of FLOPs
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        return ranks_of(args, kwargs).without_rule(func, args, kwargs or {}, problem)


@kept
def rule_of(func: Callable[..., Any]) -> Rule:
    """Return the rule of a function, a method or the getter of an attribute; `NoRuleError` with its name for none."""
    from accel.parallel.parts._rules import find_rule  # which imports this file

    rule = find_rule(func)
    if rule is None:
        raise no_rule(name_of(func))
    return rule


def make(rows: Tensor, layout: RowLayout | None, ranks: Ranks) -> PartTensor:
    """Return this rank's rows of a tensor as a part. A fresh result of torch changes its class, without a node of its
    own in the graph of gradients."""
    if ranks.nests:
        return ranks.nested(rows, layout)
    if is_dynamo_compiling() or type(rows) is not Tensor or rows.is_leaf or not torch.is_grad_enabled():
        part = rows.as_subclass(PartTensor)
    else:
        rows.__class__ = PartTensor
        part = cast(PartTensor, rows)
    part.division = layout
    part.ranks = ranks
    return part


def plain_of(part: Tensor) -> Tensor:
    """Return this rank's rows as a plain tensor."""
    return part.plain_rows() if isinstance(part, PartTensor) else part


def outside(rows: Tensor) -> Tensor:
    """Return rows that leave a model as a tensor that is no view: a change of a view in place drops the hooks of its
    gradient that `fully_shard` has."""
    is_plain_view = not is_dynamo_compiling() and type(rows) is Tensor and is_view(rows)
    return same_memory(rows) if is_plain_view else rows


def leave(part: Tensor) -> Tensor:
    """Return the whole tensor of a part, plain on every rank; a plain tensor as it is. A collective for a divided one.

    Outside, gradients are complete; inside, they are summands. So of several ranks that hold the same rows the first
    gets their gradient, and of a tensor that is not divided each gets an equal share.
    """
    if not isinstance(part, PartTensor):
        return part
    if part.division is not None:
        return whole_rows(part, part.ranks.joined)
    own = plain_of(part)
    return weighted(own, 1 / part.ranks.size) if own.requires_grad else own


def whole_rows(part: PartTensor, join: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return all rows of a divided tensor in their order, plain; `join` concatenates the rows of all ranks."""
    layout = part.division
    assert layout is not None
    rows = plain_of(part)
    repeat, segments = layout.cut
    if repeat > 1 and layout.cut.is_equal and [ways for _, ways in segments] == [part.ranks.size]:
        pieces: Tensor = cast(Any, rows).unflatten(layout.dim, (repeat, -1))
        return join(pieces, layout.dim + 1).flatten(layout.dim, layout.dim + 1)
    missing = layout.cut.local - rows.shape[layout.dim]
    if missing:  # messages are of one length; torch copies where it pads by 0
        rows = functional.pad(rows, [*[0, 0] * (rows.dim() - 1 - layout.dim), 0, missing])
    whole = join(rows, layout.dim)
    order = _order(layout.cut, part.ranks.size)
    return (whole if order is None else taken(whole, layout.dim, order)).contiguous()


@kept
def _order(cut: RowCut, size: int) -> Places | None:
    """The place of each row of the full tensor among the rows of all ranks, the first of several; None if they are in
    order."""
    place: dict[int, int] = {}
    for rank in range(size):
        for number, row in enumerate(rows_of(cut, rank, size), rank * cut.local):
            place.setdefault(row, number)
    found = [place[row] for row in range(cut.total)]
    is_ordered = found == list(range(cut.total)) and cut.is_equal and not cut.is_shared(size)
    return None if is_ordered else runs_of(found, len(cut.listed) * size)


# Inside of rules, where subclasses are off.


def layout_of(tensor: object) -> RowLayout | None:
    """Return the layout of a part; None for other tensors."""
    return tensor.division if isinstance(tensor, PartTensor) else None


def layouts_of(tensors: Iterable[Tensor]) -> list[RowLayout]:
    """Return the layouts of those tensors that are divided."""
    return [each for each in map(layout_of, tensors) if each is not None]


def whole_shape(tensor: Tensor) -> Any:
    """Return the whole shape of a part, or the shape of a plain tensor, a `torch.Size`."""
    shape = Tensor.size(tensor)
    layout = layout_of(tensor)
    return shape if layout is None else torch.Size(whole_of(shape, layout))


def ranks_of(*trees: object) -> Ranks:
    """Return the ranks of the first divided part among arguments, or of the first part where none is divided."""
    first: PartTensor | None = None
    for tree in trees:
        flat = cast("tuple[object, ...]", tree) if isinstance(tree, tuple) else (tree,)
        for each in flat:  # most often one of the arguments is a divided part
            if isinstance(each, PartTensor):
                if each.division is not None:
                    return each.ranks
                first = each if first is None else first
    if first is not None:
        return first.ranks
    parts = [each for each in tensors_of(trees) if isinstance(each, PartTensor)]
    return next((each.ranks for each in parts if each.division is not None), parts[0].ranks)


def named(names: str, args: Args, kwargs: Named) -> dict[str, Any]:
    """Return arguments by name; `names` has the names of positional ones, in order."""
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def name_of(func: Any) -> str:
    """Return the name of a torch function; for the getter or setter of an attribute, the name of the attribute."""
    name = getattr(func, "__name__", str(func))
    if name not in ("__get__", "__set__", "__delete__"):
        return name
    owner = func.__self__
    attribute = getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", "an attribute")
    return attribute if name == "__get__" else f"{attribute}.{name}"


def part_of(func: Any, args: Args) -> PartTensor:
    """Return the first argument, which must be a part."""
    if not args or not isinstance(args[0], PartTensor):
        raise no_rule("of a plain tensor and parts")
    return args[0]


def entered(tensor: Any, ranks: Ranks) -> Any:
    """Return a tensor inside of the region: this rank's rows of a part, or a plain one that enters; others as is."""
    return tensor if isinstance(tensor, PartTensor) or not isinstance(tensor, Tensor) else ranks.enter(tensor)


def own_rows(tensor: Tensor, dim: int, need: RowCut, ranks: Ranks) -> Tensor:
    """Return the rows of a cut along a dimension, of a tensor that has them: all of them, or a coarser cut."""
    layout = layout_of(tensor)
    if layout is not None and layout.dim != dim:
        raise no_rule(f"a function of parts that ranks divide along dimensions {layout.dim} and {dim}")
    if layout is not None and layout.cut == need:
        return tensor
    length = whole_shape(tensor)[dim]
    if length != need.total:
        if layout is None and length == need.local and _may_be_gradient(tensor):
            return entered(tensor, ranks)
        raise no_rule(f"a function of {length} rows and a part of {need.total}")
    if layout is None:
        ranks.note_cut()
    return taken(entered(tensor, ranks), dim, places_of(need, layout and layout.cut, ranks.rank, ranks.size))


def _may_be_gradient(tensor: Tensor) -> bool:
    """Whether a plain tensor may have the rows of a rank: a gradient, in the backward of a function of the model. Other
    rows are of another layer, or of a function that has computed with this rank's without a rule."""
    is_backward = is_dynamo_compiling() or runs_in_backward()
    return is_backward and not (tensor.requires_grad and torch.is_grad_enabled())


def taken(rows: Tensor, dim: int, places: Places) -> Tensor:
    """Return some rows along a dimension."""
    if isinstance(places, slice):
        return rows.narrow(dim, places.start, places.stop - places.start)
    if isinstance(places, Pieces):
        pieces: Tensor = cast(Any, rows).unflatten(dim, (places.repeat, -1))
        return taken(pieces, dim + 1, places.rows).flatten(dim, dim + 1)
    if isinstance(places[0], slice):
        return torch.cat([taken(rows, dim, each) for each in cast("tuple[slice, ...]", places)], dim)
    return rows.index_select(dim, torch.tensor(places).to(rows.device, non_blocking=True))


def alike_part(args: Args) -> PartTensor | None:
    """Return the first part, where all tensors among arguments are parts of one layout and rank, or numbers."""
    first: PartTensor | None = None
    for each in args:
        if type(each) in (int, float, bool):  # the question whether a number is a tensor takes 2 us
            continue
        if isinstance(each, PartTensor):
            if first is None:
                first = each
            elif each.division != first.division or each.dim() != first.dim():
                return None
        elif isinstance(each, Tensor | Sequence):
            return None
    return first


def aligned(tensors: Sequence[Tensor], ranks: Ranks) -> tuple[list[Tensor], Alignment]:
    """Return the rows of each tensor that this rank computes with, and their alignment."""
    first = alike_part(tensors)  # most often
    if first is not None:
        layout = first.division
        right, cut = (0, None) if layout is None else (first.dim() - layout.dim, layout.cut)
        return [*tensors], Alignment((None,) * len(tensors), right, cut)
    kinds = tuple(
        (layout := layout_of(each), Tensor.size(each), layout is None and _may_be_gradient(each)) for each in tensors
    )
    found = alignment_of(kinds, ranks.rank, ranks.size)
    if any(at is not None and kind[0] is None for at, kind in zip(found.places, kinds, strict=True)):
        ranks.note_cut()
    inside = [entered(each, ranks) for each in tensors]
    pairs = zip(inside, found.places, strict=True)
    return [each if at is None else taken(each, *at) for each, at in pairs], found


def placed(result: Any, alignment: Alignment, ranks: Ranks) -> Any:
    """Return what a function gave on a rank, tensors in it as parts."""
    if isinstance(result, Tensor):  # most often
        return make(result, alignment.layout(result.dim()), ranks)
    return map_kind(Tensor, lambda each: make(each, alignment.layout(each.dim()), ranks), result)
