# SPDX-License-Identifier: Apache-2.0
"""The step that is estimated on a mesh: its tokens, formats and choices; and which ranks hold equal parameters."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from accel.errors import ConfigError, check_choice
from accel.estimate._plan import COMPUTE_BYTES, OPTIMIZERS
from accel.formats import PrecisionName, StrategyName, precision
from accel.topology import Axes, Plan

Engine = Literal["fully_shard", "ddp", "none"]
_WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A training step of a transformer.

    Attributes:
        tokens: length of a sequence, before ranks along cp divide it.
        rows: sequences of a micro-batch, on ranks that share samples.
        micro_batches: number of micro-batches of the step, on ranks that share samples.
        precision: as in `accel.formats.precision`; fp8 counts as bf16.
        optimizer: one of `OPTIMIZERS`.
        strategy: "ddp" or "fsdp", for the axis `dp`; ranks along `dp_shard` hold shards in any case.
        recompute: whether blocks keep their inputs alone and compute the rest again in backward.
        held: whether gradients wait on their rank for the last micro-batch; else each one exchanges them.

    Raises:
        ConfigError: an unknown name, or a number below 1.
    """

    tokens: int
    rows: int = 1
    micro_batches: int = 1
    precision: PrecisionName = "bf16"
    optimizer: str = "adamw"
    strategy: StrategyName = "fsdp"
    recompute: bool = False
    held: bool = True

    def __post_init__(self) -> None:
        _ = precision(self.precision)
        check_choice(self.optimizer, list(OPTIMIZERS), "unknown optimizer", where="Step.optimizer")
        check_choice(self.strategy, ["ddp", "fsdp"], "unknown strategy", where="Step.strategy")
        for name in ("tokens", "rows", "micro_batches"):
            if getattr(self, name) < 1:
                got = str(getattr(self, name))
                raise ConfigError("nothing would be computed", expected="1 or above", got=got, where=f"Step.{name}")

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in products."""
        return COMPUTE_BYTES[precision(self.precision).compute]

    @property
    def stored_bytes(self) -> int:
        """Bytes of a value of a parameter, and of its gradient, between steps."""
        return 2 if precision(self.precision).params == "bf16" else 4


class Copies(NamedTuple):
    """Ranks with equal parameters: those that share their shards out, and those that repeat them.

    Attributes:
        engine: "fully_shard", "ddp", or "none" where no two ranks have equal parameters.
        shards: number of ranks among which each parameter is divided.
        replicas: number of ranks with equal shards.
        shard_axes: names of the axes of the first, joined by "+".
        replica_axes: names of the axes of the second.
    """

    engine: Engine
    shards: int
    replicas: int
    shard_axes: str
    replica_axes: str


def copies_of(axes: Axes, strategy: StrategyName) -> Copies:
    """Return which ranks of a mesh hold equal parameters of a block.

    DDP takes whole models. Where ranks along pp, tp or ep hold parts, `fully_shard` exchanges gradients of replicas.

    Args:
        axes: of the mesh.
        strategy: of the axis `dp`.
    """
    names = [name for name in ("dp", "dp_replicate", "dp_shard", "cp") if getattr(axes, name) > 1]
    whole = strategy == "ddp" and axes.dp_shard == 1
    repeated = [name for name in names if whole or name == "dp_replicate"]
    shared = [name for name in names if name not in repeated]
    parts = axes.pp * axes.tp * axes.ep > 1
    engine: Engine = "none" if not names and axes.ep == 1 else "fully_shard" if shared or parts else "ddp"
    shards = replicas = 1
    for name in shared:
        shards *= getattr(axes, name)
    for name in repeated:
        replicas *= getattr(axes, name)
    return Copies(engine, shards, replicas, "+".join(shared), "+".join(repeated))


def wire_bytes(step: Step, plan: Plan) -> tuple[int, int]:
    """Return the bytes of a value of a parameter that `fully_shard` gathers, and of a gradient that it reduces."""
    gathered = step.compute_bytes if plan.gather_dtype == "auto" else _WIRE_BYTES[plan.gather_dtype]
    reduced = 4 if plan.reduce_dtype == "auto" else _WIRE_BYTES[plan.reduce_dtype]
    return gathered, reduced


def stream_bytes(step: Step, engine: Engine) -> int:
    """Return the bytes of a value between blocks: of the compute format, or fp32 where autocast leaves it."""
    return step.compute_bytes if engine == "fully_shard" or step.stored_bytes == 2 else 4


def keeps_blocks(plan: Plan, axes: Axes) -> bool:
    """Return whether blocks stay gathered from forward to backward; those of a pipeline do for the whole step."""
    return axes.pp > 1 or plan.reshard_after_forward is False


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return the number of blocks of each stage: equal, or earlier stages one more."""
    return [layers // stages + (at < layers % stages) for at in range(stages)]


def rank_stages(plan: Plan, pp: int, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank along pp: in a V for schedules that need one, else round and round."""
    stages = pp * plan.stages_per_rank
    if plan.schedule in ("ZBVZeroBubble", "DualPipeV") and pp > 1:
        return rank, stages - 1 - rank
    return tuple(range(rank, stages, pp))


def divides_logits(plan: Plan) -> bool:
    """Return whether a plan divides the head's outputs for `vocab_cross_entropy`; what models declare gathers them."""
    if plan.tensor == "model":
        return False
    return any(name.split(".")[-1] == "lm_head" and style == "colwise" for name, style in plan.tensor.items())
