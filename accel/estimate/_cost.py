# SPDX-License-Identifier: Apache-2.0
"""Time of a training step on a mesh, from matmuls to compute and bytes to send along each axis; pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from accel.estimate._efficiencies import Hosts, attention_flops, product_flops
from accel.estimate._kept import passed_bytes
from accel.estimate._model import Tower, Transformer, is_expert
from accel.estimate._step import (
    EqualRanks,
    EstimatedStep,
    HeldParameters,
    busy_ranks,
    copies_of,
    divides_heads,
    divides_logits,
    enters_attention,
    expert_shards,
    feature_bytes,
    formats,
    held_by,
    keeps_blocks,
    latent_messages,
    own_heads,
    part_shape,
    rank_stages,
    stage_layers,
    stream_bytes,
    tower_side,
    wire_bytes,
)
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
    model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan | None = None, *, stage: int = 0
) -> tuple[Traffic, ...]:
    """Return the messages of a step, axis by axis, for the ranks at one index along pp.

    Args:
        model: sizes of the model.
        axes: the mesh.
        step: the step.
        plan: options of the spreading; `Plan()` by default.
        stage: the index along pp.
    """
    chosen = plan or Plan()
    copies = copies_of(axes, step.strategy)
    held = held_by(model, axes, chosen, step, copies, stage)
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


def _of_parameters(
    held: HeldParameters, axes: Axes, step: EstimatedStep, plan: Plan, copies: EqualRanks
) -> Iterator[Traffic]:
    """Yield gathers of parameters, and sums of gradients."""
    if copies.engine == "ddp":
        size = held.every.trained
        yield _message(copies.replica_axes, copies.replicas, "all-reduce", -(-size // _BUCKET_BYTES), size)
    if copies.engine != "fully_shard":
        return
    units = len(held.blocks)
    gathered, reduced = wire_bytes(step, plan)
    batches = step.micro_batches
    exchanges = 1 if step.held else batches
    root = 1 if held.root.tensors else 0
    if copies.shards > 1:
        again = 0 if keeps_blocks(plan, axes) else 1
        rounds = 1 if axes.pp > 1 else batches
        roots = root * (1 + (plan.reshard_after_forward is True and axes.pp == 1)) * rounds
        times = (1 + again) * rounds
        inside = held.inside.shards - (held.inside.experts if axes.ep > 1 else 0)
        # blocks that have no backward are not gathered for it, but for the one that is fetched before its turn
        without = again * rounds * max(0, held.idle - 1)
        calls = roots + units * times - without
        own = held.idle_shards // max(1, held.idle)
        size = copies.shards * (held.root.shards * roots + inside * times - own * without)
        yield _message(copies.shard_axes, copies.shards, "all-gather", calls, size * gathered)
        calls = (units - held.idle + root) * exchanges
        size = copies.shards * (held.root.shards + inside - held.idle_shards) * exchanges
        yield _message(copies.shard_axes, copies.shards, "reduce-scatter", calls, size * reduced)
        if axes.ep > 1 and (same := expert_shards(axes, copies)) > 1:  # ranks with the same experts
            name = copies.shard_axes if axes.ep == axes.tp else "efsdp"
            size = same * held.inside.experts
            some = sum(held.layers) - sum(held.dense)
            yield _message(name, same, "all-gather", some * times, size * times * gathered)
            yield _message(name, same, "reduce-scatter", some * exchanges, size * exchanges * reduced)
    if copies.replicas > 1:
        size = held.every.shards * exchanges * reduced
        yield _message(copies.replica_axes, copies.replicas, "all-reduce", (units + root) * exchanges, size)


def _along_tp(
    model: Transformer, held: HeldParameters, axes: Axes, step: EstimatedStep, plan: Plan, copies: EqualRanks
) -> Iterator[Traffic]:
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
    if model.tower is not None and model.tower.divided and held.is_first:
        blocks = model.tower.blocks
        patches = step.rows * step.images * model.tower.patches(tower_side(model.tower, step)) * step.micro_batches
        total = patches * blocks.width * blocks.layers * ((2 + again) * size + 2 * stream)
        yield _message("tp", axes.tp, "all-reduce", (4 + again) * blocks.layers * step.micro_batches, total)
    if model.experts:
        yield from _along_tp_with_experts(model, held, axes, step, copies)
    elif plan.sequence:
        # entering attention and MLP gathers, leaving them scatters, and the backward does the reverse
        entered = (2 + 2 * again) * stream + 2 * size
        left = (2 + again) * size + 2 * stream
        yield _message("tp", axes.tp, "all-gather", (4 + 2 * again) * calls, whole * layers * entered)
        yield _message("tp", axes.tp, "reduce-scatter", (4 + again) * calls, whole * layers * left)
    else:
        forward = (2 + again) * size  # recomputation stops before the last sum: its result is not kept
        yield _message("tp", axes.tp, "all-reduce", (4 + again) * calls, whole * layers * (forward + 2 * stream))
    if (
        divides_heads(model) and model.kv_heads % axes.tp
    ):  # each rank takes the rows of its head from those that store them
        size_of_row = model.width * (wire_bytes(step, plan)[0] if copies.engine == "fully_shard" else step.stored_bytes)
        rounds = 2 * (2 + again) * calls
        missing = max(0, model.head_width - model.head_width * model.kv_heads // axes.tp)  # it stores the others
        yield _message("tp", axes.tp, "all-to-all", rounds, rounds * missing * size_of_row)
    yield from _along_tp_at_ends(model, held, axes, step, plan, stream)


def _along_tp_with_experts(
    model: Transformer, held: HeldParameters, axes: Axes, step: EstimatedStep, copies: EqualRanks
) -> Iterator[Traffic]:
    """Yield sums of attention and of MLPs. Where ranks along tp do not hold all experts, each takes a part of the
    tokens to the experts, and gathers all outputs."""
    stream = stream_bytes(step, copies.engine)
    tokens = step.rows * step.tokens // axes.cp * step.micro_batches
    size = step.compute_bytes
    whole = tokens * model.width
    layers = sum(held.layers)
    dense = sum(held.dense)
    again = 1 if step.recompute else 0
    attention = layers if divides_heads(model) else 0
    mlps = dense + (layers - dense if model.shared_inner else 0)  # the last sum of a block is not computed again
    entered = attention if enters_attention(model) else 0
    calls = (1 + again) * attention + entered + 2 * mlps
    total = whole * (attention * (1 + again) * size + entered * stream + mlps * (size + stream))
    yield _message("tp", axes.tp, "all-reduce", calls * step.micro_batches, total)
    if attention:
        for operation, count, size_of_call in latent_messages(model, axes, step, stream):
            times = attention * step.micro_batches
            yield _message("tp", axes.tp, operation, times * count, times * size_of_call)
    if axes.ep == 1:
        return
    # a shared MLP keeps its tensors after the experts' outputs, which are gathered again for it
    gathers = 2 + (again if model.shared_inner else 0)
    chosen = tokens * model.experts_per_token * (size if model.corrected else 4)  # softmax computes in fp32
    some = layers - dense
    total = some * (gathers * whole * size + chosen)
    yield _message("tp", axes.tp, "all-gather", (gathers + 1) * some * step.micro_batches, total)


def _along_tp_at_ends(
    model: Transformer, held: HeldParameters, axes: Axes, step: EstimatedStep, plan: Plan, stream: int
) -> Iterator[Traffic]:
    """Yield messages of the embedding, of the head, and where tokens are shared before and after the blocks."""
    tokens = step.rows * step.tokens // axes.cp * step.micro_batches
    whole = tokens * model.width * stream
    calls = step.micro_batches
    summed = "reduce-scatter" if plan.sequence else "all-reduce"  # of the embedding, and of the gradients of the head
    if held.is_first and model.divided_ends:
        yield _message("tp", axes.tp, summed, calls, whole)
    if plan.sequence:
        ends = held.is_first + held.is_last
        yield _message("tp", axes.tp, "all-gather", ends * calls, whole * ends)
    if held.is_last and model.divided_ends:
        yield _message("tp", axes.tp, summed, calls, whole)
        if plan.logits == "deferred":
            yield _message("tp", axes.tp, "all-gather", calls, 8 * tokens * axes.tp)
        elif divides_logits(plan):
            yield _message("tp", axes.tp, "all-reduce", 2 * calls, (3 * (tokens + calls) + 4 * calls) * 4)
        else:
            padded = -(-model.vocabulary // axes.tp) * axes.tp * step.compute_bytes  # to messages of one length
            yield _message("tp", axes.tp, "all-gather", calls, tokens * padded)


def _along_cp(
    model: Transformer, held: HeldParameters, axes: Axes, step: EstimatedStep, plan: Plan
) -> Iterator[Traffic]:
    """Yield messages of keys and values, of queries too where ranks share heads."""
    if axes.cp == 1:
        return
    calls = sum(held.layers) * step.micro_batches
    tokens = step.rows * step.tokens // axes.cp
    size = step.compute_bytes
    heads, keys = own_heads(model, axes)
    pair = tokens * keys * (model.head_width + model.value_width)
    again = 1 if step.recompute else 0
    # two functions of the model find the begins of documents in all positions, and each attention takes all documents
    looks = 2 * step.micro_batches + calls * (1 + again)
    yield _message("cp", axes.cp, "all-gather", looks, looks * step.rows * step.tokens * _INDEX_BYTES)
    if plan.context == "gather":
        yield _message("cp", axes.cp, "all-gather", calls * (1 + again), calls * (1 + again) * axes.cp * pair * size)
        yield _message("cp", axes.cp, "reduce-scatter", calls, calls * axes.cp * pair * size)
    elif plan.context == "ring":
        shifts = (2 + again) * (axes.cp - 1)
        total = calls * pair * (shifts * size + axes.cp * 4)  # gradients go round in fp32
        yield _message("cp", axes.cp, "send", calls * (shifts + axes.cp), total)
    else:
        repeated = keys * (axes.cp // math.gcd(keys, axes.cp))
        both = model.head_width + model.value_width
        given = tokens * (model.head_width * heads + both * repeated) * size
        back = tokens * model.value_width * heads * size
        yield _message("cp", axes.cp, "all-to-all", calls * (4 + 2 * again), calls * (2 + again) * (given + back))


def _along_pp(
    model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, copies: EqualRanks, rank: int
) -> Iterator[Traffic]:
    """Yield tokens sent to the next stage, and gradients sent back."""
    if axes.pp == 1:
        return
    stages = axes.pp * plan.stages_per_rank
    own = rank_stages(plan, axes.pp, rank)
    onward = [at for at in own if at < stages - 1 and at + 1 not in own]
    back = [at for at in own if at > 0 and at - 1 not in own]
    tokens = step.rows * step.tokens // axes.cp * model.width * stream_bytes(step, copies.engine)
    features = feature_bytes(model, axes, step)
    calls = (len(onward) + len(back)) * step.micro_batches
    yield _message("pp", axes.pp, "send", calls * (2 if features else 1), calls * (tokens + features))


def _along_ep(model: Transformer, held: HeldParameters, axes: Axes, step: EstimatedStep) -> Iterator[Traffic]:
    """Yield tokens that go to their experts and back, as often as tokens choose all experts alike."""
    if axes.ep == 1:
        return
    calls = (sum(held.layers) - sum(held.dense)) * step.micro_batches
    rows = step.rows * step.tokens // axes.cp // axes.tp * model.experts_per_token
    again = 1 if step.recompute else 0
    size = rows * model.width * step.compute_bytes
    counts = model.experts * _INDEX_BYTES * (1 + again)
    yield _message("ep", axes.ep, "all-to-all", calls * (5 + 3 * again), calls * (size * (4 + 2 * again) + counts))


def _message(axis: str, ranks: int, operation: Operation, calls: int, size: int) -> Traffic:
    return Traffic(axis=axis, ranks=ranks, operation=operation, calls=calls, bytes=size)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step.

    Attributes:
        products: of matmuls with parameters.
        attention: of attention.
        memory: of operators that read and write more than they compute: norms, activations, casts, the optimizer.
        bubble: of ranks along pp that wait for others.
        exposed: of messages that nothing hides.
        messages: the same by collective and axis, such as "all-reduce along tp".
    """

    products: float
    attention: float
    memory: float
    bubble: float
    exposed: float
    messages: Mapping[str, float] = {}

    @property
    def compute(self) -> float:
        """The sum of matmuls, attention and memory."""
        return self.products + self.attention + self.memory

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.compute + self.bubble + self.exposed


