# SPDX-License-Identifier: Apache-2.0
"""Matmuls of divided linear layers that overlap with the messages of their inputs or outputs, in chunks of rows or
tokens.

While a chunk's message is sent, the matmul of the next chunk runs. Each function below contains the matmul and the
messages of one layer, forward and backward, so no message is pending when it returns. The idea is from Wang et al.
2023, "Overlap communication with dependent computation via decomposition in large deep learning models", ASPLOS.
Shapes: weights [outputs, inputs]; activations [..., inputs], and [batch, tokens, ..., inputs] where ranks share tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accel.comm import start_gather, start_scatter, start_sum
from accel.devices import as_autocast
from accel.errors import PrepareError
from accel.mixins import Mixin
from accel.parallel.axes.tensor._styles import COLWISE, ROWWISE, Rule, is_transposed

if TYPE_CHECKING:
    import torch.distributed as dist

_CHUNKS = 4  # of a message at most: each costs a start
_LEAST_ROWS = 128  # of a chunk's matmul: a tile of a GPU's matmuls
_TOKENS = 1  # dimension of activations


def with_overlap(model: nn.Module, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return rules by which layers overlap their messages with their matmuls. Pure.

    Raises `PrepareError` with all layers that are not known to be a matmul.
    """
    found = dict(rules)
    problems: list[str] = []
    for path, rule in rules.items():
        if rule.style in COLWISE | ROWWISE:
            problems += [path] if not _is_product(model.get_submodule(path)) else []
        elif not rule.layouts:
            continue
        found[path] = msgspec.structs.replace(rule, overlap=True)
    if problems:
        named = ", ".join(f"{each} ({type(model.get_submodule(each)).__name__})" for each in problems)
        raise PrepareError(
            "layers with a custom forward cannot overlap their matmul with messages",
            expected="nn.Linear, or Conv1D of transformers",
            got=named,
            where="prepare_model, plan.overlap",
            fix="Leave overlap out: plan=accel.parallel.Plan(overlap=False).",
        )
    return found


def _is_product(module: nn.Module) -> bool:
    """Whether a module's forward is the forward of nn.Linear or Conv1D."""
    kinds: tuple[type, ...] = type(module).__mro__
    owner = next(each for each in kinds if "forward" in vars(each) and Mixin not in each.__mro__)
    return owner is nn.Linear or (is_transposed(module) and owner.__name__ == "Conv1D")


