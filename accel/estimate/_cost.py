# SPDX-License-Identifier: Apache-2.0
"""Time of a training step on a mesh, from products to compute and bytes to send along each axis; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from accel.errors import ConfigError
from accel.estimate._efficiencies import H100, Efficiencies, attention_flops, product_flops
from accel.estimate._model import Transformer, is_expert
from accel.estimate._step import (
    OPTIMIZERS,
    EqualRanks,
    EstimatedStep,
    HeldParameters,
    busy_ranks,
    copies_of,
    divides_logits,
    expert_shards,
    formats,
    held_by,
    keeps_blocks,
    part_shape,
    rank_stages,
    stage_layers,
    stream_bytes,
    wire_bytes,
)
from accel.topology import Axes, Plan

Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
_BUCKET_BYTES = 25 << 20  # of DDP
_INDEX_BYTES = 8
_FP32 = 4


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
        plan: options of the spreading; those of `Plan()` by default.
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
        size = held.every.shards * exchanges * reduced
        yield _message(copies.replica_axes, copies.replicas, "all-reduce", (layers + root) * exchanges, size)


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
        forward = (2 + again) * size  # recomputation stops before the last sum, whose result is not kept
        yield _message("tp", axes.tp, "all-reduce", (4 + again) * calls, whole * layers * (forward + 2 * stream))
    if model.kv_heads % axes.tp:  # each rank takes the rows of its head from those that store them
        size_of_row = model.width * (wire_bytes(step, plan)[0] if copies.engine == "fully_shard" else step.stored_bytes)
        rounds = 2 * (2 + again) * calls
        yield _message("tp", axes.tp, "all-to-all", rounds, rounds * model.head_width * size_of_row)
    yield from _along_tp_at_ends(model, held, axes, step, plan, stream)


def _along_tp_at_ends(
    model: Transformer, held: HeldParameters, axes: Axes, step: EstimatedStep, plan: Plan, stream: int
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


def _along_cp(
    model: Transformer, held: HeldParameters, axes: Axes, step: EstimatedStep, plan: Plan
) -> Iterator[Traffic]:
    """Yield messages of keys and values, of queries too where ranks share heads."""
    if axes.cp == 1:
        return
    calls = sum(held.layers) * step.micro_batches
    tokens = step.rows * step.tokens // axes.cp
    size = step.compute_bytes
    keys = max(1, model.kv_heads // axes.tp)
    pair = 2 * tokens * keys * model.head_width
    again = 1 if step.recompute else 0
    places = step.rows * step.tokens * _INDEX_BYTES  # ranks find the begins of documents in them
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


def _along_pp(
    model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, copies: EqualRanks, rank: int
) -> Iterator[Traffic]:
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


def _along_ep(model: Transformer, held: HeldParameters, axes: Axes, step: EstimatedStep) -> Iterator[Traffic]:
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


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds of the machine. The defaults are those of hosts of eight H100.

    Attributes:
        ranks: number of GPUs of a host.
        inside: bytes a second that a GPU sends to others of its host.
        between: bytes a second that a GPU sends to other hosts.
        latency_s: seconds of a message, whatever its length.
        efficiencies: speeds of a GPU by shape; those published for H100 by default.
        flops: operations a second of a GPU, in their place, for products and attention of any shape and format.

    Raises:
        ConfigError: a number that is not above 0.
    """

    ranks: int = 8
    inside: float = 450e9
    between: float = 50e9
    latency_s: float = 10e-6
    efficiencies: Efficiencies = H100
    flops: float | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "inside", "between", "latency_s", "flops"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                got = str(getattr(self, name))
                raise ConfigError("not a speed", expected="a number above 0", got=got, where=f"Hosts.{name}")


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step.

    Attributes:
        products: of products with parameters.
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
        """The sum of products, attention and memory."""
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
    if axis == "efsdp":  # ranks with the same experts are apart, with those of other experts between them
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
    count = sum(layers[at] for at in own) * step.micro_batches
    heads = step.micro_batches if stages - 1 in own else 0
    passes = 2 if step.recompute and not step.keep else 1  # of the forward
    attention = count * _attention_time(model, axes, step, plan, hosts, passes)
    products = count * _block_time(model, axes, step, hosts, passes) + heads * _head_time(model, axes, step, hosts)
    held = held_by(model, axes, plan, step, copies_of(axes, step.strategy), rank)
    passed = _passed_bytes(model, axes, step, plan, held, count=count, heads=heads)
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
    model: Transformer, axes: Axes, step: EstimatedStep, plan: Plan, hosts: Hosts, passes: int
) -> float:
    """Seconds of a block's causal attention in a micro-batch."""
    seen = model.seen(step.tokens)
    forward = 4 * step.rows * seen * model.heads * model.head_width / (axes.cp * axes.tp)
    if hosts.flops:
        return (passes + 2) * forward / hosts.flops
    length = step.tokens if plan.context == "heads" else step.tokens // axes.cp  # of the queries of a kernel
    ahead, back = attention_flops(hosts.efficiencies, _dtype(step), length, model.head_width)
    return passes * forward / ahead + 2.5 * forward / back