def step_time(model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, hosts: Hosts) -> StepTime:
    """Return the time of a step on the slowest rank along pp.

    Args:
        model: sizes of the model.
        axes: the mesh.
        step: the step.
        plan: options of the spreading.
        hosts: speeds of the machine.
    """
    found = [rank_time(model, axes, step, plan, hosts, rank) for rank in busy_ranks(model, axes, step, plan)]
    return max(found, key=lambda each: each.total)


def axis_bandwidth(axes: Axes, axis: str, hosts: Hosts) -> float:
    """Return the bytes a second that a rank sends to its neighbour along an axis; several are joined by "+"."""
    if axis == "efsdp":  # ranks with the same experts are not neighbours: ranks with others are between them
        return _bandwidth(axes.expert_ranks // axes.ep, axes.ep, hosts)
    names = axis.split("+")
    order = ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp")
    size = math.prod(getattr(axes, name) for name in names)
    behind = order[order.index(names[-1]) + 1 :] if names[-1] in order else ()
    return _bandwidth(size, math.prod(getattr(axes, name) for name in behind), hosts)


def _bandwidth(size: int, stride: int, hosts: Hosts) -> float:
    # all ranks of a host together use its links to others
    together = max(1, min(size, hosts.ranks // stride))
    return hosts.inside if together == size else min(hosts.inside, together * hosts.between)


def rank_time(model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, hosts: Hosts, rank: int) -> StepTime:
    """Return the time of a step on the rank at an index along pp."""
    stages = axes.pp * plan.stages_per_rank
    layers = stage_layers(model, stages, step.balance)
    own = rank_stages(plan, axes.pp, rank)
    upto = list(itertools.accumulate(layers))
    dense = sum(model.dense_among(upto[at] - layers[at], upto[at]) for at in own) * step.micro_batches
    count = sum(layers[at] for at in own) * step.micro_batches
    heads = step.micro_batches if stages - 1 in own else 0
    passes = 2 if step.recompute and not step.keep else 1  # of the forward
    attention = count * _attention_time(model, axes, step, plan, hosts, passes)
    products = (count - dense) * _block_time(model, axes, step, hosts, passes)
    if dense:
        products += dense * _block_time(model, axes, step, hosts, passes, dense=True)
    products += heads * _head_time(model, axes, step, hosts)
    if model.tower is not None and 0 in own:
        seen, multiplied = _tower_time(model.tower, axes, step, hosts, passes)
        attention += step.micro_batches * seen
        products += step.micro_batches * multiplied
    held = held_by(model, axes, plan, step, copies_of(axes, step.strategy), rank)
    passed = passed_bytes(model, axes, step, plan, held, heads=heads)
    memory = 0.0 if hosts.flops else passed / hosts.efficiencies.bandwidth
    compute = products + attention + memory
    bubble = compute * (axes.pp - 1) / (plan.stages_per_rank * step.micro_batches)
    messages: dict[str, float] = {}
    for each in step_traffic(model, axes, step, plan, stage=rank):
        took = _message_time(each, axes, hosts)
        name = f"{each.operation} along {each.axis}"
        messages[name] = _exposed(each, took, compute, attention, model.layers // axes.pp)
    return StepTime(
        products=products,
        attention=attention,
        memory=memory,
        bubble=bubble,
        exposed=sum(messages.values()),
        messages=messages,
    )


def _attention_time(
    model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, hosts: Hosts, passes: int, *, backward: int = 2
) -> float:
    """Seconds of a block's attention in a micro-batch."""
    seen = model.seen(step.tokens)
    heads, _ = own_heads(model, axes)
    forward = 2 * step.rows * seen * heads * (model.head_width + model.value_width) / axes.cp
    if hosts.flops:
        return (passes + backward) * forward / hosts.flops
    length = step.tokens if plan.context == "heads" else step.tokens // axes.cp  # of the queries of a kernel
    ahead, back = attention_flops(hosts.efficiencies, _dtype(step), length, model.head_width)
    return (passes * forward / ahead + 1.25 * backward * forward / back) / hosts.clock


def _tower_time(tower: Tower, axes: Axes, step: EstimatedStep, hosts: Hosts, passes: int) -> tuple[float, float]:
    """Seconds of an encoder's attention and matmuls in a micro-batch. Blocks with unused output have no backward."""
    parts = Axes(tp=axes.tp if tower.divided else 1)
    side = tower_side(tower, step)
    images = msgspec.structs.replace(step, rows=step.rows * step.images, tokens=tower.patches(side))
    used, others = tower.taken, tower.blocks.layers - tower.taken
    attention = used * _attention_time(tower.blocks, parts, images, Plan(), hosts, passes)
    attention += others * _attention_time(tower.blocks, parts, images, Plan(), hosts, 1, backward=0)
    products = used * _block_time(tower.blocks, parts, images, hosts, passes)
    products += others * _block_time(tower.blocks, parts, images, hosts, 1, backward=0)
    for rows, each in tower.matrices(side):
        out, into = each.shape[0], each.count // each.shape[0]
        products += _product_time(
            images.rows * rows, out, into, _dtype(step), hosts, 1, backward=1 if "patch" in each.name else 2
        )
    return attention, products


def _block_time(
    model: Transformer, axes: Axes, step: EstimatedStep, hosts: Hosts, passes: int, *, backward: int = 2,
    dense: bool = False,
) -> float:  # fmt: skip
    """Seconds of a block's matmuls with its parameters in a micro-batch."""
    tokens = step.rows * step.tokens // axes.cp
    dtype = "fp8" if formats(step.precision).fp8 is not None else _dtype(step)
    total = 0.0
    for parameter in model.block(dense=dense):
        if len(parameter.shape) == 1:
            continue
        *several, out, into = part_shape(parameter, axes)
        experts = math.prod(several)
        rows = tokens
        if is_expert(parameter):
            # each rank has its part of the tokens, which are shared out among all experts along ep
            rows = max(
                1,
                tokens
                * model.experts_per_token
                * axes.ep
                // (axes.tp * model.experts if axes.ep > 1 else model.experts),
            )
        total += experts * _product_time(rows, out, into, dtype, hosts, passes, backward=backward)
    return total


def _head_time(model: Transformer, axes: Axes, step: EstimatedStep, hosts: Hosts) -> float:
    """Seconds of the head's matmul in a micro-batch; fp8 recipes do not change it."""
    if model.compared:
        return _product_time(step.rows, model.compared, model.width, _dtype(step), hosts, 1)
    out = model.vocabulary // axes.tp if model.divided_ends else model.vocabulary
    return _product_time(step.rows * step.tokens // axes.cp, out, model.width, _dtype(step), hosts, 1)


def _dtype(step: EstimatedStep) -> str:
    return formats(step.precision).compute


def _product_time(m: int, n: int, k: int, dtype: str, hosts: Hosts, passes: int, *, backward: int = 2) -> float:
    """Seconds of a matmul with a parameter, and of its backward: matmuls for the weight and for the input."""
    work = 2 * m * n * k
    if hosts.flops:
        return (passes + backward) * work / hosts.flops
    table = hosts.efficiencies
    total = passes * work / product_flops(table, dtype, m, n, k)
    if backward:
        total += work / product_flops(table, dtype, n, k, m)
    if backward > 1:
        total += work / product_flops(table, dtype, m, k, n)
    return total / hosts.clock


def _message_time(each: Traffic, axes: Axes, hosts: Hosts) -> float:
    rounds = 1 if each.operation == "send" else math.ceil(math.log2(each.ranks))
    return each.sent / axis_bandwidth(axes, each.axis, hosts) + each.calls * rounds * hosts.latency_s


def _exposed(each: Traffic, took: float, compute: float, attention: float, layers: int) -> float:
    """Return the seconds of a message that no computation hides."""
    if each.axis in ("tp", "ep", "pp") or (each.axis == "cp" and each.operation in ("all-gather", "reduce-scatter")):
        return took
    if each.axis == "cp" and each.operation == "all-to-all":
        return took
    # keys and values of a ring are sent during attention, parameters and gradients during other blocks; nothing hides
    # the messages of the first and the last block
    hiding = attention if each.operation == "send" else compute
    return max(took - hiding, took / max(1, layers))
