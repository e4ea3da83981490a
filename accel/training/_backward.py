# SPDX-License-Identifier: Apache-2.0
"""`backward` and `accumulate`: losses become weighted sums of gradients, exchanged once a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from time import perf_counter
from typing import NamedTuple

import msgspec
import torch
from torch import nn
from torch.autograd.graph import Node

from accel.comm import start_all_reduce
from accel.context import DistContext, context_first
from accel.data import SampleCount
from accel.devices import wide_dtype
from accel.errors import ConfigError, StepError
from accel.loop_state import Accumulation, LossScale, check_scale
from accel.parallel._engines import engine_of
from accel.parallel._labels import called_again, term_of_parameters
from accel.parallel._leftovers import check_kept, has_compiled, note_gradients
from accel.parallel._private import mixes_dtensors
from accel.parallel._shared_memory import compiled_leaves, reaches, separate_gradients
from accel.parallel._sync import exchanging, no_sync, raise_lost_peer
from accel.precision._amp import matmul_precision
from accel.tensors import is_dtensor
from accel.training._refused import refuse_in_closure
from accel.training._train_state import TrainState, after_backward, begun_window, carries_state, weight_of, window_of
from accel.training._window import StepWindow, mark_followed, times, with_loss

_SUM = 2  # what torch's nodes of losses save for reduction="sum"
_MOST_TERMS = 64  # of a loss that are looked at
_BELOW_ZERO = -1e-30  # of a number of units: below it is none


def weigh(
    ctx: DistContext,
    scaler: LossScale,
    accum: Accumulation,
    weight: float | torch.Tensor | None,
    *,
    same_units: bool,
) -> tuple[Accumulation, float | torch.Tensor]:
    """Add a pass's weight to its window; return the window and the factor of the loss. No communication.

    `weight` counts the units of a mean, None for equal ones; with `same_units` an earlier pass has counted them.
    """
    unit = accum.unit or _unit(ctx, weight, accum.steps)
    again = accum.latest == accum.micro
    if same_units and not again:
        raise StepError(
            "no backward of this micro-batch has counted these units",
            expected="same_units=True from its second backward on",
            got="it in the first",
            where="backward",
        )
    _check_alike(accum, weight)
    weighted = weight is not None
    if weight is None:
        # Micro-batches count the same on every rank, so the weight of all is known without a message.
        world = 0.0 if again else float(ctx.world_size)
        return accum.add(scale=scaler.scale, unit=unit, weighted=weighted, world=world), scaler.scale / unit
    if isinstance(weight, SampleCount):
        # The plan of the data counts the samples of all ranks; ranks that share samples each count their copy.
        local = None
        world = 0.0 if same_units else float(weight.world * weight.copies)
        factor = weight / unit * scaler.scale
    else:
        # Only this rank knows the number: one message sums it at the window's end.
        known = own_weight(ctx, weight)
        factor = times(known, scaler.scale / unit)
        world, local = 0.0, None
        if not same_units and ctx.world_size == 1:
            world = known
        elif not same_units:
            local = known
    return accum.add(scale=scaler.scale, unit=unit, weighted=weighted, world=world, local=local), factor


def start_sharing(ctx: DistContext, added: Accumulation) -> Callable[[], Accumulation]:
    """Begin to sum a window's weights over ranks where it ends; return a function that waits for it. A collective."""
    own = added.own_weight
    if not added.sync or ctx.world_size == 1 or own is None:
        return lambda: added
    # A copy, because the sum is made in place, while the window still holds this rank's own weight.
    total = own.clone() if isinstance(own, torch.Tensor) else on_device(ctx, own)
    wait = start_all_reduce(ctx.comm, total, "sum")

    def end() -> Accumulation:
        wait()
        # Read on the CPU alone: elsewhere the host would wait for the backward that it has queued.
        return added.share(total.item() if total.is_cpu else total)

    return end


