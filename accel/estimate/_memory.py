# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step on a rank of a mesh, at the moment when it is largest; pure.

Reference: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

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
        moment: the end of a forward with recomputation, the backward of the loss, of the last block or of the next one,
            the reduction of the last block's gradients or of the first one's, or the optimizer's step.
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
        plan: options of the spreading; `Plan()` by default.

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


def memory_by_moment(
    model: Model | Transformer, axes: Axes, step: EstimatedStep, plan: Plan, rank: int
) -> Iterator[RankMemory]:
    """Yield the memory of a rank along pp at each moment."""
    copies = copies_of(axes, step.strategy)
    held = held_by(model, axes, plan, step, copies, rank)
    kept = kept_by(model, axes, plan, step, copies.engine, len(held.blocks))
    return _RankStep(model, axes, step, plan, rank, copies, held, kept).moments()


class _RankStep(NamedTuple):
    """A step of one rank along pp; the methods return bytes, unless they say otherwise."""

    model: Model | Transformer  # the description of a model, or sizes of a transformer
    axes: Axes  # the mesh
    step: EstimatedStep
    plan: Plan  # options of the spreading
    rank: int  # index along pp
    copies: EqualRanks  # ranks with equal parameters
    held: HeldParameters  # parameters of the rank
    kept: Kept  # tensors that forward keeps for backward

    def moments(self) -> Iterator[RankMemory]:
        """Yield the memory at each moment."""
        step, plan, held, kept = self.step, self.plan, self.held, self.kept
        trained = held.every.trained
        full = self.full_gradients()
        earlier = self.earlier(full)
        flying = in_flight(plan, self.axes.pp, self.rank, step.micro_batches)
        images = self.of_encoder() if held.is_first else 0
        waiting = flying * (max(self.entries()) + images)
        losses = step.micro_batches if self.axes.pp > 1 and plan.schedule in _ALL_FORWARD else 1
        logits = held.is_last * (kept.ends + kept.logits)
        entry = self.entry(kept.block)
        on_its_way = self.on_its_way()
        reduced = self.reduced() + on_its_way
        units = len(held.blocks)
        whole = units if keeps_blocks(plan, self.axes) else 0

        known = self.at_all_moments()

        def at(moment: Moment, gradients: int, activations: int, blocks: int, buffers: int) -> RankMemory:
            buffers += known.buffers
            gathered = self.gathered(blocks, flying, moment)
            found = replace(known, moment=moment, gradients=gradients, gathered=gathered, buffers=buffers)
            if known.activations is not None:
                found = replace(found, activations=activations)
            return self.with_host(found, full, flying)

        again = self.again()
        layers = sum(held.layers)
        ahead = [min(layers - 1, blocks) * entry * step.offload for blocks in (1, 2)]  # come back from the host
        inside = kept.inside + self.root_gradients()
        if step.recompute:
            yield at("forward", earlier, waiting, max(1, whole), 0)
        if held.is_last:
            yield at("loss", earlier, waiting + losses * logits, max(1, whole), kept.peak)
        waiting += (losses - 1) * logits + ahead[0]
        yield at("block", earlier, waiting + again, max(2, whole), inside)
        if full:  # they are reduced during the backward of the last micro-batch, when no other waits
            waiting = max(self.entries()) + images + ahead[0]
        waiting += ahead[1] - ahead[0]
        others = min(units - 1, max(2, whole - 1))
        if layers > 1:
            yield at("next block", earlier, waiting - entry + again, others, inside + on_its_way)
        summed = on_its_way if layers > 1 and _keeps_a_sum() else 0  # until the next is formed; its parameters are free
        blocks = [(others, reduced), (others - bool(summed), reduced + summed)]
        yield max((at("reduction", earlier, waiting - entry, *each) for each in blocks), key=lambda each: each.total)
        first = waiting - images - sum(self.entries()) - ahead[1]
        yield at("last reduction", trained + full, first, 0, reduced + summed)
        temporaries = OPTIMIZERS[step.optimizer].temporaries * trained
        yield at("optimizer", trained, 0, whole if self.axes.pp > 1 and self.is_sharded else 0, temporaries)

    def at_all_moments(self) -> RankMemory:
        """Return the parts that do not change within a step; no activations where they are not known."""
        model = self.model
        return RankMemory(
            moment="forward",
            stage=self.rank,
            parameters=self.held.every.stored + (model.buffer_bytes if isinstance(model, Model) else 0),
            gradients=0,
            optimizer=self.state(),
            activations=0 if isinstance(model, Transformer) or model.knows_activations else None,
            gathered=0,
            buffers=self.received(),
        )

    def with_host(self, memory: RankMemory, full: int, flying: int) -> RankMemory:
        """Return the memory with what the plan, and `offload_activations`, leave on the host."""
        if self.plan.offload == "optimizer":
            memory = self.without_state(memory)
        elif self.plan.offload and self.is_sharded:
            memory = _offloaded(memory, full)
        return replace(memory, host=memory.host + (0 if memory.moment == "optimizer" else flying * self.away()))

    @property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` exchanges the gradients."""
        return self.copies.engine == "fully_shard"

    def without_state(self, memory: RankMemory) -> RankMemory:
        """Return the memory with the optimizer's state on the host, but for two buckets while they are stepped."""
        if memory.moment != "optimizer":
            return replace(memory, optimizer=0, host=memory.host + memory.optimizer)
        model = self.model
        # over all ranks; stacks of experts are one for each
        listed = model.parameters if isinstance(model, Model) else [*model.embedding(), *model.head(), *model.block()]
        bucket = max(STATE_BUCKET // self.step.stored_bytes, *(each.count for each in listed))
        share = min(1.0, bucket * self.axes.pp / model.count)
        state = int(memory.optimizer * min(1.0, 2 * share))
        return replace(memory, optimizer=state, buffers=int(memory.buffers * share), host=memory.optimizer - state)

    def state(self) -> int:
        """Return the optimizer's state on the rank that has most."""
        optimizer = OPTIMIZERS[self.step.optimizer]
        if not self.step.dealt or self.copies.engine != "ddp":
            return optimizer.state(self.held.every.trained, self.held.every.tensors)
        # ZeroRedundancyOptimizer gives whole parameters, the largest first, each to the rank with the fewest elements
        counts = [0] * self.copies.replicas
        sizes = [0] * self.copies.replicas
        trained = [parameter for parameter in self.model.parameters if parameter.trained]
        for parameter in sorted(trained, key=lambda each: each.count, reverse=True):
            rank = counts.index(min(counts))
            counts[rank] += parameter.count
            sizes[rank] += optimizer.state(parameter.count * self.step.item_bytes(parameter), 1)
        return max(sizes)

    def received(self) -> int:
        """Return the room for what neighbouring stages send, which torch keeps for each micro-batch."""
        sizes = sizes_of(self.model)
        if self.axes.pp == 1 or sizes is None:
            return 0
        step, stages = self.step, self.axes.pp * self.plan.stages_per_rank
        messages = sum((at > 0) + (at < stages - 1) for at in rank_stages(self.plan, self.axes.pp, self.rank))
        tokens = step.rows * step.tokens // self.axes.cp * sizes.width * stream_bytes(step, self.copies.engine)
        return messages * step.micro_batches * (tokens + feature_bytes(sizes, self.axes, step))

    def again(self) -> int:
        """Return what a block computes again, in addition to what it has kept."""
        block, step = self.kept.block, self.step
        return block.whole - (block.products if step.keep else 0) if step.recompute else 0

    def entry(self, block: KeptBlock) -> int:
        """Return what one block keeps until its backward."""
        if not self.step.recompute:
            return block.whole
        return block.entry + (block.products if self.step.keep else 0)

    def entries(self, *, offload: bool | None = None) -> Sequence[int]:
        """Return what the blocks of each stage keep on the device; `offload` in place of the step's."""
        block = self.entry(self.kept.block)
        dense = self.entry(self.kept.dense)
        if self.step.offload if offload is None else offload:
            return [block * min(layers, 1) for layers in self.held.layers]
        stages = zip(self.held.layers, self.held.dense, strict=True)
        return [(layers - some) * block + some * dense for layers, some in stages]

    def away(self) -> int:
        """Return what the blocks of a micro-batch keep on the host."""
        return max(self.entries(offload=False)) - max(self.entries())

    def of_encoder(self) -> int:
        """Return what the image encoder's blocks keep until after the decoder's backward."""
        if self.kept.tower is None:
            return 0
        count, block = self.kept.tower
        return count * self.entry(block) + self.kept.around

    def earlier(self, full: int) -> int:
        """Return the gradients during a forward: of earlier micro-batches, and DDP's buckets."""
        trained = self.held.every.trained
        held = (full or trained) if self.step.micro_batches > 1 else 0
        if self.copies.engine != "ddp":
            return held
        return trained + (held if self.step.held else 0)  # gradients that wait are outside of the buckets

    def separate_experts(self) -> int:
        """Return the elements of a block's experts on their way, where they are a separate FSDP unit."""
        return expert_shards(self.axes, self.copies) * self.held.block.experts if self.axes.ep > 1 else 0

    def wire(self) -> int:
        """Return the elements of a block on their way between ranks, padded to shards of equal length."""
        separate = self.separate_experts()
        experts = self.held.block.experts if separate else 0
        return self.copies.shards * (self.held.block.shards - experts) + separate

    def full_gradients(self) -> int:
        """Return the unsharded gradients that wait for the last micro-batch to reduce them."""
        if not self.is_sharded or not self.step.held or self.step.micro_batches == 1:
            return 0
        return self.held.every.gradients * max(wire_bytes(self.step, self.plan)[1], self.step.compute_bytes)

    def gathered(self, blocks: int, flying: int, moment: Moment) -> int:
        """Return the parameters in the compute dtype while so many blocks are used."""
        held, step, plan = self.held, self.step, self.plan
        size = wire_bytes(step, plan)[0]
        if not self.is_sharded:
            if not blocks:
                return 0  # a backward has freed them
            if self.kept.copies is not None:
                return self.kept.copies
            if step.recompute and moment != "forward":  # blocks convert again in backward, one after another
                return size * (held.root.matrices * flying + held.block.matrices)
            stages = plan.stages_per_rank if flying > 1 else 1
            before = held.root if step.recompute else held.every
            return size * (held.every.matrices + before.matrices * (flying - 1)) // stages
        if self.copies.shards == 1 and size == step.stored_bytes:
            return 0
        # experts that are a separate unit are not fetched ahead with their block, but in its backward
        separate = 0 if keeps_blocks(plan, self.axes) else self.separate_experts()
        used = min(blocks, len(held.blocks))  # one of them is on its way
        ahead = sum(each - separate if each == held.block.whole else each for each in held.blocks[1:used])
        return size * (held.root.whole + ahead + min(used, 1) * max(self.wire(), held.block.whole))

    def root_gradients(self) -> int:
        """Return the gradients outside of the blocks, which are reduced last."""
        return self.held.root.gradients * wire_bytes(self.step, self.plan)[0] if self.is_sharded else 0

    def reduced(self) -> int:
        """Return the gradients of a block, and of the root, before they are reduced."""
        block = self.held.block.gradients * wire_bytes(self.step, self.plan)[0] if self.is_sharded else 0
        return self.root_gradients() + block

    def on_its_way(self) -> int:
        """Return the gradients of a block while ranks sum them, padded to shards of equal length."""
        if not self.is_sharded:
            return 0
        block = self.held.block
        elements = max(self.wire(), block.whole) if block.gradients == block.whole else block.gradients
        return elements * wire_bytes(self.step, self.plan)[1]


def _offloaded(memory: RankMemory, full: int) -> RankMemory:
    """Return the memory with shards, their gradients and their state on the host."""
    shards = memory.gradients if memory.moment == "optimizer" else max(0, memory.gradients - full)
    return replace(
        memory,
        parameters=0,
        gradients=memory.gradients - shards,
        optimizer=0,
        buffers=0 if memory.moment == "optimizer" else memory.buffers,
        host=memory.parameters + shards + memory.optimizer,
    )


def in_flight(plan: Plan, pp: int, rank: int, micro_batches: int) -> int:
    """Return the most micro-batches that wait for their backward, counted for each stage of a rank along pp."""
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


@functools.lru_cache(maxsize=1)
def _keeps_a_sum() -> bool:
    """Whether the torch installed keeps the gradients that `fully_shard` summed last, as 2.12 does and no other."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms

    try:
        return tuple(map(int, version("torch").split(".")[:2])) == (2, 12)
    except PackageNotFoundError:
        return False


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """A way for equal ranks to share a step."""

    about: str  # description
    name: StrategyName  # strategy of the axis `dp`
    dealt: bool = False  # whether they only share the optimizer's state
    plan: Plan = Plan()  # options of the spreading

    def of(self, step: EstimatedStep) -> EstimatedStep:
        """Return a step with this strategy."""
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
        strategy: "ddp", "ddp-zero", "fsdp" or "fsdp-keep", in place of the step's.
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
