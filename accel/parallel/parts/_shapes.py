# SPDX-License-Identifier: Apache-2.0
"""Rules of views and other functions that only change shapes. Sizes in their arguments are sizes of the full tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from accel.parallel._private import is_asked_by_vmap
from accel.parallel.parts._layout import (
    RowCut,
    RowLayout,
    at,
    dims_of,
    even,
    finest,
    no_rule,
    piece_of,
    pieces_of,
    scaled,
    viewed,
)
from accel.parallel.parts._part import (
    Args,
    Named,
    PartTensor,
    Ranks,
    aligned,
    entered,
    layout_of,
    make,
    name_of,
    named,
    own_rows,
    part_of,
    plain_of,
    ranks_of,
    whole_shape,
)


def sizes_in(args: Args) -> list[int]:
    """Return sizes that are given one by one, or in one sequence."""
    return [*(args[0] if isinstance(args[0], list | tuple) else args)]


def _reshaped(part: PartTensor, new: Sequence[int], by: Callable[..., Tensor] = Tensor.reshape) -> PartTensor:
    if part.division is None:
        return make(by(part, new), None, part.ranks)
    layout, own = viewed(tuple(part.size()), part.division, tuple(new))
    if -1 in own:  # of unequal numbers of rows
        own = [*own[: layout.dim], part.size(part.division.dim), *own[layout.dim + 1 :]]
    return make(by(part, own), layout, part.ranks)


def view(func: Any, args: Args, kwargs: Named) -> Any:
    """view, reshape."""
    part = part_of(func, args)
    given = args[1:] or tuple(kwargs.values())
    if isinstance(given[0], torch.dtype):
        if given[0].itemsize != part.dtype.itemsize:
            raise no_rule("view as a dtype of another size")
        return make(part.view(given[0]), part.division, part.ranks)
    return _reshaped(part, sizes_in(given), func)


def view_as(func: Any, args: Args, kwargs: Named) -> Any:
    """view_as, reshape_as; of a plain tensor it is plain."""
    tensor, other = args[:2]
    shape = whole_shape(other)
    return _reshaped(tensor, shape) if isinstance(tensor, PartTensor) else tensor.reshape(shape)


def flatten(func: Any, args: Args, kwargs: Named) -> Any:
    """flatten, ravel."""
    part = part_of(func, args)
    given = named("input start_dim end_dim", args, kwargs)
    shape = list(whole_shape(part))
    first, last = (given.get(name, default) % len(shape) for name, default in (("start_dim", 0), ("end_dim", -1)))
    return _reshaped(part, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


def unflatten(func: Any, args: Args, kwargs: Named) -> Any:
    """unflatten."""
    part = part_of(func, args)
    given = named("input dim sizes", args, kwargs)
    shape = list(whole_shape(part))
    dim = given["dim"] % len(shape)
    new = list(given["sizes"])
    if -1 in new:
        new[new.index(-1)] = shape[dim] // max(-math.prod(new), 1)
    if math.prod(new) != shape[dim]:
        raise no_rule(f"of {shape[dim]} as {new}")
    return _reshaped(part, [*shape[:dim], *new, *shape[dim + 1 :]])


def _ordered(part: PartTensor, order: list[int]) -> PartTensor:
    """A part with its dimensions in another order."""
    layout = part.division
    return make(part.permute(order), at(order.index(layout.dim), layout.cut) if layout else None, part.ranks)


def permute(func: Any, args: Args, kwargs: Named) -> Any:
    """permute."""
    part = part_of(func, args)
    return _ordered(part, [each % part.dim() for each in sizes_in(args[1:] or tuple(kwargs.values()))])


def transpose(func: Any, args: Args, kwargs: Named) -> Any:
    """transpose, swapaxes, swapdims."""
    part = part_of(func, args)
    one, other = (each % part.dim() for each in (*args[1:], *kwargs.values()))
    order = [*range(part.dim())]
    order[one], order[other] = other, one
    return _ordered(part, order)


def turned(func: Any, args: Args, kwargs: Named) -> Any:
    """t, T, H, mT, mH: the last two dimensions."""
    part = part_of(func, args)
    if part.dim() < 2:
        return part
    if part.dim() > 2 and name_of(func) not in ("mT", "mH"):
        raise no_rule(f"of {part.dim()} dimensions")
    if part.is_complex() and name_of(func) in ("H", "mH"):
        raise no_rule("of complex numbers")
    return transpose(func, (part, -2, -1), {})


def movedim(func: Any, args: Args, kwargs: Named) -> Any:
    """movedim, moveaxis."""
    part = part_of(func, args)
    source, destination, *_ = (*args[1:], *kwargs.values())
    rank = part.dim()
    sources, destinations = (
        [each % rank for each in ([given] if isinstance(given, int) else given)] for given in (source, destination)
    )
    order = [dim for dim in range(rank) if dim not in sources]
    for place, dim in sorted(zip(destinations, sources, strict=True)):
        order.insert(place, dim)
    return _ordered(part, order)


def unsqueeze(func: Any, args: Args, kwargs: Named) -> Any:
    """unsqueeze."""
    part = part_of(func, args)
    dim = named("input dim", args, kwargs)["dim"] % (part.dim() + 1)
    layout = part.division
    return make(part.unsqueeze(dim), layout and RowLayout(layout.dim + (layout.dim >= dim), layout.cut), part.ranks)


def squeeze(func: Any, args: Args, kwargs: Named) -> Any:
    """squeeze."""
    part = part_of(func, args)
    shape = whole_shape(part)
    gone = [dim for dim in dims_of(named("input dim", args, kwargs).get("dim"), len(shape)) if shape[dim] == 1]
    rows: Tensor = part
    for dim in reversed(gone):
        rows = rows.squeeze(dim)
    layout = part.division
    kept = layout and RowLayout(layout.dim - sum(dim < layout.dim for dim in gone), layout.cut)
    return make(rows if gone else rows.view(rows.size()), kept, part.ranks)


def expand(func: Any, args: Args, kwargs: Named) -> Any:
    """expand, broadcast_to."""
    part = part_of(func, args)
    new = sizes_in(args[1:] or tuple(kwargs.values()))
    layout = part.division
    if layout is not None:
        dim = layout.dim + len(new) - part.dim()
        if new[dim] not in (-1, layout.cut.total):
            raise no_rule("of the divided dimension")
        new[dim] = -1
        layout = RowLayout(dim, layout.cut)
    return make(part.expand(new), layout, part.ranks)


def expand_as(func: Any, args: Args, kwargs: Named) -> Any:
    """expand_as; of a plain tensor it is plain."""
    tensor, other = args[:2]
    if not isinstance(tensor, PartTensor):
        return tensor.expand(whole_shape(other))
    return expand(func, (tensor, *whole_shape(other)), {})


def repeat(func: Any, args: Args, kwargs: Named) -> Any:
    """repeat, tile."""
    part = part_of(func, args)
    times = sizes_in(args[1:] or tuple(kwargs.values()))
    times = [1] * (part.dim() - len(times)) + times
    layout = part.division
    if layout is not None:
        dim = layout.dim + len(times) - part.dim()
        layout = RowLayout(dim, RowCut(layout.cut.repeat * times[dim], layout.cut.segments))
    return make(part.repeat(times), layout, part.ranks)


def repeat_interleave(func: Any, args: Args, kwargs: Named) -> Any:
    """repeat_interleave, by one number along one dimension."""
    part = part_of(func, args)
    given = named("input repeats dim", args, kwargs)
    times, dim = given["repeats"], given.get("dim")
    if dim is None or not isinstance(times, int):
        raise no_rule("by a tensor, or of all elements")
    dim %= part.dim()
    layout = part.division
    if layout is not None and layout.dim == dim:
        layout = RowLayout(dim, scaled(layout.cut, times))
    return make(part.repeat_interleave(times, dim), layout, part.ranks)


def narrowed(part: PartTensor, dim: int, start: int, stop: int) -> PartTensor:
    """Return rows from `start` to `stop` along a dimension, of the whole."""
    layout = part.division
    if layout is None or layout.dim != dim:
        return make(part.narrow(dim, start, stop - start), layout, part.ranks)
    piece = piece_of(layout.cut, start, stop)
    return make(part.narrow(dim, piece.first, piece.length), at(dim, piece.cut), part.ranks)


def narrow(func: Any, args: Args, kwargs: Named) -> Any:
    """narrow."""
    part = part_of(func, args)
    given = named("input dim start length", args, kwargs)
    return narrowed(part, given["dim"] % part.dim(), given["start"], given["start"] + given["length"])


def select(func: Any, args: Args, kwargs: Named) -> Any:
    """select."""
    part = part_of(func, args)
    given = named("input dim index", args, kwargs)
    dim = given["dim"] % part.dim()
    index = given["index"] % whole_shape(part)[dim]
    return _without(narrowed(part, dim, index, index + 1), dim)


def _without(part: PartTensor, dim: int) -> PartTensor:
    """A part without a dimension of one row."""
    layout = part.division
    if layout is not None and layout.dim == dim:
        raise no_rule("one row of a dimension that ranks divide")
    kept = layout and RowLayout(layout.dim - (layout.dim > dim), layout.cut)
    return make(part.select(dim, 0), kept, part.ranks)


def unbind(func: Any, args: Args, kwargs: Named) -> Any:
    """unbind."""
    part = part_of(func, args)
    dim = named("input dim", args, kwargs).get("dim", 0) % part.dim()
    return tuple(_without(each, dim) for each in _split(part, dim, [1] * whole_shape(part)[dim]))


def split(func: Any, args: Args, kwargs: Named) -> Any:
    """split, split_with_sizes, chunk, tensor_split."""
    part = part_of(func, args)
    name = name_of(func)
    by: Any = args[1] if len(args) > 1 else next(value for key, value in kwargs.items() if key != "dim")
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % part.dim()
    length = whole_shape(part)[dim]
    if name == "tensor_split":
        borders = [length * each // by for each in range(1, by)] if isinstance(by, int) else list(by)
        if isinstance(by, int) and length % by:
            raise no_rule(f"of {length} rows in {by}")
        by = [stop - start for start, stop in zip([0, *borders], [*borders, length], strict=True)]
    elif name == "chunk":
        by = -(-length // by)
    sizes = [min(by, length - start) for start in range(0, length, by)] if isinstance(by, int) else list(by)
    if sum(sizes) != length or min(sizes) < 0:
        raise no_rule(f"of {length} rows in {sizes}")
    return _split(part, dim, sizes)


def _split(part: Any, dim: int, sizes: Sequence[int]) -> tuple[PartTensor, ...]:
    """Pieces of so many rows of the whole, by one function: its gradient is one concatenation."""
    layout = part.division
    layouts = [layout] * len(sizes)
    if layout is not None and layout.dim == dim:
        pieces = pieces_of(layout.cut, tuple(sizes))
        sizes = [piece.length for piece in pieces]
        layouts = [at(dim, piece.cut) for piece in pieces]
    rows = part.split_with_sizes(sizes, dim)
    return tuple(make(each, own, part.ranks) for each, own in zip(rows, layouts, strict=True))


def join(func: Any, args: Args, kwargs: Named) -> Any:
    """cat, concat, concatenate."""
    given = named("tensors dim", args, kwargs)
    tensors = [each for each in given["tensors"] if each.dim() != 1 or each.numel()]  # torch passes empty ones over
    ranks = ranks_of(tensors)
    rank = tensors[0].dim()
    dim = given.get("dim", 0) % rank
    layouts = [each for each in map(layout_of, tensors) if each is not None]
    inside = [entered(each, ranks) for each in tensors]
    if not layouts:
        return make(torch.cat(inside, dim), None, ranks)
    if len({each.dim for each in layouts}) > 1:
        raise no_rule("of parts that ranks divide along several dimensions")
    if layouts[0].dim == dim:
        segments: list[tuple[int, int]] = []
        for each in tensors:
            layout = layout_of(each)
            segments += [(whole_shape(each)[dim], 1)] if layout is None else layout.cut.listed
        return make(torch.cat(inside, dim), at(dim, _repeated(segments)), ranks)
    need = finest([each.cut for each in layouts])
    own = [own_rows(each, layouts[0].dim, need, ranks) for each in tensors]
    return make(torch.cat(own, dim), RowLayout(layouts[0].dim, need), ranks)


def row_chunks(tensor: Tensor, count: int, dim: int) -> Sequence[Tensor]:
    """Return a tensor in chunks along a dimension; of a part that ranks divide along it, chunks of each rank's rows,
    which are parts: for functions that compute each of these rows by itself."""
    if getattr(type(tensor), "takes_collectives", False) and has_torch_function((tensor,)):
        return handle_torch_function(row_chunks, (tensor,), tensor, count, dim)
    return tensor.chunk(count, dim)


def joined_chunks(chunks: Sequence[Tensor], like: Tensor, dim: int) -> Tensor:
    """Concatenate the results of a function for the chunks of a tensor by `row_chunks`."""
    tensors = (*chunks, like)
    if any(getattr(type(each), "takes_collectives", False) for each in tensors) and has_torch_function(tensors):
        return handle_torch_function(joined_chunks, tensors, chunks, like, dim)
    return torch.cat([*chunks], dim)


def chunk_rows(func: Any, args: Args, kwargs: Named) -> Any:
    """row_chunks, of a part."""
    part, count, dim = args
    layout = part.division
    if layout is None or layout.dim != dim % part.dim():
        return tuple(make(each, layout, part.ranks) for each in row_chunks(plain_of(part), count, dim))
    if not layout.cut.is_equal:  # ranks would have other numbers of chunks
        raise no_rule("of rows that ranks do not divide evenly")
    return tuple(
        make(each, at(layout.dim, _own_rows_of(each, dim, part.ranks)), part.ranks)
        for each in row_chunks(plain_of(part), count, dim)
    )


def _own_rows_of(rows: Tensor, dim: int, ranks: Ranks) -> RowCut:
    return even(rows.shape[dim] * ranks.size, ranks.size)


def join_chunks(func: Any, args: Args, kwargs: Named) -> Any:
    """joined_chunks, of parts."""
    chunks, like, dim = args
    ranks = ranks_of((*chunks, like))
    layout = layout_of(like)
    if layout is not None and layout.dim == dim % like.dim():
        needs = [even(whole_shape(each)[dim], ranks.size) for each in chunks]
        own = [own_rows(each, layout.dim, need, ranks) for each, need in zip(chunks, needs, strict=True)]
    else:
        layout = layout_of(chunks[0])
        own = [entered(each, ranks) for each in chunks]
        if any(layout_of(each) != layout for each in chunks):
            raise no_rule("of chunks that ranks divide in several ways")
    return make(joined_chunks([*map(plain_of, own)], plain_of(like), dim), layout, ranks)


def _repeated(segments: list[tuple[int, int]]) -> RowCut:
    return RowCut(1, tuple(segments)) if len(set(segments)) > 1 else RowCut(len(segments), (segments[0],))


def stack(func: Any, args: Args, kwargs: Named) -> Any:
    """stack."""
    given = named("tensors dim", args, kwargs)
    ranks = ranks_of(given["tensors"])
    own, alignment = aligned(list(given["tensors"]), ranks)
    rank = own[0].dim()
    dim = given.get("dim", 0) % (rank + 1)
    layout = alignment.layout(rank)
    return make(torch.stack(own, dim), layout and RowLayout(layout.dim + (layout.dim >= dim), layout.cut), ranks)


def pad(func: Any, args: Args, kwargs: Named) -> Any:
    """functional.pad."""
    part = part_of(func, args)
    given = named("input pad mode value", args, kwargs)
    widths = list(given["pad"])
    layout = part.division
    if layout is not None:
        behind = 2 * (part.dim() - 1 - layout.dim)
        if any(widths[behind : behind + 2]):
            raise no_rule("of the divided dimension")
    return make(func(part, *args[1:], **kwargs), layout, part.ranks)


def windows(func: Any, args: Args, kwargs: Named) -> Any:
    """Tensor.unfold, along a dimension that all ranks hold; functional.unfold, by channels or samples."""
    part = part_of(func, args)
    layout = part.division
    found = func(*args, **kwargs)
    if layout is None:
        return make(found, None, part.ranks)
    if func is functional.unfold:
        by = named("input kernel_size", args, kwargs)["kernel_size"]
        if layout.dim == part.dim() - 4:
            return make(found, layout, part.ranks)
        if layout.dim != part.dim() - 3:
            raise no_rule("of a part along another dimension than channels and samples")
        cells = by * by if isinstance(by, int) else math.prod(by)
        return make(found, RowLayout(found.dim() - 2, scaled(layout.cut, cells)), part.ranks)
    if layout.dim == named("input dimension size step", args, kwargs)["dimension"] % part.dim():
        raise no_rule("along the divided dimension")
    return make(found, layout, part.ranks)


def shuffled(func: Any, args: Args, kwargs: Named) -> Any:
    """pixel_shuffle, pixel_unshuffle: by views, as channels become pixels or pixels channels."""
    part: Any = part_of(func, args)
    by = (*args[1:], *kwargs.values())[0]
    if name_of(func) == "pixel_shuffle":
        blocks = part.unflatten(-3, (-1, by, by)).movedim((-4, -3), (-3, -1))
        return blocks.flatten(-2).flatten(-3, -2)
    blocks = part.unflatten(-1, (-1, by)).unflatten(-3, (-1, by)).movedim((-3, -1), (-4, -3))
    return blocks.flatten(-5, -3)


def size(func: Any, args: Args, kwargs: Named) -> Any:
    """size, shape."""
    shape = whole_shape(args[0])
    dim = named("input dim", args, kwargs).get("dim")
    if dim is None:
        return shape
    if not is_dynamo_compiling() and layout_of(args[0]) is not None and is_asked_by_vmap():
        raise no_rule("for torch.vmap, which would compute with this rank's rows")
    return shape[dim]


def count(func: Any, args: Args, kwargs: Named) -> Any:
    """numel, nelement."""
    return whole_shape(args[0]).numel()


def length(func: Any, args: Args, kwargs: Named) -> Any:
    """len."""
    return whole_shape(args[0])[0]


def as_complex(func: Any, args: Args, kwargs: Named) -> Any:
    """view_as_complex, view_as_real: the last dimension, of pairs, is one of numbers."""
    part = part_of(func, args)
    if part.division is not None and part.division.dim == part.dim() - 1 and name_of(func) == "view_as_complex":
        raise no_rule("of the divided dimension")
    return make(func(part), part.division, part.ranks)


def triangle(func: Any, args: Args, kwargs: Named) -> Any:
    """triu, tril, of dimensions that all ranks hold."""
    part = part_of(func, args)
    if part.division is not None and part.division.dim >= part.dim() - 2:
        raise no_rule("of the divided dimension")
    return make(func(part, *args[1:], **kwargs), part.division, part.ranks)


RULES = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), view),
    **dict.fromkeys(("view_as", "reshape_as"), view_as),
    **dict.fromkeys(("flatten", "ravel"), flatten),
    "unflatten": unflatten,
    "permute": permute,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("t", "T", "H", "mT", "mH"), turned),
    **dict.fromkeys(("movedim", "moveaxis"), movedim),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **dict.fromkeys(("expand", "broadcast_to"), expand),
    "expand_as": expand_as,
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    "narrow": narrow,
    "select": select,
    "unbind": unbind,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
    "row_chunks": chunk_rows,
    "joined_chunks": join_chunks,
    **dict.fromkeys(("cat", "concat", "concatenate"), join),
    "stack": stack,
    "pad": pad,
    "unfold": windows,
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), shuffled),
    **dict.fromkeys(("size", "shape"), size),
    **dict.fromkeys(("numel", "nelement"), count),
    "__len__": length,
    **dict.fromkeys(("triu", "tril"), triangle),
    **dict.fromkeys(("view_as_complex", "view_as_real"), as_complex),
}
