# SPDX-License-Identifier: Apache-2.0
"""`accel launch`: flags of the launcher, then the script, then words that belong to the script alone."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence

from accel.cli._parser import HOSTS, Parser, add_fields, given_flags, print_settings_file, resolve_flags, value_flags
from accel.config._resolve import Resolved
from accel.errors import ConfigError, LaunchError
from accel.launching import run_launch
from accel.launching._launch import plan_here
from accel.launching._target import LaunchTarget, check_target
from accel.launching.hosts._hostfile import (
    choose_hosts,
    exported,
    host_commands,
    read_hostfile,
    read_hosts,
    run_on_hosts,
)
from accel.launching.hosts._hosts import check_endpoint, check_tasks
from accel.launching.hosts._slurm import batch_script, plan_job, submit
from accel.launching.local._launch_plan import HostPosition, LaunchPlan
from accel.launching.local._machine import describe_cores, on_pod
from accel.run_folder import hide_in_text
from accel.system import current_folder, write_error

_USAGE = "accel launch [flags] script.py [args...]"
_OURS_ALONE = ("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--gpu-ids")
_HOST_FLAGS = ("hostfile", "include", "exclude", "shell", "export")
_ABOUT = """Run a script on N processes of this host, or of several hosts.
Flags come before the script; all arguments after it go to the script.
Flags override ACCEL_* variables, and these override the file.

examples:
  accel launch --nproc-per-node 2 train.py --epochs 3
  accel launch --cpu --nproc-per-node 2 train.py
  accel launch -m package.train"""


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a script on N processes of this machine; return the exit status."""
    own, rest = split_words(words)
    known = parser().read(own)
    resolved = resolve_flags(known, environ)
    print_settings_file(resolved)
    config = on_pod(resolved, environ)
    target = _target(known, rest)
    if late := [word for word in target.args if word.partition("=")[0] in _OURS_ALONE]:
        write_error(f"accel: {late[0]} goes to the script: flags of accel launch come before it\n")
    if known.hostfile:
        return _run_on_hosts(known, target, resolved, environ)
    if idle := given_flags(known, [flag for flag in _HOST_FLAGS[1:] if getattr(known, flag)]):
        raise ConfigError("no effect without --hostfile", got=", ".join(idle))
    if known.slurm:
        print(_submit(target, resolved, environ, dry_run=known.dry_run), end="")
        return 0
    if known.dry_run:
        print(_dry_run(target, resolved, environ), end="")
        return 0
    inherited = {**environ, **resolved.sources_variable()}
    return run_launch(
        target.name,
        target.args,
        kind=target.kind,
        config=config,
        sources=resolved.sources,
        environ=inherited,
        summary=True,
        is_command=True,
    )


def parser() -> Parser:
    """Return the parser of the launcher's own flags."""
    built = Parser("accel launch", usage=_USAGE, description=_ABOUT, script="script.py")
    hosts = add_fields(built)[HOSTS]
    _ = built.add_argument("-m", "--module", action="store_true", help="run a module, as `python -m` does")
    built.switch("--no-python", "run a program that is not Python")
    built.switch("--dry-run", "print each process's command and environment, and start nothing")
    hosts.value("--hostfile", "FILE", "start ranks on the hosts in FILE, with lines such as `node0 slots=8`")
    hosts.value("--include", "HOSTS", "hosts and slots of FILE to use, such as node0@node1:0,2")
    hosts.value("--exclude", "HOSTS", "hosts and slots of FILE to leave out")
    hosts.value("--shell", "WORDS", "remote shell for --hostfile (default: ssh)")
    hosts.value("--export", "NAMES", "variables to send to the hosts, in addition to NCCL_*, GLOO_* and UCX_*")
    hosts.switch("--slurm", "submit the launch to Slurm; with --dry-run, print the batch script")
    return built


