# SPDX-License-Identifier: Apache-2.0
"""Parameters of a transformer on one rank of a mesh: parts along tp and ep, then shards of those; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from accel.estimate._plan import Parameter
from accel.estimate._step import Copies, rank_stages, stage_layers
from accel.estimate._transformer import Transformer, is_expert
from accel.topology import Axes, Plan

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


class Held(NamedTuple):
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


def held_by(model: Transformer, axes: Axes, plan: Plan, copies: Copies, rank: int) -> Held:
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
    return Held(
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


def _unit(parameters: Iterable[Parameter], axes: Axes, copies: Copies) -> Unit:
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


def expert_shards(axes: Axes, copies: Copies) -> int:
    """Return the number of ranks among which the parts of experts are divided."""
    if axes.ep == 1 or copies.shards == 1:
        return copies.shards
    return copies.shards * axes.tp // axes.ep
