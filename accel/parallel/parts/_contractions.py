# SPDX-License-Identifier: Apache-2.0
"""Rules of matmuls. A contraction of the divided dimension ends the region: its result is summed over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from accel.comm import gathered_summed
from accel.parallel._private import tensors_of
from accel.parallel.parts._elementwise import elementwise, order_of, placed_in_memory
from accel.parallel.parts._layout import RowCut, RowLayout, at, even, finest, no_rule
from accel.parallel.parts._part import (
    Args,
    Named,
    PartTensor,
    Ranks,
    aligned,
    entered,
    layout_of,
    layouts_of,
    make,
    name_of,
    named,
    own_rows,
    ranks_of,
    whole_rows,
    whole_shape,
)


def _divided_unlike(*tensors: Tensor) -> Exception:
    """The error of a matmul of tensors that are divided along different dimensions."""
    words: list[str] = []
    for each in tensors:  # torch.compile traces it
        layout = layout_of(each)
        if layout is not None:
            words.append(f"{list(whole_shape(each))} along {layout.dim}")
    return no_rule(f"a matmul of tensors that ranks divide along different dimensions: {' and '.join(words)}")


def contracted_cut(cuts: Sequence[RowCut], ranks: Ranks) -> RowCut:
    """Return the cut of rows that are contracted, which each rank must hold for itself."""
    need = finest(cuts)
    if need.is_shared(ranks.size):
        raise no_rule("a matmul over rows that several ranks hold")
    return need


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """The arguments of `linear` in order."""
    return input, weight, bias


def linear(func: Any, args: Args, kwargs: Named) -> Any:
    """linear."""
    x, weight, bias = _of_linear(*args, **kwargs)
    other = layout_of(weight)
    if other is not None and isinstance(x, PartTensor):
        early = x.ranks.product_of_rows(x, weight, bias) if other.dim == 0 else None
        if early is not None:
            return make(early, RowLayout(x.dim() - 1, other.cut), weight.ranks)
        x = x.ranks.input_of_layer(x)
    ranks = ranks_of(x, weight, bias)
    last = x.dim() - 1
    if other is not None and other.dim == 0:  # each output needs all features
        x = undivided(x, last)
    own = layout_of(x)
    if (own and own.dim == last) or (other and other.dim == 1):
        if (own and own.dim != last) or (other and other.dim != 1):
            raise _divided_unlike(x, weight)
        need = contracted_cut([each.cut for each in (own, other) if each is not None], ranks)
        pair = own_rows(x, last, need, ranks), own_rows(weight, 1, need, ranks)
        total = ranks.ended_product(*pair) if ranks.overlaps and not is_dynamo_compiling() else ranks.ended(func(*pair))
        return total if bias is None else added(total, bias)
    if own and other:
        raise _divided_unlike(x, weight)
    if other is None:
        if layout_of(bias) is not None:
            raise no_rule("with a divided bias and another weight")
        return make(func(*(entered(each, ranks) for each in (x, weight, bias))), own, ranks)
    if weight.dim() == 1:
        raise no_rule("with a divided weight of one dimension")
    rows = None if bias is None else own_rows(bias, 0, other.cut, ranks)
    if ranks.overlaps and not is_dynamo_compiling():
        return make(ranks.product(x, weight, rows), RowLayout(last, other.cut), ranks)
    return make(func(entered(x, ranks), weight, rows), RowLayout(last, other.cut), ranks)


def undivided(tensor: Tensor, dim: int) -> Tensor:
    """Return a tensor with all rows along a dimension. Where ranks divide these, it is a part with a gradient that is a
    summand, gathered once for all who take it if a gradient follows. A collective."""
    if not isinstance(tensor, PartTensor) or tensor.division is None or tensor.division.dim != dim:
        return tensor
    ranks = tensor.ranks
    if not ranks.gathers_inputs:
        raise no_rule(f"a matmul over dimension {dim} of {list(whole_shape(tensor))}, which ranks would have to gather")
    is_kept = tensor.requires_grad and torch.is_grad_enabled()
    known = ranks.known(tensor) if is_kept else None
    if known is not None:
        return known
    whole = make(whole_rows(tensor, lambda rows, dim: gathered_summed(rows, dim, ranks.group)), None, ranks)
    if is_kept:
        ranks.keep(tensor, whole)
    return whole


def added(one: Tensor, other: Tensor) -> Tensor:
    """Return a sum of tensors, each plain or a part."""
    return (
        elementwise(torch.add, (one, other), {})
        if isinstance(one, PartTensor) or isinstance(other, PartTensor)
        else one + other
    )


def product(func: Any, args: Args, kwargs: Named) -> Any:
    """matmul, mm, bmm, mv, dot and the operator @."""
    x, y = (*args, *kwargs.values())[:2]
    return multiplied(*((y, x) if name_of(func) == "__rmatmul__" else (x, y)), ranks_of(x, y))


def multiplied(x: Tensor, y: Tensor, ranks: Ranks) -> Tensor:
    """Return the matmul of two tensors, one or both of them parts."""
    other = layout_of(y)
    last = x.dim() - 1  # the contracted dimensions
    first = max(y.dim() - 2, 0)
    if other is not None and other.dim == y.dim() - 1 == 1:
        x = undivided(x, last)
    own = layout_of(x)
    over = [each.cut for each, dim in ((own, last), (other, first)) if each is not None and each.dim == dim]
    if over:
        if (own and own.dim != last) or (other and other.dim != first):
            raise _divided_unlike(x, y)
        need = contracted_cut(over, ranks)
        return ranks.ended(torch.matmul(own_rows(x, last, need, ranks), own_rows(y, first, need, ranks)))
    in_batch = [each is not None and each.dim < tensor.dim() - 2 for each, tensor in ((own, x), (other, y))]
    if any(in_batch):
        return _batched(x, y, ranks, in_batch)
    if own and other:
        raise _divided_unlike(x, y)
    found = torch.matmul(entered(x, ranks), entered(y, ranks))
    if own:
        return make(found, RowLayout(found.dim() - min(y.dim(), 2), own.cut), ranks)
    return make(found, other and RowLayout(found.dim() - 1, other.cut), ranks)


def _batched(x: Tensor, y: Tensor, ranks: Ranks, in_batch: Sequence[bool]) -> PartTensor:
    """A matmul where a dimension of the batch is divided."""
    layouts = [layout_of(x), layout_of(y)]
    if any(each is not None and not inside for each, inside in zip(layouts, in_batch, strict=True)):
        raise _divided_unlike(x, y)
    if min(x.dim(), y.dim()) <= 2:  # a matrix for the whole batch
        tensor, layout = (x, layouts[0]) if layouts[0] is not None else (y, layouts[1])
        found = torch.matmul(entered(x, ranks), entered(y, ranks))
        assert layout is not None
        return make(found, RowLayout(layout.dim + max(0, found.dim() - tensor.dim()), layout.cut), ranks)
    own, alignment = aligned([x, y], ranks)
    found = torch.matmul(*own)
    return make(found, alignment.layout(found.dim()), ranks)


def added_product(func: Any, args: Args, kwargs: Named) -> Any:
    """addmm, baddbmm."""
    given = named("input mat1 mat2", args, kwargs)
    x: Tensor = given["batch1"] if "batch1" in given else given["mat1"]
    y: Tensor = given["batch2"] if "batch2" in given else given["mat2"]
    is_layer = len(given) == 3 and y.dim() == 2 and given["input"].dim() == 1
    if is_layer and isinstance(y, PartTensor) and y.division is not None and y.ranks.overlaps:
        rows = RowLayout(1 - y.division.dim, y.division.cut)
        return linear(functional.linear, (x, make(y.t(), rows, y.ranks), given["input"]), {})
    found = multiplied(x, y, ranks_of(x, y)) if ranks_or_none(x, y) else torch.matmul(x, y)
    scaled = _times(found, given.get("alpha", 1))
    beta = given.get("beta", 1)
    return added(scaled, _times(given["input"], beta)) if beta else scaled  # torch reads no memory for 0


def ranks_or_none(*tensors: Tensor) -> Ranks | None:
    """Return the ranks of the first part among tensors; None for none."""
    return next((each.ranks for each in tensors if isinstance(each, PartTensor)), None)


def _times(tensor: Tensor, factor: float) -> Tensor:
    if factor == 1:
        return tensor
    return elementwise(torch.mul, (tensor, factor), {}) if isinstance(tensor, PartTensor) else tensor * factor


def einsum(func: Any, args: Args, kwargs: Named) -> Any:
    """einsum, by an equation."""
    equation, *given = args
    tensors: list[Tensor] = [*given[0]] if isinstance(given[0], list | tuple) else given
    if not isinstance(equation, str):
        raise no_rule("without an equation")
    terms, result = terms_of(equation, [each.dim() for each in tensors])
    written = f"{','.join(terms)}->{result}"
    return _contracted(partial(torch.einsum, written), terms, result, tensors)


def _contracted(product: Any, terms: Sequence[str], result: str, tensors: Sequence[Tensor], groups: str = "") -> Tensor:
    """A product of tensors with a letter for each dimension. Dimensions of `groups` must have all rows."""
    ranks = ranks_of(tensors)
    divided = _divided_letters(terms, tensors)
    if len(divided) > 1:  # each entry of a dimension of the result needs all of a contracted one
        tensors = [_whole_where_contracted(each, term, result) for each, term in zip(tensors, terms, strict=True)]
        divided = _divided_letters(terms, tensors)
    if not divided:
        return make(product(*(entered(each, ranks) for each in tensors)), None, ranks)
    if len(divided) > 1:
        raise _divided_unlike(*tensors)
    (letter,) = divided
    if letter in groups:
        raise no_rule("of groups that ranks divide")
    need = finest([each.cut for each in layouts_of(tensors)])
    if letter not in result:
        need = contracted_cut([need], ranks)
    own: list[Tensor] = []
    for term, each in zip(terms, tensors, strict=True):
        if term.count(letter) > 1:
            raise no_rule(f"{','.join(terms)}->{result}: a diagonal of the divided dimension")
        has_rows = letter in term and whole_shape(each)[term.index(letter)] != 1
        own.append(own_rows(each, term.index(letter), need, ranks) if has_rows else entered(each, ranks))
    found = product(*own)
    if letter in result:
        if len(terms) == 2 and not is_dynamo_compiling() and found.size(result.index(letter)) == 1:
            found = placed_in_memory(found, _order_of_result(terms, result, tensors))
        return make(found, RowLayout(result.index(letter), need), ranks)
    return ranks.ended(found)


def _order_of_result(terms: Sequence[str], result: str, tensors: Sequence[Tensor]) -> list[int]:
    """The dimensions of einsum's result of two full tensors from the outermost in memory."""
    if set(result).issuperset(terms[0] + terms[1]):  # a product of elements
        first = tensors[0]
        known = [result.index(terms[0][dim]) for dim in order_of(first)] if first.dim() == len(result) else []
        return known or [*range(len(result))]
    long = [
        {letter for letter, length in zip(term, whole_shape(each), strict=True) if length > 1}
        for term, each in zip(terms, tensors, strict=True)
    ]
    kinds = {letter: 2 - (letter in long[0]) - (letter in long[0] & long[1]) for letter in result}
    return sorted(range(len(result)), key=lambda dim: kinds[result[dim]])  # of both, of the first alone, and others


