# SPDX-License-Identifier: Apache-2.0
"""A model's forward on parts of positions, which its first call proves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from accel.comm import Call, exchange_values, peer_error, shared_failure
from accel.compiling import ModelUncompiled
from accel.context import DistContext
from accel.devices import wide_dtype
from accel.errors import ConfigError, PrepareError
from accel.mixins import add_mixin
from accel.parallel._copies import NotPickled
from accel.parallel._modules import forward_names, note_module, notes_of, written_class
from accel.parallel._private import (
    called_eagerly,
    compile_in_place,
    is_compiled,
    runs_in_backward,
    tensors_of,
    untraced,
)
from accel.parallel.axes.context._attention import whole_positions
from accel.parallel.axes.context._checks import refuse_fake, refuse_reentrant
from accel.parallel.axes.context._inner import (
    COMPILED_AROUND,
    Full,
    Inputs,
    PositionRegion,
    ProofInputs,
    compile_inside,
    full_outputs,
    has_rows,
    listed,
    log_uncompiled,
    may_be_full,
)
from accel.parallel.axes.context._positions import PositionRanks
from accel.parallel.axes.context._proof import (
    DIFFERENT,
    FAILED_ALONE,
    PROVED,
    attempted,
    differ,
    evaluated,
    outputs_of,
    whole_outputs,
)
from accel.parallel.axes.context._selected import whole_of
from accel.parallel.axes.context._split import (
    ALL_POSITIONS,
    OWN_LOSSES,
    UNCUT_INPUTS,
    is_cut,
    is_cut_along,
    is_part,
    note_attention,
    note_cut,
    own_positions,
)
from accel.parallel.logits._logits import sources_of
from accel.parallel.parts import PartTensor, keep_buffers_whole, refuse_hidden
from accel.tree import map_tensors
from accel.tree._walk import leaves

_LOG = logging.getLogger("accel.parallel")
_PROOF = Call("positions", "proof", ordered=False)
_ALIKE = (
    "ranks along cp=%d hold the same integers in input %s, and each takes them for its positions: right for documents"
    " of one length; an input of all ranks needs another length"
)


class Traits(NamedTuple):
    """Facts of a model that computes with parts of positions."""

    is_cut: bool = True  # whether its inputs are cut
    samples: tuple[str, ...] = ()  # beginnings of the names of arguments that are never cut
    has_own_losses: bool = False  # whether losses in its forward are of this rank's positions


def use_positions(ctx: DistContext, model: nn.Module, traits: Traits, within: Sequence[nn.Module] = ()) -> None:
    """Let a model's forward compute with parts of positions. Mutates it, by a class and hooks.

    `within`: first blocks of stacks. All ranks hold their full inputs, and they get this rank's positions of them.
    """
    positions = Positions(ctx, [model], traits)
    positions.begin(model, [model], within)
    positions.guard_all(model)


class _ByPositions(NotPickled, nn.Module):
    """Stands before the class of a model: its forward computes with parts of positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward, with parts of the inputs that are cut."""
        positions = cast("Positions | None", notes_of(self).get("positions"))
        if positions is None or positions.in_region:  # None for a new model of the class
            return super().forward(*args, **kwargs)
        return positions.call(self, super().forward, Inputs(args, kwargs), is_traced=torch.compiler.is_compiling())


def _has_parts(given: Inputs) -> bool:
    """Return whether a forward that computes with parts gives these inputs."""
    return any(isinstance(each, PartTensor) for each in listed(tuple(given)))


_Forward = Callable[..., Any]
_Way = tuple[int | None, int | None]


def _with_graphs(module: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Let gradients be compared, also in a call in inference mode, but for parameters that were made in it."""
    is_needed = torch.is_inference_mode_enabled() and not any(each.is_inference() for each in module.parameters())
    return torch.inference_mode(False) if is_needed else contextlib.nullcontext()


def _as_saved(tensor: Tensor) -> Tensor:
    """The same values as a tensor that a graph can save, which one made in inference mode is not."""
    return tensor.clone() if tensor.is_inference() else tensor


