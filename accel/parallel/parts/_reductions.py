# SPDX-License-Identifier: Apache-2.0
"""Rules of sums, norms and softmax. Sums over the divided dimension end a region; norms over it exchange their sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from accel.parallel._private import lost_argument, map_kind, tensors_of
from accel.parallel.parts._elementwise import elementwise
from accel.parallel.parts._layout import RowLayout, at, cut_of, dims_of, no_rule, places_of, rows_of
from accel.parallel.parts._part import (
    Args,
    Named,
    PartTensor,
    Ranks,
    Rule,
    entered,
    layout_of,
    layouts_of,
    leave,
    make,
    name_of,
    named,
    own_rows,
    part_of,
    plain_of,
    ranks_of,
    taken,
    whole_shape,
)


def along(place: int, default: int | Sequence[int] | None = -1) -> Rule:
    """Return the rule of a function that keeps the shape, along dimensions that must not be the divided one. Its
    argument for them has this place, or the name `dim`."""

    def rule(func: Any, args: Args, kwargs: Named) -> Any:
        part = part_of(func, args)
        given = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims", default))
        if part.division is not None and part.division.dim in dims_of(given, part.dim()):
            raise no_rule("along the divided dimension")
        return _like(func(*args, **kwargs), part.division, part)

    return rule


def _like(found: Any, layout: RowLayout | None, part: PartTensor) -> Any:
    return map_kind(Tensor, lambda each: make(each, layout, part.ranks), found)


def halved(func: Any, args: Args, kwargs: Named) -> Any:
    """glu, along a dimension that all ranks hold in full, or one with halves that they divide alike."""
    part = part_of(func, args)
    layout = part.division
    if layout is not None and layout.dim == named("input dim", args, kwargs).get("dim", -1) % part.dim():
        listed = layout.cut.listed
        half = len(listed) // 2
        if listed[:half] != listed[half:]:
            raise no_rule("along the divided dimension, of halves that ranks divide differently")
        layout = at(layout.dim, cut_of(1, listed[:half]))
    return make(func(*args, **kwargs), layout, part.ranks)


def reduced(func: Any, args: Args, kwargs: Named) -> Any:
    """sum, mean, amax, var and their like: over dimensions, or all."""
    part = part_of(func, args)
    name = name_of(func)
    is_spread = name in ("var", "std")
    given = named(f"input dim {'unbiased ' if is_spread else ''}keepdim", args, kwargs)
    dim = given.get("dim")
    if name in ("max", "min") and isinstance(dim, Tensor):
        return elementwise(func, args, kwargs)
    if is_spread and isinstance(dim, bool):
        raise no_rule("with its second argument by place")
    dims = dims_of(None if dim == () or dim == [] else dim, part.dim())
    layout = part.division
    if layout is None:
        return _like(func(*args, **kwargs), None, part)
    if layout.dim not in dims:
        kept = _reduced_layout(layout, dims, keepdim=bool(given.get("keepdim")))
        return _like(func(*args, **kwargs), kept, part)
    if layout.cut.is_shared(part.ranks.size):
        raise no_rule("over rows that several ranks hold")
    if is_spread:
        return _spread(name, part, dims, given)
    if name in ("max", "min") and dim is not None and layout.cut.is_equal:
        return _extreme(func, part, layout, keepdim=bool(given.get("keepdim")))
    if name in ("amax", "amin") and part.size(layout.dim) and layout.cut.is_equal:
        return _extremes(func, part, dims, keepdim=bool(given.get("keepdim")))
    if name not in ("sum", "mean"):
        raise no_rule("over the divided dimension")
    if name == "sum":
        return part.ranks.total(func(*args, **kwargs))
    rows = part.size(layout.dim)  # of this rank, which may be fewer than others', or none, with a mean of NaN
    summand = (func if rows else torch.sum)(*args, **kwargs)
    return part.ranks.total(summand * (rows / layout.cut.total))


def _spread(name: str, part: PartTensor, dims: list[int], given: Named) -> Tensor:
    """var, std: by the mean and the sum of squares of all ranks."""
    if part.is_complex():
        raise no_rule("of complex numbers over the divided dimension")
    correction = given.get("correction")
    if correction is None:
        correction = 1 if given.get("unbiased", True) else 0
    rows = _wide(plain_of(part))
    shape = whole_shape(part)
    count = math.prod([shape[dim] for dim in dims])  # torch.compile multiplies no generator
    mean = part.ranks.enter(part.ranks.total(rows.sum(dims, keepdim=True))) / count
    squares = (rows - mean).square().sum(dims, keepdim=bool(given.get("keepdim")))
    found = part.ranks.total(squares) / max(count - correction, 0)
    return (_power(found, 0.5) if name == "std" else found).to(part.dtype)


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in a dtype for sums of squares."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _power(x: Tensor, exponent: float) -> Tensor:
    """Return powers of positive numbers and 0, with a gradient of 0 at 0, as those of torch's functions."""
    is_zero = x == 0
    return x.masked_fill(is_zero, 1).pow(exponent).masked_fill(is_zero, 0)


