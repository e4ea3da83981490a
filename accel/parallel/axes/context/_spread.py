# SPDX-License-Identifier: Apache-2.0
"""The answer for context parallelism: parameters stay whole, and attention crosses the ranks, torch's modules of it
among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from accel.comm import exchange_values
from accel.context import DistContext
from accel.errors import ConfigError, PrepareError
from accel.mixins import Mixin, add_mixin
from accel.parallel._modules import note_module, note_prepared, notes_of, prepared_of, written_class
from accel.parallel._private import called_eagerly, untraced
from accel.parallel._spread import ModelView, Spread, SpreadOptions, compare_models
from accel.parallel.axes.context._attention import context_attention, whole_positions
from accel.parallel.axes.context._checks import (
    check_mixers,
    check_multihead,
    check_transformers,
    multihead_attentions,
    outermost,
    towers_of,
)
from accel.parallel.axes.context._split import (
    all_positions,
    has_all_positions,
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


class ContextOptions(SpreadOptions, frozen=True, kw_only=True):
    """Options of context parallelism: `context` of `Plan`."""

    context: ContextMethod = "gather"


def _is_done(ctx: DistContext, view: ModelView) -> bool:
    """Return whether a model was prepared, or is on a mesh of the user's, whose axes are the user's own."""
    return not ctx.position.opened or any("context" in prepared_of(module) for module in view.modules.values())


def _check(ctx: DistContext, view: ModelView, options: ContextOptions) -> None:
    model = view.model
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
    if known and (inner := multihead_attentions(model, known)):
        raise PrepareError(
            "an attention that sees the own positions alone, beside a model of transformers",
            expected="attention of one of them",
            got=f"MultiheadAttention at {next(iter(inner))}",
            where="prepare_model, on a mesh with cp",
            fix="Call accel.parallel.context_attention in its place, or leave cp out of the mesh.",
        )
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
    note_prepared(model, context=options.context)
    use_multihead(ctx, model, [each for _, each in transformers_models(model)])
    whole = {id(each) for each in _whole_models(model, options)}
    for path, each in transformers_models(model):
        if id(each) in whole:
            use_whole_attention(ctx, each, path)
        else:
            use_context_attention(ctx, each, options.context)
    return model


def use_multihead(ctx: DistContext, model: nn.Module, excluded: Sequence[nn.Module]) -> None:
    """Let torch's modules of attention outside of the models `excluded` see all keys. Mutates them, by hooks."""
    found = multihead_attentions(model, excluded)
    proof = _Proof(ctx)
    for module in found.values():
        _ = module.register_forward_pre_hook(_AllKeys(proof), with_kwargs=True)
    if use_torch_attention(proof, model, excluded) or found:
        _ = model.register_forward_pre_hook(proof, prepend=True, with_kwargs=True)
    for module in model.modules():
        if found and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its tokens without padding have other positions
    if found and ctx.is_main_process:
        text = "%d modules MultiheadAttention gather their keys and values along cp=%d before they project them"
        _LOG.warning(text, len(found), ctx.axis("cp").size)


