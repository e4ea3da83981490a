# SPDX-License-Identifier: Apache-2.0
"""Borders of code that computes with parts: modules that torch compiles, and outputs."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from accel.errors import PrepareError
from accel.mixins import add_mixin
from accel.parallel._modules import RANKS, note_module, notes_of, written_class
from accel.parallel._private import (
    REGION,
    called_eagerly,
    compile_in_place,
    contains_compiled,
    forward_pre_hooks,
    is_compiled,
    run_eagerly,
    tensors_of,
)
from accel.parallel.axes.context._kernels import allow_in_graphs
from accel.parallel.axes.context._positions import PositionRanks
from accel.parallel.parts import PartRegion, PartsInGraph, PartTensor
from accel.parallel.parts._region import leave_uncompiled
from accel.tree._walk import tensors


def listed(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [each for _, each in tensors(tree)]


@contextlib.contextmanager
def noted(model: nn.Module, ranks: PositionRanks) -> Generator[None]:
    """Note modules of a model: in `ranks.across` if positions need other ranks there, in `ranks.plain` if the module
    gets no part."""

    def begin(module: nn.Module, inputs: Any, keywords: Any) -> None:
        ranks.callers.append(module)
        if not any(isinstance(each, PartTensor) for each in tensors_of((inputs, keywords))):
            ranks.plain.add(module)

    def end(module: nn.Module, *_given: Any) -> None:
        if ranks.callers[-1:] == [module]:  # a pipeline calls hooks for modules of other stages
            _ = ranks.callers.pop()

    hooks = [each.register_forward_pre_hook(begin, with_kwargs=True) for each in model.modules()]
    hooks += [each.register_forward_hook(end, always_call=True) for each in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        ranks.callers.clear()


class Inputs(NamedTuple):
    """Arguments of a call."""

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]


class PositionRegion(PartRegion, nn.Module):
    """A module of a model that computes with parts, which torch may compile."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. A graph does not see what is around it, so a call alone is refused here, and a model that
        is one graph gets parts."""
        notes = notes_of(self)
        positions: Any = notes.get("positions")
        if is_dynamo_compiling() or positions is None:  # None for a new model of the class
            return super().__call__(*args, **kwargs)
        if "within" in notes:
            return self._called(*args, **kwargs)
        own: Any = super(PartRegion, self)
        if not _is_one_graph(self):
            return own.__call__(*args, **kwargs)
        if not positions.is_proved:
            with called_eagerly(self):
                return own.__call__(*args, **kwargs)
        if problem := self._problem_with(args, kwargs):
            leave_uncompiled(self, problem)
            return own.__call__(*args, **kwargs)
        return positions.call(self, self._called, Inputs(args, kwargs), is_traced=False)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        positions: Any = notes_of(self).get("positions")
        if positions.refuse_alone in forward_pre_hooks(self).values():
            positions.refuse_alone(self, args, kwargs)
        positions.ranks.counts_changes = not torch.is_inference_mode_enabled()
        is_inner, positions.in_region = positions.in_region, True
        try:
            return super().__call__(*args, **kwargs)
        finally:
            positions.in_region = is_inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, on parts; in a graph, by a mode."""
        with PartsInGraph() if is_dynamo_compiling() else contextlib.nullcontext():
            return super().forward(*args, **kwargs)


class ProofInputs(NamedTuple):
    """Inputs of a model for the calls of a proof."""

    whole: Inputs  # with all positions
    own: Inputs  # with this rank's of them
    half: Inputs  # with the first half of all
    lengths: frozenset[int]  # of the sequences with all positions


def may_be_full(outputs: Sequence[Tensor], lengths: frozenset[int], *, or_longer: bool = False) -> bool:
    """Return whether each rank may compute an output in full, as a model makes it of single positions. `or_longer`:
    also one that is longer than the sequences, as a model pads to a number of positions of its own."""
    shapes = [each.shape for each in outputs if not has_rows(each)]
    longest = max(lengths, default=0)  # 0 for a model that cuts its hidden states: none of its outputs is cut
    return any(lengths.intersection(each) or (or_longer and 0 < longest < max(each)) for each in shapes if each)


_UNKNOWN = (
    "output {} of shape {}, which each rank computes in full, of a model that needs this length: if it is of positions,"
    " return output + 0 * hidden, with positions in hidden, and else another shape"
)
Full = tuple[int, int | None]  # dimension of the positions, and their number where it is the same for all sequences