def _extreme(func: Any, part: PartTensor, layout: RowLayout, *, keepdim: bool) -> Any:
    """max, min along the divided dimension: of the extremes of all ranks, with rows of the whole as indices, the first
    of equal ones."""
    ranks, dim = part.ranks, layout.dim
    own, places = func(plain_of(part), dim, keepdim=True)
    rows = torch.tensor(rows_of(layout.cut, ranks.rank, ranks.size), device=own.device)[places]
    joined = ranks.joined(own, dim)
    joined_rows = ranks.joined(rows, dim)
    is_found = (joined == func(joined, dim, keepdim=True)[0]) | (joined != joined)  # NaN is the extreme of all
    which = joined_rows.masked_fill(~is_found, layout.cut.total).argmin(dim, keepdim=True)
    found = joined.gather(dim, which), joined_rows.gather(dim, which)
    kinds: Any = torch.return_types
    kind = kinds.max if name_of(func) == "max" else kinds.min
    return kind(found if keepdim else [each.squeeze(dim) for each in found])


def _extremes(func: Any, part: PartTensor, dims: list[int], *, keepdim: bool) -> Tensor:
    """amax, amin, also along the divided dimension: all equal extremes share the gradient, as torch's do."""
    ranks, own = part.ranks, plain_of(part)
    dim = cast(RowLayout, part.division).dim
    found: Tensor = func(ranks.joined(func(own.detach(), dims, keepdim=True), dim), dim, keepdim=True)
    if own.requires_grad and torch.is_grad_enabled():
        is_one = own == found
        count = ranks.total(is_one.to(own.dtype).sum(dims, keepdim=True))
        mean = ranks.total(own.masked_fill(~is_one, 0).sum(dims, keepdim=True)) / count
        found = torch.where(found.isfinite(), mean + (found - mean).detach(), found)
    return found if keepdim else found.squeeze(dims)


def norm(func: Any, args: Args, kwargs: Named) -> Any:
    """norm, linalg.vector_norm; over the divided dimension by sums of powers of the norms of ranks."""
    given = named("input ord dim keepdim", args, kwargs)
    part = part_of(func, args)
    order = given.get("p", given.get("ord", 2))
    order = 2 if order in (None, "fro") else order
    if not isinstance(order, int | float):
        raise no_rule(f"of order {order}")
    dim = given.get("dim")
    dim = None if dim in ((), []) else dim
    is_kept = bool(given.get("keepdim"))
    norms: Any = cast(Any, torch.linalg).vector_norm
    own: Tensor = norms(plain_of(part), order, dim, is_kept, dtype=given.get("dtype"))
    layout = part.division
    if layout is None:
        return make(own, None, part.ranks)
    if layout.dim not in (dims := dims_of(dim, part.dim())):
        return make(own, _reduced_layout(layout, dims, keepdim=is_kept), part.ranks)
    if not 0 < order < float("inf"):
        raise no_rule(f"of order {order}")
    if layout.cut.is_shared(part.ranks.size):
        raise no_rule("over rows that several ranks hold")
    total = part.ranks.total(_power(_wide(own), order))
    return _power(total, 1 / order).to(own.dtype)


