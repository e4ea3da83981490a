# SPDX-License-Identifier: Apache-2.0
"""Launches on the hosts of a file by a remote shell: hosts, slots, and commands."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from accel.config import LaunchConfig
from accel.config._schema import to_text
from accel.config._settings import FIELDS
from accel.errors import ConfigError, LaunchError
from accel.errors._checks import did_you_mean
from accel.launching._target import LaunchTarget
from accel.launching.local._signals import Signals, listening
from accel.launching.reports._report import notify
from accel.opening import read_named
from accel.system import STOPPING

_LINE = re.compile(r"(?P<name>[^\s#]+)(?:\s+slots\s*=\s*(?P<slots>[0-9]{1,4}))?\s*(?:#.*)?")
_FILTER = re.compile(r"(?P<name>[^:@\s]+)(?::(?P<slots>[0-9]+(?:,[0-9]+)*))?")
_SETTLED_HERE = {"nnodes", "node_rank", "rdzv_endpoint", "nproc_per_node", "gpu_ids"}
# Ends the launcher when this end of the connection is gone, as closing a terminal would.
_UNTIL_CUT_OFF = "exec 3<&0; {command} & pid=$!; {{ read -r _ <&3; kill -TERM $pid; }} >/dev/null 2>&1 & watch=$!; \
wait $pid; status=$?; kill $watch 2>/dev/null; exit $status"
_EXPORTED = ("NCCL_", "GLOO_", "UCX_", "OMP_NUM_THREADS", "PYTHONPATH", "TORCH_NCCL_")
PORT = 29400


class HostSlots(msgspec.Struct, frozen=True):
    """A host, and its slots by number: its GPUs, or its processes where there are none."""

    name: str  # name or address
    slots: tuple[int, ...] | None = None  # numbers of the slots to use; None where the file does not count them
    whole: bool = True  # whether these are all of the host's slots


class HostCommand(msgspec.Struct, frozen=True):
    """The command that starts a host's launcher, for a shell there."""

    host: str
    command: str


def read_hosts(text: str, path: str) -> tuple[HostSlots, ...]:
    """Return the hosts of a file of lines such as "node0 slots=8", as DeepSpeed and Open MPI write it."""
    hosts: dict[str, HostSlots] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (stripped := line.strip()) or stripped.startswith("#"):
            continue
        found = _LINE.fullmatch(stripped)
        where = f"{path}, line {number}"
        if found is None or found["slots"] == "0":
            raise LaunchError(
                "the line does not describe a host", expected="NAME slots=COUNT", got=repr(stripped), where=where
            )
        if found["name"] in hosts:
            raise LaunchError("a host is listed twice", got=found["name"], where=where, fix="Add its slots up.")
        slots = tuple(range(int(found["slots"]))) if found["slots"] else None
        hosts[found["name"]] = HostSlots(found["name"], slots)
    if not hosts:
        raise LaunchError("the file names no host", expected="lines such as NAME slots=COUNT", where=path)
    return tuple(hosts.values())


def choose_hosts(hosts: Sequence[HostSlots], include: str = "", exclude: str = "") -> tuple[HostSlots, ...]:
    """Return the hosts and slots that a filter leaves: "node0@node1:0,2" is all of node0, two slots of node1."""
    if include and exclude:
        raise ConfigError("two filters exclude each other", got="--include and --exclude", fix="Leave one of them out.")
    if not include and not exclude:
        return tuple(hosts)
    flag = "--include" if include else "--exclude"
    named = _filter(include or exclude, flag, {host.name: host for host in hosts})
    left = [_kept(host, named, is_include=bool(include)) for host in hosts]
    chosen = tuple(host for host in left if host is not None)
    if not chosen:
        raise LaunchError("the filter leaves no host", got=include or exclude, where=flag)
    return chosen