class Positions:
    """Calls of one model, and hooks of its modules.

    Attributes:
        ranks: of parts that enter the model; `within` are the ranks of parts that its blocks make.
        traits: of the model.
        names: arguments of the model's forward.
        alike: whether all ranks hold the same values of inputs that could be cut by their shapes; by path.
        uncut: `id`s of the tensors of the present call that all ranks hold.
        dim: dimension of the positions where several could be; None where the first one never is.
        is_proved: whether a call was compared with one of all positions.
        is_running: whether a forward of the model runs.
        in_region: whether a `PositionRegion` runs.
        guards: hooks that refuse separate calls of parts of the model.
        full: dimensions of positions, by number, of floating-point outputs that each rank computes in full.
        lengths: of the sequences of the present call, if there are such outputs.
        roots: modules that run the whole forward, or a stage of it.
    """

    def __init__(self, ctx: DistContext, roots: Sequence[nn.Module], traits: Traits) -> None:
        self.ctx = ctx
        self.roots = tuple(roots)
        self.ranks = PositionRanks(ctx)
        self.traits = traits
        self.names: Sequence[str] = ()
        self.alike: dict[str, bool] = {}
        self.uncut: set[int] = set()
        self.within = PositionRanks(ctx)
        self.dim: int | None = 1
        self.is_proved = False
        self.is_running = False
        self.in_region = False
        self.guards: list[RemovableHandle] = []
        self.full: dict[int, Full] = {}
        self.lengths: set[int] = set()

    def begin(self, model: nn.Module, runs: Sequence[nn.Module], within: Sequence[nn.Module]) -> None:
        """Compute with parts from now on. Mutates modules, by classes and hooks.

        Args:
            model: the model.
            runs: modules with its forward: the model, or its stages.
            within: first blocks of stacks.
        """
        self.names = forward_names(model)
        for block in within:
            _ = block.register_forward_pre_hook(self.divide, with_kwargs=True)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # its tokens without padding have other positions
        for each in (model, *runs):
            note_module(each, positions=self)
        add_mixin(runs, _ByPositions)
        add_mixin(runs, PositionRegion)
        keep_buffers_whole(model)

    def guard_all(self, model: nn.Module) -> None:
        """Refuse separate calls of all modules that can have an attention, until the first call is proved. A model
        inside that computes with parts itself may be called alone."""
        modules = list(model.modules())
        for each in modules:
            if (inner := notes_of(each).get("positions")) is not None:
                inner.guard([])
        self.guard(each for each in modules if [*each.children()] or isinstance(each, nn.MultiheadAttention))

    @untraced
    def call(self, module: nn.Module, forward: _Forward, given: Inputs, *, is_traced: bool) -> Any:
        """Call a forward with parts of the inputs that are cut, and return own positions. A collective of the first
        call, which is proved. `is_traced`: whether torch compiles the call."""
        self.is_running = True
        eager = ModelUncompiled(tensors_of(tuple(given)))
        losses = OWN_LOSSES.begun(self.ctx) if self.traits.has_own_losses else contextlib.nullcontext()
        try:
            with losses, eager:
                output = self._call(module, forward, given, is_traced=is_traced)
            eager.end(sources_of(output))
            return output
        except RuntimeError as error:  # of a message in the graph of a compiled block
            if (lost := peer_error(error, f"the forward of {written_class(module).__name__}")) is not None:
                raise lost from error
            raise
        finally:
            self.is_running = False

    def _call(self, module: nn.Module, forward: _Forward, given: Inputs, *, is_traced: bool) -> Any:
        if ALL_POSITIONS.holds(self.ctx):
            return forward(*given.inputs, **given.keywords)
        refuse_fake(listed(tuple(given)))
        if self.traits.is_cut and not self.has_own(given):
            with contextlib.nullcontext() if _has_parts(given) else UNCUT_INPUTS.begun(self.ctx):
                return forward(*given.inputs, **given.keywords)
        if not self.traits.is_cut:
            note_cut(self.ctx, 0)  # by a first block
        if not self.is_proved:
            _ = compile_in_place(module)  # the proof calls blocks as they are
            self.prove(module, given, partial(self._problem, module, forward, given))
            if is_traced and not is_compiled(module):
                log_uncompiled(module, self.ranks, COMPILED_AROUND)
        inputs, keywords = parts = self.parts_of(given, self.dim)
        layouts = [each.division for each in listed(parts) if isinstance(each, PartTensor)] if self.full else ()
        self.lengths = {each.cut.total for each in layouts if each is not None}
        compile_inside(module, self.ranks, self)
        return self.left(forward(*inputs, **keywords))

    def left(self, output: Any) -> Any:
        """Return own positions for the parts of an output."""
        refuse_hidden(output)
        numbers = count()

        def own(each: Tensor) -> Tensor:
            found = self.ranks.left(each)
            dim, fixed = self.full.get(next(numbers), (None, None)) if each.is_floating_point() else (None, None)
            if dim is None or has_rows(each) or found.shape[dim] % (2 * self.ranks.size):
                return found
            if fixed is not None and found.shape[dim] not in self.lengths:
                return found
            return own_positions(found, self.ranks.rank, self.ranks.size, dim)

        return map_tensors(own, output)

    @untraced
    def divide(
        self, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Cut the hidden states that all ranks hold, as a hook of a first block."""
        if ALL_POSITIONS.holds(self.ctx):
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
        if runs and not ALL_POSITIONS.holds(self.ctx):
            refuse_reentrant(module)
        if runs or ALL_POSITIONS.holds(self.ctx) or not self._has_own(Inputs(inputs, keywords)):
            return
        if not in_backward and self.ranks.across.get(module):
            self.ranks.plain.add(module)
            return
        if not in_backward:
            raise ConfigError(
                "a part of the model was called alone",
                expected="a forward of the prepared model, in which positions see the positions of other ranks",
                got=type(module).__name__,
                where="forward of a module on a mesh with cp",
                fix="Call the prepared model: let its forward choose the part, by an argument.",
            )
        if module not in self.ranks.plain:
            raise ConfigError(
                "a checkpoint under hooks of saved tensors, as in another one, lost the positions of its tensors",
                expected="tensors that torch does not pack: tensors of the outer checkpoint, and keywords",
                got=f"{type(module).__name__} with packed tensors",
                where="backward of a model on a mesh with cp",
                fix="Pass tensors to the inner checkpoint by keyword: checkpoint(block, x=x, use_reentrant=False).",
            )

    def has_own(self, given: Inputs) -> bool:
        """Return whether inputs of the model are cut, and no parts yet. A collective, as `note_uncut`."""
        self.note_uncut(given)
        return self._has_own(given)

    def note_uncut(self, given: Inputs) -> None:
        """Note inputs that are not cut, though as long as one that is: samples that all ranks hold, such as images. A
        collective of the first call with an input that `split_sequence` has not returned.

        Integers for each position are cut, with a warning: those of packed documents of one length are alike on all
        ranks, too. Complex numbers, which turn queries and keys, are cut.
        """
        known = (*zip(self.names, given.inputs, strict=False), *given.keywords.items())
        samples = [value for name, value in known if name.startswith(self.traits.samples)]
        self.uncut = set(map(id, listed(tuple(samples))))
        for path, each in leaves(given):
            is_plain = isinstance(each, Tensor) and not isinstance(each, PartTensor)
            at = self.cut_dim(each, 1) if is_plain else None
            if at is None:
                continue
            may_be_uncut = each.is_floating_point() or each.dim() > 3
            if each.is_complex() and not may_be_uncut:
                continue
            if is_part(self.ctx, each):
                self.alike[path] = False
            elif path not in self.alike:
                is_alike = self.ranks.hold_alike(each.detach(), at)
                self.alike[path] = is_alike and may_be_uncut
                if is_alike and not self.alike[path] and self.ctx.is_main_process:
                    _LOG.warning(_ALIKE, self.ranks.size, path)
            if self.alike[path]:
                self.uncut.add(id(each))

    def _has_own(self, given: Inputs) -> bool:
        return not _has_parts(given) and any(self.cut_dim(each, 1) is not None for each in listed(tuple(given)))

    def cut_dim(self, each: Tensor, dim: int | None) -> int | None:
        """Return the dimension of a tensor's positions; None where it has none. `dim`: where several could be; None if
        the first one is of samples, or of documents in a row, however long it is."""
        if id(each) in self.uncut:
            return None
        last = 2 if each.dim() < 4 else 3  # a mask of queries and keys
        dims = [
            at
            for at, length in enumerate(each.shape if self.traits.is_cut else ())
            if is_cut(self.ctx, length) and (at < last or is_cut_along(self.ctx, at))
        ]
        if dim is None:
            dims = [at for at in dims if at > 0]
        return (dim if dim in dims else dims[-1]) if dims else None

    def parts_of(self, given: Inputs, dim: int | None) -> Inputs:
        """Return parts for the inputs that are cut."""

        def part(each: Tensor) -> Tensor:
            at = self.cut_dim(each, dim)
            return each if at is None else self.ranks.part(each, at)

        return map_tensors(part, Inputs(tuple(given.inputs), dict(given.keywords)))

    def prove(self, module: nn.Module, given: Inputs, problem_of: Callable[[int | None, int | None], str]) -> None:
        """Raise `PrepareError` on every rank where parts of positions give something else than all of them. A
        collective.

        `problem_of`: returns the difference for a dimension of the positions, and a number of them; "" for none.
        """
        if not self.traits.is_cut:
            self._compare(given)
        problems: list[str] = []
        guesses, ways = self._ways(given)
        for at, (dim, most) in enumerate([*guesses, *ways]):
            with shared_failure(self.ctx.comm, _PROOF):
                try:
                    with _with_graphs(module):
                        problem = problem_of(dim, most)
                except Exception as error:
                    if at >= len(guesses):
                        raise
                    problem = type(error).__name__
            texts = exchange_values(self.ctx.comm, _PROOF, problem, str)
            problems.append(max(texts, key=lambda each: (bool(each), each != DIFFERENT)))
            if not problems[-1]:
                self.guard(self.ranks.across)
                note_attention(self.ctx)  # or no position needs another
                if self.ctx.is_main_process:
                    self._log(module)
                self.is_proved = True
                self.dim = dim
                return
        raise PrepareError(
            "the model would compute other values if ranks share its positions",
            expected="layers that work on positions one by one, and attention of tensors with cut positions",
            got=problems[-2],  # of all positions: numbers in it are the user's
            where=f"first forward of {written_class(module).__name__} on a mesh with cp",
            fix="Give a function of each position separately a rank's positions: "
            'accel.parallel.local_map(function, "rows"). Attend by accel.parallel.context_attention. '
            "Or leave cp out of the mesh.",
        )

    @contextlib.contextmanager
    def agreeing(self) -> Generator[None]:
        """Let ranks agree before each collective of parts, in a block."""
        with self.ranks.agreeing(), self.within.agreeing():
            yield

    def _ways(self, given: Inputs) -> tuple[list[_Way], list[_Way]]:
        """Return dimensions and numbers of positions to try: guesses, which may fail in any way, and all others.

        A first dimension that is as long as the own positions may be of them, or of samples and documents by chance.
        With values of those, all positions show it: their number differs from the own.
        """
        tensors = listed(tuple(given))
        found = {dim: [self.cut_dim(each, dim) for each in tensors] for dim in (None, 1)}
        most = PROVED * self.ranks.size
        first = None if found[None] == found[1] else 1
        ways: list[_Way] = [(first, most), (0, most), (first, None), (0, None)]  # models of one length need all of it
        has_rows = any(at is not None for at in found[None])
        return ([(None, None)] if first == 1 and has_rows else []), ways

    def _log(self, model: nn.Module) -> None:
        if self.ranks.has_sum:
            text = "%s sums a loss over all positions, on each rank along cp=%d: divide it in the forward by all tokens"
            _LOG.warning(text, written_class(model).__name__, self.ranks.size)
        if self.ranks.whole:
            text = "%s: each rank along cp=%d computes all positions in %s"
            _LOG.info(text, written_class(model).__name__, self.ranks.size, ", ".join(self.ranks.whole))

    def guard(self, modules: Iterable[nn.Module]) -> None:
        """Refuse separate calls of these modules, and no longer of others. Mutates them, by hooks."""
        for hook in self.guards:
            hook.remove()
        guarded = [each for each in modules if each not in self.roots and "positions" not in notes_of(each)]
        self.guards = [each.register_forward_pre_hook(self.refuse_alone, with_kwargs=True) for each in guarded]

    def _compare(self, given: Inputs) -> None:
        """Raise `ConfigError` on every rank where those along cp have other inputs, of a model that cuts them itself. A
        collective."""
        sums = [float(each.detach().to(wide_dtype(self.ctx.device)).sum()) for each in listed(tuple(given))]
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

    def _problem(self, module: nn.Module, forward: _Forward, given: Inputs, dim: int | None, most: int | None) -> str:
        """Return the difference of a call with parts from one with all positions; "" for none. A collective."""
        proof = self.proof_inputs(given, dim, most)

        def run(inputs: Inputs) -> list[Tensor]:
            return outputs_of(forward(*inputs.inputs, **inputs.keywords))

        def run_own() -> list[Tensor]:
            return run(self.parts_of(proof.own, dim))

        def attempt() -> None:
            units = list(module.children())
            got = differ(self.ranks, module, partial(run, proof.whole), run_own, units)
            self.full = {}
            if may_be_full(got, proof.lengths, or_longer=True):
                shorter = whole_outputs(self.ranks, partial(run, proof.half), may_fail=True)
                self.full = full_outputs(got, shorter, proof.lengths)

        def problem_in(*, trains: bool, may_train: bool) -> str:
            with evaluated(module, self.ctx.device, trains=trains), called_eagerly(module), self.agreeing():
                return attempted(self.ranks, attempt, may_train=may_train)

        problem = problem_in(trains=False, may_train=module.training)
        return problem_in(trains=True, may_train=False) if problem == FAILED_ALONE else problem

    def proof_inputs(self, given: Inputs, dim: int | None, most: int | None) -> ProofInputs:
        """Return the inputs of the calls of a proof, with `most` positions at most. A collective."""
        tensors = listed(tuple(given))
        lengths: dict[int, int] = {}  # in the proof, by the length of a sequence
        proofs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for each in tensors:
            at = self.cut_dim(each, dim)
            if at is not None and id(each) not in proofs:
                whole = whole_positions(self.ctx, each.detach(), at)
                length = min(whole.shape[at], most or whole.shape[at])
                lengths[whole.shape[at]] = length
                note_cut(self.ctx, length // self.ranks.size)
                whole = _as_saved(whole.narrow(at, 0, length))
                own = own_positions(whole, self.ranks.rank, self.ranks.size, at)
                proofs[id(each)] = whole, own, whole.narrow(at, 0, length // 2)
        for each in tensors:  # masks of all positions
            whole = half = _as_saved(each)
            for at, size in enumerate(each.shape):
                if id(each) not in (*proofs, *self.uncut) and size in lengths:
                    whole = whole.narrow(at, 0, lengths[size])
                    half = half.narrow(at, 0, lengths[size] // 2)
            _ = proofs.setdefault(id(each), (whole, whole, half))
        whole, own, half = (map_tensors(lambda each, at=at: proofs[id(each)][at], given) for at in range(3))
        return ProofInputs(whole, own, half, frozenset(lengths.values()))
