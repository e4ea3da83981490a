# SPDX-License-Identifier: Apache-2.0
"""Time of a training step on a mesh, from products to compute and bytes to send; pure.

What travels while something else computes counts only as far as it takes longer. Nothing is said of how well kernels
of smaller shapes use a GPU.
"""

from __future__ import annotations

import math

import msgspec

from accel.errors import ConfigError
from accel.estimate._step import Step, rank_stages, stage_layers
from accel.estimate._traffic import Traffic, step_traffic
from accel.estimate._transformer import Transformer
from accel.topology import Axes, Plan


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds of the machine. The defaults are those of hosts of eight H100.

    Attributes:
        ranks: number of GPUs of a host.
        inside: bytes a second that a GPU sends to others of its host.
        between: bytes a second that a GPU sends to other hosts.
        latency_s: seconds of a message, whatever its length.
        flops: operations a second of a GPU in large products, as measured.

    Raises:
        ConfigError: a number that is not above 0.
    """

    ranks: int = 8
    inside: float = 450e9
    between: float = 50e9
    latency_s: float = 10e-6
    flops: float = 400e12

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                got = str(getattr(self, name))
                raise ConfigError("not a speed", expected="a number above 0", got=got, where=f"Hosts.{name}")


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step.

    Attributes:
        compute: of the products.
        bubble: of ranks along pp that wait for others.
        exposed: of messages that nothing hides.
    """

    compute: float
    bubble: float
    exposed: float

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.compute + self.bubble + self.exposed


def step_time(model: Transformer, axes: Axes, step: Step, plan: Plan, hosts: Hosts) -> StepTime:
    """Return the time of a step on the slowest rank along pp.

    Args:
        model: sizes of the model.
        axes: of the mesh.
        step: tokens, formats and choices.
        plan: options of the spreading.
        hosts: speeds of the machine.
    """
    ranks = {0, min(1, axes.pp - 1), axes.pp - 1}
    found = [_rank_time(model, axes, step, plan, hosts, rank) for rank in ranks]
    return max(found, key=lambda each: each.total)


def axis_bandwidth(axes: Axes, axis: str, hosts: Hosts) -> float:
    """Return the bytes a second that a rank sends to its neighbour along an axis.

    Ranks of one host send inside. Where some are on other hosts, all those of a host together use their links to
    others.

    Args:
        axes: of the mesh.
        axis: name of an axis; several are joined by "+".
        hosts: speeds of the machine.
    """
    if axis == "efsdp":  # ranks with the same experts, of which those with others lie between
        return _bandwidth(axes.expert_ranks // axes.ep, axes.ep, hosts)
    names = axis.split("+")
    order = ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp")
    size = math.prod(getattr(axes, name) for name in names)
    behind = order[order.index(names[-1]) + 1 :] if names[-1] in order else ()
    return _bandwidth(size, math.prod(getattr(axes, name) for name in behind), hosts)


def _bandwidth(size: int, stride: int, hosts: Hosts) -> float:
    together = max(1, min(size, hosts.ranks // stride))
    return hosts.inside if together == size else min(hosts.inside, together * hosts.between)


def _rank_time(model: Transformer, axes: Axes, step: Step, plan: Plan, hosts: Hosts, rank: int) -> StepTime:
    attention, products = _operations(model, axes, step, plan, rank)
    compute = (attention + products) / hosts.flops
    rounds = plan.stages_per_rank * step.micro_batches
    bubble = compute * (axes.pp - 1) / rounds
    exposed = 0.0
    for each in step_traffic(model, axes, step, plan, stage=rank):
        took = _message_time(each, axes, hosts)
        exposed += _exposed(each, took, compute, attention / hosts.flops, model.layers // axes.pp)
    return StepTime(compute=compute, bubble=bubble, exposed=exposed)


def _operations(model: Transformer, axes: Axes, step: Step, plan: Plan, rank: int) -> tuple[float, float]:
    """Operations of a rank in a step: of causal attention, and of products with parameters."""
    stages = axes.pp * plan.stages_per_rank
    layers = stage_layers(model.layers, stages)
    own = rank_stages(plan, axes.pp, rank)
    count = sum(layers[at] for at in own)
    sequences = step.rows * step.micro_batches
    tokens = sequences * step.tokens
    passes = 4 if step.recompute else 3  # forward, twice that in backward, forward again
    head = model.width * model.vocabulary
    block = (model.active_count - head) // model.layers
    products = 2 * tokens * (passes * count * block + (3 * head if stages - 1 in own else 0))
    attention = 2 * sequences * step.tokens**2 * model.heads * model.head_width * passes * count
    share = axes.cp * axes.tp
    return attention / share, products / share


def _message_time(each: Traffic, axes: Axes, hosts: Hosts) -> float:
    rounds = 1 if each.operation == "send" else math.ceil(math.log2(each.ranks))
    return each.sent / axis_bandwidth(axes, each.axis, hosts) + each.calls * rounds * hosts.latency_s


def _exposed(each: Traffic, took: float, compute: float, attention: float, layers: int) -> float:
    """Seconds of a message that no computation hides.

    Parameters and gradients travel beside the computation of other blocks, keys and values of a ring beside attention.
    Those of the first and the last block have nothing beside them.
    """
    if each.axis in ("tp", "ep", "pp") or (each.axis == "cp" and each.operation in ("all-gather", "reduce-scatter")):
        return took
    if each.axis == "cp" and each.operation == "all-to-all":
        return took
    beside = attention if each.operation == "send" else compute
    return max(took - beside, took / max(1, layers))
