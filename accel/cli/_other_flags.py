# SPDX-License-Identifier: Apache-2.0
"""Flags of torchrun, mpirun and Hugging Face's launcher, and the flag that does the same here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from accel.formats import precision_fix


class _Same(NamedTuple):
    """A flag of ours for another launcher's.

    Attributes:
        flag: ours; empty where none is needed.
        value: the value to write after it; empty for the other flag's own.
        note: the difference, one sentence.
    """

    flag: str
    value: str = ""
    note: str = ""


_PROCESSES = _Same("--nproc-per-node", note="It counts the processes of one host.")
_ENDPOINT = _Same("--rdzv-endpoint", "HOST:PORT", "One host alone needs none.")
_FREE = _Same("", note="Leave it out: ranks of one host meet at a free port.")
_SHARDS = _Same("--strategy", "fsdp", "`accel.prepare` finds the blocks to shard.")
_OTHERS = {
    "n": _PROCESSES,
    "np": _PROCESSES,
    "num_processes": _PROCESSES,
    "nproc": _PROCESSES,
    "nproc_per_node": _PROCESSES,
    "num_machines": _Same("--nnodes"),
    "machine_rank": _Same("--node-rank"),
    "main_process_ip": _ENDPOINT,
    "main_process_port": _ENDPOINT,
    "master_addr": _ENDPOINT,
    "master_port": _ENDPOINT,
    "rdzv_backend": _ENDPOINT,
    "rdzv_conf": _Same("--rdzv-timeout-s", "SECONDS", "Its last_call_timeout is --rdzv-last-call-s."),
    "standalone": _FREE,
    "same_network": _FREE,
    "multi_gpu": _Same("--nproc-per-node", "auto", "Without it, too, each GPU gets a process."),
    "num_gpus": _PROCESSES,
    "use_cpu": _Same("--cpu"),
    "fp16": _Same("--precision", "fp16"),
    "bf16": _Same("--precision", "bf16"),
    "mixed_precision": _Same("--precision"),
    "gradient_accumulation_steps": _Same("--accumulation"),
    "num_cpu_threads_per_process": _Same("--threads-per-process"),
    "enable_cpu_affinity": _Same("--bind-cores"),
    "use_fsdp": _SHARDS,
    "use_deepspeed": _Same("--strategy", "deepspeed"),
    "zero_stage": _SHARDS,
    "config_file": _Same("--config"),
    "redirects": _Same("--log-dir"),
    "tee": _Same("--log-dir"),
}


def other_flag(word: str, flags: Sequence[str]) -> str:
    """Return the sentence that names the flag to use for another launcher's; empty if none is known.

    Args:
        word: an unknown flag, perhaps with its value: "--num_processes=4", "-n4".
        flags: the flags that the command has.
    """
    name, _, value = word.lstrip("-").partition("=")
    short = re.fullmatch(r"(np?)(\d+)", name)
    if short is not None:
        name, value = short[1], short[2]
    key = name.replace("-", "_")
    dashed = "--" + name.replace("_", "-")
    same = _OTHERS.get(key) or (_Same(dashed) if dashed in flags else None)
    if same is None and key.startswith("fsdp_"):
        same = _SHARDS
    if same is None or (same.flag and same.flag not in flags):
        return ""
    if not same.flag:
        return same.note
    given = same.value or _translated(same.flag, value)
    return f"Use `{same.flag}{' ' * bool(given)}{given}`.{' ' * bool(same.note)}{same.note}"


def _translated(flag: str, value: str) -> str:
    """Another launcher's value as ours."""
    fix = precision_fix(value) if flag == "--precision" else ""
    return fix.split('"')[1] if fix else value