def _block_time(model: Transformer, axes: Axes, step: EstimatedStep, hosts: Hosts, passes: int) -> float:
    """Seconds of a block's products with its parameters in a micro-batch."""
    tokens = step.rows * step.tokens // axes.cp
    dtype = "fp8" if formats(step.precision).fp8 is not None else _dtype(step)
    total = 0.0
    for parameter in model.block():
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
        total += experts * _product_time(rows, out, into, dtype, hosts, passes)
    return total


def _head_time(model: Transformer, axes: Axes, step: EstimatedStep, hosts: Hosts) -> float:
    """Seconds of the head's product in a micro-batch; recipes of fp8 leave it alone."""
    out = model.vocabulary // axes.tp if model.divided_ends else model.vocabulary
    return _product_time(step.rows * step.tokens // axes.cp, out, model.width, _dtype(step), hosts, 1)


def _dtype(step: EstimatedStep) -> str:
    return formats(step.precision).compute


def _product_time(m: int, n: int, k: int, dtype: str, hosts: Hosts, passes: int) -> float:
    """Seconds of a product with a parameter, and of the two of its backward."""
    work = 2 * m * n * k
    if hosts.flops:
        return (passes + 2) * work / hosts.flops
    table = hosts.efficiencies
    forward = work / product_flops(table, dtype, m, n, k)
    return passes * forward + work / product_flops(table, dtype, m, k, n) + work / product_flops(table, dtype, n, k, m)


# Bytes that the operators between products read and write, for each value of a token between blocks, in heads and
# inside the MLP, in a step and in its forward alone: of a Llama of transformers, whose RMSNorm and rotations are many
# operators, and of a block of torch's LayerNorm and GELU.
_EAGER = ((307, 52, 28), (79, 20, 10))
_PLAIN = ((60, 0, 10), (20, 0, 4))
# The same where each chain of operators reads its inputs once and writes its result, as torch.compile fuses them.
_FUSED = ((48, 8, 16), (18, 4, 6))
_LOGIT = {False: 45, True: 10}
_CAST = 15  # of fp8: a tensor is read for its maximum, read again and written, for three products of two tensors


def _passed_bytes(
    model: Transformer,
    axes: Axes,
    step: EstimatedStep,
    plan: Plan,
    held: HeldParameters,
    *,
    count: int,
    heads: int,
) -> float:
    """Bytes that a rank's operators other than products and attention read and write in a step."""
    tokens = step.rows * step.tokens // axes.cp
    own = tokens // axes.tp if plan.sequence else tokens
    spread = (model.heads + model.kv_heads) * model.head_width / axes.tp
    routed = model.experts_per_token or 1
    inner = model.inner * routed / axes.tp
    whole, forward = (_FUSED if step.compiled else _EAGER) if model.gated else _PLAIN
    times = [one + again * step.recompute for one, again in zip(whole, forward, strict=True)]
    scale = step.compute_bytes / 2
    block = scale * (own * model.width * times[0] + tokens * (spread * times[1] + inner * times[2]))
    if formats(step.precision).fp8 is not None:
        block += _CAST * tokens * (4 * model.width / axes.tp + 2 * model.width + 3 * inner)
    vocabulary = model.vocabulary / (axes.tp if divides_logits(plan) else 1)
    ends = tokens * vocabulary * _LOGIT[step.compiled] * scale
    return count * block + heads * ends + _exchanged_bytes(held, step)


def _exchanged_bytes(held: HeldParameters, step: EstimatedStep) -> float:
    """Bytes of parameters copied from and to messages or converted, and of the optimizer's step with `foreach`."""
    size = step.compute_bytes
    passes = step.micro_batches * (4 * size if step.held else 5 * size + _FP32)
    optimizer = OPTIMIZERS[step.optimizer]
    return held.every.whole * (passes + size + _FP32) + held.every.trained * (2 + 6 * optimizer.values)


def _message_time(each: Traffic, axes: Axes, hosts: Hosts) -> float:
    rounds = 1 if each.operation == "send" else math.ceil(math.log2(each.ranks))
    return each.sent / axis_bandwidth(axes, each.axis, hosts) + each.calls * rounds * hosts.latency_s


def _exposed(each: Traffic, took: float, compute: float, attention: float, layers: int) -> float:
    """Return the seconds of a message that no computation hides."""
    if each.axis in ("tp", "ep", "pp") or (each.axis == "cp" and each.operation in ("all-gather", "reduce-scatter")):
        return took
    if each.axis == "cp" and each.operation == "all-to-all":
        return took
    # keys and values of a ring travel beside attention, parameters and gradients beside other blocks; those of the
    # first and the last block have nothing beside them
    beside = attention if each.operation == "send" else compute
    return max(took - beside, took / max(1, layers))