def copied_product(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return this rank's outputs of a layer with the same input on all ranks, and the input for others to use. The
    backward is a collective: it sums the gradients of both in one message per chunk."""
    return cast(Any, _Copied).apply(x, *_cast(weight, bias), group)


def gathered_product(
    part: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return this rank's outputs of a layer, from its part of the input's tokens, and the gathered input for others to
    use. A collective, as its backward."""
    return cast(Any, _Gathered).apply(part, *_cast(weight, bias), group)


def summed_product(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of a layer's outputs. A collective; the backward makes none."""
    return cast(Any, _Summed).apply(*_cast(x, weight), group)


def scattered_product(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of a layer's outputs for this rank's part of the tokens. A collective, as its
    backward."""
    return cast(Any, _Scattered).apply(*_cast(x, weight), group)


def _cast(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype of autocast, which does not apply in a backward."""
    return [None if each is None else as_autocast(each) for each in tensors]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> tuple[Tensor, Tensor]:
        same = x.view_as(x)
        _begin(ctx, x, weight, same, group)
        return _product(x, weight, bias), same

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        x, weight = ctx.saved_tensors
        own, others = (None if each is None else _rows(each) for each in grads)
        waits = list[Any]()
        total = None
        if ctx.needs_input_grad[0]:
            total = weight.new_empty(ctx.shape, dtype=ctx.dtype)
            rows = _rows(total)
            for at in _chunks(len(rows), 1):
                chunk = rows[at]
                _join(chunk, own if own is None else own[at], others if others is None else others[at], weight)
                waits.append(start_sum(chunk, ctx.group))
        of_weight = _of_weight(own, x)
        of_bias = _of_bias(ctx, own)
        for wait in waits:
            wait()
        return total, of_weight, of_bias, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> tuple[Tensor, Tensor]:
        chunks = _token_chunks(part.shape, group)
        waits = [start_gather(part[:, at], group) for at in chunks]
        whole = part.new_empty(_whole_shape(part, group))
        output = weight.new_empty(*whole.shape[:-1], len(weight))
        for at, wait in zip(chunks, waits, strict=True):
            arrived = wait()
            _by_rank(whole, group)[:, :, at] = arrived
            _by_rank(output, group)[:, :, at] = _product(arrived, weight, bias)
        _begin(ctx, part, weight, whole, group)
        return output, whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        whole, weight = ctx.saved_tensors
        own, others = (None if each is None else _by_rank(each, ctx.group) for each in grads)
        total = None
        waits = list[Any]()
        if ctx.needs_input_grad[0]:
            for at in _token_chunks(ctx.shape, ctx.group):
                like = cast(Tensor, own if others is None else others)[:, :, at]
                chunk = weight.new_empty((*like.shape[:-1], weight.shape[1]), dtype=ctx.dtype)
                _join(_rows(chunk), _token_rows(own, at), _token_rows(others, at), weight)
                waits.append(start_scatter(chunk, ctx.group))
        rows = None if grads[0] is None else _rows(grads[0])
        of_weight = _of_weight(rows, whole)
        of_bias = _of_bias(ctx, rows)
        if waits:
            total = torch.cat([wait() for wait in waits], _TOKENS)
        return total, of_weight, of_bias, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        output = x.new_empty(*x.shape[:-1], len(weight))
        rows = _rows(output)
        own = _rows(x)
        waits = list[Any]()
        for at in _chunks(len(rows), 1):
            _join(rows[at], own[at], None, weight.t())
            waits.append(start_sum(rows[at], group))
        for wait in waits:
            wait()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        x, weight = ctx.saved_tensors
        of_x = _product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        return of_x, _of_weight(_rows(grad), x), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group = group
        by_rank = _by_rank(x, group)
        chunks = _token_chunks(by_rank.shape[1:], group)
        waits = [start_scatter(_product(by_rank[:, :, at], weight), group) for at in chunks]
        return torch.cat([wait() for wait in waits], _TOKENS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - decorated
        x, weight = ctx.saved_tensors
        group = ctx.group
        chunks = _token_chunks(grad.shape, group)
        waits = [start_gather(grad[:, at], group) for at in chunks]
        whole = grad.new_empty(_whole_shape(grad, group))
        of_x = grad.new_empty(*whole.shape[:-1], weight.shape[1]) if ctx.needs_input_grad[0] else None
        for at, wait in zip(chunks, waits, strict=True):
            arrived = wait()
            _by_rank(whole, group)[:, :, at] = arrived
            if of_x is not None:
                _by_rank(of_x, group)[:, :, at] = _product(arrived, weight.t())
        return of_x, _of_weight(_rows(whole), x), None


def _chunks(length: int, rows: int) -> list[slice]:
    """Slices of a length, by the rows of a place along it: at least one, and of equal lengths but for one place."""
    count = max(1, min(_CHUNKS, length, length * rows // _LEAST_ROWS))
    ends = [length * at // count for at in range(count + 1)]
    return [slice(*both) for both in itertools.pairwise(ends)]


def _token_chunks(shape: torch.Size, group: Any) -> list[slice]:
    """Slices of the tokens of each rank's part, of shape [batch, tokens, ..., features]."""
    others = math.prod(shape[:-1]) // max(shape[_TOKENS], 1)
    return _chunks(shape[_TOKENS], group.size() * others)


def _whole_shape(part: Tensor, group: Any) -> tuple[int, ...]:
    return part.shape[0], part.shape[_TOKENS] * group.size(), *part.shape[2:]


def _by_rank(x: Tensor, group: Any) -> Tensor:
    """A view [size, batch, own tokens, ...] of activations, by the rank that has the tokens between layers."""
    return cast(Any, x).unflatten(_TOKENS, (group.size(), -1)).movedim(_TOKENS, 0)


def _token_rows(by_rank: Tensor | None, at: slice) -> Tensor | None:
    return None if by_rank is None else _rows(by_rank[:, :, at])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = _rows(x)
    output = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    return output.view(*x.shape[:-1], len(weight))


def _join(out: Tensor, rows: Tensor | None, others: Tensor | None, matrix: Tensor) -> None:
    """Write the product of rows and a matrix to rows that may have another dtype, with others added."""
    if rows is None:
        _ = out.copy_(cast(Tensor, others))
    elif out.dtype != matrix.dtype:
        _ = out.copy_(rows @ matrix)
        if others is not None:
            out += others
    elif others is None:
        torch.mm(rows, matrix, out=out)
    else:
        torch.addmm(others, rows, matrix, out=out)


def _begin(ctx: Any, x: Tensor, weight: Tensor, others: Tensor, group: Any) -> None:
    """Keep what the backward of a matmul needs if others use its input too."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(others if ctx.needs_input_grad[1] else None, weight)
    ctx.group = group
    ctx.shape, ctx.dtype = x.shape, x.dtype
    if not ctx.needs_input_grad[0]:
        ctx.mark_non_differentiable(others)


def _of_weight(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
    """The gradient of a weight, from rows of the outputs' gradient."""
    return None if grad is None or x is None else grad.t() @ _rows(x).to(grad.dtype)


def _of_bias(ctx: Any, grad: Tensor | None) -> Tensor | None:
    return grad.sum(0) if grad is not None and ctx.needs_input_grad[2] else None