def own_weight(ctx: DistContext, weight: float | torch.Tensor) -> float | torch.Tensor:
    """Return a weight that only this rank knows: a number where reading it does not wait for a device.

    A wrong weight on a device becomes NaN, which the step reads together with the total weight.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise _no_weight(f"a tensor of shape {list(weight.shape)} and {weight.dtype}")
        if not weight.is_cpu:
            weight = weight.detach() if weight.requires_grad else weight
            weight = weight.reshape(()) if weight.ndim else weight
            return torch.threshold(weight.to(ctx.device, _weight_dtype(ctx)), _BELOW_ZERO, math.nan)
        weight = weight.item()
    try:
        number = float(weight) if isinstance(weight, Real) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not 0 <= number < math.inf:
        raise _no_weight("a number too large" if number == math.inf else repr(weight))
    return number


def on_device(ctx: DistContext, number: float) -> torch.Tensor:
    """Return a number as a tensor of shape [] on the context's device.

    For XLA it is data: a constant would be part of the graph, which must be the same on all ranks.
    """
    if ctx.device.type == "xla":
        return torch.tensor(number, dtype=_weight_dtype(ctx), device="cpu").to(ctx.device)
    return torch.full((), number, dtype=_weight_dtype(ctx), device=ctx.device)


def _check_alike(accum: Accumulation, weight: float | torch.Tensor | None) -> None:
    """Raise `StepError` where a window has backward passes with a weight and without."""
    if accum.weighted is None or accum.weighted == (weight is not None):
        return
    raise StepError(
        "some backward passes of this window have a weight, and others not",
        expected="weight= in all of them, or in none",
        got=f"{'none' if weight is None else 'one'} in micro-batch {accum.micro} of {accum.steps}",
        where="backward, weight=",
        fix="Pass weight= each time, such as batch.valid; also with same_units=True.",
    )


def _unit(ctx: DistContext, weight: float | torch.Tensor | None, steps: int) -> float:
    """Return the unit of the window's weights: a full window of equal parts then needs no division at its end."""
    if isinstance(weight, SampleCount):
        return weight.world * weight.copies / ctx.world_size * steps or 1.0
    return float(steps) if weight is None else 1.0


def _weight_dtype(ctx: DistContext) -> torch.dtype:
    return wide_dtype(ctx.device)


def _no_weight(got: str) -> ConfigError:
    return ConfigError(
        "the weight is not valid", expected="a finite number, 0 or above", got=got, where="backward, weight="
    )


class Graph(NamedTuple):
    """Graphs and leaves of a pass: the arguments of torch.autograd.backward."""

    retain: bool = False
    create: bool = False
    inputs: Sequence[torch.Tensor] | torch.Tensor | None = None

    def check(self, ctx: DistContext) -> None:
        """Raise `ConfigError` where no graph, or no choice of leaves, is behind what ranks exchange or divide."""
        if not self.create and self.inputs is None:
            return
        spread = engine_of(ctx) is not None
        if self.create and (ctx.world_size > 1 or spread):
            raise ConfigError(
                "gradients that ranks exchange have no graph behind them",
                expected="create_graph=True on one rank",
                got=f"strategy {ctx.strategy} on {ctx.world_size} ranks",
                where="backward, create_graph=",
                fix="Use torch.autograd.grad(loss, tensors, create_graph=True), and add the term of it to the loss.",
            )
        leaves = [self.inputs] if isinstance(self.inputs, torch.Tensor) else self.inputs or ()
        if leaves and (spread or any(map(is_dtensor, leaves))):
            raise ConfigError(
                "parameters that are spread over ranks are no leaves of the graph",
                expected="parameters that are replicated on each rank, or other tensors",
                got=f"strategy {ctx.strategy} on {ctx.world_size} ranks",
                where="backward, inputs=",
                fix="Freeze the other parameters by requires_grad_(False).",
            )


_PLAIN = Graph()
_KEPT = "state = accel.backward(ctx, loss, state, ...), or accum = parts.backward(...)"


