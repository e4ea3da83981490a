# SPDX-License-Identifier: Apache-2.0
"""The target of a launch, which every process runs, and the terms on which hosts take part in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal

import msgspec

from accel.config import LaunchConfig
from accel.config._schema import to_text
from accel.config._settings import SETTINGS
from accel.errors import LaunchError
from accel.errors._checks import did_you_mean
from accel.system import current_folder
from accel.terminal import show_names


class LaunchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The target that every process runs."""

    # A Python script, a module as after `python -m`, or any program.
    kind: Literal["script", "module", "program"] = "script"
    name: str  # the script's path, the module's dotted name, or the program
    args: tuple[str, ...] = ()  # its own arguments, passed on unchanged


def check_target(target: LaunchTarget, environ: Mapping[str, str]) -> None:
    """Refuse a target that does not exist, or may not be read or executed."""
    # Once, before a process starts: else each rank would print a traceback for the same typing error.
    if target.kind == "script":
        _check_script(target.name)
    elif target.kind == "module":
        _check_module(target.name)
    else:
        _check_program(target.name, environ)


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_file() and os.access(path, os.R_OK):
        return
    if path.is_dir():
        problem, got, fix = "the script is a folder", script, "Name the script inside it."
    elif path.exists():
        problem, got, fix = "the script cannot be read", script, "Check its type and permissions with `ls -l`."
    else:
        problem, got, fix = "there is no such script", script, _nearest(path)
    raise LaunchError(problem, expected="the path of a Python file", got=repr(got), where=current_folder(), fix=fix)


def _check_module(module: str) -> None:
    """Look a module up without importing its packages, which may take seconds and print."""
    places: list[str] | None = [current_folder(), *sys.path]
    spec = None
    for at, part in enumerate(parts := module.split(".")):
        name = ".".join(parts[: at + 1])
        # Without places the part before is a plain module, which holds no further ones.
        spec = _find(name, places) if part and places is not None else None
        if spec is None:
            raise LaunchError(
                "there is no such module",
                expected="a module's dotted name",
                got=repr(module),
                where=current_folder(),
                fix="Leave `.py` out." if module.endswith(".py") else f"Python finds no `{name}`; check PYTHONPATH.",
            )
        found = spec.submodule_search_locations
        places = None if found is None else list(found)
    if places is not None and _find(f"{module}.__main__", places) is None:
        raise LaunchError(
            "the module is a package that cannot be run",
            expected="a package with `__main__.py`",
            got=repr(module),
            fix="Name a module inside it.",
        )


def _find(name: str, places: list[str]) -> ModuleSpec | None:
    """Ask all finders, including the finders of editable installs."""
    found = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _check_program(program: str, environ: Mapping[str, str]) -> None:
    if shutil.which(program, path=environ.get("PATH")):
        return
    if Path(program).is_file():
        problem, fix = "the program may not be executed", f"Allow it with `chmod +x {program}`."
    else:
        problem, fix = "there is no such program", "Check the path, or PATH."
    raise LaunchError(problem, expected="an executable file", got=repr(program), where=current_folder(), fix=fix)


def _nearest(path: Path) -> str:
    hint = did_you_mean(path.name, (near.name for near in path.parent.glob("*.py")))
    return hint if hint.startswith("Did you mean") else "Check the path."


# What must be the same on all hosts, or ranks would wait for each other in vain.
_SHARED = ("nnodes", *(field.name for field in SETTINGS), "max_restarts")


class HostTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms on which one host takes part in a launch."""

    host: str  # its name
    node_rank: int | None  # the position that it asks for; None for any
    settings: dict[str, str]  # values that must be the same on all hosts, as text
    role: str = "default"  # role of its processes


def terms_of(host: str, config: LaunchConfig, *, processes: int, contents: Mapping[str, str]) -> HostTerms:
    """Return the terms of a host; `contents` are versions of packages and script, which hosts must share."""
    settings = {name: to_text(getattr(config, name)) for name in _SHARED}
    return HostTerms(
        host=host,
        node_rank=None if config.node_rank == "auto" else config.node_rank,
        settings=settings | {"processes": str(processes)} | dict(contents),
        role=config.role,
    )


def assign_node_ranks(terms: Sequence[HostTerms]) -> list[int]:
    """Return the node rank of each host: the one that it asks for, else the next free one."""
    asked = Counter(each.node_rank for each in terms if each.node_rank is not None)
    if taken := [rank for rank, count in asked.items() if count > 1]:
        hosts = " and ".join(each.host for each in terms if each.node_rank == taken[0])
        raise LaunchError(
            "two hosts have one node_rank",
            got=f"node_rank={taken[0]} on {hosts}",
            fix="Give each host a different number, or leave node_rank out on all.",
        )
    compare(terms, "Launch alike on all hosts.")
    free = iter(rank for rank in range(len(terms)) if rank not in asked)
    return [next(free) if each.node_rank is None else each.node_rank for each in terms]


def compare(terms: Sequence[HostTerms], fix: str) -> None:
    """Refuse hosts with different settings; the error names the hosts and ends with `fix`."""
    # One difference is reported at a time, as one slip often causes several.
    for name in terms[0].settings:
        hosts_by_value: dict[str, list[str]] = {}
        for each in terms:
            # A host with another version of accel may lack a setting.
            hosts_by_value.setdefault(each.settings.get(name, "nothing"), []).append(each.host)
        if len(hosts_by_value) > 1:
            got = "; ".join(f"{value} on {show_names(hosts, 4)}" for value, hosts in hosts_by_value.items())
            raise LaunchError(f"hosts do not agree on {name}", got=got, fix=fix)


def describe_hosts(hosts: Sequence[str], processes: int) -> str:
    """Return the ranks of each host as text: "ranks 0-1 on node0, 2-3 on node1"."""
    spans = [(at * processes, (at + 1) * processes - 1, host) for at, host in enumerate(hosts)]
    shown = [f"{first}-{last} on {host}" if last > first else f"{first} on {host}" for first, last, host in spans[:8]]
    more = [f"and {len(hosts) - 8} more hosts"] if len(hosts) > 8 else []
    return f"rank{'s' if len(hosts) * processes > 1 else ''} {', '.join(shown + more)}"
