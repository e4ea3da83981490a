# SPDX-License-Identifier: Apache-2.0
"""Refusals of an axis cp: arguments of `context_attention` and inputs of models by a `ConfigError` before anything is
sent, models by a `PrepareError` that names the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel.context import DistContext
from accel.errors import ConfigError, PrepareError
from accel.fakes import is_fake
from accel.parallel._blocks import ModuleGroup, block_groups, outermost_groups
from accel.parallel._modules import forward_names, is_in, layerdrops, named_modules, source_of, written_class
from accel.parallel._private import runs_in_reentrant_checkpoint
from accel.parallel.axes.context._kernels import Terms
from accel.parallel.axes.context._split import UNCUT_INPUTS, is_cut
from accel.parallel.parts import PartTensor

_WHERE = "context_attention"


def check_fit(q: Tensor, k: Tensor, v: Tensor, size: int, *, causal: bool) -> None:
    """Raise `ConfigError` for tensors that do not fit together. No communication."""
    fit = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]
    if not fit or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ConfigError(
            "q, k and v do not fit together",
            expected="[batch, heads, own, head dim], with key heads that divide the heads",
            got=", ".join(str(list(each.shape)) for each in (q, k, v)),
            where=_WHERE,
        )
    if q.shape[2] != k.shape[2] and size > 1 and causal:
        raise ConfigError(
            "queries and keys of other positions",
            expected="as many keys as queries, of the same positions",
            got=f"{q.shape[2]} queries and {k.shape[2]} keys",
            where=_WHERE,
            fix="Leave caches of keys out: use_cache=False. Generation takes a mesh without cp. Cross-attention is "
            "causal=False.",
        )
    if len({(each.dtype, each.device) for each in (q, k, v)}) > 1:
        got = ", ".join(f"{each.dtype} on {each.device}" for each in (q, k, v))
        raise ConfigError("q, k and v differ", expected="one dtype and device", got=got, where=_WHERE)
    if size > 1 and (q.shape[2] % 2 or k.shape[2] % 2):
        raise ConfigError(
            "positions that no rank of cp has",
            expected="an even number, as split_sequence gives",
            got=f"{q.shape[2]} queries and {k.shape[2]} keys",
            where=_WHERE,
            fix="Cut the sequence by accel.parallel.split_sequence.",
        )


def check_terms(q: Tensor, k: Tensor, terms: Terms, size: int) -> None:
    """Raise `ConfigError` for a window, mask, soft cap or sinks that fit no query or no key."""
    window, softcap, sinks = terms.window, terms.softcap, terms.sinks
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError(
            "the window is not valid", expected="1 position or more", got=repr(window), where=f"{_WHERE}, window="
        )
    if softcap is not None and not softcap > 0:
        raise ConfigError(
            "the soft cap is not valid", expected="above 0", got=repr(softcap), where=f"{_WHERE}, softcap="
        )
    if sinks is not None and sinks.shape != (q.shape[1],):
        got = str(list(sinks.shape))
        raise ConfigError(
            "the sinks do not fit the heads", expected=f"[{q.shape[1]}]", got=got, where=f"{_WHERE}, sinks="
        )
    if not 0 <= terms.dropout_p <= 1:
        raise ConfigError(
            "the dropout is not valid", expected="0 to 1", got=repr(terms.dropout_p), where=f"{_WHERE}, dropout_p="
        )
    _check_documents(q, k, terms, size)
    ignored = terms.ignored
    if ignored is not None and (ignored.shape != (k.shape[0], k.shape[2]) or ignored.dtype != torch.bool):
        raise ConfigError(
            "the mask does not fit the keys",
            expected=f"torch.bool of shape {[k.shape[0], k.shape[2]]}, True for a key to ignore",
            got=_said(ignored),
            where=f"{_WHERE}, key_padding_mask=",
            fix="Cut it with the keys, by accel.parallel.split_sequence.",
        )
    _check_mask(q, k, terms.mask, size)


def _check_documents(q: Tensor, k: Tensor, terms: Terms, size: int) -> None:
    documents = terms.documents
    if documents is not None and (documents.shape != (q.shape[0], q.shape[2]) or documents.is_floating_point()):
        raise ConfigError(
            "the documents do not fit the positions",
            expected=f"integers of shape {[q.shape[0], q.shape[2]]}",
            got=_said(documents),
            where=f"{_WHERE}, documents=",
            fix="Cut them with the rest of the batch, by accel.parallel.split_sequence.",
        )
    given = [name for name in ("documents", "window") if getattr(terms, name) is not None]
    if given and q.shape[2] != k.shape[2] and (size > 1 or documents is not None):
        raise ConfigError(
            "documents or a window of two sequences",
            expected="queries and keys of the same positions",
            got=f"{' and '.join(given)}, {q.shape[2]} queries and {k.shape[2]} keys",
            where=_WHERE,
            fix="Say what a query sees of another sequence by attn_mask=.",
        )


def _check_mask(q: Tensor, k: Tensor, mask: Tensor | None, size: int) -> None:
    if mask is None:
        return
    shape = (*q.shape[:3], k.shape[2] * size)
    has_shape = mask.ndim <= 4 and mask.shape[-1] == shape[3]
    pairs = zip(reversed(mask.shape), reversed(shape), strict=False)
    if not has_shape or not all(have in (1, want) for have, want in pairs):
        raise ConfigError(
            "the mask does not fit this rank's queries and all keys",
            expected=f"a shape that expands to {list(shape)}",
            got=_said(mask),
            where=f"{_WHERE}, attn_mask=",
            fix="Cut its queries alone, accel.parallel.split_sequence(ctx, {'mask': mask}, dim=2), and keep all keys "
            "in the order of the sequence.",
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ConfigError(
            "the mask is not valid",
            expected="torch.bool, True where a query sees a key, or scores to add",
            got=_said(mask),
            where=f"{_WHERE}, attn_mask=",
            fix="Pass mask.bool().",
        )


def _said(x: Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}"


def check_method(q: Tensor, terms: Terms, method: str, size: int) -> None:
    """Raise `ConfigError` for a method that has no such attention."""
    if method == "heads" and q.shape[1] % size:
        raise ConfigError(
            "heads that the ranks along cp cannot share",
            expected=f"a multiple of {size}",
            got=f"{q.shape[1]} heads",
            where=f"{_WHERE}, method='heads'",
            fix="Use the method 'gather' or 'ring', or a smaller cp.",
        )
    if method != "gather" and terms.given:
        raise ConfigError(
            "a mask or scores of all keys where ranks have some",
            expected='the method "gather"',
            got=f"{' and '.join(terms.given)} with the method {method!r}",
            where=_WHERE,
            fix='Use Plan(context="gather"). causal, window, documents and key_padding_mask go with every method.',
        )
    if method == "ring" and terms.dropout_p:
        raise ConfigError(
            "dropout of attention in a ring: kernels that merge blocks have none",
            expected='the method "gather" or "heads", or 0',
            got=f"dropout_p={terms.dropout_p} with the method 'ring'",
            where=_WHERE,
            fix='Use Plan(context="gather") or Plan(context="heads"), or set the dropout of attention to 0.',
        )


FORWARD = "forward of a model on a mesh with cp"
LEAVE = "Leave cp out of the mesh."
SAMPLES = ("pixel_values", "input_features", "input_values")  # inputs that are no tokens


def transformers_models(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the models of transformers among modules, with their paths; of nested ones the outermost."""
    found: list[str] = []
    for name, module in modules.items():
        kinds = [(kind.__name__, kind.__module__.partition(".")[0]) for kind in type(module).__mro__]
        if not any(is_in(name, outer) for outer in found) and ("PreTrainedModel", "transformers") in kinds:
            found.append(name)
            yield name, module


