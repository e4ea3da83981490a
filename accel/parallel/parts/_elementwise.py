# SPDX-License-Identifier: Apache-2.0
"""Rules of functions element by element, of draws, and of questions that every rank answers alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from accel.parallel._private import map_kind, runs_in_backward, tensors_of
from accel.parallel.parts._layout import RowLayout, no_rule
from accel.parallel.parts._part import (
    Args,
    Named,
    PartTensor,
    aligned,
    alike_part,
    entered,
    leave,
    make,
    name_of,
    named,
    own_rows,
    part_of,
    placed,
    plain_of,
    ranks_of,
    whole_shape,
)


def written_whole(func: Any, args: Args, kwargs: Named) -> Any:
    """Change a plain tensor in place, by the whole tensors of parts: it may be outside of the region, as a cache is of
    keys and values. A collective."""
    given, by_name = map_kind(PartTensor, leave, (tuple(args), dict(kwargs)))
    return func(*given, **by_name)


def elementwise(func: Any, args: Args, kwargs: Named) -> Any:
    """A function of elements at the same place, after broadcasting."""
    first = alike_part(args)
    if first is not None and not (kwargs and any(isinstance(each, Tensor) for each in kwargs.values())):
        found = in_order(func, func(*map(_kept_plain, args), **kwargs), first.division, first)
        return make(found, first.division, first.ranks)
    ranks = ranks_of(args, kwargs)
    own, alignment = aligned(tensors_of((*args, *kwargs.values())), ranks)
    given = map(_kept_plain, own)

    def put(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [put(each) for each in cast("list[Any]", value)]
        return next(given) if isinstance(value, Tensor) else value

    ordered = [put(each) for each in args]
    by_name = {key: put(value) for key, value in kwargs.items()}
    found = func(*ordered, **by_name)
    if isinstance(found, Tensor):
        full = next((each for each in own if each.shape == found.shape), found)
        found = in_order(func, found, alignment.layout(found.dim()), full)
    return placed(found, alignment, ranks)


_CONTIGUOUS = ("masked_fill", "log_sigmoid")  # torch makes their results contiguous


def in_order(func: Any, found: Tensor, layout: RowLayout | None, operand: Tensor) -> Tensor:
    """Return the result of a function with its dimensions in memory as its operand has them. torch forgets the place of
    a dimension of one row, but the full tensor has it, and dropout draws in the order of its memory."""
    if layout is None or is_dynamo_compiling() or operand.size(layout.dim) != 1 or operand.shape != found.shape:
        return found
    if operand.stride(layout.dim) == found.stride(layout.dim) or not operand.is_contiguous():
        return found
    if name_of(func) in _CONTIGUOUS:
        return found
    return placed_in_memory(found, order_of(operand))


def placed_in_memory(found: Tensor, order: list[int]) -> Tensor:
    """Return a tensor that has its dimensions in this order in memory, with those of one row at their place."""
    rows = found.permute(order)
    if not rows.is_contiguous():
        return found
    return rows.view(-1).view(rows.shape).permute([order.index(at) for at in range(found.dim())])


def order_of(rows: Tensor) -> list[int]:
    """Return the dimensions of dense rows from the outermost in memory; a single row is inside of others."""
    return sorted(range(rows.dim()), key=lambda at: (-rows.stride(at), rows.shape[at] < 2))


def of_tags(func: Any, args: Args, kwargs: Named) -> Any:
    """An operator of torch.library that computes each element alone, by its tags."""
    return func(*args, **kwargs) if runs_in_backward() else elementwise(func, args, kwargs)  # there rows are plain


def _written(function: Any, func: Any, args: Args, kwargs: Named) -> Any:
    """An operator that torch writes in Python, by functions that it does not, as torch.compile needs."""
    return elementwise(function, args, kwargs)


def _power_of(exponent: Tensor, base: Any) -> Tensor:
    return torch.pow(base, exponent)


def _quotient_by(divisor: Tensor, value: Any) -> Tensor:
    return torch.reciprocal(divisor) * value


def _chosen(func: Any, args: Args, kwargs: Named) -> Any:
    """`where`, with values to take or only with a condition."""
    return (alike if len(args) == 1 and not kwargs else elementwise)(func, args, kwargs)


def _kept_plain(each: Any) -> Any:
    """Return a part without a gradient as its plain rows: a graph of gradients keeps the tensor itself, and the checks
    of a checkpoint ask it for its shape."""
    if type(each) in (int, float, bool) or is_dynamo_compiling():
        return each
    is_constant = isinstance(each, PartTensor) and not each.requires_grad and torch.is_grad_enabled()
    return plain_of(each) if is_constant else each


_READS = ("__index__", "__int__", "__invert__", "__iter__")  # the operators in place begin alike


def changes(name: str) -> bool:
    """Return whether a function of this name changes its first argument."""
    is_operator = name.startswith("__i") and name not in _READS
    return is_operator or (name.endswith("_") and not name.endswith("__"))


# Functions that change their first argument; names of a trace of torch.compile can only be looked up.
_WRITES = dict.fromkeys(("__setitem__", *filter(changes, chain(dir(Tensor), dir(torch), dir(functional)))))


def writes(name: str) -> bool:
    """Return whether a function of this name changes its first argument, or an item of it."""
    return name in _WRITES if is_dynamo_compiling() else changes(name) or name == "__setitem__"


def written_rows(part: Tensor) -> Tensor:
    """Return what a function that changes a part takes for it: a trace takes a tensor that is changed for a plain one
    from then on."""
    return plain_of(part) if is_dynamo_compiling() else part


def _changed(func: Any, args: Args, kwargs: Named) -> Any:
    """Change a part in place, or a plain tensor."""
    if not isinstance(args[0], PartTensor):
        return written_whole(func, args, kwargs)
    part = args[0]
    own, alignment = aligned(tensors_of((*args, *kwargs.values())), part.ranks)
    if alignment.layout(part.dim()) != part.division:
        raise no_rule("in place, of a tensor that more ranks hold than the other")
    own[0] = written_rows(own[0])
    given = iter(own)
    values = [next(given) if isinstance(each, Tensor) else each for each in args]
    by_name = {key: next(given) if isinstance(each, Tensor) else each for key, each in kwargs.items()}
    func(*values, **by_name)
    return part


def same(func: Any, args: Args, kwargs: Named) -> Any:
    """A function of one part that keeps its rows: an element-wise function, a copy, or another dtype or memory."""
    part = part_of(func, args)
    if is_dynamo_compiling() and writes(name_of(func)):
        func(written_rows(part), *args[1:], **kwargs)
        return part
    found = func(*args, **kwargs)
    if not isinstance(found, Tensor) or (found is part and not is_dynamo_compiling()):  # there two names are one tensor
        return found
    if kwargs.get("memory_format") in (None, torch.preserve_format):
        found = in_order(func, found, part.division, part)
    return make(found, part.division, part.ranks)


def laid_out(func: Any, args: Args, kwargs: Named) -> Any:
    """contiguous, which copies where the full tensor is not: rows of one head may be contiguous before."""
    found = same(func, args, kwargs)
    if found is not args[0] or is_dynamo_compiling() or found.size(found.division.dim if found.division else 0) != 1:
        return found
    order = order_of(found)
    if order == sorted(order):
        return found
    return make(found.clone(memory_format=torch.contiguous_format), found.division, found.ranks)


def duplicated(func: Any, args: Args, kwargs: Named) -> Any:
    """copy.deepcopy, as of a cache of keys."""
    part = part_of(func, args)
    # copy knows what it has copied by numbers of objects: of plain rows, which are gone, another part may have it next
    return make(func(plain_of(part), {}), part.division, part.ranks)


def converted(func: Any, args: Args, kwargs: Named) -> Any:
    """to, type_as; of a plain tensor it is plain."""
    return (same if isinstance(args[0], PartTensor) else facts)(func, args, kwargs)


def facts(func: Any, args: Args, kwargs: Named) -> Any:
    """A question about dtypes, devices or strides; or a new plain tensor of a size that the model names."""
    if is_dynamo_compiling():  # which asks subclasses for attributes again
        args = [plain_of(each) for each in args]
    return func(*args, **kwargs)


def _gradient(func: Any, args: Args, kwargs: Named) -> Any:
    """The gradient of a tensor that the model has computed; in a backward, which a reentrant checkpoint begins in
    another, its rows."""
    found = func(*args, **kwargs)
    if found is not None and not runs_in_backward():
        raise no_rule("of a part")
    return found


def _backward(func: Any, args: Args, kwargs: Named) -> None:
    """The backward of a reentrant checkpoint, in another."""
    if not runs_in_backward():
        raise no_rule("of a part")
    func(*args, **kwargs)


def _followed(func: Any, args: Args, kwargs: Named) -> None:
    """`tensor.requires_grad = True`."""
    func(part_of(func, args), *args[1:], **kwargs)


def alike(func: Any, args: Args, kwargs: Named) -> Any:
    """A value that is the same on all ranks: of a part that is not divided."""
    part = part_of(func, args)
    if part.division is not None:
        raise no_rule("of a part")
    return func(plain_of(part), *args[1:], **kwargs)


def dropped(func: Any, args: Args, kwargs: Named) -> Any:
    """dropout to dropout3d: all ranks draw for the full tensor and keep their part, as one process does."""
    part = part_of(func, args)
    given = named("input p training inplace", args, kwargs)
    rate = given.get("p", 0.5)
    if not given.get("training", True) or not rate:
        return part
    drop: Callable[..., Any] = getattr(functional, name_of(func))
    is_in_place = bool(given.get("inplace")) and not is_dynamo_compiling()  # a graph takes the result
    if part.division is None:
        found = drop(part, rate, inplace=is_in_place)
    else:
        mask = own_mask(part, rate, drop)
        found = part.mul_(mask) if is_in_place else part * mask
    return part if is_in_place else make(found, part.division, part.ranks)


def sloped(func: Any, args: Args, kwargs: Named) -> Any:
    """prelu, by one slope or one for each channel, the second dimension."""
    given = named("input weight", args, kwargs)
    part, weight = part_of(func, [given["input"]]), given["weight"]
    layout = part.division
    is_by_channel = layout is not None and layout.dim == 1 and whole_shape(weight).numel() > 1
    if layout is not None and is_by_channel:
        return make(func(part, own_rows(weight, 0, layout.cut, part.ranks)), layout, part.ranks)
    return make(func(part, entered(weight, part.ranks)), layout, part.ranks)


def own_mask(part: PartTensor, rate: float, drop: Callable[..., Any] = functional.dropout) -> Tensor:
    """Return this rank's part of a mask of dropout for a whole tensor: 0 or `1 / (1 - rate)`."""
    mask = drop(_whole_like(part).fill_(1), rate)
    return mask if part.division is None else own_rows(mask, part.division.dim, part.division.cut, part.ranks)


