# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step on a rank of a mesh, at the moment when it is largest; pure.

Reference: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from accel.errors._checks import check_choice
from accel.estimate._kept import Kept, KeptBlock, kept_by
from accel.estimate._model import Model, Transformer, sizes_of
from accel.estimate._step import (
    OPTIMIZERS,
    EqualRanks,
    EstimatedStep,
    HeldParameters,
    busy_ranks,
    copies_of,
    expert_shards,
    feature_bytes,
    held_by,
    keeps_blocks,
    rank_stages,
    stream_bytes,
    wire_bytes,
)
from accel.formats import StrategyName
from accel.topology import SCHEDULES_IN_A_V, STATE_BUCKET, Axes, Plan

_ALL_FORWARD = ("GPipe", "LoopedBFS")  # schedules in which all forwards come before the backwards
Moment = Literal["forward", "loss", "block", "next block", "reduction", "last reduction", "optimizer"]


PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")  # of the total


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on a rank at one moment of a step.

    Attributes:
        moment: the end of a forward whose blocks compute again, the backward of the loss, that of the last block or of
            the next one, the reduction of the last block's gradients or of the first one's, or the optimizer's step.
        stage: index of the rank along pp.
        parameters: of parameters as stored, and of buffers.
        gradients: of gradients.
        optimizer: of optimizer state.
        activations: of what forward keeps for backward, logits included; None where they are not known.
        gathered: of parameters in the compute format: gathered from other ranks, or converted by autocast.
        buffers: of gradients on their way to other ranks, and of temporaries of the loss and of the optimizer.
        host: bytes in the host's memory, by `Plan.offload` and `offload_activations`; no part of the total.
    """

    moment: Moment
    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    gathered: int
    buffers: int
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of all known parts on the rank's device."""
        stored = self.parameters + self.gradients + self.optimizer
        return stored + (self.activations or 0) + self.gathered + self.buffers


def rank_memory(model: Model | Transformer, axes: Axes, step: EstimatedStep, plan: Plan | None = None) -> RankMemory:
    """Return the memory of the rank that needs most, at the moment when it does.

    Args:
        model: the description of a model, or sizes of a transformer.
        axes: the mesh.
        step: the step.
        plan: options of the spreading; those of `Plan()` by default.

    Raises:
        ConfigError: a mesh of more than data parallelism for a model without the sizes of a transformer.
    """
    return max(_moments(model, axes, step, plan), key=lambda each: each.total)


def largest_parts(
    model: Model | Transformer, axes: Axes, step: EstimatedStep, plan: Plan | None = None
) -> Mapping[str, int | None]:
    """Return the most bytes of each part, whenever in the step: not at one moment, so their sum is above a total."""
    found = list(_moments(model, axes, step, plan))
    return {part: max((getattr(each, part) for each in found), key=lambda size: size or 0) for part in PARTS}


def _moments(model: Model | Transformer, axes: Axes, step: EstimatedStep, plan: Plan | None) -> Iterator[RankMemory]:
    for rank in busy_ranks(model, axes, step, plan or Plan()):
        yield from memory_by_moment(model, axes, step, plan or Plan(), rank)


def _offloaded(memory: RankMemory, full: int) -> RankMemory:
    """The memory of a rank whose shards, their gradients and their state are in host memory."""
    shards = memory.gradients if memory.moment == "optimizer" else max(0, memory.gradients - full)
    return replace(
        memory,
        parameters=0,
        gradients=memory.gradients - shards,
        optimizer=0,
        buffers=0 if memory.moment == "optimizer" else memory.buffers,
        host=memory.parameters + shards + memory.optimizer,
    )


def _with_host(
    memory: RankMemory,
    model: Model | Transformer,
    axes: Axes,
    step: EstimatedStep,
    plan: Plan,
    full: int,
    away: int,
) -> RankMemory:
    """The memory of a rank with what the plan, and `offload_activations`, leave in the host's."""
    if plan.offload == "optimizer":
        memory = _without_state(memory, model, axes, step)
    elif plan.offload and copies_of(axes, step.strategy).engine == "fully_shard":
        memory = _offloaded(memory, full)
    return replace(memory, host=memory.host + (0 if memory.moment == "optimizer" else away))