def split_words(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the command line before the script: the launcher's flags, then the script and all that follows it."""
    flags = value_flags() | {f"--{flag}" for flag in _HOST_FLAGS}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return words[:at], words[at + 1 :]
        at += 2 if words[at] in flags else 1
    return words[:at], words[at:]


def _target(known: argparse.Namespace, rest: Sequence[str]) -> LaunchTarget:
    if known.module and known.no_python:
        raise ConfigError(
            "a module is run by python", got="--module and --no-python", where="accel launch", fix="Leave one out."
        )
    if not rest:
        raise LaunchError("no script was given", expected=_USAGE, fix="Name the script to run.")
    kind = "module" if known.module else "program" if known.no_python else "script"
    return LaunchTarget(kind=kind, name=rest[0], args=tuple(rest[1:]))


def _run_on_hosts(
    known: argparse.Namespace, target: LaunchTarget, resolved: Resolved, environ: Mapping[str, str]
) -> int:
    check_target(target, environ)
    hosts = choose_hosts(
        read_hosts(read_hostfile(known.hostfile), known.hostfile), known.include or "", known.exclude or ""
    )
    given = [name for name, source in resolved.sources.items() if source.kind != "default"]
    exports = exported(environ, [name for name in (known.export or "").split(",") if name])
    commands = host_commands(
        hosts, target, resolved.config, given, python=sys.executable, folder=current_folder(), exports=exports
    )
    shell = shlex.split(known.shell or "ssh")
    if known.dry_run:
        print("\n".join(shlex.join([*shell, each.host, each.command]) for each in commands))
        return 0
    return run_on_hosts(commands, shell, environ, grace_s=resolved.config.stop_grace_s)


def _submit(target: LaunchTarget, resolved: Resolved, environ: Mapping[str, str], *, dry_run: bool) -> str:
    check_target(target, environ)
    if resolved.config.node_rank != "auto":
        where = str(resolved.sources["node_rank"])
        raise ConfigError("Slurm numbers the nodes by itself", where=where, fix="Leave node_rank out with --slurm.")
    given = {name for name, source in resolved.sources.items() if source.kind != "default"}
    config, idle = plan_job(target, resolved.config, given, environ)
    if idle:
        write_error(f"accel: {idle}\n")
    script = batch_script(
        target, config, given | {"nproc_per_node"}, python=sys.executable, has_file=bool(resolved.file)
    )
    return script if dry_run else submit(script, environ)


def _dry_run(target: LaunchTarget, resolved: Resolved, environ: Mapping[str, str]) -> str:
    check_target(target, environ)
    config = on_pod(resolved, environ)
    hosts = config.hosts[1]
    if hosts == 1:
        check_tasks(resolved.sources, environ)
        return describe_plan(plan_here(target, config, environ, record_dir="."), environ)
    at = 0 if config.node_rank == "auto" else config.node_rank
    position = HostPosition(node_rank=at, num_nodes=hosts, master_addr=check_endpoint(config))
    plan = plan_here(target, config, environ, record_dir=".", position=position)
    settled = "places, MASTER_ADDR and MASTER_PORT are settled when the hosts have met"
    return f"# host {at} of {hosts}; {settled}\n\n{describe_plan(plan, environ)}"


def describe_plan(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """Return a plan as commands for a shell: the variables that differ from its environment, and the program of each
    process."""
    text = [f"# not bound to cores: {plan.unbound}\n"] if plan.unbound else []
    text += [f"# {plan.idle}\n"] if plan.idle else []
    for process in plan.processes:
        unset = [f"-u {name}" for name in environ if name not in process.environ]
        changed = [
            f"{name}={shlex.quote(hide_in_text(value))}"
            for name, value in process.environ.items()
            if environ.get(name) != value
        ]
        lines = [" ".join(["env", *unset]), *changed, shlex.join(process.program)]
        place = f", on cores {describe_cores(process.cores)}" if process.cores else ""
        text.append(f"# rank {process.rank}{place}\n" + " \\\n    ".join(lines) + "\n")
    return "\n".join(text)
