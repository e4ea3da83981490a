# SPDX-License-Identifier: Apache-2.0
"""The self-check: it passes where all is well, on any number of ranks, and each check fails for what it is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.testing import Simulator
from accel.testing.selfcheck import CHECKS, Check, Outcome, _checks, likely_cause, run_checks

NAMED = {check.name: check for check in CHECKS}


def outcomes(ranks: Simulator, folder: Path, *checks: Check, world_size: int = 2) -> list[Outcome]:
    everyone = ranks.run(lambda ctx: run_checks(ctx, folder, lambda _: None, checks or CHECKS), world_size)
    told = [[(each.name, each.state, each.cause) for each in mine] for mine in everyone]
    assert all(mine == told[0] for mine in told)
    return everyone[0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_is_well(ranks: Simulator, tmp_path: Path, world_size: int) -> None:
    found = outcomes(ranks, tmp_path, world_size=world_size)
    assert [each.name for each in found] == [check.name for check in CHECKS]
    assert all(each.state == "ok" and each.detail and not each.cause for each in found), found
    assert not list(tmp_path.iterdir())


def test_all_is_well_where_ranks_share_the_model_out(ranks: Simulator, tmp_path: Path) -> None:
    def rank(ctx: accel.DistContext) -> list[Outcome]:
        return run_checks(accel.replace(ctx, strategy="fsdp"), tmp_path, lambda _: None, CHECKS)

    for found in ranks.run(rank, 2, default_group=True):
        assert {each.state for each in found} == {"ok"}, found


def test_without_a_folder_what_takes_one_is_skipped(ranks: Simulator) -> None:
    quick = [NAMED["devices"], NAMED["checkpoint"]]
    everyone = ranks.run(lambda ctx: run_checks(ctx, None, lambda _: None, quick), 2)
    assert [each.state for each in everyone[1]] == ["ok", "skipped"]
    assert str(everyone[0][1]) == "skip    checkpoint   takes a folder that all hosts share; name it with --folder"


def off_by_one(real: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that gives rank 1 something else."""

    def wrong(ctx: accel.DistContext, tree: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(ctx, tree, *args, **kwargs)
        return accel.tree.map_tensors(lambda leaf: leaf + (ctx.rank == 1), result)  # type: ignore[attr-defined]

    return wrong


def shuffled(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda seed, epoch, n: real(seed + 1, epoch, n)


def inexact(real: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(ctx: accel.DistContext, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(ctx, optimizer, *args, **kwargs)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(0.01)
        return result

    return wrong


def forgetful(real: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(ctx: accel.DistContext, path: Path, items: dict[str, Any]) -> Any:
        loaded = real(ctx, path, items)
        return loaded | {"state": loaded["state"].at(accel.Cursor(seed=8))}

    return wrong


@pytest.mark.parametrize(
    ("check", "name", "broken", "words"),
    [
        ("collectives", "reduce", off_by_one, "rank 1: reduce gives a wrong result"),
        ("collectives", "gather", off_by_one, "rank 1: gather gives a wrong result"),
        ("collectives", "broadcast", off_by_one, "rank 1: broadcast gives a wrong result"),
        ("data order", "order", shuffled, "ranks 0, 1: step 0 has other samples than it should"),
        ("data order", "gather_for_metrics", off_by_one, "rank 1: step 0 has other samples"),
        ("gradients", "optimizer_step", inexact, "ranks 0, 1: parameters differ from one process's by"),
        ("checkpoint", "load_state", forgetful, "ranks 0, 1: the resumed run ends with other parameters"),
    ],
)
def test_a_check_fails_for_what_it_is_about(
    ranks: Simulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    name: str,
    broken: Callable[[Any], Any],
    words: str,
) -> None:
    monkeypatch.setattr(_checks, name, broken(getattr(_checks, name)))
    (found,) = outcomes(ranks, tmp_path, NAMED[check])
    assert found.state == "failed"
    assert words in found.detail
    assert found.cause == NAMED[check].cause
    assert str(found).endswith(f"likely: {found.cause}")


def test_what_every_rank_raises_is_an_outcome_and_the_others_follow(ranks: Simulator, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = outcomes(ranks, tmp_path / "file", NAMED["checkpoint"], NAMED["bandwidth"])
    assert [each.state for each in found] == ["failed", "ok"]
    assert "ranks 0, 1: " in found[0].detail


def test_what_one_rank_raises_alone_is_raised_itself(ranks: Simulator, tmp_path: Path) -> None:
    def alone(ctx: accel.DistContext, _: Path) -> tuple[str, list[str]]:
        if ctx.rank == 1:
            raise ArithmeticError("only here")
        return str(accel.reduce(ctx, torch.ones(1))), []

    with pytest.raises(ArithmeticError, match="only here"):
        outcomes(ranks, tmp_path, Check("alone", alone, "nothing"))


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        ("rank 0: OutOfMemoryError: CUDA out of memory", "nvidia-smi"),
        ("rank 0: CheckpointError: No space left on device", "--folder"),
        ("rank 1: DeviceError: rank 1 has no GPU", "--cpu"),
        ("rank 1: DistBackendError: NCCL error in: x.cpp", "NCCL_DEBUG"),
        ("something else", "the check's own"),
    ],
)
def test_a_cause_follows_from_the_words(detail: str, words: str) -> None:
    assert words in likely_cause(detail, "the check's own")