def _without_state(memory: RankMemory, model: Model | Transformer, axes: Axes, step: EstimatedStep) -> RankMemory:
    """The memory of a rank whose optimizer's state is on the host, but for two buckets while they are stepped."""
    if memory.moment != "optimizer":
        return replace(memory, optimizer=0, host=memory.host + memory.optimizer)
    bucket = max(STATE_BUCKET // step.stored_bytes, _largest_parameter(model, axes))
    share = min(1.0, bucket * axes.pp / model.count)
    state = int(memory.optimizer * min(1.0, 2 * share))
    temporaries = int(memory.buffers * share)
    return replace(memory, optimizer=state, buffers=temporaries, host=memory.optimizer - state)


def _largest_parameter(model: Model | Transformer, axes: Axes) -> int:
    """Elements of the largest parameter over all ranks; stacks of experts are one for each."""
    if isinstance(model, Model):
        return max(each.count for each in model.parameters)
    return max(each.count for each in (*model.embedding(), *model.head(), *model.block()))


def memory_by_moment(
    model: Model | Transformer, axes: Axes, step: EstimatedStep, plan: Plan, rank: int
) -> Iterator[RankMemory]:
    """Yield the memory of a rank along pp at each moment."""
    copies = copies_of(axes, step.strategy)
    held = held_by(model, axes, plan, step, copies, rank)
    kept = kept_by(model, axes, plan, step, copies.engine, len(held.blocks))
    trained = held.every.trained
    state = _state(model, held, step, copies)
    full = _full_gradients(held, step, plan, copies)
    earlier = _earlier(trained, full, step, copies)
    flying = in_flight(plan, axes.pp, rank, step.micro_batches)
    beside = _beside(kept, step) if held.is_first else 0
    waiting = _waiting(held, kept, step, flying) + flying * beside
    losses = step.micro_batches if axes.pp > 1 and plan.schedule in _ALL_FORWARD else 1
    logits = held.is_last * (kept.ends + kept.logits)
    entry = _entry(kept.block, step)
    wire = _wire(held, axes, copies)
    reduced = _reduced(held, step, plan, copies, wire)
    units = len(held.blocks)
    whole = units if keeps_blocks(plan, axes) else 0
    separate = 0 if whole else _separate_experts(held, axes, copies)

    def at(moment: Moment, gradients: int, activations: int, blocks: int, buffers: int) -> RankMemory:
        found = RankMemory(
            moment=moment,
            stage=rank,
            parameters=held.every.stored + (model.buffer_bytes if isinstance(model, Model) else 0),
            gradients=gradients,
            optimizer=state,
            activations=activations if isinstance(model, Transformer) or model.knows_activations else None,
            gathered=_gathered(held, kept, step, plan, copies, blocks, flying, wire, moment, separate),
            buffers=buffers + _received(model, axes, step, plan, copies, rank),
        )
        return _with_host(found, model, axes, step, plan, full, _away(held, kept, step, flying))

    again = _again(kept.block, step)
    layers = sum(held.layers)
    ahead = _ahead(kept, step, layers)
    inside = kept.inside + _root_gradients(held, step, plan, copies)
    if step.recompute:
        yield at("forward", earlier, waiting, max(1, whole), 0)
    if held.is_last:
        yield at("loss", earlier, waiting + losses * logits, max(1, whole), kept.peak)
    waiting += (losses - 1) * logits + ahead[0]
    yield at("block", earlier, waiting + again, max(2, whole), inside)
    if full:  # they are reduced beside the backward of the last micro-batch, when no other waits
        waiting = _waiting(held, kept, step, 1) + beside + ahead[0]
    waiting += ahead[1] - ahead[0]
    others = min(units - 1, max(2, whole - 1))
    on_its_way = _on_its_way(held, step, plan, copies, wire)
    if layers > 1:
        yield at("next block", earlier, waiting - entry + again, others, inside + on_its_way)
    summed = on_its_way if layers > 1 and _keeps_a_sum() else 0  # until the next is formed; its parameters are free
    blocks = [(others, reduced), (others - bool(summed), reduced + summed)]
    yield max((at("reduction", earlier, waiting - entry, *each) for each in blocks), key=lambda each: each.total)
    reduced += summed
    first = waiting - beside - sum(_entries(held, kept, step)) - ahead[1]
    yield at("last reduction", trained + full, first, 0, reduced)
    temporaries = OPTIMIZERS[step.optimizer].temporaries * trained
    yield at("optimizer", trained, 0, whole if axes.pp > 1 and copies.engine == "fully_shard" else 0, temporaries)


def _state(model: Model | Transformer, held: HeldParameters, step: EstimatedStep, copies: EqualRanks) -> int:
    """Bytes of the optimizer's state on the rank that has most."""
    optimizer = OPTIMIZERS[step.optimizer]
    if not step.dealt or copies.engine != "ddp":
        return optimizer.state(held.every.trained, held.every.tensors)
    # ZeroRedundancyOptimizer gives whole parameters, the largest first, each to the rank with the fewest elements
    counts = [0] * copies.replicas
    sizes = [0] * copies.replicas
    trained = [parameter for parameter in model.parameters if parameter.trained]
    for parameter in sorted(trained, key=lambda each: each.count, reverse=True):
        rank = counts.index(min(counts))
        counts[rank] += parameter.count
        sizes[rank] += optimizer.state(parameter.count * step.item_bytes(parameter), 1)
    return max(sizes)


def in_flight(plan: Plan, pp: int, rank: int, micro_batches: int) -> int:
    """Return the most micro-batches, counted for each stage of a rank along pp, whose backward is still to come."""
    if pp == 1:
        return 1
    most = micro_batches * plan.stages_per_rank
    if plan.schedule in _ALL_FORWARD:
        return most
    if plan.schedule == "1F1B":
        return min(most, pp - rank)
    if plan.schedule in SCHEDULES_IN_A_V:
        return min(most, 2 * pp)
    return min(most, (plan.stages_per_rank - 1) * pp + 2 * (pp - rank - 1) + 1)


def _received(
    model: Model | Transformer, axes: Axes, step: EstimatedStep, plan: Plan, copies: EqualRanks, rank: int
) -> int:
    """Bytes of room for what stages before and behind send, which torch keeps for each micro-batch."""
    sizes = sizes_of(model)
    if axes.pp == 1 or sizes is None:
        return 0
    last = axes.pp * plan.stages_per_rank - 1
    messages = sum((at > 0) + (at < last) for at in rank_stages(plan, axes.pp, rank))
    tokens = step.rows * step.tokens // axes.cp * sizes.width * stream_bytes(step, copies.engine)
    return messages * step.micro_batches * (tokens + feature_bytes(sizes, axes, step))


def _again(kept: KeptBlock, step: EstimatedStep) -> int:
    """Bytes of a block that computes again, beside what it has kept."""
    return kept.whole - (kept.products if step.keep else 0) if step.recompute else 0


def _waiting(held: HeldParameters, kept: Kept, step: EstimatedStep, flying: int) -> int:
    """Bytes of blocks whose backward is still to come, of all micro-batches in flight."""
    return flying * max(_entries(held, kept, step))


def _away(held: HeldParameters, kept: Kept, step: EstimatedStep, flying: int) -> int:
    """Bytes of blocks that are on the host until their backward."""
    if not step.offload:
        return 0
    return flying * (max(_entries(held, kept, replace(step, offload=False))) - max(_entries(held, kept, step)))


def _ahead(kept: Kept, step: EstimatedStep, layers: int) -> Sequence[int]:
    """Bytes that have come back from the host before the backward of the last block, and of the next one."""
    return [min(layers - 1, blocks) * _entry(kept.block, step) * step.offload for blocks in (1, 2)]


def _entries(held: HeldParameters, kept: Kept, step: EstimatedStep) -> Sequence[int]:
    """Bytes on the device of the blocks of each stage of the rank."""
    block, dense = (_entry(each, step) for each in (kept.block, kept.dense))
    if step.offload:
        return [block * min(layers, 1) for layers in held.layers]
    return [(layers - some) * block + some * dense for layers, some in zip(held.layers, held.dense, strict=True)]


def _entry(kept: KeptBlock, step: EstimatedStep) -> int:
    """Bytes of one block whose backward is still to come."""
    if not step.recompute:
        return kept.whole
    return kept.entry + (kept.products if step.keep else 0)


def _beside(kept: Kept, step: EstimatedStep) -> int:
    """Bytes of the image encoder's blocks, kept until after the decoder's backward."""
    if kept.tower is None:
        return 0
    count, block = kept.tower
    return count * _entry(block, step) + kept.around


def _earlier(trained: int, full: int, step: EstimatedStep, copies: EqualRanks) -> int:
    """Bytes of gradients while a forward runs: those of micro-batches before, and DDP's buckets."""
    held = (full or trained) if step.micro_batches > 1 else 0
    if copies.engine != "ddp":
        return held
    return trained + (held if step.held else 0)  # gradients that wait are outside of the buckets


def _wire(held: HeldParameters, axes: Axes, copies: EqualRanks) -> int:
    """Elements of a block on its way to or from other ranks, filled up to shards of equal length."""
    separate = _separate_experts(held, axes, copies)
    experts = held.block.experts if separate else 0
    return copies.shards * (held.block.shards - experts) + separate


def _separate_experts(held: HeldParameters, axes: Axes, copies: EqualRanks) -> int:
    """Elements of a block's experts on their way, where they are a unit of their own."""
    return expert_shards(axes, copies) * held.block.experts if axes.ep > 1 else 0


def _full_gradients(held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks) -> int:
    """Bytes of gradients that wait whole, for the last micro-batch to reduce them."""
    if copies.engine != "fully_shard" or not step.held or step.micro_batches == 1:
        return 0
    return held.every.gradients * max(wire_bytes(step, plan)[1], step.compute_bytes)


def _gathered(
    held: HeldParameters,
    kept: Kept,
    step: EstimatedStep,
    plan: Plan,
    copies: EqualRanks,
    blocks: int,
    flying: int,
    wire: int,
    moment: Moment,
    separate: int,
) -> int:
    """Bytes of parameters in the compute format while so many blocks are used; autocast converts in each forward.

    `separate`: elements of a block's experts that are not fetched ahead with it, but in its own backward.
    """
    size = wire_bytes(step, plan)[0]
    if copies.engine != "fully_shard":
        if not blocks:
            return 0  # a backward has freed them
        if kept.copies is not None:
            return kept.copies
        if step.recompute and moment != "forward":  # blocks convert again in backward, one after another
            return size * (held.root.matrices * flying + held.block.matrices)
        stages = plan.stages_per_rank if flying > 1 else 1
        before = held.root if step.recompute else held.every
        return size * (held.every.matrices + before.matrices * (flying - 1)) // stages
    if copies.shards == 1 and size == step.stored_bytes:
        return 0
    used = min(blocks, len(held.blocks))  # one of them is on its way
    ahead = sum(each - separate if each == held.block.whole else each for each in held.blocks[1:used])
    return size * (held.root.whole + ahead + min(used, 1) * max(wire, held.block.whole))


def _root_gradients(held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks) -> int:
    """Bytes of the gradients outside of the blocks, which are reduced last."""
    return held.root.gradients * wire_bytes(step, plan)[0] if copies.engine == "fully_shard" else 0


def _reduced(held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks, wire: int) -> int:
    """Bytes of the gradients of a block, and of the root's, before and while they are reduced."""
    if copies.engine != "fully_shard":
        return 0
    block = held.block.gradients * wire_bytes(step, plan)[0]
    return _root_gradients(held, step, plan, copies) + block + _on_its_way(held, step, plan, copies, wire)


def _on_its_way(held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks, wire: int) -> int:
    """Bytes of the gradients of a block while ranks sum them, filled up to shards of equal length."""
    if copies.engine != "fully_shard":
        return 0
    block = held.block
    elements = max(wire, block.whole) if block.gradients == block.whole else block.gradients
    return elements * wire_bytes(step, plan)[1]


@functools.lru_cache(maxsize=1)
def _keeps_a_sum() -> bool:
    """Whether the torch installed keeps the gradients that `fully_shard` summed last, as 2.12 does and no other."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms

    try:
        return tuple(map(int, version("torch").split(".")[:2])) == (2, 12)
    except PackageNotFoundError:
        return False


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """A way for equal ranks to share a step.

    Attributes:
        about: description.
        name: strategy of the axis `dp`.
        dealt: whether they share the optimizer's state alone.
        plan: options of the spreading.
    """

    about: str
    name: StrategyName
    dealt: bool = False
    plan: Plan = Plan()

    def of(self, step: EstimatedStep) -> EstimatedStep:
        """Return a step with this strategy instead of its own."""
        return replace(step, strategy=self.name, dealt=self.dealt)


STRATEGIES: Mapping[str, Strategy] = {
    "ddp": Strategy(about="every rank holds all", name="ddp"),
    "ddp-zero": Strategy(about="DDP with ZeroRedundancyOptimizer", name="ddp", dealt=True),
    "fsdp-keep": Strategy(
        about="fully_shard(reshard_after_forward=False)", name="fsdp", plan=Plan(reshard_after_forward=False)
    ),
    "fsdp": Strategy(about="fully_shard", name="fsdp"),
}
_MOST_RANKS = 1 << 16


def strategy_memory(model: Model, strategy: str, step: EstimatedStep, nproc: int = 1) -> RankMemory:
    """Return the memory of a rank of a mesh with the one axis `dp`.

    Args:
        model: the description of a model.
        strategy: "ddp", "ddp-zero", "fsdp" or "fsdp-keep", in place of that of the step.
        step: the step.
        nproc: number of ranks.

    Raises:
        ConfigError: an unknown strategy.
    """
    check_choice(strategy, list(STRATEGIES), "unknown strategy", where="strategy")
    how = STRATEGIES[strategy]
    return rank_memory(model, Axes(dp=nproc), how.of(step), how.plan)


def fewest_ranks(model: Model, limit: int, strategy: str, step: EstimatedStep, *, least: int = 1) -> int:
    """Return the smallest of `least`, twice that and so on, at which a step fits into `limit` bytes; 0 if none."""
    nproc = least
    while nproc <= _MOST_RANKS:
        if strategy_memory(model, strategy, step, nproc).total <= limit:
            return nproc
        nproc *= 2
    return 0
