# SPDX-License-Identifier: Apache-2.0
"""The answer for context parallelism: parameters stay whole, and attention crosses the ranks, torch's modules of it
among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from accel.comm import exchange_values, gathered_summed
from accel.context import DistContext, group_of
from accel.errors import ConfigError, PrepareError
from accel.parallel._private import called_eagerly, untraced
from accel.parallel._spread import Spread, SpreadOptions, compare_models
from accel.parallel.axes.context._attention import sorted_positions
from accel.parallel.axes.context._checks import (
    check_mixers,
    check_multihead,
    check_transformers,
    mask_refused,
    multihead_attentions,
    towers_of,
)
from accel.parallel.axes.context._split import (
    has_plan,
    is_cut,
    note_attention,
    note_cut,
    own_positions,
    plan_method,
    planned_method,
)
from accel.parallel.axes.context._transformers import transformers_models, use_context_attention
from accel.parallel.axes.context._whole import (
    PROOF,
    PROVED,
    bound,
    evaluated,
    off_by,
    outputs_of,
    use_whole_attention,
    with_arguments,
)
from accel.topology import ContextMethod

_LOG = logging.getLogger("accel.parallel")
_MARK = "accel_context_method"  # attribute of a prepared module


class ContextOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of context parallelism: `context` of `Plan`."""

    context: ContextMethod = "gather"


def _is_done(ctx: DistContext, model: nn.Module) -> bool:
    """Return whether a model was prepared, or is on a mesh of the user's, whose axes are the user's own."""
    return not ctx.position.opened or any(hasattr(module, _MARK) for module in model.modules())


def _check(ctx: DistContext, model: nn.Module, options: ContextOptions) -> None:
    if has_plan(ctx) and planned_method(ctx) != options.context:
        raise ConfigError(
            "two methods of context parallelism in one context",
            expected=f"{planned_method(ctx)!r}, as of the model before",
            got=repr(options.context),
            where="plan.context",
            fix="Prepare both models with one plan; a call of context_attention may have a method= of its own.",
        )
    whole = _whole_models(model, options)
    known = [each for _, each in transformers_models(model)]
    check_mixers(model, whole, [tower for each in known for tower in towers_of(each)])
    check_multihead(model, known, options.context)
    hooked = [*whole, *multihead_attentions(model, known).values()]
    if hooked and ctx.axis("pp").size > 1:
        raise PrepareError(
            "an attention that hooks gather sequences for, in a model that is cut into stages",
            expected="a mesh without cp or without pp",
            got=type(hooked[0]).__name__,
            where="prepare_model",
            fix="Leave cp or pp out of the mesh.",
        )


def _whole_models(model: nn.Module, options: ContextOptions) -> list[Any]:
    """Return the models of transformers that need whole attention, or raise `PrepareError`."""
    return [each for path, each in transformers_models(model) if check_transformers(path, each, options.context)]


def _spread(ctx: DistContext, model: nn.Module, options: ContextOptions, *, is_empty: bool) -> nn.Module:
    _ = is_empty
    compare_models(ctx, options, {})
    plan_method(ctx, options.context)
    setattr(model, _MARK, options.context)
    use_multihead(ctx, model, [each for _, each in transformers_models(model)])
    whole = {id(each) for each in _whole_models(model, options)}
    for path, each in transformers_models(model):
        if id(each) in whole:
            use_whole_attention(ctx, each, path)
        else:
            use_context_attention(ctx, each, options.context)
    return model


def use_multihead(ctx: DistContext, model: nn.Module, apart: Sequence[nn.Module]) -> None:
    """Let torch's modules of attention outside of the models `apart` see all keys. Mutates them, by hooks."""
    found = multihead_attentions(model, apart)
    keys = _AllKeys(ctx)
    for module in found.values():
        _ = module.register_forward_pre_hook(keys, with_kwargs=True)
    if found:
        _ = model.register_forward_pre_hook(_Proof(ctx, keys), with_kwargs=True)
    for module in model.modules():
        if found and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its tokens without padding have other positions
    if found and ctx.is_main_process:
        text = "%d modules MultiheadAttention gather their keys and values along cp=%d before they project them"
        _LOG.warning(text, len(found), ctx.axis("cp").size)