def linalg_norm(func: Any, args: Args, kwargs: Named) -> Any:
    """linalg.norm, but of matrices."""
    given = named("input ord dim keepdim", args, kwargs)
    dims = dims_of(given.get("dim"), part_of(func, args).dim())
    if len(dims) > 1 and given.get("ord") not in (None, "fro"):
        raise no_rule("of matrices")
    return norm(func, args, kwargs)


def _reduced_layout(layout: RowLayout, dims: Sequence[int], *, keepdim: bool) -> RowLayout:
    """The layout of a reduction over other dimensions than the divided one."""
    return RowLayout(layout.dim if keepdim else layout.dim - sum(each < layout.dim for each in dims), layout.cut)


def normalized(func: Any, args: Args, kwargs: Named) -> Any:
    """functional.normalize."""
    given = named("input p dim eps", args, kwargs)
    eps = given.get("eps", 1e-12)
    return _over_norms(given["input"], given.get("p", 2.0), given.get("dim", 1), lambda total: total.clamp_min(eps))


def _over_norms(tensor: Tensor, order: float, dim: int, at_least: Callable[[Tensor], Tensor]) -> Any:
    """Divide a tensor, plain or a part, by its norms along a dimension, which `at_least` bounds from below."""
    vector_norm = cast(Any, torch.linalg).vector_norm
    if not isinstance(tensor, PartTensor):
        return tensor / at_least(vector_norm(tensor, order, dim, True))
    total = norm(vector_norm, (tensor, order, dim, True), {})
    least = at_least(plain_of(total))
    if isinstance(total, PartTensor):
        least = make(least, total.division, total.ranks)
    return elementwise(torch.div, (tensor, least), {})


def normed(func: Any, args: Args, kwargs: Named) -> Any:
    """layer_norm, rms_norm."""
    is_centered = name_of(func) == "layer_norm"
    given = named(f"input normalized_shape weight {'bias ' if is_centered else ''}eps", args, kwargs)
    ranks = ranks_of(args, kwargs)
    x, layout = given["input"], layout_of(given["input"])
    first = x.dim() - len(given["normalized_shape"])
    if layout is not None and layout.dim >= first:
        return _normed_over(given, layout, is_centered=is_centered)
    for name in ("weight", "bias"):
        if layout_of(given.get(name)) is not None:
            raise no_rule(f"with a divided {name} and another input")
    inside = {name: entered(each, ranks) for name, each in given.items()}
    if is_dynamo_compiling():  # it calls the rule of a subclass again, as torch writes rms_norm in Python
        inside = {name: plain_of(each) for name, each in inside.items()}
    return make(func(**inside), layout, ranks)


def _normed_over(given: dict[str, Any], layout: RowLayout, *, is_centered: bool) -> PartTensor:
    """A norm only over the divided dimension: ranks sum their sums of squares."""
    x: PartTensor = given["input"]
    ranks = x.ranks
    if layout.dim != x.dim() - 1 or len(given["normalized_shape"]) > 1 or layout.cut.is_shared(ranks.size):
        raise no_rule("a norm over the divided dimension and others, or of rows that ranks share")
    rows = _wide(x)
    eps = given.get("eps", 1e-5 if is_centered else None)

    def mean(values: Tensor) -> Tensor:
        total = ranks.total(values.sum(-1, keepdim=True))
        return ranks.enter(total) / layout.cut.total

    if is_centered:
        rows = rows - mean(rows)
    scale = torch.rsqrt(mean(rows.square()) + (torch.finfo(x.dtype).eps if eps is None else eps))
    found = make((rows * scale).to(x.dtype), layout, ranks)
    if given.get("weight") is not None:
        found = elementwise(torch.mul, (found, given["weight"]), {})
    return found if given.get("bias") is None else elementwise(torch.add, (found, given["bias"]), {})


