# SPDX-License-Identifier: Apache-2.0
"""Stages of each rank along a pipeline, and numbers of stages and micro-batches that a schedule can run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from accel.errors import ConfigError

_ONE_STAGE = ("GPipe", "1F1B")
_IN_A_V = ("ZBVZeroBubble", "DualPipeV")
_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_AT_LEAST_STAGES = ("1F1B", "DualPipeV")
SPLIT_BACKWARDS: frozenset[str] = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})


class Layout(NamedTuple):
    """Numbers of a pipeline.

    Attributes:
        schedule: name of torch's schedule.
        ranks: number of ranks along the pipeline.
        stages: number of stages, of all ranks.
        micro_batches: number of micro-batches of a batch.
    """

    schedule: str
    ranks: int
    stages: int
    micro_batches: int

    @property
    def owners(self) -> Mapping[int, int]:
        """Rank along the pipeline of each stage."""
        return {stage: rank for rank in range(self.ranks) for stage in own_stages(self, rank)}


def own_stages(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank along the pipeline: in a V for schedules that need one, else round and round."""
    if layout.schedule in _IN_A_V:
        return rank, layout.stages - 1 - rank
    return tuple(range(rank, layout.stages, layout.ranks))


def make_layout(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int | None) -> Layout:
    """Return the numbers of a pipeline.

    Args:
        schedule: a name of `Plan.schedule`.
        ranks: number of ranks along the pipeline, 2 or more.
        stages_per_rank: as in `Plan`.
        micro_batches: as in `Plan`; None for the number of stages.

    Raises:
        ConfigError: the schedule does not run so many stages on a rank, or so many micro-batches.
    """
    stages = ranks * stages_per_rank
    micro = stages if micro_batches is None else micro_batches
    if schedule in _ONE_STAGE and stages_per_rank != 1:
        raise _refused(schedule, "1", stages_per_rank, "Take Interleaved1F1B, or leave stages_per_rank out.")
    if schedule in _IN_A_V and stages_per_rank != 2:
        raise _refused(schedule, "2, one on each side of its V", stages_per_rank, "Pass Plan(stages_per_rank=2).")
    if schedule not in (*_ONE_STAGE, *_IN_A_V) and stages_per_rank < 2:
        raise _refused(schedule, "2 or more", stages_per_rank, "Pass Plan(stages_per_rank=2), or take 1F1B.")
    if schedule in _AT_LEAST_STAGES and micro < stages:
        raise ConfigError(
            f"{schedule} needs as many micro-batches as stages",
            expected=f"{stages} or more",
            got=str(micro),
            where="plan=, micro_batches",
            fix="Make more micro-batches, or take GPipe.",
        )
    rounds = max(1, micro // ranks)
    if schedule in _ROUNDS and micro % rounds:
        raise ConfigError(
            f"{schedule} runs micro-batches in rounds of equal length",
            expected=f"a multiple of {rounds}, the number of rounds",
            got=str(micro),
            where="plan=, micro_batches",
            fix=f"Make {micro // ranks * ranks} or {(micro // ranks + 1) * ranks}.",
        )
    return Layout(schedule, ranks, stages, micro)


def _refused(schedule: str, expected: str, got: int, fix: str) -> ConfigError:
    return ConfigError(
        f"{schedule} does not run so many stages on a rank",
        expected=expected,
        got=str(got),
        where="plan=, stages_per_rank",
        fix=fix,
    )