def exported(environ: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables for launchers on other hosts: for communication, threads, Python's path, and `names`."""
    if missing := [name for name in names if name not in environ]:
        raise ConfigError("the variable is not set on this host", got=", ".join(missing), where="--export")
    # No others: command lines are visible to every user of a host, and variables may hold secrets.
    own = {name: value for name, value in environ.items() if name.startswith(_EXPORTED) or name in names}
    return dict(sorted(own.items()))


def host_commands(
    hosts: Sequence[HostSlots],
    target: LaunchTarget,
    config: LaunchConfig,
    given: Collection[str],
    *,
    python: str,
    folder: str,
    exports: Mapping[str, str],
) -> tuple[HostCommand, ...]:
    """Return the command of each host's launcher, in order of rank; fields in `given` become its flags."""
    _check(hosts, config, given)
    endpoint = config.rdzv_endpoint or f"{hosts[0].name}:{PORT}"
    options = [
        f"{field.flag}={to_text(getattr(config, field.name))}"
        for field in FIELDS
        if field.name in given and field.name not in _SETTLED_HERE
    ]
    kind = {"script": [], "module": ["--module"], "program": ["--no-python"]}[target.kind]
    commands: list[HostCommand] = []
    for rank, host in enumerate(hosts):
        place = [f"--nnodes={len(hosts)}"]
        place += [f"--node-rank={rank}", f"--rdzv-endpoint={endpoint}"] if len(hosts) > 1 else []
        place += [f"--nproc-per-node={_count(host, config)}", *_gpus(host, config, given)]
        words = [python, "-m", "accel.cli", "launch", *place, *options, *kind, "--", target.name, *target.args]
        variables = [f"{name}={value}" for name, value in exports.items()]
        # By `env`, as sshd drops most variables that its client sends.
        command = shlex.join(["env", *variables, *words] if variables else words)
        inside = _UNTIL_CUT_OFF.format(command=command)
        # A remote shell begins in the home folder; the script's path may be relative to this one.
        commands.append(HostCommand(host.name, f"cd {shlex.quote(folder)} || exit 1; {inside}"))
    return tuple(commands)


def _filter(text: str, flag: str, hosts: Mapping[str, HostSlots]) -> dict[str, tuple[int, ...] | None]:
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        found = _FILTER.fullmatch(part.strip())
        if found is None:
            raise ConfigError("the filter is not valid", expected="NAME[:SLOT,SLOT][@NAME...]", got=text, where=flag)
        name = found["name"]
        slots = tuple(sorted({int(slot) for slot in found["slots"].split(",")})) if found["slots"] else None
        if name not in hosts:
            raise LaunchError(
                "the file of hosts does not list this host", got=name, where=flag, fix=did_you_mean(name, hosts)
            )
        there = hosts[name].slots
        if slots is not None and not set(slots) <= set(there or ()):
            raise LaunchError(
                "the host has no such slot",
                expected=f"0 to {len(there) - 1}" if there else "slots=COUNT in the file of hosts",
                got=part,
                where=flag,
            )
        before = named.get(name, ())
        named[name] = None if slots is None or before is None else tuple(sorted({*before, *slots}))
    return named


def _kept(host: HostSlots, named: Mapping[str, tuple[int, ...] | None], *, is_include: bool) -> HostSlots | None:
    """Return what a filter leaves of a host; None for nothing."""
    if host.name not in named:
        return None if is_include else host
    slots = named[host.name]
    if slots is None:
        return host if is_include else None
    left = slots if is_include else tuple(slot for slot in host.slots or () if slot not in slots)
    return HostSlots(host.name, left, whole=left == host.slots) if left else None


def _check(hosts: Sequence[HostSlots], config: LaunchConfig, given: Collection[str]) -> None:
    for name in ("nnodes", "node_rank"):
        if name in given:
            raise ConfigError(f"the file of hosts determines {name}", fix="Leave it out, or use --include.")
    counts = {host.name: _count(host, config) for host in hosts}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise LaunchError(
            "the hosts have different numbers of slots",
            expected="equally many, as every host starts as many processes",
            got=listed,
            fix="Choose as many of each with --include NAME:0,1@NAME:0,1.",
        )
    counted = hosts[0].slots is not None
    if counted and "nproc_per_node" in given and config.nproc_per_node not in ("auto", counts[hosts[0].name]):
        raise ConfigError(
            "nproc_per_node contradicts the slots",
            expected=str(counts[hosts[0].name]),
            got=str(config.nproc_per_node),
            fix="Leave it out, or choose slots with --include.",
        )


def _count(host: HostSlots, config: LaunchConfig) -> int | str:
    return config.nproc_per_node if host.slots is None else len(host.slots)


def _gpus(host: HostSlots, config: LaunchConfig, given: Collection[str]) -> Iterator[str]:
    """Yield the flag of the GPUs: the chosen slots, or the setting's where all slots are used."""
    if host.slots is not None and not host.whole and not config.device.startswith(("cpu", "xla")):
        if "gpu_ids" in given:
            raise ConfigError("gpu_ids and the filter both choose GPUs", fix="Leave one of them out.")
        yield f"--gpu-ids={to_text(host.slots)}"
    elif "gpu_ids" in given:
        yield f"--gpu-ids={to_text(config.gpu_ids)}"


_NO_CONNECTION = 255  # of ssh
_KILL_AFTER_S = 20.0  # over the grace of the launchers themselves


def read_hostfile(path: str) -> str:
    """Return the text of a file of hosts."""
    try:
        return read_named(path).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError("the file of hosts cannot be read", got=str(reason), where=path) from None


def run_on_hosts(
    commands: Sequence[HostCommand], shell: Sequence[str], environ: Mapping[str, str], *, grace_s: float
) -> int:
    """Start every host's launcher and wait for all; return the first failure's status, or 128 and a stop's signal.

    A stop here, or a host without connection, ends the others."""
    with listening() as signals:
        started: list[subprocess.Popen[bytes]] = []
        try:
            for each in commands:
                words = [*shell, each.host, each.command]
                # The open pipe keeps the launcher there alive: a remote shell forwards no signals.
                started.append(subprocess.Popen(words, env=dict(environ), stdin=subprocess.PIPE))
        except OSError as error:
            _end(started)
            raise LaunchError(
                "the remote shell cannot be started", got=str(error), where=f"--remote-shell {' '.join(shell)}"
            ) from None
        return _wait(commands, started, signals, grace_s)


def _wait(
    commands: Sequence[HostCommand], started: Sequence[subprocess.Popen[bytes]], signals: Signals, grace_s: float
) -> int:
    """Wait for all; the end of one that had no connection ends the others, which would wait for it."""
    failed = stopped = 0
    deadline: float | None = None
    open_ones = dict(zip((each.host for each in commands), started, strict=True))
    while open_ones:
        number = signals.wait(0.5 if deadline is None else max(0.0, min(0.5, deadline - time.monotonic())))
        if number in STOPPING and not stopped:
            stopped = number
            notify(f"accel: {signal.Signals(number).name} stops the launchers of all hosts\n")
        for host, process in list(open_ones.items()):
            if (status := process.poll()) is None:
                continue
            del open_ones[host]
            failed = failed or status
            if status == _NO_CONNECTION:
                notify(f"accel: no connection to {host}, exit status {status}\n")
                # The others would wait for this host up to their time-out.
                stopped = stopped or -1
        if stopped and deadline is None:
            deadline = time.monotonic() + grace_s + _KILL_AFTER_S
            _cut_off(started)
        if deadline is not None and time.monotonic() > deadline:
            _end(started)
    return 128 + stopped if stopped > 0 else abs(failed)


def _cut_off(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close the connections' ends here, on which the launchers end their ranks."""
    for process in started:
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    _cut_off(started)
    for process in started:
        process.kill()
        _ = process.wait()