def run_backward(ctx: DistContext, loss: torch.Tensor, factor: float | torch.Tensor, graph: Graph = _PLAIN) -> None:
    """Run backward of a loss times a factor; raise `PeerError` where another rank was lost."""
    if ctx.device.type == "xla" and not isinstance(factor, torch.Tensor):
        factor = on_device(ctx, factor)
    engine = engine_of(ctx)
    try:
        # Backward runs outside of the loop's autocast block, which has taken its tf32 along.
        with matmul_precision(ctx):
            if engine is None:
                loss, grad = rooted(loss, factor)
                leaves = compiled_leaves((loss,)) if has_compiled() else ()
                torch.autograd.backward(loss, grad, graph.retain or graph.create, graph.create, inputs=graph.inputs)
                if leaves:
                    separate_gradients(leaves)
            else:
                engine.backward(ctx, times(loss, matched(factor, loss)), graph.retain)
    except RuntimeError as error:
        raise_lost_peer(ctx.comm, error, "backward")
        _raise_marked_twice(error, loss)
        if ctx.world_size > 1:
            _raise_mixed(error)
        if mixes_dtensors(error):
            raise called_again(error, str(error)) or term_of_parameters(str(error)) from error
        raise


def matched(factor: float | torch.Tensor, loss: torch.Tensor) -> float | torch.Tensor:
    """Return the factor of a loss, a tensor on its device and of its dtype."""
    return factor.detach().to(loss.device, loss.dtype) if isinstance(factor, torch.Tensor) else factor


