# SPDX-License-Identifier: Apache-2.0
"""Whole attention: modules of attention that no function reaches get the whole sequence, all others the own positions.

A model of transformers makes masks and positions from whole inputs, as on one rank; its first block cuts the hidden
states. Around each module of attention they are gathered, and its output is cut. Every rank computes the
attention of all positions, so that this is right for any attention, and saves no work in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from accel.comm import Call, exchange_values
from accel.context import DistContext
from accel.devices import wide_dtype
from accel.errors import ConfigError, PrepareError
from accel.parallel._compile import Recomputed
from accel.parallel._modules import forward_names, named_modules
from accel.parallel._private import called_eagerly, runs_in_backward, untraced
from accel.parallel.axes.context._attention import whole_positions
from accel.parallel.axes.context._checks import (
    FORWARD,
    SAMPLES,
    Stack,
    check_inputs,
    stacks_of,
    takes_cut_tokens,
)
from accel.parallel.axes.context._forward import evaluated, off_by, outputs_of
from accel.parallel.axes.context._split import kept_positions, note_attention, note_cut, own_positions

_LOG = logging.getLogger("accel.parallel")
PROVED = 8  # positions of a rank in the proof
_OF_OTHERS = ("key_value_states", "encoder_hidden_states")  # of the encoder, which are whole
_UNCUT = ("labels", "shift_labels", *SAMPLES)
_RECORDS = ("output_attentions", "output_hidden_states")
PROOF = Call("whole attention", "proof", ordered=False)
_COMPARED = Call("whole attention", "inputs", ordered=False)


def use_whole_attention(ctx: DistContext, model: Any, path: str) -> None:
    """Let a model of transformers cut its hidden states in its first block, and attend to whole sequences. Mutates it,
    by hooks."""
    whole = _WholeSequences(ctx, model)
    _ = model.register_forward_pre_hook(whole.enter, with_kwargs=True)
    _ = model.register_forward_hook(whole.leave, always_call=True)
    for stack in whole.stacks:
        _ = stack.blocks[0].register_forward_pre_hook(whole.cut, with_kwargs=True)
        for attention in stack.attentions:
            _ = attention.register_forward_pre_hook(whole.gather, with_kwargs=True)
            _ = attention.register_forward_hook(whole.keep)
        _ = stack.blocks[-1].register_forward_hook(whole.join)
        _ = stack.owner.register_forward_hook(whole.part)
    if ctx.is_main_process:
        kinds = sorted({type(each).__name__ for stack in whole.stacks for each in stack.attentions})
        _LOG.warning(
            "%s: no function reaches the attention of %s, so each of its %d modules computes whole sequences on every "
            "rank along cp=%d, from hidden states that it gathers; other layers of the blocks compute own positions",
            path or type(model).__name__,
            ", ".join(kinds),
            sum(len(stack.attentions) for stack in whole.stacks),
            ctx.axis("cp").size,
        )


class _WholeSequences:
    """Hooks of one model.

    Attributes:
        stacks: lists of blocks whose hidden states are cut.
        cuts: whether the hidden states are cut; not so in one of the proof's forwards.
        joins: whether they are whole again behind every list of blocks, for models that say their shape there.
        recomputes: whether blocks run again in a backward, after other forwards.
        lengths: of a stack's whole sequences, by the number of own positions.
    """

    def __init__(self, ctx: DistContext, model: Any) -> None:
        self.ctx = ctx
        self.stacks: Sequence[Stack] = stacks_of(model)
        self.names = forward_names(model)
        self.takes_cut = takes_cut_tokens(model)
        self.is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
        self.padding = _kept_for_padding(model)
        self.cuts = True
        self.joins = False
        self.is_running = False
        self.is_proved = False
        self.recomputes = False
        self.lengths: dict[int, dict[int, int]] = {}
        self.stack_of = {id(each): at for at, stack in enumerate(self.stacks) for each in stack.modules}

    @untraced
    def enter(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the inputs of the own tokens, as a hook of the model. A collective."""
        known = {**dict(zip(self.names, inputs, strict=False)), **keywords}
        self._check(module, known)
        self.recomputes = any(map(_is_recomputed, module.modules()))
        if self.takes_cut:
            known = {name: self._whole_input(name, each, known) for name, each in known.items()}
        else:
            note_cut(self.ctx, 0)  # by the first block
        self.is_running = True
        note_attention(self.ctx)
        positions = known.get("position_ids")
        if self.padding is not None and isinstance(positions, Tensor) and int(positions.min()) <= self.padding:
            raise ConfigError(
                "positions that this model keeps for padding",
                expected=f"positions from {self.padding + 1} on, as the model numbers them itself",
                got=f"positions from {int(positions.min())} on",
                where=FORWARD,
                fix="Leave position_ids out: the model numbers the full sequence.",
            )
        if not self.is_proved:
            self._compare_whole(known)
            self._prove(module, known)
            self.is_proved = True
        return (), known

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        """Note that the forward of the model is over."""
        self.is_running = False

    @untraced
    def cut(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut the hidden states, as a hook of a first block."""
        if not self.cuts:
            return inputs, dict(keywords)
        if not self.is_running and not runs_in_backward():
            raise ConfigError(
                "a part of the model was called alone",
                expected="a forward of the model that prepare has prepared, which gathers the tokens of all ranks",
                got=type(module).__name__,
                where=FORWARD,
                fix="Call the prepared model.",
            )
        name, hidden = _first(module, inputs, keywords)
        own = own_positions(hidden, *self.ctx.axis("cp"))
        lengths = self.lengths.setdefault(self.stack_of[id(module)], {})
        if self.recomputes and lengths.get(own.shape[1], hidden.shape[1]) != hidden.shape[1]:
            raise ConfigError(
                "sequences of several lengths that are cut alike, in blocks that run again in the backward",
                expected=f"{lengths[own.shape[1]]} positions, as before",
                got=f"{hidden.shape[1]}",
                where=FORWARD,
                fix="Pad them to one length, or keep the activations of this model.",
            )
        lengths[own.shape[1]] = hidden.shape[1]
        return with_arguments(module, inputs, keywords, {name: own})

    @untraced
    def gather(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the hidden states of all positions, as a hook of an attention. A collective, as its backward."""
        if not self.cuts:
            return inputs, dict(keywords)
        _, hidden = _first(module, inputs, keywords)
        known = bound(module, inputs, keywords)
        whole: dict[int, Tensor] = {}
        changes: dict[str, Any] = {}
        for name, each in known.items():
            is_own = isinstance(each, Tensor) and each.shape == hidden.shape and each.is_floating_point()
            if is_own and name not in _OF_OTHERS:
                if id(each) not in whole:
                    whole[id(each)] = self._joined(module, each)
                changes[name] = whole[id(each)]
        return with_arguments(module, inputs, keywords, changes)

    @untraced
    def keep(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Keep the own positions of an attention's output, as its hook."""
        if not self.cuts:
            return output
        return _replaced(output, lambda whole: self._own(_checked(whole, FORWARD)))

    @untraced
    def join(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Gather the output of a last block, where what follows needs it. A collective, as its backward."""
        if not self.cuts or not (self.joins or self._stack_of(module).ends_whole):
            return output
        return _replaced(output, lambda own: self._joined(module, own))

    @untraced
    def part(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Cut the output of the module behind whose blocks the hidden states were gathered."""
        if not self.cuts or not self.joins or self._stack_of(module).ends_whole:
            return output
        return _replaced(output, lambda whole: self._own(_checked(whole, FORWARD)))

    def _stack_of(self, module: nn.Module) -> Stack:
        return self.stacks[self.stack_of[id(module)]]

    def _own(self, whole: Tensor) -> Tensor:
        return own_positions(whole, *self.ctx.axis("cp"))

    def _joined(self, module: nn.Module, own: Tensor) -> Tensor:
        """Return the positions of all ranks in their order, without the filling. A collective, as its backward."""
        length = self.lengths[self.stack_of[id(module)]][own.shape[1]]
        return whole_positions(self.ctx, own)[:, :length]

    def _check(self, module: Any, known: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for inputs that a cut model does not take."""
        allowed = {name: each for name, each in known.items() if name not in SAMPLES}
        if self.is_pair and any(known.get(name) is not None for name in SAMPLES):
            _ = allowed.pop("attention_mask", None)  # of the samples, which are not cut
        _ = allowed.pop("labels", None)
        if self.takes_cut:
            check_inputs(allowed, self.ctx.axis("cp").size, has_positions=False)
        recorded = [name for name in _RECORDS if known.get(name) or getattr(module.config, name, False)]
        if recorded:
            raise ConfigError(
                "records of blocks are of own positions in some, and of whole sequences in others",
                expected="False",
                got=f"{recorded[0]}=True",
                where=FORWARD,
                fix=f"Leave {recorded[0]} out.",
            )
        if known.get("labels") is not None and self.takes_cut and not self.is_pair:
            raise ConfigError(
                "the model would shift labels within each rank's positions",
                expected="the loss outside of the model",
                got="labels",
                where=FORWARD,
                fix="Leave labels out of the call: cross_entropy(logits.flatten(0, 1), part['labels'].flatten()).",
            )

    def _whole_input(self, name: str, each: Any, known: Mapping[str, Any]) -> Any:
        """Return an input of all ranks' positions, for one of the own. A collective."""
        has_samples = self.is_pair and any(known.get(other) is not None for other in SAMPLES)
        is_other = name in _UNCUT or (has_samples and not name.startswith("decoder_"))
        if is_other or not isinstance(each, Tensor) or each.ndim < 2:
            return each
        # queries of a mask are [batch, heads, own, length]
        return whole_positions(self.ctx, each, 2 if each.ndim == 4 else 1)

    def _compare_whole(self, known: Mapping[str, Any]) -> None:
        """Raise `ConfigError` on every rank where those along cp have other whole inputs. A collective."""
        if self.takes_cut:
            return
        sums = [
            float(each.detach().to(wide_dtype(each.device)).sum())
            for each in known.values()
            if isinstance(each, Tensor)
        ]
        share = self.ctx.data_parallel[0]
        facts = exchange_values(self.ctx.comm, _COMPARED, f"{share}: {sums}", str)
        if len(set(facts)) > len({fact.partition(":")[0] for fact in facts}):
            raise ConfigError(
                "ranks that share a sequence have other inputs",
                expected="whole inputs, alike on ranks along cp: this model cuts them itself",
                got="inputs that are cut, or other samples",
                where=FORWARD,
                fix="Leave split_sequence out for this model.",
            )

    def _prove(self, module: nn.Module, known: Mapping[str, Any]) -> None:
        """Raise `PrepareError` on every rank where the cut model computes something else than the whole one, in a short
        call without gradients. A collective."""
        short = self._short(known)
        found = ""
        for self.joins in (False, True):
            problem = self._problem(module, short)
            found = max(exchange_values(self.ctx.comm, PROOF, problem, str))
            if not found:
                return
        raise PrepareError(
            "the model computes something else where ranks share its positions",
            expected="layers that work on positions one by one, between modules of attention",
            got=found,
            where=f"first forward of a {_name(module)} on a mesh with cp",
            fix="Leave cp out of the mesh.",
        )

    def _problem(self, module: nn.Module, short: Mapping[str, Any]) -> str:
        """Return the difference of the cut model from the whole one; "" for none. A collective."""
        forward = cast(Any, module).forward
        with evaluated(module, self.ctx.device), called_eagerly(module):
            self.cuts = False
            try:
                expected = outputs_of(forward(**short))
            finally:
                self.cuts = True
            try:
                return self._difference(expected, outputs_of(forward(**short)))
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
            finally:
                self.lengths.clear()

    def _short(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a short call: those of one row, and of some positions where all is tokens."""
        has_samples = any(isinstance(known.get(name), Tensor) for name in SAMPLES)
        count = PROVED * self.ctx.axis("cp").size
        short: dict[str, Any] = {}
        for name, each in known.items():
            if name.endswith("labels"):
                continue
            if isinstance(each, Tensor) and not has_samples:
                each = each.detach()[:1]
                if each.ndim > 1:
                    each = each[:, :count] if each.ndim < 4 else each[..., :count, :count]
            short[name] = each
        return {**short, "use_cache": False} if "use_cache" in self.names else short

    def _difference(self, expected: Sequence[Tensor], got: Sequence[Tensor]) -> str:
        """Return a line on the first output that is not that of the whole model; "" for none."""
        if len(expected) != len(got):
            return f"{len(got)} outputs of {len(expected)}"
        for number, (want, have) in enumerate(zip(expected, got, strict=True)):
            own = self._own(want) if want.ndim > 1 else want
            want = want if want.shape == have.shape else own
            if want.shape != have.shape:
                return f"output {number} of shape {list(have.shape)}, expected {list(want.shape)}"
            off = off_by(want, have)
            if not off <= torch.finfo(want.dtype).eps ** 0.4:
                return f"output {number} is off by {off:.0e} of its norm"
        return ""


def _name(module: nn.Module) -> str:
    """Return the name of a model's class, behind those that sharding puts before it."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] == "transformers"]
    return kinds[0].__name__ if kinds else type(module).__name__


def _kept_for_padding(model: nn.Module) -> int | None:
    """Return the last position that a model's own numbers skip, or its table keeps for padding; None for none."""
    if (skipped := kept_positions(model)) is not None:
        return skipped
    for name, module in named_modules(model):
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.padding_idx
    return None


def _is_recomputed(module: nn.Module) -> bool:
    """Return whether a block runs again in the backward, by transformers' checkpointing or accel's."""
    return bool(getattr(module, "gradient_checkpointing", False)) or isinstance(module, Recomputed)


def _replaced(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with other hidden states."""
    if isinstance(output, Mapping):  # of transformers
        cast(Any, output)["last_hidden_state"] = change(cast(Any, output)["last_hidden_state"])
        return cast(Any, output)
    if isinstance(output, tuple | list):
        first, *rest = cast("Sequence[Any]", output)
        return cast(Any, type(cast(Any, output)))([change(first), *rest])
    return change(output)


def bound(module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    names = forward_names(module)
    return {**dict(zip(names, inputs, strict=False)), **keywords}


def _first(module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Return the hidden states of a call, and their argument's name."""
    name, hidden = next(iter(bound(module, inputs, keywords).items()), ("", None))
    if "hidden_states" in keywords:
        name, hidden = "hidden_states", keywords["hidden_states"]
    return name, _checked(hidden, f"{type(module).__name__} on a mesh with cp")


def _checked(hidden: object, where: str) -> Tensor:
    """Return hidden states; raise `ConfigError` for a value of another form."""
    if isinstance(hidden, Tensor) and hidden.ndim == 3:
        return hidden
    got = f"shape {list(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
    raise ConfigError(
        "no hidden states that ranks can share",
        expected="a tensor of shape [batch, positions, width], the first argument and the first output",
        got=got,
        where=where,
        fix="Leave cp out of the mesh.",
    )


def with_arguments(
    module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with others by name."""
    names = forward_names(module)
    given = [changes.get(name, value) for name, value in zip(names, inputs, strict=False)]
    return tuple(given), {name: changes.get(name, value) for name, value in keywords.items()}