def _divided_letters(terms: Sequence[str], tensors: Sequence[Tensor]) -> list[str]:
    """The letters of the dimensions that ranks divide, each once."""
    pairs = [(term, layout_of(each)) for term, each in zip(terms, tensors, strict=True)]
    return list(dict.fromkeys(term[layout.dim] for term, layout in pairs if layout is not None))


def _whole_where_contracted(tensor: Tensor, term: str, result: str) -> Tensor:
    """An operand with all rows of a dimension that the result does not have."""
    layout = layout_of(tensor)
    return tensor if layout is None or term[layout.dim] in result else undivided(tensor, layout.dim)


# The letters of a matmul of groups by the dimensions of its tensors, and the letters that the groups divide.
_OF_GROUPS: Mapping[tuple[int, int], tuple[str, str, str, str]] = {
    (2, 3): ("mk", "gkn", "mn", "gm"),
    (3, 2): ("gmk", "kn", "mn", "gn"),
    (2, 2): ("mk", "kn", "gmn", "k"),
    (3, 3): ("gmk", "gkn", "gmn", ""),
}
_OF_KERNELS = 8  # bfloat16 values of 16 bytes, which rows begin at in memory


def operands_first(args: Args, kwargs: Named, *, is_added: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a matmul with its two operands first, which may have been given by name.

    `is_added`: whether it is added to a tensor, which is before them.
    """
    found, given = [*args], dict(kwargs)
    for names in (_ADDED if is_added else _OPERANDS)[len(found) :]:
        found += [given.pop(name) for name in names if name in given]
    return found, given


_OPERANDS = (("input", "self", "mat_a"), ("weight", "other", "mat2", "mat_b"))  # names of the first and the second
_ADDED = (("input",), ("mat1", "batch1"), ("mat2", "batch2"))


def of_groups(func: Any, args: Args, kwargs: Named) -> Any:
    """grouped_mm: a matmul for each group of rows, as of experts."""
    given = named("mat_a mat_b offs bias out_dtype", *operands_first(args, kwargs))
    one = given.pop("mat_a")
    other = given.pop("mat_b")
    if layouts_of(tensors_of(given)):
        raise no_rule("of ends of groups that ranks divide")
    *terms, result, groups = _OF_GROUPS[one.dim(), other.dim()]
    for term, layout in zip(terms, map(layout_of, (one, other)), strict=True):
        if layout is not None and term[layout.dim] != "g" and layout.cut.local % _OF_KERNELS:
            raise no_rule(f"of {layout.cut.local} rows of a rank: kernels take multiples of {_OF_KERNELS}")

    def product(*own: Tensor) -> Tensor:
        return func(*own, **given)

    return _contracted(product, terms, result, (one, other), groups)


def tensordot(func: Any, args: Args, kwargs: Named) -> Any:
    """tensordot, by an equation."""
    given = named("a b dims", args, kwargs)
    one, other = given["a"], given["b"]
    return einsum(func, (dotted(one.dim(), other.dim(), given.get("dims", 2)), one, other), {})


def bilinear(func: Any, args: Args, kwargs: Named) -> Any:
    """bilinear, by an equation."""
    given = named("input1 input2 weight bias", args, kwargs)
    operands = (given["input1"], given["weight"], given["input2"])
    equation = "...i,oij,...j->...o"
    found = einsum(func, (equation, *operands), {}) if ranks_or_none(*operands) else torch.einsum(equation, *operands)
    return found if given.get("bias") is None else added(found, given["bias"])


def dotted(rank: int, other: int, dims: Any) -> str:
    """Return the equation of a tensordot of tensors of these ranks."""
    ones, others = (range(rank - dims, rank), range(dims)) if isinstance(dims, int) else dims
    left = list(ascii_letters[:rank])
    right = list(ascii_letters[rank : rank + other])
    for one, two in zip(ones, others, strict=True):
        right[two] = left[one]
    kept = [each for each in (*left, *right) if (each in left) != (each in right)]
    return f"{''.join(left)},{''.join(right)}->{''.join(kept)}"


def terms_of(equation: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with letters for `...`."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spare = "".join(each for each in ascii_letters if each not in equation)
    widths = [dim - len(term.replace("...", "")) if "..." in term else 0 for term, dim in zip(terms, dims, strict=True)]
    dots = spare[: max(widths, default=0)]
    terms = [term.replace("...", dots[len(dots) - width :]) for term, width in zip(terms, widths, strict=True)]
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        result = "..." + "".join(each for each in sorted(set(letters)) if letters.count(each) == 1)
    return terms, result.replace("...", dots)


def cell(func: Any, args: Args, kwargs: Named) -> Any:
    """gru_cell, lstm_cell, rnn_tanh_cell, rnn_relu_cell: one step of a recurrent layer, by its formula."""
    given = named("input hx w_ih w_hh b_ih b_hh", args, kwargs)
    name = name_of(func)
    state = given["hx"][0] if name == "lstm_cell" else given["hx"]
    of_input = functional.linear(given["input"], given["w_ih"], given.get("b_ih"))
    of_state = functional.linear(state, given["w_hh"], given.get("b_hh"))
    if name == "gru_cell":
        (reset, keep, new), (other_reset, other_keep, other_new) = (each.chunk(3, -1) for each in (of_input, of_state))
        found = torch.tanh(new + torch.sigmoid(reset + other_reset) * other_new)
        return found + torch.sigmoid(keep + other_keep) * (state - found)
    total = of_input + of_state
    if name != "lstm_cell":
        return torch.relu(total) if name == "rnn_relu_cell" else torch.tanh(total)
    enter, keep, new, show = total.chunk(4, -1)
    memory = torch.sigmoid(keep) * given["hx"][1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(memory), memory


def embedding(func: Any, args: Args, kwargs: Named) -> Any:
    """functional.embedding, of a table that ranks divide or of parts of ids; torch.embedding, of the table first."""
    if func is torch.embedding:
        given = named("weight input padding_idx scale_grad_by_freq sparse", args, kwargs)
        given["input"] = given.pop("indices", given.get("input"))
        if given.get("padding_idx") == -1:
            del given["padding_idx"]  # of no row
    else:
        given = named("input weight padding_idx max_norm", args, kwargs)
    ids, table = given["input"], given["weight"]
    ranks = ranks_of(ids, table)
    layout = layout_of(table)
    own = layout_of(ids)
    if given.get("max_norm") is not None:
        raise no_rule("with max_norm")
    if layout is not None and layout.dim == 0 and own is None:
        return _embedding_of_own_rows(given, layout.cut, ranks)
    if layout is not None and (layout.dim == 0 or own is not None):
        raise no_rule("of rows that ranks divide")
    inside = {name: entered(each, ranks) for name, each in given.items()}
    found = functional.embedding(**inside)
    return make(found, own if layout is None else at(found.dim() - 1, layout.cut), ranks)


class OwnIds(NamedTuple):
    """Ids of a table as places among this rank's rows, and which ids are other ranks'."""

    places: Tensor
    others: Tensor


def own_ids(ids: Tensor, cut: RowCut, rank: int) -> OwnIds:
    """Return ids as places among a rank's rows. Ids that no rank has stay outside of the rows, where torch raises its
    error."""
    first, rows = _rows_of_rank(cut, rank)
    places = ids - first
    others = ((places < 0) | (places >= rows)) & (ids >= 0) & (ids < cut.total)
    return OwnIds(places.masked_fill(others, 0), others)


def own_place(row: int | None, cut: RowCut, rank: int) -> int | None:
    """Return the place of a row, such as the padding's, among a rank's rows; None on other ranks."""
    first, rows = _rows_of_rank(cut, rank)
    place = -1 if row is None else row % cut.total - first
    return place if 0 <= place < rows else None


def _rows_of_rank(cut: RowCut, rank: int) -> tuple[int, int]:
    """The first row of a rank, and the number of its rows, of a cut into one piece for each."""
    first = rank * cut.local
    return first, min(cut.local, cut.total - first)


def _check_one_piece(cut: RowCut, ranks: Ranks) -> None:
    if cut != even(cut.total, ranks.size):
        raise no_rule("of rows that ranks divide in several pieces")


def _embedding_of_own_rows(given: Named, cut: RowCut, ranks: Ranks) -> Tensor:
    """The sum of the embeddings of each rank's rows."""
    if given.get("scale_grad_by_freq") or given.get("sparse"):
        raise no_rule("of rows that ranks divide, with scale_grad_by_freq or sparse")
    _check_one_piece(cut, ranks)
    ids = own_ids(entered(given["input"], ranks), cut, ranks.rank)
    padding = own_place(given.get("padding_idx"), cut, ranks.rank)
    found = functional.embedding(ids.places, given["weight"], padding)
    return ranks.ended(found.masked_fill(ids.others.unsqueeze(-1), 0))


def embedding_bag(func: Any, args: Args, kwargs: Named) -> Any:
    """functional.embedding_bag, sums and means of rows of a table that ranks divide by rows or by features."""
    names = "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights"
    given = named(f"{names} include_last_offset padding_idx", args, kwargs)
    table = given.pop("weight")
    ranks = ranks_of(table, *given.values())
    layout = layout_of(table)
    if layout is None or layouts_of([*tensors_of([*given.values()])]):
        raise no_rule("of ids or weights that ranks divide")
    inside = {name: entered(each, ranks) for name, each in given.items()}
    if inside.get("max_norm") is not None or inside.get("scale_grad_by_freq") or inside.get("sparse"):
        raise no_rule("with max_norm, scale_grad_by_freq or sparse")
    ids = inside.pop("input")
    if layout.dim == 1:
        return make(functional.embedding_bag(ids, table, **inside), layout, ranks)
    mode = inside.pop("mode", "mean")
    padding = inside.pop("padding_idx", None)
    weights = inside.pop("per_sample_weights", None)
    if mode == "max":
        raise no_rule("the largest of rows that ranks divide")
    if mode == "mean" and weights is not None:
        raise no_rule("the mean with per_sample_weights")
    _check_one_piece(layout.cut, ranks)
    own = own_ids(ids, layout.cut, ranks.rank)
    own_padding = own_place(padding, layout.cut, ranks.rank)
    left_out = own_padding or 0
    places = own.places.masked_fill(own.others, left_out)
    summand = _sums(places, table, left_out, per_sample_weights=weights, **inside)
    if own_padding is None:  # the first row was left out with the rows of others
        is_first = ((own.places == 0) & ~own.others).to(ids.dtype)
        ones = table.new_ones(2, 1)
        counts = _sums(is_first, ones, 0, **inside)
        factors = counts if weights is None else _sums(is_first, ones, 0, per_sample_weights=weights, **inside)
        summand = summand + torch.where(counts > 0, factors * table[:1], 0.0)  # 0 times the row may be NaN
    total = ranks.total(summand)
    if mode == "sum":
        return total
    is_padding = torch.zeros_like(ids) if padding is None else (ids == padding % layout.cut.total).to(ids.dtype)
    counts = _sums(is_padding, total.new_ones(2, 1), 1, **inside)
    return total / counts.clamp(min=1)


def _sums(ids: Tensor, table: Tensor, padding: int | None, **bags: Any) -> Tensor:
    """The sum of the rows of each bag."""
    return functional.embedding_bag(ids, table, mode="sum", padding_idx=padding, **bags)


RULES = {
    "linear": linear,
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "linalg_matmul"), product),
    **dict.fromkeys(("addmm", "baddbmm"), added_product),
    "einsum": einsum,
    **dict.fromkeys(("_grouped_mm", "grouped_mm"), of_groups),
    "tensordot": tensordot,
    "bilinear": bilinear,
    **dict.fromkeys(("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"), cell),
    "embedding": embedding,
    "embedding_bag": embedding_bag,
}