def rooted(loss: torch.Tensor, factor: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what backward begins at, and its gradient: the factor, which saves a multiplication and its backward."""
    factor = matched(factor, loss)
    if is_dtensor(loss):
        return times(loss, factor), None
    if isinstance(factor, torch.Tensor):
        return loss, factor.reshape(())
    return loss, None if factor == 1.0 else torch.full_like(loss, factor)


def _raise_marked_twice(error: RuntimeError, loss: torch.Tensor) -> None:
    if "ready only once" not in str(error):
        return
    if reaches(loss, "CheckpointFunctionBackward"):
        raise StepError(
            "a block that reentrant checkpointing runs several times gives DDP its gradients several times",
            expected="checkpoint(block, hidden, use_reentrant=False)",
            got="use_reentrant=True, around parameters that the forward uses more than once",
            where="backward",
            fix="hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)",
        ) from error
    raise StepError(
        "DDP saw some gradients twice and others not at all in one forward",
        expected="all of them in each backward",
        got=str(error).partition(". ")[0],
        where="backward",
        fix="Add the losses and call backward once: (first + second). With find_unused_parameters=True"
        " also call the model once in each: DDP looks for unused parameters from the outputs of the last call.",
    ) from error


# DDP's error for a gradient that is sparse and should not be, or the reverse
_MIXED = {
    "Expected variable to have sparse gradient": "a dense gradient of an embedding with sparse=True",
    "Expected sparse gradient to be defined": "no gradient of an embedding with sparse=True",
    "storage of SparseTensorImpl": "a sparse gradient of another parameter",
}


def _raise_mixed(error: RuntimeError) -> None:
    for text, got in _MIXED.items():
        if text in str(error):
            raise StepError(
                "DDP exchanges the gradients of a parameter either sparse or dense",
                expected="sparse gradients in every backward from nn.Embedding or nn.EmbeddingBag with sparse=True, and"
                " from nothing else",
                got=got,
                where="backward",
                fix="Use the weight of such an embedding only by its forward; if a batch looks nothing up, add"
                " table(ids[:0]).sum() to the loss. Or build the embedding with sparse=False.",
            ) from error


@carries_state(1, "with {}:")
@context_first
def accumulate(ctx: DistContext, state: TrainState, *models: nn.Module) -> AbstractContextManager[None]:
    """Hold back the exchange of gradients in this block's forward and backward until `state.sync`.

    At the start of a window it looks for gradients left by an earlier one; `optimizer_step` refuses to step with them.

    Args:
        ctx: the context.
        state: state from `state.next(batch)`.
        models: all models that the block trains, from `prepare_model`.

    Returns:
        A context manager for one block.

    Raises:
        StepError: no micro-batch was begun; the window's gradients were cleared; at the end of a window's last block, a
            parameter took no part in the loss.
        PrepareError: a trainable model that is not prepared, on more ranks than one.
        PeerError: another rank was lost within the block.
        ContextClosedError: the context is closed.

    Examples:
        >>> state = state.next(batch)
        >>> with accel.accumulate(ctx, state, model):
        ...     state = accel.backward(ctx, model(batch.data[0]).square().mean(), state)
    """
    ctx.comm.check_open()
    return window_block(ctx, begun_window(state.accum, "accel.accumulate"), models)


def window_block(ctx: DistContext, accum: Accumulation, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Return the block of a micro-batch's forward and backward, which exchanges gradients or holds them back."""
    # Gradients are exchanged once a window: each rank accumulates until the last backward. Sharded models need memory
    # for full gradients meanwhile, which `sync_each_batch` saves.
    block = exchanging(ctx, *models) if accum.sync or accum.sync_each_batch else no_sync(ctx, *models)
    if accum.micro == 1 and not accum.backwards:
        # Noted here and refused by the step: a gradient that is there already would be summed into this window's.
        note_gradients(models)
    elif accum.micro == 2 and accum.backwards and not accum.sync_each_batch and engine_of(ctx) is None:
        # The usual slip is zero_grad() in every micro-batch, which leaves the step only the gradients of the last.
        check_kept(models)
    return block


@carries_state(2, "accum = {}")
@context_first
def backward(
    ctx: DistContext,
    loss: torch.Tensor,
    state: TrainState,
    *,
    weight: float | torch.Tensor | None = None,
    same_units: bool = False,
    retain_graph: bool = False,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | torch.Tensor | None = None,
) -> TrainState:
    """Add the gradients of `loss * weight` to the parameters. Exchanges gradients when the window ends.

    Args:
        ctx: the context.
        loss: shape [], a mean over `weight` units on this rank.
        state: the state within a batch.
        weight: number of real units behind the mean: samples (`batch.valid`, the default) or valid tokens. 0 adds
            nothing, if the loss's own gradient is finite: divide by tokens.clamp(min=1).
        same_units: whether an earlier backward of this micro-batch was over the same units; the losses are then added,
            and their weight counts once.
        retain_graph: as in torch.autograd.backward.
        create_graph: as there: whether gradients get a graph, and this one is kept. They are the gradients of the loss
            times its weight and the loss scale. On one rank only.
        inputs: as there: the leaves that gradients are added to; None for all. Of a model on several ranks all of its
            parameters or none, where this pass exchanges gradients.

    Returns:
        The state with the weight added.

    Raises:
        StepError: not a scalar loss with a gradient, a sum of torch's losses without `weight`, or calls out of order.
        ConfigError: a weight that is no number from 0; no `TrainState`; `create_graph` or `inputs` where ranks exchange
            or divide what they are about.
        PeerError: another rank was lost while gradients were exchanged.

    Examples:
        >>> state = accel.backward(ctx, model(batch.data[0]).square().mean(), state.next(batch))
        >>> state.sync
        True
    """
    began = perf_counter()
    given, weight = weight, weight_of(state, weight, same_units=same_units)
    if given is None and isinstance(weight, SampleCount):
        _check_mean(ctx, loss, weight, state.accum)
    if ctx.comm.closure is not None:
        refuse_in_closure(ctx)
    graph = Graph(retain_graph, create_graph, inputs)
    return after_backward(state, add_loss(ctx, loss, window_of(state), weight, graph, same_units=same_units), began)


def add_loss(
    ctx: DistContext,
    loss: torch.Tensor,
    window: StepWindow,
    weight: float | torch.Tensor | None,
    graph: Graph,
    *,
    same_units: bool,
) -> Accumulation:
    """Add the gradients of a loss times its weight to the parameters; return the window with the weight added."""
    ctx.comm.check_open()
    graph.check(ctx)
    check_loss(loss, "backward", "Use the mean over what `weight=` counts: loss.mean().")
    if loss.dtype in (torch.float16, torch.bfloat16):
        loss = loss.float()  # weight times scale does not fit into 16 bits
    accum = window.accum
    check_scale(accum, window.scaler)
    if accum.latest == accum.micro:  # a further pass of this batch: no later call would miss its weight
        mark_followed(ctx, window, _KEPT)
    added, factor = weigh(ctx, window.scaler, accum, weight, same_units=same_units)
    if graph.retain and accum.sync and ctx.world_size > 1:
        # A further backward of this graph comes after the exchange, so ranks then hold gradients that differ.
        added = msgspec.structs.replace(added, retained=True)
    # First the message of weights, then backward: it arrives while gradients are computed.
    shared = start_sharing(ctx, added)
    run_backward(ctx, loss, factor, graph)
    return with_loss(shared(), loss)


def _check_mean(ctx: DistContext, loss: torch.Tensor, weight: SampleCount, accum: Accumulation) -> None:
    """Raise `StepError` for a sum in the place of a mean, if several ranks or micro-batches have the samples of a step.

    A sum of one rank's samples is no mean over them, so its gradient would change with the number of ranks.
    """
    counted = weight.world * weight.copies
    is_divided = weight.copies < ctx.world_size or ctx.axes.cp > 1 or accum.steps > 1
    if is_divided and counted > ctx.world_size and isinstance(loss, torch.Tensor) and _is_sum(loss):  # pyright: ignore[reportUnnecessaryIsInstance] - check_loss refuses others
        raise StepError(
            "the loss is a sum, and without weight= it must be a mean over the samples of the batch",
            expected="a mean, so that the result does not depend on the number of ranks and micro-batches",
            got='a loss of torch with reduction="sum"',
            where="backward",
            fix="Divide it: state = accel.backward(ctx, loss / max(batch.valid, 1), state). Or pass the function that"
            " makes the sum to accel.train_step.",
        )


def _is_sum(loss: torch.Tensor) -> bool:
    """Return whether a term of a loss is one of torch's losses with `reduction="sum"`, by its graph. A penalty on
    parameters is none, as it sums no samples."""
    waiting = [loss.grad_fn]
    for _ in range(_MOST_TERMS):
        node = waiting.pop() if waiting else None
        if node is None:
            return False
        if getattr(node, "_saved_reduction", None) == _SUM and not _is_of_leaves(node):
            return True
        if node.name() in ("AddBackward0", "SubBackward0"):
            waiting += [each for each, _ in node.next_functions if each is not None]
    return False


def _is_of_leaves(node: Node) -> bool:
    """Return whether a function of a graph takes leaves alone, such as parameters."""
    return all(each is None or each.name() == "torch::autograd::AccumulateGrad" for each, _ in node.next_functions)


def check_loss(loss: torch.Tensor, where: str, fix: str) -> None:
    """Raise `StepError` unless a loss is a scalar with a gradient; `fix` says how to get one from several elements."""
    if not isinstance(loss, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass what models return
        hint = "Pass it without .item()." if isinstance(loss, float) else "Pass the tensor itself, such as output.loss."
        raise StepError("a loss must be a tensor", got=type(loss).__name__, where=where, fix=hint)
    if loss.ndim:
        raise StepError(
            "a loss must be a scalar",
            expected="shape []",
            got=f"shape {list(loss.shape)}",
            where=where,
            fix=fix,
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss has no gradient",
            expected="a loss computed from trainable parameters",
            got="requires_grad=False",
            where=where,
            fix="Look for no_grad, detach() or item() between the model and the loss, and for frozen parameters.",
        )