def first_blocks(model: Any) -> list[nn.Module]:
    """Return the first block of each list of blocks with attention, except lists with hidden states of tokens that are
    cut, in a model of transformers."""
    decoder = model.get_decoder() if _is_pair(model) and _takes_samples(model) else model
    of_tokens = {id(module) for module in decoder.modules()} if takes_cut_tokens(model) else set[int]()
    first = [group.entries[0][1] for group in _attending(model)]
    return [block for block in first if id(block) not in of_tokens]


def _attending(model: nn.Module) -> list[ModuleGroup]:
    """The groups of blocks with modules of attention in them, without those inside of others."""
    groups = block_groups(model)
    return outermost_groups(group for group in groups if all(_has_attention(block) for _, block in group.entries))


def _has_attention(block: nn.Module) -> bool:
    return any(map(is_attention, block.modules())) and not is_attention(block)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention, by the name of its class."""
    return "Attention" in type(module).__name__


def takes_cut_tokens(model: Any) -> bool:
    """Return whether a model of transformers takes own tokens and gives own outputs; else all are whole."""
    makes_tokens = "input_ids" in forward_names(model) and bool(model.can_generate())
    return _is_pair(model) or not _takes_samples(model) or makes_tokens


def _takes_samples(model: Any) -> bool:
    return any(name in forward_names(model) for name in SAMPLES)


def text_decoder(model: Any) -> Any:
    """Return the text model of a model that puts images among its own tokens; None for others."""
    if _is_pair(model) or not takes_cut_tokens(model) or not _takes_samples(model):
        return None
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "set_attn_implementation") and decoder is not model else None


_Refuse = Callable[..., PrepareError]
# what attentions pass to some functions of transformers' interface: DeepSeek-V3.2, MiniMax M3, Inkling 2
_OF_VALUES = (" indices=", " block_indices=", " sinks=")


def out_of_reach(model: Any) -> str:
    """Return the reason for which a model's attention cannot work on own positions, so that the method is "gather"; ""
    for none."""
    sources = _attention_sources(text_decoder(model) or model)
    scores_itself = any("softmax" in each and "ATTENTION_FUNCTIONS" not in each for each in sources)
    makes_masks = any(hasattr(each, "prepare_dynamic_mask") for each in model.modules())  # Doge
    reasons = {
        "an attention that does not come from transformers' AttentionInterface": (
            scores_itself or not model._can_set_attn_implementation()
        ),
        "inputs that are not split like the tokens": (
            not takes_cut_tokens(model) or (_is_pair(model) and _takes_samples(model))
        ),
        "a mask or sinks that attentions make of values": (
            makes_masks or any(word in each for each in sources for word in _OF_VALUES)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_transformers(path: str, model: Any, method: str) -> None:
    """Raise `PrepareError` for a model of transformers that cannot compute along cp."""
    where = f"prepare_model, {path or type(model).__name__}"

    def refuse(problem: str, expected: str, got: str, fix: str = LEAVE) -> PrepareError:
        return PrepareError(problem, expected=expected, got=got, where=where, fix=fix)

    _check_layerdrop(model, refuse)
    reason = out_of_reach(model)
    if reason and method != "gather":
        fix = 'Use Plan(context="gather"), which gathers the keys and values.'
        raise refuse(reason, f"an attention that the method {method!r} reaches", type(model).__name__, fix)
    if reason and not takes_cut_tokens(model):
        _check_blocks(model, reason, refuse)


def _is_pair(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _check_blocks(model: Any, reason: str, refuse: _Refuse) -> None:
    """Raise `PrepareError` for a model with blocks that mix positions outside of attention modules."""
    groups = _attending(model)
    if not groups:
        expected = "lists of blocks with attention modules, and hidden states that ranks can share"
        raise refuse(reason, expected, f"{type(model).__name__}, without an attention module in its blocks")
    for group in groups:
        if any(_attending(block) for _, block in group.entries):
            got = f"a list of blocks in each module of {group.holder}"
            raise refuse(reason, "blocks with one number of positions in all hidden states", got)


def _check_layerdrop(model: Any, refuse: _Refuse) -> None:
    """Raise `PrepareError` for a model that leaves out blocks: ranks may leave out different ones, and hooks are of
    blocks."""
    rates = [(name, rate) for name, module in named_modules(model) for rate in layerdrops(module)]
    if dropped := [f"{rate} at {name or 'the top'}" for name, rate in rates if rate]:
        fix = "Set layerdrop to 0 in the model's config."
        raise refuse("blocks that are left out by chance", "layerdrop=0", dropped[0], fix)


def _attention_sources(model: nn.Module) -> list[str]:
    kinds = {written_class(module) for module in model.modules() if is_attention(module)}
    return [source_of(kind) or "" for kind in kinds]


def check_cut(ctx: DistContext, own: int) -> None:
    """Raise `ConfigError` for positions in a forward of inputs that were not cut, if no sequence was cut to so many."""
    if UNCUT_INPUTS.holds(ctx) and not is_cut(ctx, own):
        raise _uncut(f"queries of {own} positions")


def _uncut(got: str) -> ConfigError:
    return ConfigError(
        "tokens of no sequence that was cut: every rank would see its own alone",
        expected="tokens of a batch that was cut",
        got=f"{got}, of no sequence that was cut",
        where=FORWARD,
        fix="Pass each batch through accel.parallel.split_sequence. Where your data come cut already, note "
        "that by accel.parallel.sequence_positions(ctx, length).",
    )


_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


def check_inputs(ctx: DistContext, known: Mapping[str, Any], *, is_pair: bool) -> None:
    """Raise `ConfigError` for inputs that do not belong to this rank's positions. `is_pair`: of an encoder-decoder."""
    if known.get("past_key_values") is not None:
        raise ConfigError(
            "a cache of keys does not cross ranks",
            expected="past_key_values=None",
            got=type(known["past_key_values"]).__name__,
            where=FORWARD,
            fix="Generate on a mesh without cp. Prefixes of peft are caches: train them there, or train LoRA.",
        )
    given = {name: known[name] for name in _TOKENS if isinstance(known.get(name), Tensor)}
    for name, tokens in given.items():
        if not isinstance(tokens, PartTensor) and not is_cut(ctx, tokens.shape[1]):
            raise _uncut(f"{name} of {tokens.shape[1]} tokens")
    if is_pair and not any(name.startswith("decoder") for name in given):
        raise ConfigError(
            "every rank would compute the decoder for all positions, as the model makes its tokens",
            expected="decoder_input_ids of the own positions",
            got="none",
            where=FORWARD,
            fix="Shift the full sequence, cut it by accel.parallel.split_sequence(ctx, ..., shift=()), and pass "
            "decoder_input_ids= and labels= of the part.",
        )
    mask = known.get("attention_mask")
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if isinstance(mask, Tensor) and not isinstance(mask, PartTensor) and tokens is not None:
        own = tokens.shape[1]
        if mask.shape[-1] != (own if mask.ndim == 2 else own * ctx.axis("cp").size):
            raise ConfigError(
                "a mask of other positions",
                expected="attention_mask of the own tokens, [batch, own], or of the own queries and all keys, "
                "[batch, 1 or heads, own, length]",
                got=f"shape {list(mask.shape)}",
                where="attention on a mesh with cp",
                fix="Cut a mask of tokens by accel.parallel.split_sequence, and of a mask of pairs the queries alone: "
                "split_sequence(ctx, {'mask': mask}, dim=2). Packed documents are marked by position_ids that begin "
                "anew.",
            )
    if known.get("start_positions") is not None or (
        known.get("labels") is not None and known.get("shift_labels") is None
    ):
        raise ConfigError(
            "transformers would shift labels that are shifted already, within each rank's positions",
            expected="shift_labels with labels, or the loss outside of the model",
            got="labels alone",
            where=FORWARD,
            fix="Pass labels=part['labels'], shift_labels=part['labels'], of accel.parallel.split_sequence.",
        )


def refuse_fake(inputs: Iterable[Tensor]) -> None:
    """Raise `ConfigError` for inputs without values, as of `FakeTensorMode`: the proof compares values."""
    if any(map(is_fake, inputs)):
        raise ConfigError(
            "a model that ranks along cp share ran on fake tensors",
            expected="tensors with values: the first call compares them, and ranks send them",
            got="a forward in FakeTensorMode",
            where=FORWARD,
            fix="Run the model on fake tensors before accel.prepare.",
        )


def refuse_reentrant(module: nn.Module) -> None:
    """Raise `ConfigError` for a call in a reentrant checkpoint, which loses positions."""
    if module.training and runs_in_reentrant_checkpoint():
        raise ConfigError(
            "a reentrant checkpoint does not keep the positions of its tensors",
            expected="a checkpoint of the other kind",
            got=f"a call of {written_class(module).__name__} in one",
            where=FORWARD,
            fix="Pass it use_reentrant=False: checkpoint(block, x, use_reentrant=False).",
        )
