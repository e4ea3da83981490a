# SPDX-License-Identifier: Apache-2.0
"""The answer for context parallelism: parameters stay whole, and attention crosses ranks, that of transformers too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accel.comm import gathered
from accel.context import DistContext, group_of
from accel.errors import ConfigError, MissingExtraError, PrepareError
from accel.parallel._modules import named_modules
from accel.parallel._spread import Spread, SpreadOptions, compare_models
from accel.parallel.axes.context._attention import context_attention, sorted_positions
from accel.parallel.axes.context._split import has_plan, places, plan_method, planned_method
from accel.topology import ContextMethod

NAME = "accel_context"  # of the attention, and of the keyword that carries the context to it
# keywords of attentions that mean other scores or masks, and reach the function where a model has them
_OTHER_SCORES = ("position_bias", "head_mask", "cu_seq_lens_q", "block_mask")


class ContextCall(NamedTuple):
    """Facts that a forward passes to its attentions.

    Attributes:
        ctx: the context.
        method: that of `context_attention`.
        documents: numbers of the documents of the own positions, [batch or 1, own]; None for one document.
    """

    ctx: DistContext
    method: ContextMethod
    documents: Tensor | None


def transformers_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the models of transformers in a module, with their paths; of nested ones the outermost."""
    found: list[str] = []
    for name, module in named_modules(model):
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and any(_is_pretrained(kind) for kind in type(module).__mro__):
            found.append(name)
            yield name, module


def _is_pretrained(kind: type) -> bool:
    return kind.__name__ == "PreTrainedModel" and kind.__module__.partition(".")[0] == "transformers"


def check_transformers(path: str, model: Any) -> None:
    """Raise `PrepareError` for a model of transformers whose attention cannot cross ranks."""
    where = f"prepare_model, {path or type(model).__name__}"
    if not model._can_set_attn_implementation():
        raise PrepareError(
            "the model's attention cannot be exchanged",
            expected="a model that takes its attention from transformers' AttentionInterface",
            got=type(model).__name__,
            where=where,
            fix="Leave cp out of the mesh.",
        )
    if "position_ids" not in _forward_names(model):
        raise PrepareError(
            "the model numbers positions itself, and would begin at 0 on every rank",
            expected="a forward that takes position_ids",
            got=type(model).__name__,
            where=where,
            fix="Leave cp out of the mesh.",
        )


def use_context_attention(ctx: DistContext, model: Any, method: ContextMethod) -> None:
    """Let a model of transformers attend across the ranks along cp, or raise `MissingExtraError`. Mutates it, and
    transformers' list of attentions."""
    interface = getattr(import_module("transformers"), "AttentionInterface", None)
    if interface is None:
        raise MissingExtraError(
            "context parallelism needs transformers' AttentionInterface, which this version does not have",
            expected="transformers 5 or newer",
            where="prepare_model",
            fix="Run `pip install accel-torch[transformers]`.",
        )
    interface.register(NAME, _attention)
    model.set_attn_implementation(NAME)
    _ = model.register_forward_pre_hook(_HandOn(ctx, method, _forward_names(model)), with_kwargs=True)


def _forward_names(model: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(model.forward).parameters)


class _HandOn:
    """A hook of a model: adds the context to the keywords of a forward, and refuses what cannot follow a cut."""

    def __init__(self, ctx: DistContext, method: ContextMethod, names: tuple[str, ...]) -> None:
        self.ctx = ctx
        self.method: ContextMethod = method
        self.names = names

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        known = {**dict(zip(self.names, inputs, strict=False)), **keywords}
        _check_inputs(known)
        documents = _documents(self.ctx, known["position_ids"])
        if documents is not None:
            _check_packed(module, known)
        call = ContextCall(self.ctx, self.method, documents)
        return inputs, {**keywords, NAME: call}


