# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step of a transformer on a rank of a mesh, at the moment when it is largest; pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from accel.estimate._activations import Kept, kept_by_block
from accel.estimate._plan import OPTIMIZERS
from accel.estimate._shards import Held, expert_shards, held_by
from accel.estimate._step import Copies, Step, copies_of, keeps_blocks, rank_stages, stream_bytes, wire_bytes
from accel.estimate._transformer import Transformer
from accel.topology import Axes, Plan

_ALL_FORWARD = ("GPipe", "LoopedBFS")  # schedules in which all forwards come before the backwards
Moment = Literal["loss", "block", "next block", "reduction", "last reduction", "optimizer"]


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on a rank at one moment of a step.

    Attributes:
        moment: the backward of the loss, that of the last block or of the next one, the reduction of the last block's
            gradients or of the first one's, or the optimizer's step.
        stage: index of the rank along pp.
        parameters: of parameters as stored.
        gradients: of gradients.
        optimizer: of optimizer state.
        activations: of what forward keeps for backward, logits included.
        gathered: of parameters in the compute format: gathered from other ranks, or converted by autocast.
        buffers: of gradients on their way to other ranks, and of temporaries of the loss and of the optimizer.
        host: in the host's memory, of shards that `Plan.offload` leaves there: no part of the total.
    """

    moment: Moment
    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    buffers: int
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts on the rank's device."""
        stored = self.parameters + self.gradients + self.optimizer
        return stored + self.activations + self.gathered + self.buffers


def rank_memory(model: Transformer, axes: Axes, step: Step, plan: Plan | None = None) -> RankMemory:
    """Return the memory of the rank that needs most, at the moment when it does.

    Args:
        model: sizes of the model.
        axes: of the mesh.
        step: tokens, formats and choices.
        plan: options of the spreading; None for the defaults.
    """
    chosen = plan or Plan()
    ranks = {0, min(1, axes.pp - 1), axes.pp - 1}  # those between hold no more micro-batches than the second
    found = [each for rank in ranks for each in memory_by_moment(model, axes, step, chosen, rank)]
    return max(found, key=lambda each: each.total)


def _offloaded(memory: RankMemory, full: int) -> RankMemory:
    """The memory of a rank whose shards, their gradients and their state lie in the host's."""
    shards = memory.gradients if memory.moment == "optimizer" else max(0, memory.gradients - full)
    return msgspec.structs.replace(
        memory,
        parameters=0,
        gradients=memory.gradients - shards,
        optimizer=0,
        buffers=0 if memory.moment == "optimizer" else memory.buffers,
        host=memory.parameters + shards + memory.optimizer,
    )


def memory_by_moment(model: Transformer, axes: Axes, step: Step, plan: Plan, rank: int) -> Iterator[RankMemory]:
    """Yield the memory of a rank along pp at each moment.

    Args:
        model, axes, step, plan: as for `rank_memory`.
        rank: index along pp.
    """
    copies = copies_of(axes, step.strategy)
    held = held_by(model, axes, plan, copies, rank)
    kept = kept_by_block(model, axes, plan, step, copies.engine)
    values, counts_steps = OPTIMIZERS[step.optimizer]
    parameters = held.total("shards") * step.stored_bytes
    state = values * parameters + 4 * counts_steps * held.total("tensors")
    full = _full_gradients(held, step, plan, copies)
    gradients = parameters + full
    earlier = _earlier(parameters, full, step, copies)
    flying = in_flight(plan, axes.pp, rank, step.micro_batches)
    waiting = _waiting(held, kept, step, flying)
    losses = step.micro_batches if axes.pp > 1 and plan.schedule in _ALL_FORWARD else 1
    logits = held.is_last * (kept.ends + kept.logits)
    received = _received(model, axes, step, plan, copies, rank)
    entry = kept.entry if step.recompute else kept.block
    wire = _wire(held, axes, copies)
    reduced = _reduced(held, step, plan, copies, wire)

    def at(moment: Moment, gradients: int, activations: int, blocks: int, buffers: int) -> RankMemory:
        found = RankMemory(
            moment=moment,
            stage=rank,
            parameters=parameters,
            gradients=gradients,
            optimizer=state,
            activations=activations,
            gathered=_gathered(held, step, plan, copies, blocks, flying, wire),
            buffers=buffers + received,
        )
        return _offloaded(found, full) if plan.offload and copies.engine == "fully_shard" else found

    layers = sum(held.layers)
    whole = layers if keeps_blocks(plan, axes) else 0
    again = kept.block if step.recompute else 0
    inside = kept.inside + _root_gradients(held, step, plan, copies)
    if held.is_last:
        yield at("loss", earlier, waiting + losses * logits, max(1, whole), kept.peak)
    waiting += (losses - 1) * logits
    yield at("block", earlier, waiting + again, max(2, whole), inside)
    if full:  # they are reduced beside the backward of the last micro-batch, when no other waits
        waiting = _waiting(held, kept, step, 1)
    if layers > 1:
        beside = inside + _on_its_way(held, step, plan, copies, wire)
        yield at("next block", earlier, waiting - entry + again, min(layers - 1, max(2, whole - 1)), beside)
    yield at("reduction", earlier, waiting - entry, min(layers - 1, max(2, whole - 1)), reduced)
    yield at("last reduction", gradients, waiting - layers * entry, 0, reduced)
    yield at("optimizer", parameters, 0, 0 if axes.pp == 1 else whole, parameters)


