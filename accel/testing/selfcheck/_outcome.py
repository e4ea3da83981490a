# SPDX-License-Identifier: Apache-2.0
"""Outcome of a check, as a value, as a line, and in a file, with the likely reason of a failure. Without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

_CAUSES = (
    (r"out of memory|OutOfMemory", "another program holds the memory of the GPU; `nvidia-smi` names it."),
    (r"No space left|Disk quota", "the disk of the folder is full; name another one with --folder."),
    (
        r"Permission denied|Read-only|No such file|a file is in the place",
        "the folder may not be written, or hosts do not share it; name another with --folder.",
    ),
    (r"no such backend|backend", "this build of torch lacks the backend; `accel env` lists those that it has."),
    (r"does not compute in", "the device is too old for the precision; choose another with --precision."),
    (
        r"no GPU|GPU \d+ for local rank",
        "there are fewer GPUs than ranks; start fewer, or take the CPU with --cpu.",
    ),
    (r"NCCL|nccl", "the GPUs do not reach each other; NCCL_DEBUG=INFO shows where, NCCL_P2P_DISABLE=1 avoids the bus."),
    (
        r"no kernel image|driver|CUDA error",
        "torch was built for another GPU or driver; `accel env` shows both versions.",
    ),
    (r"did not|time-out|timed out|left:", "a rank ended or hangs; the report of the launcher above names it."),
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a check, the same on all ranks.

    Attributes:
        name: of the check.
        state: "running" until it has ended; "skipped" if it could not be made.
        detail: observation, fault, or missing part.
        cause: likely reason; empty unless it failed.
        seconds: duration.
    """

    name: str
    state: Literal["ok", "failed", "skipped", "running"]
    detail: str = ""
    cause: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.state == "skipped":
            return f"{'skip':6}  {self.name:11}  {self.detail}"
        if self.state != "failed":
            return f"{self.state:6}  {self.name:11}  {self.detail} ({self.seconds:.1f} s)"
        lines = [*self.detail.splitlines(), f"likely: {self.cause}"]
        return "\n".join([f"FAILED  {self.name}", *(f"        {line}" for line in lines)])


def likely_cause(detail: str, default: str) -> str:
    """Return what is likely behind a failure: by its text, else the usual cause of such a check's failure."""
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, detail)), default)


def write_outcomes(path: str, outcomes: Sequence[Outcome]) -> None:
    """Write outcomes so that a reader finds all of them or those before."""
    partial = f"{path}.partial"
    with open(partial, "wb") as file:
        _ = file.write(msgspec.json.encode(outcomes))
    os.replace(partial, path)
