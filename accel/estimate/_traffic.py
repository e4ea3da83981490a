# SPDX-License-Identifier: Apache-2.0
"""Bytes that a training step of a transformer sends along each axis of a mesh; pure.

Bytes of a collective are those of the larger of its two sides on a rank: the result of an all-gather, the input of a
reduce-scatter, the tensor of an all-reduce or of an all-to-all, what is sent from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from accel.estimate._shards import Held, expert_shards, held_by
from accel.estimate._step import (
    Copies,
    Step,
    copies_of,
    divides_logits,
    keeps_blocks,
    rank_stages,
    stream_bytes,
    wire_bytes,
)
from accel.estimate._transformer import Transformer
from accel.topology import Axes, Plan

Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
_BUCKET_BYTES = 25 << 20  # of DDP
_INDEX_BYTES = 8


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of one kind along an axis, of one rank in one step.

    Attributes:
        axis: name of the axis; of several, joined by "+".
        ranks: number of ranks along it.
        operation: the collective.
        calls: number of collectives.
        bytes: of all of them.
    """

    axis: str
    ranks: int
    operation: Operation
    calls: int
    bytes: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, where each collective goes round a ring."""
        if self.operation == "send":
            return self.bytes
        rounds = 2 if self.operation == "all-reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) // self.ranks


def step_traffic(
    model: Transformer, axes: Axes, step: Step, plan: Plan | None = None, *, stage: int = 0
) -> tuple[Traffic, ...]:
    """Return the messages of a step, axis by axis.

    Args:
        model: sizes of the model.
        axes: of the mesh.
        step: tokens, formats and choices.
        plan: options of the spreading; None for the defaults.
        stage: index of the rank along pp.
    """
    chosen = plan or Plan()
    copies = copies_of(axes, step.strategy)
    held = held_by(model, axes, chosen, copies, stage)
    found = [
        *_of_parameters(held, axes, step, chosen, copies),
        *_along_tp(model, held, axes, step, chosen, copies),
        *_along_cp(model, held, axes, step, chosen),
        *_along_pp(model, axes, step, chosen, copies, stage),
        *_along_ep(model, held, axes, step),
    ]
    merged: dict[tuple[str, Operation], Traffic] = {}
    for each in found:
        before = merged.get((each.axis, each.operation))
        calls = each.calls + (before.calls if before else 0)
        total = each.bytes + (before.bytes if before else 0)
        merged[each.axis, each.operation] = msgspec.structs.replace(each, calls=calls, bytes=total)
    return tuple(each for each in merged.values() if each.bytes)


def _of_parameters(held: Held, axes: Axes, step: Step, plan: Plan, copies: Copies) -> Iterator[Traffic]:
    """Yield gathers of parameters, and sums of gradients."""
    if copies.engine == "ddp":
        size = held.total("whole") * step.stored_bytes
        yield _message(copies.replica_axes, copies.replicas, "all-reduce", -(-size // _BUCKET_BYTES), size)
    if copies.engine != "fully_shard":
        return
    layers = sum(held.layers)
    gathered, reduced = wire_bytes(step, plan)
    batches = step.micro_batches
    exchanges = 1 if step.held else batches
    root = 1 if held.root.tensors else 0
    if copies.shards > 1:
        again = 0 if keeps_blocks(plan, axes) else 1
        rounds = 1 if axes.pp > 1 else batches
        roots = root * (1 + (plan.reshard_after_forward is True and axes.pp == 1)) * rounds
        blocks = layers * (1 + again) * rounds
        block = held.block.shards - (held.block.experts if axes.ep > 1 else 0)
        size = copies.shards * (held.root.shards * roots + block * blocks)
        yield _message(copies.shard_axes, copies.shards, "all-gather", roots + blocks, size * gathered)
        size = copies.shards * (held.root.shards + layers * block) * exchanges
        yield _message(copies.shard_axes, copies.shards, "reduce-scatter", (layers + root) * exchanges, size * reduced)
        if axes.ep > 1 and (same := expert_shards(axes, copies)) > 1:  # ranks with the same experts
            name = copies.shard_axes if axes.ep == axes.tp else "efsdp"
            size = same * held.block.experts
            yield _message(name, same, "all-gather", blocks, size * blocks * gathered)
            yield _message(name, same, "reduce-scatter", layers * exchanges, size * layers * exchanges * reduced)
    if copies.replicas > 1:
        size = held.total("shards") * exchanges * reduced
        yield _message(copies.replica_axes, copies.replicas, "all-reduce", (layers + root) * exchanges, size)


def _along_tp(model: Transformer, held: Held, axes: Axes, step: Step, plan: Plan, copies: Copies) -> Iterator[Traffic]:
    """Yield sums and gathers of tokens around attention and MLP: four of each block, more where it computes again."""
    if axes.tp == 1:
        return
    tokens = step.rows * step.tokens // axes.cp * step.micro_batches
    layers = sum(held.layers)
    size = step.compute_bytes
    stream = stream_bytes(step, copies.engine)
    calls = layers * step.micro_batches
    whole = tokens * model.width
    again = 1 if step.recompute else 0
    if model.experts:
        # attention alone sums; each rank takes its part of the tokens to the experts, and gathers all outputs
        total = whole * layers * ((1 + again) * size + stream)
        yield _message("tp", axes.tp, "all-reduce", (2 + again) * calls, total)
        chosen = tokens * model.experts_per_token * 4
        yield _message("tp", axes.tp, "all-gather", 3 * calls, layers * (2 * whole * size + chosen))
    elif plan.sequence:
        # entering attention and MLP gathers, leaving them scatters, and the backward does the reverse
        entered = (2 + 2 * again) * stream + 2 * size
        left = (2 + again) * size + 2 * stream
        yield _message("tp", axes.tp, "all-gather", (4 + 2 * again) * calls, whole * layers * entered)
        yield _message("tp", axes.tp, "reduce-scatter", (4 + again) * calls, whole * layers * left)
    else:
        forward = (2 + again) * size  # what computes again stops before the last sum, of which nothing is kept
        yield _message("tp", axes.tp, "all-reduce", (4 + again) * calls, whole * layers * (forward + 2 * stream))
    if model.kv_heads % axes.tp:  # each rank takes the rows of its head from those that store them
        size_of_row = model.width * (wire_bytes(step, plan)[0] if copies.engine == "fully_shard" else step.stored_bytes)
        rounds = 2 * (2 + again) * calls
        yield _message("tp", axes.tp, "all-to-all", rounds, rounds * model.head_width * size_of_row)
    yield from _along_tp_at_ends(model, held, axes, step, plan, stream)


def _along_tp_at_ends(
    model: Transformer, held: Held, axes: Axes, step: Step, plan: Plan, stream: int
) -> Iterator[Traffic]:
    """Yield messages of the embedding, of the head, and where tokens are shared before and after the blocks."""
    tokens = step.rows * step.tokens // axes.cp * step.micro_batches
    whole = tokens * model.width * stream
    calls = step.micro_batches
    if held.is_first and model.divided_ends:
        yield _message("tp", axes.tp, "all-reduce", calls, whole)
    if plan.sequence:
        yield _message(
            "tp", axes.tp, "all-gather", (held.is_first + held.is_last) * calls, whole * (held.is_first + held.is_last)
        )
    if held.is_last and model.divided_ends:
        yield _message("tp", axes.tp, "all-reduce", calls, whole)
        if divides_logits(plan):
            yield _message("tp", axes.tp, "all-reduce", 2 * calls, 3 * (tokens + calls) * 4)
        else:
            padded = -(-model.vocabulary // axes.tp) * axes.tp  # to messages of one length
            yield _message("tp", axes.tp, "all-gather", calls, tokens * padded * step.compute_bytes)


def _along_cp(model: Transformer, held: Held, axes: Axes, step: Step, plan: Plan) -> Iterator[Traffic]:
    """Yield messages of keys and values, of queries too where ranks share heads."""
    if axes.cp == 1:
        return
    calls = sum(held.layers) * step.micro_batches
    tokens = step.rows * step.tokens // axes.cp
    size = step.compute_bytes
    keys = max(1, model.kv_heads // axes.tp)
    pair = 2 * tokens * keys * model.head_width
    again = 1 if step.recompute else 0
    places = step.rows * step.tokens * _INDEX_BYTES  # of which ranks learn where documents begin
    yield _message("cp", axes.cp, "all-gather", step.micro_batches, step.micro_batches * places)
    if plan.context == "gather":
        yield _message("cp", axes.cp, "all-gather", calls * (1 + again), calls * (1 + again) * axes.cp * pair * size)
        yield _message("cp", axes.cp, "reduce-scatter", calls, calls * axes.cp * pair * size)
    elif plan.context == "ring":
        shifts = (2 + again) * (axes.cp - 1)
        total = calls * pair * (shifts * size + axes.cp * 4)  # gradients go round in fp32
        yield _message("cp", axes.cp, "send", calls * (shifts + axes.cp), total)
    else:
        heads = model.heads // axes.tp
        repeated = keys * (axes.cp // _common(keys, axes.cp))
        given = tokens * model.head_width * (heads + 2 * repeated) * size
        back = tokens * model.head_width * heads * size
        yield _message("cp", axes.cp, "all-to-all", calls * (4 + 2 * again), calls * (2 + again) * (given + back))


def _along_pp(model: Transformer, axes: Axes, step: Step, plan: Plan, copies: Copies, rank: int) -> Iterator[Traffic]:
    """Yield tokens that go on to the next stage, and gradients that go back."""
    if axes.pp == 1:
        return
    stages = axes.pp * plan.stages_per_rank
    own = rank_stages(plan, axes.pp, rank)
    onward = [at for at in own if at < stages - 1 and at + 1 not in own]
    back = [at for at in own if at > 0 and at - 1 not in own]
    tokens = step.rows * step.tokens // axes.cp
    calls = (len(onward) + len(back)) * step.micro_batches
    yield _message("pp", axes.pp, "send", calls, calls * tokens * model.width * stream_bytes(step, copies.engine))


def _along_ep(model: Transformer, held: Held, axes: Axes, step: Step) -> Iterator[Traffic]:
    """Yield tokens that go to their experts and back, as often as tokens choose all experts alike."""
    if axes.ep == 1:
        return
    calls = sum(held.layers) * step.micro_batches
    rows = step.rows * step.tokens // axes.cp // axes.tp * model.experts_per_token
    again = 1 if step.recompute else 0
    size = rows * model.width * step.compute_bytes
    counts = model.experts * _INDEX_BYTES * (1 + again)
    yield _message("ep", axes.ep, "all-to-all", calls * (5 + 3 * again), calls * (size * (4 + 2 * again) + counts))


def _common(one: int, other: int) -> int:
    while other:
        one, other = other, one % other
    return one


def _message(axis: str, ranks: int, operation: Operation, calls: int, size: int) -> Traffic:
    return Traffic(axis=axis, ranks=ranks, operation=operation, calls=calls, bytes=size)