def _check_inputs(known: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for inputs that are not those of a rank's own positions."""
    if known.get("past_key_values") is not None:
        raise ConfigError(
            "a cache of keys does not cross ranks",
            expected="past_key_values=None",
            got=type(known["past_key_values"]).__name__,
            where="forward of a model on a mesh with cp",
            fix="Generate on a mesh without cp.",
        )
    if not isinstance(known.get("position_ids"), Tensor):
        raise ConfigError(
            "the model would number the positions of every rank from 0",
            expected="position_ids of the own positions",
            got="none",
            where="forward of a model on a mesh with cp",
            fix="Pass position_ids=part['position_ids'], of accel.parallel.split_sequence.",
        )
    if known.get("attention_mask") is not None:
        raise _mask_refused()
    if known.get("labels") is not None and known.get("shift_labels") is None:
        raise ConfigError(
            "transformers would shift labels that are shifted already, within each rank's positions",
            expected="shift_labels beside labels, or the loss outside of the model",
            got="labels alone",
            where="forward of a model on a mesh with cp",
            fix="Pass labels=part['labels'], shift_labels=part['labels'], of accel.parallel.split_sequence.",
        )


def _check_packed(model: Any, known: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for packed documents beside a cache, which make transformers see one document elsewhere."""
    if known.get("use_cache", getattr(model.config, "use_cache", False)):
        raise ConfigError(
            "on one rank, transformers would not keep packed documents apart beside a cache of keys",
            expected="use_cache=False",
            got="a cache, and position_ids that begin anew",
            where="forward of a model on a mesh with cp",
            fix="Pass use_cache=False, or positions of one document.",
        )


def _mask_refused() -> ConfigError:
    return ConfigError(
        "a mask cannot follow a sequence that is cut",
        expected="attention_mask=None",
        got="a mask",
        where="attention on a mesh with cp",
        fix="Pad at the end, where labels are ignored and a causal model needs no mask. Packed documents are marked by "
        "position_ids that begin anew.",
    )


def _documents(ctx: DistContext, position_ids: Tensor) -> Tensor | None:
    """Return the numbers of packed documents, whose positions begin anew, as transformers finds them; None for one. A
    collective, and it syncs."""
    group = group_of(ctx, "cp")
    assert group is not None
    own = position_ids.shape[1]
    whole = sorted_positions(gathered(position_ids.contiguous(), 1, group), 1, group.size())
    begins = whole[:, 1:] != whole[:, :-1] + 1
    if not bool(begins.any()):
        return None
    numbers = torch.nn.functional.pad(begins.cumsum(1), (1, 0))
    runs = places(own * group.size(), group.rank(), group.size())
    return torch.cat([numbers[:, run.start : run.stop] for run in runs], 1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer, [batch, own, heads, head dim], as transformers' `AttentionInterface` asks."""
    call = keywords.get(NAME)
    where = f"{type(module).__name__} on a mesh with cp"
    if not isinstance(call, ContextCall):
        raise ConfigError(
            "no context came with the call",
            expected="a forward of the model that prepare has prepared, which forwards keywords to its attention",
            got="none",
            where=where,
            fix="Call the prepared model; a model that does not forward keywords needs a mesh without cp.",
        )
    if attention_mask is not None:
        raise _mask_refused()
    if dropout:
        raise ConfigError(
            "dropout of attention does not cross ranks",
            expected="0",
            got=str(dropout),
            where=where,
            fix="Set attention_dropout=0 in the model's config, or its attn_pdrop; other dropout stays.",
        )
    window = keywords.get("sliding_window")
    whole = query.shape[2] * call.ctx.axis("cp").size
    if other := [name for name in _OTHER_SCORES if keywords.get(name) is not None]:
        raise _unsupported(", ".join(other), where)
    causal = keywords.get("is_causal")
    out = context_attention(
        call.ctx,
        query,
        key,
        value,
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
        documents=None if call.documents is None else call.documents.expand(query.shape[0], -1),
        scale=scaling,
        method=call.method,
        window=None if window is None or window >= whole else window,
        softcap=keywords.get("softcap"),
        sinks=keywords.get("s_aux"),
    )
    return out.transpose(1, 2).contiguous(), None


def _unsupported(got: str, where: str) -> ConfigError:
    return ConfigError(
        "this attention does not cross ranks",
        expected="softmax over keys of a document, causal or full, with a window, a soft cap or sinks",
        got=got,
        where=where,
        fix="Leave cp out of the mesh.",
    )


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
    for path, each in transformers_models(model):
        check_transformers(path, each)


def _spread(ctx: DistContext, model: nn.Module, options: ContextOptions, *, is_empty: bool) -> nn.Module:
    _ = is_empty
    compare_models(ctx, options, {})
    plan_method(ctx, options.context)
    setattr(model, _MARK, options.context)
    for _, each in transformers_models(model):
        use_context_attention(ctx, each, options.context)
    return model


CONTEXT = Spread(
    dimension="context", options=ContextOptions, is_done=_is_done, check=_check, spread=_spread, replaces=False
)
