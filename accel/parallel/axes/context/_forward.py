# SPDX-License-Identifier: Apache-2.0
"""A model's forward on parts of positions, and the proof of its first call against all positions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from accel.comm import Call, exchange_values, shared_failure
from accel.context import DistContext
from accel.devices import wide_dtype
from accel.errors import ConfigError, PrepareError
from accel.mixins import Mixin, add_mixin
from accel.parallel._copies import WideMode, gradients_of
from accel.parallel._modules import forward_names, note_module, notes_of, sharded_roots, written_class
from accel.parallel._private import (
    called_eagerly,
    is_of_inputs,
    runs_in_backward,
    untraced,
)
from accel.parallel.axes.context._attention import whole_positions
from accel.parallel.axes.context._checks import refuse_reentrant
from accel.parallel.axes.context._inner import Outputs, compile_inside, listed, noted, uncompiled_for
from accel.parallel.axes.context._positions import DifferentRankError, PositionRanks, SelectedTensor, whole_of
from accel.parallel.axes.context._split import (
    all_positions,
    attends,
    has_all_positions,
    is_cut,
    note_attention,
    note_cut,
    own_losses,
    own_positions,
)
from accel.parallel.parts import NoRuleError, PartTensor, plain_of, rows_of
from accel.parallel.parts._nested import hold_plain_rows
from accel.random import isolated_rng
from accel.tensors import is_dtensor
from accel.tree import map_tensors

_LOG = logging.getLogger("accel.parallel")
_PROOF = Call("positions", "proof", ordered=False)
_DIFFERENT = "ranks along cp did not compute the same"
_PROVED = 8  # positions of a rank in the proof
_LARGEST = 2**28  # most parameter elements for comparing all gradients; larger models: vectors
_WIDEST = 2**29  # elements of the largest parameter that the proof copies in a wide dtype: 4 GiB


def use_positions(
    ctx: DistContext,
    model: nn.Module,
    within: Sequence[nn.Module] | None = None,
    *,
    is_cut: bool = True,
    holds_models: bool = False,
    samples: tuple[str, ...] = (),
    has_own_losses: bool = False,
) -> None:
    """Let a model's forward compute with parts of positions. Mutates it, by a class and hooks.

    `within`: first blocks of stacks. All ranks hold their full inputs, and they get this rank's positions of them. None
    for a model that may call `context_attention` itself. `is_cut`: whether the model's inputs are cut. `holds_models`:
    whether models of transformers are inside of it. `samples`: beginnings of the names of arguments that are never cut.
    `has_own_losses`: whether its losses are of this rank's positions.
    """
    may_cross = within is None and not holds_models
    positions = _Positions(ctx, is_cut=is_cut, may_cross=may_cross, samples=samples, has_own_losses=has_own_losses)
    for block in within or ():
        _ = block.register_forward_pre_hook(positions.divide, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its tokens without padding have other positions
    note_module(model, positions=positions)
    add_mixin([model], _ByPositions)
    # until the first call is proved, of all that can have an attention
    if not holds_models:
        others = [each for each in model.modules() if each is not model]
        positions.guard(each for each in others if any(each.children()) or isinstance(each, nn.MultiheadAttention))


class _ByPositions(Mixin, nn.Module):
    """Stands before the class of a model: its forward computes with parts of positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward, with parts of the inputs that are cut."""
        positions = cast(_Positions, notes_of(self).get("positions"))
        if positions.crosses:
            return super().forward(*args, **kwargs)
        return positions.call(self, super().forward, _Inputs(args, kwargs), is_traced=torch.compiler.is_compiling())


class _Inputs(NamedTuple):
    """Arguments of a call."""

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]


_Forward = Callable[..., Any]
_Way = tuple[int | None, int | None]


class _Positions:
    """Calls of one model, and hooks of its modules.

    Attributes:
        ranks: of parts that enter the model; `within` are the ranks of parts that its blocks make.
        is_cut: whether the model's inputs are cut.
        may_cross: whether the model may call `context_attention` itself.
        samples: beginnings of the names of arguments that are never cut.
        has_own_losses: whether losses in its forward are of this rank's positions.
        uncut: `id`s of these arguments in the present call.
        dim: dimension of the positions where several could be; None where the first one never is.
        is_proved: whether a call was compared with one of all positions.
        crosses: whether the model calls `context_attention` itself, and gets own positions as they are.
        is_running: whether a forward of the model runs.
        in_region: whether a `PositionRegion` runs.
        guards: hooks that refuse separate calls of parts of the model.
        outputs: of the forward.
    """

    def __init__(
        self, ctx: DistContext, *, is_cut: bool, may_cross: bool, samples: tuple[str, ...], has_own_losses: bool
    ) -> None:
        self.ctx = ctx
        self.ranks = PositionRanks(ctx)
        self.samples = samples
        self.has_own_losses = has_own_losses
        self.uncut: set[int] = set()
        self.within = PositionRanks(ctx)
        self.is_cut = is_cut
        self.may_cross = may_cross
        self.dim: int | None = 1
        self.is_proved = False
        self.crosses = False
        self.is_running = False
        self.in_region = False
        self.guards: list[RemovableHandle] = []
        self.outputs = Outputs(self.ranks)

    @untraced
    def call(self, module: nn.Module, forward: _Forward, given: _Inputs, *, is_traced: bool) -> Any:
        """Call a forward with parts of the inputs that are cut, and return own positions. A collective of the first
        call, which is proved. `is_traced`: whether torch compiles the call."""
        known = zip(forward_names(module), given.inputs, strict=False)
        self.uncut = {id(each) for name, each in (*known, *given.keywords.items()) if name.startswith(self.samples)}
        with own_losses(self.ctx) if self.has_own_losses else contextlib.nullcontext():
            return self._call(module, forward, given, is_traced=is_traced)

    def _call(self, module: nn.Module, forward: _Forward, given: _Inputs, *, is_traced: bool) -> Any:
        if has_all_positions(self.ctx) or (self.is_cut and not self._has_own(given)):
            return forward(*given.inputs, **given.keywords)
        if not self.is_cut:
            note_cut(self.ctx, 0)  # by a first block
        self.is_running = True
        try:
            if not self.is_proved:
                self._prove(module, forward, given, is_traced=is_traced)
            if self.crosses:
                return forward(*given.inputs, **given.keywords)
            inputs, keywords = self._parts_of(given, self.dim)
            compile_inside(module, self.ranks, self)
            output = forward(*inputs, **keywords)
        finally:
            self.is_running = False
        return self.outputs.leave(output)

    @untraced
    def divide(
        self, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Cut the hidden states that all ranks hold, as a hook of a first block."""
        if has_all_positions(self.ctx):
            return None
        name = next((each for each in keywords if not inputs), "")
        hidden = inputs[0] if inputs else keywords[name]
        if isinstance(hidden, PartTensor) and hidden.division is not None:
            return None
        hidden = whole_of(hidden)
        own = self.within.part_of(hidden, 1)
        return ((own, *inputs[1:]), keywords) if inputs else (inputs, {**keywords, name: own})

    def refuse_alone(self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if a loop calls a part of the model with positions that need others, as its hook."""
        if is_dynamo_compiling() and self.in_region:
            return  # which has asked
        in_backward = runs_in_backward()
        runs = self.is_running and not in_backward
        if runs and not has_all_positions(self.ctx):
            refuse_reentrant(module)
        if runs or has_all_positions(self.ctx) or not self._has_own(_Inputs(inputs, keywords)):
            return
        if not in_backward:
            raise ConfigError(
                "a part of the model was called alone",
                expected="a forward of the prepared model, in which positions see the positions of other ranks",
                got=type(module).__name__,
                where="forward of a module on a mesh with cp",
                fix="Call the prepared model.",
            )
        if module not in self.ranks.plain:
            raise ConfigError(
                "a checkpoint under hooks of saved tensors, as in another one, lost the positions of its tensors",
                expected="tensors that torch does not pack: tensors of the outer checkpoint, and keywords",
                got=f"{type(module).__name__} with packed tensors",
                where="backward of a model on a mesh with cp",
                fix="Pass tensors to the inner checkpoint by keyword: checkpoint(block, x=x, use_reentrant=False).",
            )

    def _has_own(self, given: _Inputs) -> bool:
        tensors = listed(tuple(given))
        is_within = any(isinstance(each, PartTensor) for each in tensors)  # a forward that computes with parts
        return not is_within and any(self._cut_dim(each, 1) is not None for each in tensors)

    def _cut_dim(self, each: Tensor, dim: int | None) -> int | None:
        """The dimension of a tensor's positions; None where it has none. `dim`: where several could be; None if the
        first one is of samples, or of documents in a row, however long it is."""
        if id(each) in self.uncut:
            return None
        last = 2 if each.dim() < 4 else 3  # a mask of queries and keys
        dims = [at for at, length in enumerate(each.shape[:last]) if self.is_cut and is_cut(self.ctx, length)]
        if dim is None:
            dims = [at for at in dims if at > 0]
        return (dim if dim in dims else dims[-1]) if dims else None

    def _parts_of(self, given: _Inputs, dim: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def part(each: Tensor) -> Tensor:
            at = self._cut_dim(each, dim)
            return each if at is None else self.ranks.part(each, at)

        return map_tensors(part, (tuple(given.inputs), dict(given.keywords)))

    def _prove(self, module: nn.Module, forward: _Forward, given: _Inputs, *, is_traced: bool) -> None:
        """Raise `PrepareError` on every rank where parts of positions give something else than all of them. A
        collective."""
        if not self.is_cut:
            self._compare(given)
        problems: list[str] = []
        guesses, ways = self._ways(given)
        for at, (dim, most) in enumerate([*guesses, *ways]):
            with shared_failure(self.ctx.comm, _PROOF):
                try:
                    problem = self._problem(module, forward, given, dim, most)
                except Exception as error:
                    if at >= len(guesses):
                        raise
                    problem = type(error).__name__
            texts = exchange_values(self.ctx.comm, _PROOF, problem, str)
            problems.append(max(texts, key=lambda each: (bool(each), each != _DIFFERENT)))
            if not problems[-1]:
                self.guard([] if self.crosses else [each for each in self.ranks.across if each is not module])
                if self.crosses:
                    hold_plain_rows(module)
                else:
                    note_attention(self.ctx)  # or no position needs another
                    if self.ctx.is_main_process:
                        self._log(module, uncompiled_for(module, self.ranks, is_traced=is_traced))
                self.is_proved = True
                self.dim = dim
                return
        raise PrepareError(
            "the model would compute other values if ranks share its positions",
            expected="layers that work on positions one by one, and attention of tensors with cut positions",
            got=problems[len(guesses)],
            where=f"first forward of {written_class(module).__name__} on a mesh with cp",
            fix="Call accel.parallel.context_attention in the model, or leave cp out of the mesh.",
        )

    def _ways(self, given: _Inputs) -> tuple[list[_Way], list[_Way]]:
        """Return dimensions and numbers of positions to try: guesses, which may fail in any way, and all others.

        A first dimension that is as long as the own positions may be of them, or of samples and documents by chance.
        With values of those, all positions show it: their number differs from the own.
        """
        tensors = listed(tuple(given))
        found = {dim: [self._cut_dim(each, dim) for each in tensors] for dim in (None, 1)}
        most = _PROVED * self.ranks.size
        first = None if found[None] == found[1] else 1
        ways: list[_Way] = [(first, most), (0, most), (first, None), (0, None)]  # models of one length need all of it
        has_rows = any(at is not None for at in found[None])
        return ([(None, None)] if first == 1 and has_rows else []), ways

    def _log(self, model: nn.Module, reason: str) -> None:
        if reason:
            text = "%s runs as it is, uncompiled, along cp=%d: %s"
            _LOG.warning(text, written_class(model).__name__, self.ranks.size, reason)
        if self.ranks.whole:
            text = "%s: each rank along cp=%d computes all positions in %s"
            _LOG.info(text, written_class(model).__name__, self.ranks.size, ", ".join(self.ranks.whole))

    def guard(self, modules: Iterable[nn.Module]) -> None:
        """Refuse separate calls of these modules, and no longer of others. Mutates them, by hooks."""
        for hook in self.guards:
            hook.remove()
        self.guards = [each.register_forward_pre_hook(self.refuse_alone, with_kwargs=True) for each in modules]

    def _compare(self, given: _Inputs) -> None:
        """Raise `ConfigError` on every rank where those along cp have other inputs, of a model that cuts them itself. A
        collective."""
        wide = wide_dtype(self.ctx.device)
        sums = [float(each.detach().to(wide).sum()) for each in listed(tuple(given))]
        share = self.ctx.data_parallel[0]
        facts = exchange_values(self.ctx.comm, _PROOF, f"{share}: {sums}", str)
        if len(set(facts)) > len({fact.partition(":")[0] for fact in facts}):
            raise ConfigError(
                "ranks that share a sequence have different inputs",
                expected="full inputs, the same on ranks along cp: this model splits them itself",
                got="inputs that are cut, or other samples",
                where="forward of a model on a mesh with cp",
                fix="Leave split_sequence out for this model.",
            )

    def _problem(self, module: nn.Module, forward: _Forward, given: _Inputs, dim: int | None, most: int | None) -> str:
        """Return the difference of a call with parts from one with all positions; "" for none. A collective."""
        pairs = self._pairs(given, dim, most)
        whole, own = (map_tensors(lambda each, at=at: pairs[id(each)][at], given) for at in (0, 1))
        with _evaluated(module, self.ctx.device), called_eagerly(module), self.ranks.agreeing():
            try:
                own_call = partial(forward, *own.inputs, **own.keywords)
                if self.may_cross:
                    self.crosses = attends(self.ctx, own_call)
                self.ranks.meet(self.crosses)
                if not self.crosses:
                    self._differ(module, forward, whole, own, dim)
                self.ranks.meet(_PROVED)
            except DifferentRankError:
                return _DIFFERENT
            except Exception as error:
                with contextlib.suppress(DifferentRankError):  # which the other ranks raise
                    self.ranks.meet(-1)
                return _problem_of(error)
        return ""

    def _differ(self, module: nn.Module, forward: _Forward, whole: _Inputs, own: _Inputs, dim: int | None) -> None:
        """Raise `PrepareError` where a call with parts differs from one with all positions. A collective.

        Both compute in a wide dtype, as rounding would hide an error in a narrow one. A forward that does not run in
        it, has a very large parameter or gathers units of `fully_shard`, and the gradients of a large model, are
        compared in its dtypes.
        """
        everything = list(module.parameters())
        parameters = _proved(everything)
        sizes = [each.numel() for each in everything]
        is_small = bool(parameters) and sum(sizes) <= _LARGEST  # frozen ones count: a graph keeps wide copies
        mode = WideMode(wide_dtype(self.ctx.device), everything if is_small else [])
        copies = [mode.copies[id(each)] for each in parameters] if is_small else []
        runs = [(mode, copies), (contextlib.nullcontext(), parameters)]
        has_units = any(sharded_roots(child) for child in module.children())  # messages fill buffers of their dtype
        for run, compared in runs[1:] if has_units or max(sizes, default=0) > _WIDEST else runs:
            # if ranks share parameters, a graph is made alone: functions that lose positions fail in it
            follows = not parameters and (run is not mode or sum(sizes) <= _LARGEST)
            is_followed = bool(compared) or (follows and any(each.requires_grad for each in everything))
            with run, torch.set_grad_enabled(is_followed):
                expected = self._expected(forward, whole, may_fail=run is mode)
                if expected is None:
                    continue
                inputs, keywords = self._parts_of(own, dim)
                with noted(module, self.ranks):
                    got = _outputs_of(forward(*inputs, **keywords))
                if difference := self._difference(expected, got, compared):
                    raise PrepareError("", got=difference)
                self.outputs.note_full(got, whole, own, partial(self._expected, forward, may_fail=True))
            if compared or not parameters:
                return

    def _expected(self, forward: _Forward, whole: _Inputs, *, may_fail: bool) -> list[Tensor] | None:
        """Return the outputs of a call with all positions; None if it failed and may. A collective."""
        with all_positions(self.ctx):
            try:
                found = _outputs_of(forward(*whole.inputs, **whole.keywords))
            except Exception:
                if not may_fail:
                    raise
                found = None
        self.ranks.meet(found is None)
        return found

    def _pairs(self, given: _Inputs, dim: int | None, most: int | None) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the tensors of a call by `id`: of all positions, of `most` at most, and of the own among them. A
        collective."""
        tensors = listed(tuple(given))
        lengths: dict[int, int] = {}
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for each in tensors:
            at = self._cut_dim(each, dim)
            if at is not None and id(each) not in pairs:
                whole = whole_positions(self.ctx, each.detach(), at)
                length = min(whole.shape[at], most or whole.shape[at])
                lengths[whole.shape[at]] = length
                note_cut(self.ctx, length // self.ranks.size)
                whole = whole.narrow(at, 0, length)
                pairs[id(each)] = whole, own_positions(whole, self.ranks.rank, self.ranks.size, at)
        for each in tensors:  # masks of all positions
            whole = each
            for at, length in enumerate(each.shape):
                if id(each) not in (*pairs, *self.uncut) and length in lengths:
                    whole = whole.narrow(at, 0, lengths[length])
            _ = pairs.setdefault(id(each), (whole, whole))
        return pairs

    def _difference(self, expected: Sequence[Tensor], got: Sequence[Tensor], parameters: Sequence[Tensor]) -> str:
        """Return a line on the first output or gradient that differs from the one of all positions; "" for none. A
        collective."""
        if len(expected) != len(got):
            return f"{len(got)} outputs of {len(expected)}"
        objectives: list[tuple[Tensor, Tensor]] = []
        for number, (want, have) in enumerate(zip(expected, got, strict=True)):
            if self.ranks.has_own_loss and not want.dim():
                continue
            if want.shape != have.shape:
                return f"output {number} of shape {list(have.shape)}, expected {list(want.shape)}"
            draw = torch.arange(want.numel(), device=want.device).sin().view(want.shape).to(want.dtype)
            layout = have.division if isinstance(have, PartTensor) else None
            if layout is not None and layout.cut.is_shared(self.ranks.size):
                draw = draw * 0  # several ranks would count a row
            share = draw / self.ranks.size
            own = plain_of(have)
            wanted = want
            if layout is not None:
                rows = torch.tensor(rows_of(layout.cut, self.ranks.rank, self.ranks.size), device=want.device)
                wanted, share = (each.index_select(layout.dim, rows) for each in (want, draw))
            off = _norm((wanted - own).detach()) / max(_norm(wanted.detach()), 1e-30)
            if not off <= _tolerance(want):
                return f"output {number} is off by {off:.0e} of its norm"
            objectives.append(((want * draw).sum(), (own * share).sum()))
        return self._gradients(objectives, parameters) if objectives else ""

    def _gradients(self, objectives: Sequence[tuple[Tensor, Tensor]], parameters: Sequence[Tensor]) -> str:
        """Return a line on the first gradient that the ranks' do not sum up to; "" for none. A collective."""
        want, have = (torch.stack([each[at].real for each in objectives]).sum() for at in (0, 1))
        if not parameters or not want.requires_grad:
            return ""
        with all_positions(self.ctx):  # where blocks are recomputed
            expected = gradients_of(want, parameters)
        own = gradients_of(have, parameters)
        with torch.no_grad():
            largest = max(_norm(each) for each in expected)
            for parameter, wanted, mine in zip(parameters, expected, own, strict=True):
                off = _norm(self.ranks.total(mine.contiguous()) - wanted)
                size = max(_norm(wanted), largest / 100, 1e-30)
                if not off <= _tolerance(parameter) * size:
                    return f"a gradient of a parameter of shape {list(parameter.shape)} is off"
        return ""


def _proved(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters to compare gradients of: none if ranks share some, only vectors if there are many."""
    found = [each for each in parameters if each.requires_grad]
    if any(is_dtensor(each) for each in found):
        return []
    is_large = sum(each.numel() for each in found) > _LARGEST
    return [each for each in found if each.dim() < 2] if is_large else found


def _tolerance(tensor: Tensor) -> float:
    """Return the largest difference that rounding makes, as a share of a norm; some functions round in float32."""
    return max(torch.finfo(tensor.dtype).eps ** 0.4, 1e-5)


@contextlib.contextmanager
def _evaluated(module: nn.Module, device: torch.device) -> Generator[None]:
    """Compute without gradients and without dropout; streams of random numbers stay as they are.

    Modules and names of modes that a model replaces by the length of its inputs are put back.
    """
    before = [(each, each.training, dict(each.named_children()), dict(vars(each))) for each in module.modules()]
    try:
        _ = module.eval()
        with isolated_rng(device), torch.no_grad():
            yield
    finally:
        for each, training, children, own in before:
            for name in [name for name, child in children.items() if getattr(each, name) is not child]:
                setattr(each, name, children[name])
            vars(each).update({name: value for name, value in own.items() if isinstance(value, str)})
            each.training = training


def _problem_of(error: Exception) -> str:
    """Return a line on an error of a call with parts; raise those that are not of parts."""
    if isinstance(error, PrepareError) and (isinstance(error, NoRuleError) or not error.problem):
        return str(error.got)
    if is_of_inputs(error):
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise error


def _norm(tensor: Tensor) -> float:
    return float(tensor.abs().to(wide_dtype(tensor.device)).square().sum().sqrt())


def _outputs_of(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a forward's output."""
    found = [whole_of(each) if isinstance(each, SelectedTensor) else each for each in listed(output)]
    return [each for each in found if each.is_floating_point()]