def in_flight(plan: Plan, pp: int, rank: int, micro_batches: int) -> int:
    """Return the most micro-batches, counted for each stage of a rank, whose backward is still to come.

    Args:
        plan: schedule and stages of a rank.
        pp: number of ranks along pp.
        rank: index along pp.
        micro_batches: number of micro-batches of the step.
    """
    if pp == 1:
        return 1
    most = micro_batches * plan.stages_per_rank
    if plan.schedule in _ALL_FORWARD:
        return most
    if plan.schedule == "1F1B":
        return min(most, pp - rank)
    if plan.schedule in ("ZBVZeroBubble", "DualPipeV"):
        return min(most, 2 * pp)
    return min(most, (plan.stages_per_rank - 1) * pp + 2 * (pp - rank - 1) + 1)


def _received(model: Transformer, axes: Axes, step: Step, plan: Plan, copies: Copies, rank: int) -> int:
    """Bytes of room for what stages before and behind send, which torch keeps for each micro-batch."""
    if axes.pp == 1:
        return 0
    last = axes.pp * plan.stages_per_rank - 1
    messages = sum((at > 0) + (at < last) for at in rank_stages(plan, axes.pp, rank))
    tokens = step.rows * step.tokens // axes.cp
    return messages * step.micro_batches * tokens * model.width * stream_bytes(step, copies.engine)


def _waiting(held: Held, kept: Kept, step: Step, flying: int) -> int:
    """Bytes of blocks whose backward is still to come, of all micro-batches in flight."""
    layers = max(held.layers)
    return flying * layers * (kept.entry if step.recompute else kept.block)


def _earlier(parameters: int, full: int, step: Step, copies: Copies) -> int:
    """Bytes of gradients while a forward runs: those of micro-batches before, and DDP's buckets."""
    held = (full or parameters) if step.micro_batches > 1 else 0
    if copies.engine != "ddp":
        return held
    return parameters + (held if step.held else 0)  # gradients that wait lie outside of the buckets


def _wire(held: Held, axes: Axes, copies: Copies) -> int:
    """Elements of a block on its way to or from other ranks, filled up to shards of equal length."""
    experts = held.block.experts if axes.ep > 1 else 0
    return copies.shards * (held.block.shards - experts) + expert_shards(axes, copies) * experts


def _full_gradients(held: Held, step: Step, plan: Plan, copies: Copies) -> int:
    """Bytes of gradients that wait whole, for the last micro-batch to reduce them."""
    if copies.engine != "fully_shard" or not step.held or step.micro_batches == 1:
        return 0
    return held.total("whole") * max(wire_bytes(step, plan)[1], step.compute_bytes)


def _gathered(held: Held, step: Step, plan: Plan, copies: Copies, blocks: int, flying: int, wire: int) -> int:
    """Bytes of parameters in the compute format while so many blocks are used; autocast converts in each forward."""
    size = wire_bytes(step, plan)[0]
    if copies.engine != "fully_shard":
        stages = plan.stages_per_rank if flying > 1 else 1
        return held.total("matrices") * size * flying // stages if size < step.stored_bytes else 0
    if copies.shards == 1 and size == step.stored_bytes:
        return 0
    used = min(blocks, sum(held.layers))  # one of them is on its way
    return size * (held.root.whole + max(0, used - 1) * held.block.whole + min(used, 1) * max(wire, held.block.whole))


def _root_gradients(held: Held, step: Step, plan: Plan, copies: Copies) -> int:
    """Bytes of the gradients outside of the blocks, which are reduced last."""
    return held.root.whole * wire_bytes(step, plan)[0] if copies.engine == "fully_shard" else 0


def _reduced(held: Held, step: Step, plan: Plan, copies: Copies, wire: int) -> int:
    """Bytes of the gradients of a block, and of the root's, before and while they are reduced."""
    if copies.engine != "fully_shard":
        return 0
    block = held.block.whole * wire_bytes(step, plan)[0]
    return _root_gradients(held, step, plan, copies) + block + _on_its_way(held, step, plan, copies, wire)


def _on_its_way(held: Held, step: Step, plan: Plan, copies: Copies, wire: int) -> int:
    """Bytes of the gradients of a block while ranks sum them, filled up to shards of equal length."""
    if copies.engine != "fully_shard":
        return 0
    return max(wire, held.block.whole) * wire_bytes(step, plan)[1]
