# SPDX-License-Identifier: Apache-2.0
"""The same cases on two gloo processes and on two simulated ranks, compared to the byte.

A script that calls `serve` is one of the two processes; `differences` runs it twice and simulates beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from processes import job, script_ranks

from accel.testing import simulate_groups

Run = Callable[[dist.ProcessGroup, Any], Any]
Outcomes = list[list[Any]]  # by rank and case
_SHOWN_BYTES = 64
_REFUSED = "refused: "


def outcome(run: Run, group: dist.ProcessGroup, case: object) -> Any:
    """What a case returns, as JSON, or how it was refused."""
    try:
        return plain(run(group, case))
    except Exception as error:
        return f"{_REFUSED}{type(error).__name__}: {error}"


def refused(found: object) -> bool:
    return isinstance(found, str) and found.startswith(_REFUSED)


def plain(value: Any) -> Any:
    """The value as JSON; containers with their type, tensors by their bytes."""
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, msgspec.Struct):
        value = {"": type(value).__name__, **msgspec.structs.asdict(value)}
    elif dataclasses.is_dataclass(value):
        value = {"": type(value).__name__, **vars(value)}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return {str(key): plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _plain_tensor(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    if tensor.dtype == torch.bool:  # gloo adds them up as bytes, so that a true one can hold 2
        flat = flat.view(torch.uint8) != 0
    numbers = flat.view(torch.uint8).tolist() if flat.numel() else []
    if len(numbers) > _SHOWN_BYTES:
        numbers = hashlib.sha256(bytes(numbers)).hexdigest()
    return [str(tensor.dtype), list(tensor.shape), tensor.requires_grad, numbers]


def serve(run: Run, cases: Sequence[object]) -> None:
    """Be one of two gloo processes: write what becomes of the cases to the file that the command line begins with."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    found = [outcome(run, group, case) for case in cases]
    Path(f"{sys.argv[1]}-{dist.get_rank()}").write_text(json.dumps(found))
    os._exit(0)  # torch may abort an interpreter that ends while something still refers to a group


def differences(
    script: str, arguments: Sequence[str], run: Run, cases: Sequence[object], same: Callable[[Any, Any], bool]
) -> tuple[list[str], Outcomes]:
    """Run all cases both ways.

    Args:
        script: the path of the file that calls `serve` with these cases.
        arguments: what its command line has after the file for the outcomes.
        run: what to do with a case.
        cases: the cases.
        same: compares what gloo gave with what the simulation did.

    Returns:
        The cases that differ, in words, and what gloo gave.
    """
    real, simulated = _real(script, arguments), json.loads(json.dumps(_simulated(run, cases)))
    wrong = [
        f"rank {rank}: {case}\n  gloo: {expected}\n  simulated: {got}"
        for rank in range(2)
        for case, expected, got in zip(cases, real[rank], simulated[rank], strict=True)
        if not same(expected, got)
    ]
    return wrong, real


def _real(script: str, arguments: Sequence[str]) -> Outcomes:
    with (
        tempfile.TemporaryDirectory() as folder,
        script_ranks(Path(script), job(2), Path(folder) / "outcomes", *arguments, folder=Path(folder)) as ranks,
    ):
        assert not any(rank.wait(240) for rank in ranks), [rank.said()[-2000:] for rank in ranks]
        return [json.loads(Path(folder, f"outcomes-{rank}").read_text()) for rank in range(2)]


def _simulated(run: Run, cases: Sequence[object]) -> Outcomes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names that still have to work
        return simulate_groups(
            lambda group: [outcome(run, group, case) for case in cases],
            2,
            seed=1,
            timeout_s=240,
            network="gloo",
            default_group=True,
        )