def _whole_like(part: PartTensor) -> Tensor:
    """Return a whole tensor without values, with dimensions in memory as the rows have them: torch draws in this
    order."""
    shape = whole_shape(part)
    order = list(range(len(shape)))
    if not is_dynamo_compiling():
        order = order_of(torch.empty_like(plain_of(part), device="meta"))  # dense, also of what `expand` gave
    whole = torch.empty([shape[at] for at in order], dtype=part.dtype, device=part.device)
    return whole.permute([order.index(at) for at in range(len(shape))])


def drawn_like(func: Any, args: Args, kwargs: Named) -> Any:
    """rand_like, randn_like: all ranks draw for the whole and keep their part."""
    part = part_of(func, args)
    whole = func(_whole_like(part), *args[1:], **kwargs)
    own = whole if part.division is None else own_rows(whole, part.division.dim, part.division.cut, part.ranks)
    return make(own, part.division, part.ranks)


def passage(func: Any, args: Args, kwargs: Named) -> Any:
    """A collective of ranks along another axis, which exchanges no rows of the divided dimension."""
    part, by, group = part_of(func, args), args[1], args[2]
    layout = part.division
    if group is part.ranks.group:
        raise no_rule("of the ranks that hold the parts")
    exchanges = by.kind not in ("copied", "summed")
    if layout is not None and exchanges and by.dim % part.dim() == layout.dim:
        raise no_rule(f"{by.kind} along the divided dimension")
    return make(func(plain_of(part), by, group), layout, part.ranks)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BROADCAST = _names("""
    add sub mul div float_power clamp clamp_min clamp_max clip masked_fill lerp addcmul addcdiv maximum
    minimum fmax fmin eq ne lt le gt ge less less_equal greater greater_equal not_equal logical_and logical_or
    logical_xor bitwise_and bitwise_or bitwise_xor atan2 fmod remainder true_divide floor_divide rsub multiply
    subtract divide logaddexp logaddexp2 xlogy special_xlogy special_xlog1py polar complex hypot copysign
    isclose heaviside
    add_ sub_ mul_ div_ clamp_ masked_fill_ copy_ clamp_min_
    clamp_max_ addcmul_ addcdiv_ pow_ lerp_ __add__ __radd__ __iadd__ __sub__ __isub__ __mul__ __rmul__
    __imul__ __truediv__ __div__ __itruediv__ __and__ __rand__ __or__ __ror__
    __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __rfloordiv__ __mod__ __rmod__
""")
_OPERATORS: dict[str, Any] = {
    "__rsub__": torch.rsub,
    "pow": torch.pow,  # of the operator, too
    "__rpow__": _power_of,
    "__rtruediv__": _quotient_by,
    "__rdiv__": _quotient_by,
    "__floordiv__": torch.floor_divide,
}
ELEMENTWISE = ("where", *_BROADCAST, *_OPERATORS)
_SAME = _names("""
    neg negative abs absolute exp exp2 expm1 log log1p log2 log10 sqrt rsqrt sin cos tan tanh sinh cosh asin acos
    atan sigmoid relu relu6 gelu silu mish elu selu celu softplus hardtanh hardswish hardsigmoid leaky_relu
    logsigmoid softsign tanhshrink hardshrink softshrink square reciprocal sign sgn floor ceil round trunc frac
    logical_not bitwise_not isnan isinf isfinite nan_to_num erf erfc erfinv logit threshold conj angle __neg__
    __pos__ __invert__ __abs__ real imag relu_ exp_ neg_ tanh_ sigmoid_ sqrt_ rsqrt_ zero_ fill_ clone
    detach type double float half bfloat16 long int bool positive conj_physical resolve_conj resolve_neg zeros_like
    ones_like empty_like full_like data requires_grad_ acosh asinh atanh sinc lgamma digamma celu fix signbit byte
    short cdouble cfloat cpu cuda abs_ log_ log1p_ square_ sin_ cos_ reciprocal_ round_ floor_ ceil_ nan_to_num_ celu_
    logical_not_ erf_ expm1_ trunc_ log_sigmoid _threshold special_expit special_erf special_erfc special_erfcx
    special_erfinv special_exp2 special_expm1 special_log1p special_gammaln special_digamma special_psi special_sinc
    special_ndtr special_ndtri special_log_ndtr special_i0 special_i0e special_i1 special_i1e special_entr special_logit
""")
FACTS = _names("""
    dim ndimension is_floating_point is_contiguous is_complex is_signed is_conj is_neg element_size get_device
    stride storage_offset is_same_size is_inference result_type can_cast __hash__ untyped_storage new_zeros
    new_ones new_empty new_full new_tensor ndim dtype device is_cuda requires_grad layout is_meta is_leaf grad_fn
    is_sparse is_quantized is_nested is_cpu is_mps is_xpu is_mkldnn itemsize is_xla is_mtia is_vulkan output_nr
    retains_grad is_pinned _base _version _is_view register_hook is_sparse_csr is_maia is_ipu _backward_hooks
    _backward_hooks.__set__
""")

RULES = {
    **{name: _changed if changes(name) else elementwise for name in _BROADCAST},
    "where": _chosen,
    **{name: partial(_written, function) for name, function in _OPERATORS.items()},
    **dict.fromkeys(_SAME, same),
    **dict.fromkeys(("to", "type_as"), converted),
    "contiguous": laid_out,
    **dict.fromkeys(FACTS, facts),
    "grad": _gradient,
    "backward": _backward,
    "requires_grad.__set__": _followed,
    "__deepcopy__": duplicated,
    **dict.fromkeys(("item", "tolist", "__bool__", "__float__", "__int__", "__index__"), alike),
    "data_ptr": alike,  # a kernel would take the whole shape for the shape of this rank's memory
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), dropped),
    "prelu": sloped,
    **dict.fromkeys(("rand_like", "randn_like"), drawn_like),
    "passed": passage,
    "weighted": same,
}
