# SPDX-License-Identifier: Apache-2.0
"""Slurm's short forms of lists, https://slurm.schedmd.com/srun.html: "2(x3),1" and "n[08-10,12],login"."""

from __future__ import annotations

import re

from accel.errors import EnvError

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_FIRST = re.compile(r"((?:[^\[\],\s]|\[[^\]]*\])+)(,|$)")
_RANGE = re.compile(r"\[(\d+)[^\]]*\]")


def tasks_per_node(text: str) -> list[int]:
    """Return how many tasks each node has: "2(x3),1" is [2, 2, 2, 1].

    Raises:
        EnvError: the text is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            where = "SLURM_STEP_TASKS_PER_NODE"
            raise EnvError("not a list of tasks per node", expected="such as 2(x3),1", got=repr(text), where=where)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(text: str) -> str:
    """Return the first host of a list: of "n[08-10,12],login" it is "n08".

    Raises:
        EnvError: the text is no such list.
    """
    first = _FIRST.match(text)
    host = _RANGE.sub(r"\1", first[1]) if first else ""
    if not host or "[" in host:
        wanted = "such as n[08-10,12],login"
        raise EnvError("not a list of hosts", expected=wanted, got=repr(text), where="SLURM_STEP_NODELIST")
    return host