def full_outputs(
    outputs: Sequence[Tensor], shorter: Sequence[Tensor] | None, lengths: frozenset[int]
) -> dict[int, Full]:
    """Return the dimensions of positions, by number, of outputs that each rank computes in full: of a sequence's length
    and half as long in `shorter`, of half of it, or as long in both and other for the second half alone. `PrepareError`
    if the model fails for that, so that nobody knows."""
    found: dict[int, Full] = {}
    for number, each in enumerate(outputs):
        longs = [] if has_rows(each) else [at for at, size in enumerate(each.shape) if size in lengths]
        if shorter is None and [at for at in longs if at]:
            raise PrepareError("", got=_UNKNOWN.format(number, [*each.shape]))
        if shorter is not None and [one.dim() for one in shorter] == [one.dim() for one in outputs]:
            half = shorter[number]
            dims: list[Full] = [(at, None) for at in longs if half.shape[at] == each.shape[at] // 2]
            if not dims and not has_rows(each) and half.shape == each.shape:
                dims = [(at, each.shape[at]) for at in range(each.dim()) if _follows(each, half, at, lengths)]
            found |= {number: min(dims, key=lambda one: one[0] != 1)} if dims else {}
    return found


def _follows(output: Tensor, shorter: Tensor, dim: int, lengths: frozenset[int]) -> bool:
    """Return whether places along a dimension follow the positions of a sequence: those of the first half are the same
    without the second one, and each of the second half is not."""
    length = max(lengths)
    if output.shape[dim] < length or length < 2 or not output.numel():
        return False
    change = (output.detach() - shorter).abs().narrow(dim, 0, length).movedim(dim, 0)
    first, second = change.reshape(length, -1).amax(1).chunk(2)
    least = torch.finfo(shorter.dtype).eps ** 0.4 * float(output.detach().abs().max())
    return float(first.max()) <= least < float(second.min())


def has_rows(tensor: Tensor) -> bool:
    """Return whether a tensor is a part with this rank's rows."""
    return isinstance(tensor, PartTensor) and tensor.division is not None


COMPILED_AROUND = 'compile its blocks alone, accel.compile_model(model, "repeated")'


def _is_one_graph(model: nn.Module) -> bool:
    """Return whether `compile_model` compiles a model as a whole, and no units gather shards around its blocks."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    is_region = is_compiled(model) and REGION in vars(model)
    return is_region and not any(isinstance(each, sharded) for each in model.modules())


def log_uncompiled(model: nn.Module, ranks: PositionRanks, reason: str) -> None:
    """Log on the main process that modules that torch compiles run as they are."""
    if ranks.ctx.is_main_process:
        text = "%s runs as it is, uncompiled, along cp=%d: %s"
        logging.getLogger("accel.parallel").warning(text, written_class(model).__name__, ranks.size, reason)


def _uncompiled_for(model: nn.Module, ranks: PositionRanks) -> str:
    """Return the reason for which compiled modules of a model run as they are; "" for none."""
    if ranks.in_stages:
        return "stages of a pipeline send the positions of its blocks"
    if is_compiled(model) and not _is_one_graph(model):
        return COMPILED_AROUND
    if any(vars(each).get(RANKS) not in (None, ranks) for each in model.modules()):
        return "ranks along tp divide the same tensors"
    return ""


def compile_inside(model: nn.Module, ranks: PositionRanks, positions: Any) -> None:
    """Let compiled modules of a model take parts at the borders of their graphs. Mutates them, by a class; if they
    cannot, they run as they are from now on. `positions`: calls of the model."""
    if not contains_compiled(model):
        return
    _ = compile_in_place(model)  # blocks that a user has compiled after `prepare`
    if reason := _uncompiled_for(model, ranks):
        log_uncompiled(model, ranks, reason)
        run_eagerly(model)  # and in a backward that computes blocks again
        return
    allow_in_graphs()
    compiled = [each for each in model.modules() if is_compiled(each)]
    for each in compiled:
        if each is not model and each not in positions.roots:
            note_module(each, within=True)
        note_module(each, positions=positions)
        setattr(each, RANKS, ranks)
    add_mixin(compiled, PositionRegion)