class _AllKeys:
    """A hook of torch's attention: gives it the keys and values of all positions, beside the own queries.

    Attributes:
        cuts: whether ranks have own positions; not so in one of the proof's forwards.
    """

    def __init__(self, ctx: DistContext) -> None:
        self.ctx = ctx
        self.cuts = True

    @untraced
    def __call__(
        self, module: nn.MultiheadAttention, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.cuts:
            return inputs, dict(keywords)
        known = bound(module, inputs, keywords)
        query, key, value = (cast(Tensor, known[name]) for name in ("query", "key", "value"))
        dim = 1 if module.batch_first and query.ndim == 3 else 0
        for each in (query, key):
            if not is_cut(self.ctx, each.shape[dim]):
                raise ConfigError(
                    "an attention along another dimension than that of the positions",
                    expected="as many as split_sequence or sequence_positions has given",
                    got=f"{each.shape[dim]}",
                    where=f"{type(module).__name__} on a mesh with cp",
                    fix="Cut each sequence by accel.parallel.split_sequence. An attention within one position needs a "
                    "module of your own, or a mesh without cp.",
                )
        note_attention(self.ctx)
        keys = self.whole(key, dim)
        changes: dict[str, Any] = {"key": keys, "value": keys if value is key else self.whole(value, dim)}
        padding = known.get("key_padding_mask")
        if isinstance(padding, Tensor):
            changes["key_padding_mask"] = self.whole(padding, padding.ndim - 1)
        mask = known.get("attn_mask")
        if isinstance(mask, Tensor):
            changes["attn_mask"] = self._own_rows(mask, query.shape[dim], keys.shape[dim])
            changes["is_causal"] = False  # a hint for a square mask
        given, named = with_arguments(module, inputs, keywords, changes)
        return given, {**named, "is_causal": False} if mask is not None and len(given) < 8 else named

    def whole(self, own: Tensor, dim: int) -> Tensor:
        """Return all positions in their order. A collective, as its backward."""
        group = group_of(self.ctx, "cp")
        assert group is not None
        return sorted_positions(gathered_summed(own.contiguous(), dim, group), dim, group.size())

    def _own_rows(self, mask: Tensor, own: int, keys: int) -> Tensor:
        rank, size = self.ctx.axis("cp")
        if mask.shape[-1] != keys or mask.shape[-2] not in (own, own * size):
            raise mask_refused()
        return mask if mask.shape[-2] == own else own_positions(mask, rank, size, mask.ndim - 2)


class _Proof:
    """A hook of a model with torch's attention: its first call proves that ranks with own positions compute as one rank
    does with all of them."""

    def __init__(self, ctx: DistContext, keys: _AllKeys) -> None:
        self.ctx = ctx
        self.keys = keys
        self.is_done = False

    @untraced
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Raise `PrepareError` on every rank where the outputs differ. A collective of the first call."""
        if self.is_done:
            return
        problems: list[str] = []
        for most in (PROVED * self.ctx.axis("cp").size, None):  # models of one length need all of it
            for dim in (1, 0):
                problem = self._problem(module, (inputs, dict(keywords)), dim, most)
                problems.append(max(exchange_values(self.ctx.comm, PROOF, problem, str)))
                if not problems[-1]:
                    self.is_done = True
                    return
        raise PrepareError(
            "the model computes something else where ranks share its positions",
            expected="layers that work on positions one by one, at positions that the call passes",
            got=problems[0],
            where=f"first forward of {type(module).__name__} on a mesh with cp",
            fix="Pass part['position_ids'], of accel.parallel.split_sequence, to a model that counts positions from 0. "
            "Else leave cp out of the mesh.",
        )

    def _problem(self, module: nn.Module, given: tuple[Any, Any], dim: int, most: int | None) -> str:
        """Return the difference of a call with own positions from one with all; "" for none. A collective."""
        forward = cast(Any, module).forward
        with evaluated(module, self.ctx.device), called_eagerly(module):
            pairs = self._pairs(given, dim, most)
            if pairs is None:
                return "no input that split_sequence has cut"
            inputs, keywords = _mapped(given, lambda each: pairs[id(each)][0])
            own_inputs, own_keywords = _mapped(given, lambda each: pairs[id(each)][1])
            self.keys.cuts = False
            try:
                expected = outputs_of(forward(*inputs, **keywords))
                self.keys.cuts = True
                return self._difference(expected, outputs_of(forward(*own_inputs, **own_keywords)))
            except ConfigError:
                raise
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
            finally:
                self.keys.cuts = True

    def _pairs(self, given: Any, dim: int, most: int | None) -> dict[int, tuple[Tensor, Tensor]] | None:
        """Return the tensors of a call by `id`: of all positions, of `most` at most, and of the own among them; None
        where none was cut. `dim`: the dimension of positions where several could be. A collective."""
        rank, size = self.ctx.axis("cp")
        tensors: list[Tensor] = []
        _ = _mapped(given, tensors.append)
        lengths: dict[int, int] = {}
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for each in tensors:
            dims = [at for at, length in enumerate(each.shape) if is_cut(self.ctx, length)]
            if dims and id(each) not in pairs:
                at = dim if dim in dims else dims[0]
                whole = self.keys.whole(each.detach(), at)
                length = min(whole.shape[at], most or whole.shape[at])
                lengths[whole.shape[at]] = length
                note_cut(self.ctx, length // size)
                whole = whole.narrow(at, 0, length)
                pairs[id(each)] = whole, own_positions(whole, rank, size, at)
        for each in tensors:  # masks of all positions
            whole = each
            for at, length in enumerate(each.shape):
                if id(each) not in pairs and length in lengths:
                    whole = whole.narrow(at, 0, lengths[length])
            _ = pairs.setdefault(id(each), (whole, whole))
        return pairs if lengths else None

    def _difference(self, expected: Sequence[Tensor], got: Sequence[Tensor]) -> str:
        """Return a line on the first output that is not that of all positions; "" for none. A collective of losses."""
        rank, size = self.ctx.axis("cp")
        totals = [None if each.ndim else self.keys.whole(each.expand(2), 0).sum() / 2 for each in got]
        for number, (want, have, total) in enumerate(zip(expected, got, totals, strict=True)):
            for at, (whole, own) in enumerate(zip(want.shape, have.shape, strict=True)):
                if whole != own:
                    want = own_positions(want, rank, size, at)
            offs = [off_by(want, each) for each in ([have] if total is None else [total, total / size])]
            if not min(offs) <= torch.finfo(want.dtype).eps ** 0.4:
                return f"output {number} is off by {min(offs):.0e} of its norm"
        return ""


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a call's arguments with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(each, change) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, tuple | list):
        listed = [_mapped(each, change) for each in cast("Sequence[Any]", value)]
        return tuple(listed) if isinstance(value, tuple) else listed
    return value


CONTEXT = Spread(
    dimension="context", options=ContextOptions, is_done=_is_done, check=_check, spread=_spread, replaces=False
)