class _AllKeys:
    """A hook of torch's attention: gives it the keys and values of all positions, beside the own queries."""

    def __init__(self, proof: _Proof) -> None:
        self.ctx = proof.ctx
        self.proof = proof

    @untraced
    def __call__(
        self, module: nn.MultiheadAttention, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if has_all_positions(self.ctx):
            return inputs, dict(keywords)
        known = bound(module, inputs, keywords)
        if not {"query", "key", "value"} <= known.keys():
            raise ConfigError(
                "an attention whose forward has arguments of its own",
                expected="query, key and value, as of nn.MultiheadAttention",
                got=", ".join(known),
                where=f"{written_class(module).__name__} on a mesh with cp",
                fix="Call an nn.MultiheadAttention within a module of your own, in the place of a subclass.",
            )
        query, key, value = (cast(Tensor, known[name]) for name in ("query", "key", "value"))
        dim = 1 if module.batch_first and query.ndim == 3 else 0
        for each in (query, key):
            if not self.proof.is_own(each.shape[dim]):
                raise ConfigError(
                    "an attention along another dimension than that of the positions",
                    expected="as many as split_sequence or sequence_positions has given",
                    got=f"{each.shape[dim]}",
                    where=f"{type(module).__name__} on a mesh with cp",
                    fix="Cut each sequence by accel.parallel.split_sequence. An attention within one position needs a "
                    "module of your own, or a mesh without cp.",
                )
        note_attention(self.ctx)
        keys = whole_positions(self.ctx, key, dim)
        values = keys if value is key else whole_positions(self.ctx, value, dim)
        changes: dict[str, Any] = {"key": keys, "value": values}
        padding = known.get("key_padding_mask")
        if isinstance(padding, Tensor):
            changes["key_padding_mask"] = whole_positions(self.ctx, padding, padding.ndim - 1)
        mask = known.get("attn_mask")
        if isinstance(mask, Tensor):
            changes["attn_mask"] = _own_rows(self.ctx, mask, query.shape[dim], keys.shape[dim])
            changes["is_causal"] = False  # a hint for a square mask
        given, named = with_arguments(module, inputs, keywords, changes)
        return given, {**named, "is_causal": False} if mask is not None and len(given) < 8 else named


def _own_rows(ctx: DistContext, mask: Tensor, own: int, keys: int) -> Tensor:
    """Return a mask of the own queries and all keys, for one of all queries or of the own ones."""
    rank, size = ctx.axis("cp")
    if mask.shape[-1] != keys or mask.shape[-2] not in (own, own * size):
        raise ConfigError(
            "a mask of other positions",
            expected=f"attn_mask of all positions, [{keys}, {keys}], whose queries are cut here, or of the own queries "
            f"and all keys, [{own}, {keys}]",
            got=f"shape {list(mask.shape)}",
            where="nn.MultiheadAttention on a mesh with cp",
            fix="Make the mask for the whole sequence, not by the number of this rank's tokens.",
        )
    return mask if mask.shape[-2] == own else own_positions(mask, rank, size, mask.ndim - 2)


class _Shared(TorchFunctionMode):
    """Lets torch's `scaled_dot_product_attention` cross the ranks where it is along their positions."""

    def __init__(self, proof: _Proof) -> None:
        super().__init__()
        self.proof = proof

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        if func is functional.scaled_dot_product_attention and not has_all_positions(self.proof.ctx):
            return _shared_attention(self.proof, *args, **named)
        return func(*args, **named)


def _shared_attention(
    proof: _Proof,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what torch's function does, whose arguments these are, of all keys. A collective where they are cut."""
    own, keys = query.shape[-2], key.shape[-2]
    if not proof.is_own(keys):  # along another dimension, or keys that are alike on all ranks
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    ctx = proof.ctx
    if not proof.is_own(own) or dropout_p or query.ndim not in (3, 4):
        raise ConfigError(
            "this attention does not cross ranks",
            expected="own queries and own keys, [batch, heads, own, head dim], without dropout",
            got=f"queries of shape {list(query.shape)}, keys of {list(key.shape)}, dropout {dropout_p}",
            where="scaled_dot_product_attention on a mesh with cp",
            fix="Set the dropout of attention to 0. For other shapes call accel.parallel.context_attention.",
        )
    mask = None if attn_mask is None else _own_rows(ctx, attn_mask, own, keys * ctx.axis("cp").size)
    q, k, v = (each if each.ndim == 4 else each.unsqueeze(1) for each in (query, key, value))
    if mask is not None and mask.ndim == 3 and query.ndim == 3:
        mask = mask.unsqueeze(1)
    out = context_attention(ctx, q, k, v, causal=is_causal, scale=scale, attn_mask=mask)
    return out if query.ndim == 4 else out.squeeze(1)


class _Crosses(Mixin, nn.Module):
    """Stands before the class of a module that calls torch's `scaled_dot_product_attention`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, whose attention crosses the ranks."""
        with _Shared(cast(_Proof, notes_of(self).get("proof"))):
            return super().forward(*args, **kwargs)


def attending_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules by path whose class, of the user's own, calls torch's attention function; none where
    one of the model calls `context_attention`."""
    kinds = {written_class(module) for module in model.modules()}
    names = {kind: _names_in(kind) for kind in kinds}
    if any(context_attention.__name__ in each for each in names.values()):
        return {}
    calls = {kind for kind, each in names.items() if "scaled_dot_product_attention" in each}
    return dict(outermost(model, lambda module: written_class(module) in calls))


def _names_in(kind: type) -> set[str]:
    """Return the names that a class's functions use, and functions of its files that they call, beside torch's own."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in ("torch", "accel", "builtins")]
    waiting = [each for one in own for each in vars(one).values() if isinstance(each, FunctionType)]
    seen: set[FunctionType] = set()
    found: set[str] = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        codes: list[CodeType] = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            found.update(code.co_names)
            values = [function.__globals__.get(name) for name in code.co_names]
            found.update(each.__name__ for each in values if isinstance(each, FunctionType | BuiltinFunctionType))
            waiting += [
                each for each in values if isinstance(each, FunctionType) and each.__module__ == function.__module__
            ]
    return found


def use_torch_attention(proof: _Proof, model: nn.Module, excluded: Sequence[nn.Module]) -> bool:
    """Let modules that call torch's attention function see all keys; return whether there are some. Mutates them."""
    ctx = proof.ctx
    found = {} if ctx.axis("pp").size > 1 or excluded else attending_modules(model)
    for module in found.values():
        note_module(module, proof=proof)
    add_mixin(found.values(), _Crosses)
    if found and ctx.is_main_process:
        name, module = next(iter(found.items()))
        text = "scaled_dot_product_attention of %d modules crosses the ranks along cp=%d, such as of %s at %s"
        _LOG.warning(text, len(found), ctx.axis("cp").size, type(module).__name__, name or "the top")
    return bool(found)


class _Proof:
    """A hook of a model with torch's attention: its first call proves that ranks with own positions compute as one rank
    does with all of them."""

    def __init__(self, ctx: DistContext) -> None:
        self.ctx = ctx
        self.is_done = False
        self.has_own = False

    def is_own(self, length: int) -> bool:
        """Return whether so many positions are the own ones of this call; raise `ConfigError` for a part alone."""
        if not is_cut(self.ctx, length) or (self.is_done and not self.has_own):
            return False
        if not self.is_done and not self.has_own:
            raise ConfigError(
                "an attention whose model was not called with own positions",
                expected="a forward of the model that prepare has prepared, with inputs that split_sequence has cut",
                got=f"{length} positions",
                where="attention on a mesh with cp",
                fix="Call the prepared model with the part that split_sequence gives.",
            )
        return True

    @untraced
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Raise `PrepareError` on every rank where the outputs differ. A collective of the first call."""
        tensors: list[Tensor] = []
        _ = _mapped((inputs, keywords), tensors.append)
        self.has_own = any(is_cut(self.ctx, length) for each in tensors for length in each.shape)
        if self.is_done or not self.has_own:
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
            where=f"first forward of {written_class(module).__name__} on a mesh with cp",
            fix="Pass part['position_ids'], of accel.parallel.split_sequence, to a model that counts positions from 0, "
            "and masks of the whole sequence. Else leave cp out of the mesh.",
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
            try:
                with all_positions(self.ctx):
                    expected = outputs_of(forward(*inputs, **keywords))
                if isinstance(module, nn.MultiheadAttention):  # whose own hooks a call of its forward passes by
                    own_inputs, own_keywords = _AllKeys(self)(module, own_inputs, own_keywords)
                return self._difference(expected, outputs_of(forward(*own_inputs, **own_keywords)))
            except ConfigError:
                raise
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"

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
                whole = whole_positions(self.ctx, each.detach(), at)
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
        totals = [None if each.ndim else whole_positions(self.ctx, each.expand(2), 0).sum() / 2 for each in got]
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
    dimension="context",
    options_from=lambda plan, _keywords, _view: ContextOptions(context=plan.context),
    is_done=_is_done,
    check=_check,
    spread=_spread,
    replaces=False,
)