def group_normed(func: Any, args: Args, kwargs: Named) -> Any:
    """group_norm. Ranks sum their sums of squares where a group is divided."""
    given = named("input num_groups weight bias eps", args, kwargs)
    ranks = ranks_of(args, kwargs)
    layout = layout_of(given["input"])
    if layout is None:
        if layouts_of(each for each in given.values() if isinstance(each, Tensor)):
            raise no_rule("with a divided weight and another input")
        return make(func(**{name: entered(each, ranks) for name, each in given.items()}), None, ranks)
    cut = layout.cut
    groups = given["num_groups"]
    if layout.dim != 1 or cut.is_shared(ranks.size):
        raise no_rule(f"of {groups} groups of a part along another dimension than channels, or that ranks share")
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            given[name] = own_rows(given[name], 0, cut, ranks)
    if len(cut.listed) > 1 or groups % ranks.size:
        return _group_normed_over(given, layout, ranks)
    return make(func(**{**given, "num_groups": groups // ranks.size}), layout, ranks)


def _group_normed_over(given: dict[str, Any], layout: RowLayout, ranks: Ranks) -> PartTensor:
    """A norm of groups of channels that ranks divide."""
    x: Tensor = given["input"]
    rows = _wide(plain_of(x))
    further = [*range(2, rows.dim())]  # dimensions of an image or a sound
    length = layout.cut.total // given["num_groups"]
    of_channel = [row // length for row in rows_of(layout.cut, ranks.rank, ranks.size)]
    group = torch.tensor(of_channel, device=x.device)
    count = length * math.prod([rows.shape[dim] for dim in further])

    def mean(values: Tensor) -> Tensor:
        by_channel = values.sum(further) if further else values
        sums = by_channel.new_zeros(len(values), given["num_groups"]).index_add(1, group, by_channel)
        means = ranks.enter(ranks.total(sums)) / count
        return means.index_select(1, group).view(len(values), len(of_channel), *[1] * len(further))

    rows = rows - mean(rows)
    found = (rows * torch.rsqrt(mean(rows.square()) + given.get("eps", 1e-5))).to(x.dtype)
    column = (-1, *[1] * len(further))
    if given.get("weight") is not None:
        found = found * given["weight"].view(column)
    if given.get("bias") is not None:
        found = found + given["bias"].view(column)
    return make(found, layout, ranks)


_BY_CHANNEL = "input running_mean running_var weight bias"
_BY_CHANNEL_INSIDE = "input weight bias running_mean running_var"  # of torch.batch_norm, not of torch.nn.functional's


def channel_normed(func: Any, args: Args, kwargs: Named) -> Any:
    """batch_norm, instance_norm: a rank has all values of its channels. Running statistics are of all channels on each
    rank, so ranks exchange the new ones."""
    names = _BY_CHANNEL if func in (functional.batch_norm, functional.instance_norm) else _BY_CHANNEL_INSIDE
    by_name = named(names, args[:5], kwargs)
    ranks = ranks_of(args, kwargs)
    layout = layout_of(by_name["input"])
    given = {name: by_name.pop(name, None) for name in _BY_CHANNEL.split()}
    if layout is None:
        if layouts_of(each for each in given.values() if isinstance(each, Tensor)):
            raise no_rule("with a divided weight and another input")
        inside = {name: entered(each, ranks) for name, each in given.items()}
        return make(func(*(inside[name] for name in names.split()), *args[5:], **by_name), None, ranks)
    if layout.dim != 1:
        raise no_rule("of a part along another dimension than channels")
    for name in ("weight", "bias"):
        if given[name] is not None:
            given[name] = own_rows(given[name], 0, layout.cut, ranks)
    running = {name: given[name] for name in ("running_mean", "running_var") if given[name] is not None}
    places = places_of(layout.cut, None, ranks.rank, ranks.size)
    given.update({name: taken(each.detach(), 0, places).clone() for name, each in running.items()})
    found = make(func(*(given[name] for name in names.split()), *args[5:], **by_name), layout, ranks)
    trains = by_name.get("training", by_name.get("use_input_stats", name_of(func) == "instance_norm"))
    if running and (args[5] if len(args) > 5 else trains):
        rows = torch.stack([given[name] for name in running], 1)
        new = leave(make(rows, RowLayout(0, layout.cut), ranks))
        for column, each in zip(new.unbind(1), running.values(), strict=True):
            _ = each.detach().copy_(column)
    return found


def weight_normed(func: Any, args: Args, kwargs: Named) -> Any:
    """_weight_norm: directions divided by their norms, times lengths."""
    given = named("v g dim", args, kwargs)
    v, g = given["v"], given["g"]
    dim = given.get("dim", 0) % v.dim()
    others = [each for each in range(v.dim()) if each != dim]
    squares = elementwise(torch.mul, (v, v), {}) if isinstance(v, PartTensor) else v * v
    totals = reduced(torch.sum, (squares, others, True), {}) if isinstance(v, PartTensor) else squares.sum(others, True)
    norms = elementwise(torch.sqrt, (totals,), {}) if isinstance(totals, PartTensor) else totals.sqrt()
    factors = (
        elementwise(torch.div, (g, norms), {})
        if isinstance(g, PartTensor) or isinstance(norms, PartTensor)
        else g / norms
    )
    return elementwise(torch.mul, (v, factors), {})


def flipped(func: Any, args: Args, kwargs: Named) -> Any:
    """flip, of dimensions one by one or in one sequence."""
    part = part_of(func, args)
    given = args[1] if len(args) == 2 else args[1:] or kwargs["dims"]
    return along(1)(func, (part, given), {})


def topped(func: Any, args: Args, kwargs: Named) -> Any:
    """topk, sort: values and indices along a dimension that all ranks hold."""
    part = part_of(func, args)
    names = "input k dim largest sorted" if name_of(func) == "topk" else "input dim descending"
    dim = named(names, args, kwargs).get("dim", -1) % part.dim()
    if part.division is not None and part.division.dim == dim:
        raise no_rule("along the divided dimension")
    return _like(func(*args, **kwargs), at(part.division.dim, part.division.cut) if part.division else None, part)


def loss_of_classes(func: Any, args: Args, kwargs: Named) -> Any:
    """cross_entropy of classes that ranks divide, which gather them, with whole targets."""
    given = named("input target weight", args, kwargs)
    scores = part_of(func, args or (kwargs["input"],))
    classes = min(1, scores.dim() - 1)
    others = [*tensors_of([given["target"], given.get("weight")])]
    if (
        scores.division is None
        or scores.division.dim != classes
        or any(isinstance(each, PartTensor) for each in others)
    ):
        raise no_rule("of anything but classes that ranks divide")
    return func(**{**given, "input": leave(scores)})


def loss_of_elements(func: Any, args: Args, kwargs: Named) -> Any:
    """mse_loss and its like: of elements at the same place, then their mean or sum."""
    name = name_of(func)
    names = "input target weight" if "binary" in name else "input target"
    given = named(names, args, {key: each for key, each in kwargs.items() if each is not None})
    how = reduction_of(given)
    if len(args) > len(names.split()) or how not in _HOWS or func is not getattr(functional, name):
        raise no_rule("with options by place, or a number for its reduction")
    if problem := lost_weight(func):
        raise no_rule(problem)
    scores = given.pop("input")
    found = elementwise(func, (scores, given.pop("target")), {**given, "reduction": "none"})
    if how == "none":
        return found
    if name == "mse_loss" and how == "mean" and "weight" in given:
        weights = elementwise(torch.mul, (elementwise(torch.ones_like, (found,), {}), given["weight"]), {})
        return _quotient(*(reduced(torch.sum, (each,), {}) for each in (found, weights)))
    total = reduced(torch.mean if how == "mean" else torch.sum, (found,), {})
    if how != "batchmean" or not whole_shape(scores):
        return total
    return _quotient(total, whole_shape(scores)[0])


def _quotient(total: Tensor, count: Tensor | int) -> Tensor:
    return elementwise(torch.div, (total, count), {}) if isinstance(total, PartTensor) else total / count


def reduction_of(given: dict[str, Any]) -> Any:
    """Take the reduction out of a loss's arguments; also torch's old options, as torch reads them."""
    average = given.pop("size_average", None)
    each = given.pop("reduce", None)
    how = given.pop("reduction", "mean")
    if average is None and each is None:
        return how
    return "none" if each is False else "sum" if average is False else "mean"


def lost_weight(func: Any) -> str:
    """Return a problem for the weight of l1_loss, which torch does not pass on to subclasses; "" without one."""
    if name_of(func) != "l1_loss" or not lost_argument(func, "weight"):
        return ""
    return "with weight=, which torch drops here: the mean is (torch.abs(x - y) * weight).sum() / weight.sum()"


def cosine_similarity(func: Any, args: Args, kwargs: Named) -> Any:
    """cosine_similarity, by the products of two normalized tensors."""
    given = named("x1 x2 dim eps", args, kwargs)
    dim = given.get("dim", 1)
    one, other = map(whole_shape, (given["x1"], given["x2"]))
    if len(one) != len(other) or one[dim] != other[dim]:  # torch computes norms of what it broadcasts
        raise no_rule("of tensors with other lengths")
    eps = given.get("eps", 1e-8)

    def at_least(total: Tensor) -> Tensor:  # torch gives smaller norms their gradients, too
        return total + (total.clamp_min(eps) - total).detach()

    one, other = (_over_norms(given[name], 2.0, dim, at_least) for name in ("x1", "x2"))
    return reduced(torch.sum, (elementwise(torch.mul, (one, other), {}), dim), {})


_SPECTRA = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_ALONG_DIMS = {"": along(2), "2": along(2, (-2, -1)), "n": along(2, None)}  # by the end of the function's name
_ALONG = ("softmax", "log_softmax", "softmin", "_softmax")
LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "poisson_nll_loss",
    "hinge_embedding_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
)  # fmt: skip
_HOWS = ("none", "mean", "sum", "batchmean")
_OVER = (
    "sum", "mean", "amax", "amin", "max", "min", "any", "all", "var", "std", "logsumexp", "prod", "argmax", "argmin",
)  # fmt: skip
RULES = {
    **dict.fromkeys((*_ALONG, "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), along(1)),
    **{f"fft_{kind}{dims}": rule for kind in _SPECTRA for dims, rule in _ALONG_DIMS.items()},
    "flip": flipped,
    "roll": along(2, None),
    "glu": halved,
    **dict.fromkeys(_OVER, reduced),
    **dict.fromkeys(("norm", "linalg_vector_norm", "vector_norm"), norm),
    "linalg_norm": linalg_norm,
    "normalize": normalized,
    **dict.fromkeys(("layer_norm", "rms_norm"), normed),
    "group_norm": group_normed,
    **dict.fromkeys(("batch_norm", "instance_norm"), channel_normed),
    "_weight_norm": weight_normed,
    "cross_entropy": loss_of_classes,
    **dict.fromkeys(LOSSES, loss_of_elements),
    "cosine_similarity": cosine_similarity,
    **dict.fromkeys(("topk", "sort", "argsort"), topped),
}
