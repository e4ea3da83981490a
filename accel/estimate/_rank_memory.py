# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step of a transformer on a rank of a mesh, at the moment when it is largest; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from accel.estimate._plan import OPTIMIZERS, Parameter
from accel.estimate._transformer import (
    Engine,
    EqualRanks,
    EstimatedStep,
    Transformer,
    copies_of,
    divides_logits,
    is_expert,
    keeps_blocks,
    rank_stages,
    stage_layers,
    stream_bytes,
    wire_bytes,
)
from accel.topology import Axes, Plan

_FP32 = 4


class Kept(NamedTuple):
    """Bytes of a micro-batch.

    Attributes:
        block: of one block.
        entry: of one block that computes again in backward: its input.
        ends: of what stands behind the blocks, without the logits.
        logits: of the logits, until their backward is done.
        peak: further ones while the loss's backward computes.
        inside: further ones while a block's backward computes.
    """

    block: int
    entry: int
    ends: int
    logits: int
    peak: int
    inside: int


def kept_by_block(model: Transformer, axes: Axes, plan: Plan, step: EstimatedStep, engine: Engine) -> Kept:
    """Return what one micro-batch keeps on a rank.

    Args:
        model: sizes of the model.
        axes: of the mesh.
        plan: options of the spreading.
        step: tokens and formats.
        engine: of data parallelism: `fully_shard` computes with parameters in the compute format, others by autocast.
    """
    tokens = step.rows * step.tokens // axes.cp
    own = tokens // axes.tp if plan.sequence else tokens  # of what lies between products
    size = step.compute_bytes
    stream = stream_bytes(step, engine)
    entry = own * model.width * stream
    norms = _norm(model, own, tokens, stream, size, 3) + _norm(model, own, tokens, stream, size, 2)
    attention = _attention(model, axes, plan, tokens, size)
    block = norms + attention + _mlp(model, axes, tokens, size)
    vocabulary = -(-model.vocabulary // (axes.tp if divides_logits(plan) else 1))
    return Kept(
        block=block,
        entry=entry,
        ends=_norm(model, own, tokens, stream, size, 1),
        logits=tokens * vocabulary * _FP32,
        peak=2 * tokens * vocabulary * _FP32,
        inside=3 * _mlp(model, axes, tokens, size) // 4,
    )


def _norm(model: Transformer, own: int, tokens: int, stream: int, size: int, products: int) -> int:
    """Bytes of a norm: its input and its result in between, and what the products behind it read."""
    between = stream if model.biases else _FP32 + stream  # an RMSNorm keeps both in fp32, and normalised
    casts = products if stream > size else 1  # autocast converts for each product
    return own * model.width * between + tokens * model.width * size * casts


def _attention(model: Transformer, axes: Axes, plan: Plan, tokens: int, size: int) -> int:
    """Bytes of queries, keys, values and outputs, and of the sums of the softmax."""
    heads = model.heads // axes.tp
    keys = max(1, model.kv_heads // axes.tp)
    values = 2 * heads + 2 * keys
    if axes.cp > 1 and plan.context == "heads":
        values = 4 * heads  # keys repeated for the heads that share them
    if axes.cp > 1 and plan.context == "gather":
        # each half of the queries keeps the keys up to its own end; together those of the sequence and half a part
        seen = heads * (2 * axes.cp + 1) if keys < heads else 2 * keys * axes.cp
        values = 2 * heads + seen
    return tokens * (values * model.head_width * size + heads * _FP32)


def _mlp(model: Transformer, axes: Axes, tokens: int, size: int) -> int:
    if not model.experts:
        return tokens * -(-model.inner // axes.tp) * size * (4 if model.gated else 5)
    # ranks along tp that hold all experts compute all tokens; those that send them to others send a part each
    rows = tokens * model.experts_per_token // (axes.tp if axes.ep > 1 else 1)
    return rows * (4 * model.inner + 2 * model.width) * size


_COLWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
_ROWWISE = ("o_proj.weight", "down_proj.weight")


class Unit(NamedTuple):
    """Parameters that `fully_shard` gathers together, as numbers of elements on one rank.

    Attributes:
        whole: of the parts that this rank computes with.
        matrices: of those of two dimensions and more.
        shards: of its shards, each as long as the longest.
        experts: of those of experts.
        tensors: number of parameters.
    """

    whole: int
    matrices: int
    shards: int
    experts: int
    tensors: int


class HeldParameters(NamedTuple):
    """The parameters of one rank.

    Attributes:
        root: unit of what is outside of the blocks.
        block: unit of each block.
        layers: number of blocks of each stage of the rank.
        is_first: whether the rank has the embedding.
        is_last: whether the rank has the head.
    """

    root: Unit
    block: Unit
    layers: Sequence[int]
    is_first: bool
    is_last: bool

    def total(self, name: str) -> int:
        """The sum of an attribute over all units."""
        return getattr(self.root, name) + sum(self.layers) * getattr(self.block, name)


def held_by(model: Transformer, axes: Axes, plan: Plan, copies: EqualRanks, rank: int) -> HeldParameters:
    """Return the parameters of a rank along pp.

    Args:
        model: sizes of the model.
        axes: of the mesh.
        plan: options of the spreading.
        copies: ranks with equal parameters.
        rank: index along pp.
    """
    own = rank_stages(plan, axes.pp, rank)
    stages = axes.pp * plan.stages_per_rank
    layers = stage_layers(model.layers, stages)
    is_first, is_last = 0 in own, stages - 1 in own
    ends = [*(model.embedding() if is_first else ()), *(model.head() if is_last else ())]
    if model.tied and is_last and not is_first:
        ends += model.embedding()[:1]  # both ends have a copy
    return HeldParameters(
        _unit(ends, axes, copies), _unit(model.block(), axes, copies), [layers[at] for at in own], is_first, is_last
    )


def part_shape(parameter: Parameter, axes: Axes) -> list[int]:
    """Return the shape of the largest part of a parameter along tp and ep, which the first rank has."""
    shape = list(parameter.shape)
    if is_expert(parameter):
        shape[0] //= axes.ep
        return shape
    if parameter.name.split(".")[-2] in _COLWISE:
        shape[0] = -(-shape[0] // axes.tp)
    if parameter.name.endswith(_ROWWISE):
        shape[1] = -(-shape[1] // axes.tp)
    return shape


def _unit(parameters: Iterable[Parameter], axes: Axes, copies: EqualRanks) -> Unit:
    whole = matrices = shards = experts = tensors = 0
    for parameter in parameters:
        shape = part_shape(parameter, axes)
        count = math.prod(shape)
        ranks = expert_shards(axes, copies) if is_expert(parameter) else copies.shards
        whole += count
        matrices += count if len(shape) > 1 else 0
        first, *others = shape
        shard = -(-first // ranks) * math.prod(others)
        shards += shard
        experts += shard if is_expert(parameter) else 0
        tensors += 1
    return Unit(whole, matrices, shards, experts, tensors)


def expert_shards(axes: Axes, copies: EqualRanks) -> int:
    """Return the number of ranks among which the parts of experts are divided."""
    if axes.ep == 1 or copies.shards == 1:
        return copies.shards
    return copies.shards * axes.tp // axes.ep


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


def rank_memory(model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan | None = None) -> RankMemory:
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


def memory_by_moment(
    model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, rank: int
) -> Iterator[RankMemory]:
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


def _received(model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, copies: EqualRanks, rank: int) -> int:
    """Bytes of room for what stages before and behind send, which torch keeps for each micro-batch."""
    if axes.pp == 1:
        return 0
    last = axes.pp * plan.stages_per_rank - 1
    messages = sum((at > 0) + (at < last) for at in rank_stages(plan, axes.pp, rank))
    tokens = step.rows * step.tokens // axes.cp
    return messages * step.micro_batches * tokens * model.width * stream_bytes(step, copies.engine)


def _waiting(held: HeldParameters, kept: Kept, step: EstimatedStep, flying: int) -> int:
    """Bytes of blocks whose backward is still to come, of all micro-batches in flight."""
    layers = max(held.layers)
    return flying * layers * (kept.entry if step.recompute else kept.block)


def _earlier(parameters: int, full: int, step: EstimatedStep, copies: EqualRanks) -> int:
    """Bytes of gradients while a forward runs: those of micro-batches before, and DDP's buckets."""
    held = (full or parameters) if step.micro_batches > 1 else 0
    if copies.engine != "ddp":
        return held
    return parameters + (held if step.held else 0)  # gradients that wait lie outside of the buckets


def _wire(held: HeldParameters, axes: Axes, copies: EqualRanks) -> int:
    """Elements of a block on its way to or from other ranks, filled up to shards of equal length."""
    experts = held.block.experts if axes.ep > 1 else 0
    return copies.shards * (held.block.shards - experts) + expert_shards(axes, copies) * experts


def _full_gradients(held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks) -> int:
    """Bytes of gradients that wait whole, for the last micro-batch to reduce them."""
    if copies.engine != "fully_shard" or not step.held or step.micro_batches == 1:
        return 0
    return held.total("whole") * max(wire_bytes(step, plan)[1], step.compute_bytes)


def _gathered(
    held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks, blocks: int, flying: int, wire: int
) -> int:
    """Bytes of parameters in the compute format while so many blocks are used; autocast converts in each forward."""
    size = wire_bytes(step, plan)[0]
    if copies.engine != "fully_shard":
        stages = plan.stages_per_rank if flying > 1 else 1
        return held.total("matrices") * size * flying // stages if size < step.stored_bytes else 0
    if copies.shards == 1 and size == step.stored_bytes:
        return 0
    used = min(blocks, sum(held.layers))  # one of them is on its way
    return size * (held.root.whole + max(0, used - 1) * held.block.whole + min(used, 1) * max(wire, held.block.whole))


def _root_gradients(held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks) -> int:
    """Bytes of the gradients outside of the blocks, which are reduced last."""
    return held.root.whole * wire_bytes(step, plan)[0] if copies.engine == "fully_shard" else 0


def _reduced(held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks, wire: int) -> int:
    """Bytes of the gradients of a block, and of the root's, before and while they are reduced."""
    if copies.engine != "fully_shard":
        return 0
    block = held.block.whole * wire_bytes(step, plan)[0]
    return _root_gradients(held, step, plan, copies) + block + _on_its_way(held, step, plan, copies, wire)


def _on_its_way(held: HeldParameters, step: EstimatedStep, plan: Plan, copies: EqualRanks, wire: int) -> int:
    """Bytes of the gradients of a block while ranks sum them, filled up to shards of equal length."""
    if copies.engine != "fully_shard":
        return 0
    return max(wire, held.block.whole) * wire_bytes(step, plan)[1]
