# SPDX-License-Identifier: Apache-2.0
"""The stages of ranks, and what a schedule and batch norms need of the number of micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - torch has no other name

from accel.errors import AccelError, ConfigError
from accel.errors._checks import with_article
from accel.parallel._modules import named_modules
from accel.topology import SCHEDULES_IN_A_V, stages_of_rank

_ONE_STAGE = ("GPipe", "1F1B")
_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_AT_LEAST_STAGES = ("1F1B", "DualPipeV")
SPLIT_BACKWARDS: frozenset[str] = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})


class Layout(NamedTuple):
    """Numbers of a pipeline."""

    schedule: str  # name of torch's schedule
    ranks: int  # number of ranks along the pipeline
    stages: int  # number of stages, of all ranks
    micro_batches: int  # number of micro-batches of a batch
    is_set: bool = True  # whether the plan says that number, so that one process makes as many

    @property
    def owners(self) -> Mapping[int, int]:
        """Rank along the pipeline of each stage."""
        return {stage: rank for rank in range(self.ranks) for stage in self.of(rank)}

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank along the pipeline."""
        return stages_of_rank(self.schedule, self.ranks, self.stages, rank)


def make_layout(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int | None) -> Layout:
    """Return the numbers of a pipeline, or raise `ConfigError` for stages or micro-batches that the schedule does not
    run."""
    stages = ranks * stages_per_rank
    micro = stages if micro_batches is None else micro_batches
    if schedule in _ONE_STAGE and stages_per_rank != 1:
        raise _refused(schedule, "1", stages_per_rank, "Use Interleaved1F1B, or leave stages_per_rank out.")
    if schedule in SCHEDULES_IN_A_V and stages_per_rank != 2:
        raise _refused(schedule, "2, one on each side of its V", stages_per_rank, "Pass Plan(stages_per_rank=2).")
    if schedule not in (*_ONE_STAGE, *SCHEDULES_IN_A_V) and stages_per_rank < 2:
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
    return Layout(schedule, ranks, stages, micro, micro_batches is not None)


def _refused(schedule: str, expected: str, got: int, fix: str) -> ConfigError:
    return ConfigError(
        f"{schedule} does not run so many stages on a rank",
        expected=expected,
        got=str(got),
        where="plan=, stages_per_rank",
        fix=fix,
    )


Norms = tuple[tuple[str, _BatchNorm], ...]
_OTHER_NORMS = "Use nn.GroupNorm, or call .eval() on the norms, which use their own statistics then"


def batch_norms(model: nn.Module | Mapping[str, nn.Module]) -> Norms:
    """Return the batch norms of a model, with their paths."""
    return tuple((path, each) for path, each in named_modules(model) if isinstance(each, _BatchNorm))


def check_norms(norms: Norms, layout: Layout, kind: type[AccelError], where: str, *, filled: int = 0) -> None:
    """Raise for a batch norm that would take the statistics of other rows than in one process, by its mode now.

    `filled`: number of rows of the batch that are copies of its last one.
    """
    for path, norm in norms:
        # norms of other stages have no tensors any more
        if not norm.training and (norm.track_running_stats or norm.running_mean is not None):
            continue
        mode = "in training" if norm.training else "without running statistics"
        got = f"{path}, {with_article(type(norm).__name__)} {mode}"
        if isinstance(norm, nn.SyncBatchNorm) and norm.process_group is None:
            raise kind(
                "a batch norm exchanges its statistics with the ranks of other stages",
                expected="a group of ranks with the same stage",
                got=got,
                where=where,
                fix=f"{_OTHER_NORMS}; or pass convert_sync_batchnorm a process_group, such as the group along dp.",
            )
        if not layout.is_set and layout.micro_batches > 1:
            raise kind(
                "a batch norm takes the statistics of each micro-batch, and the mesh decides how many there are",
                expected="norms of single samples or in eval mode, or a plan with the number of micro-batches",
                got=got,
                where=where,
                fix=f"{_OTHER_NORMS}; or say the number, which one process makes, too:"
                f" accel.parallel.Plan(micro_batches={layout.micro_batches}), or"
                ' Plan(schedule="GPipe", micro_batches=1) for the statistics of full batches.',
            )
        if filled:
            raise kind(
                "a batch norm would take the statistics of rows that fill the last micro-batches up",
                expected=f"a batch with rows that {layout.micro_batches} micro-batches divide",
                got=f"{filled} rows too few; {got}",
                where=where,
                fix=f"Pass DataLoader(drop_last=True) and such a batch_size. {_OTHER_NORMS}.",
            )
