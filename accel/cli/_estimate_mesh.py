# SPDX-License-Identifier: Apache-2.0
"""`accel estimate --mesh`: memory of a rank by kind, and what it sends along each axis in a step."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

import msgspec

from accel.errors import ConfigError, check_choice
from accel.estimate import (
    RankMemory,
    Step,
    Traffic,
    Transformer,
    mesh_problem,
    rank_memory,
    read_transformer,
    step_traffic,
)
from accel.formats import PrecisionName, StrategyName
from accel.terminal import show_size, show_table
from accel.topology import Axes, ContextMethod, Plan, fit_axes, mesh_sizes

CONTEXT_METHODS: tuple[str, ...] = get_args(ContextMethod)
_ROWS = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)(:int64)?")
_DEFAULT_INPUT = "1x4096"
_PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")


class MeshReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for programs.

    Attributes:
        source: the configuration.
        parameters: number of elements of the model.
        mesh: sizes of the axes.
        ranks: number of ranks.
        memory: bytes on the rank that needs most.
        total: their sum.
        traffic: messages of this rank in a step.
        fits: True within the limit; None without one.
    """

    source: str
    parameters: int
    mesh: str
    ranks: int
    memory: RankMemory
    total: int
    traffic: Sequence[Traffic]
    fits: bool | None


def add_mesh_flags(built: argparse.ArgumentParser) -> None:
    """Give a parser the flags of a step on a mesh."""
    group = built.add_argument_group("a step on a mesh, of a config.json alone; --input is then ROWSxTOKENS")
    add = group.add_argument
    _ = add("--mesh", metavar="TEXT", help="sizes by axis, such as dp=16,tp=4; -1 takes the ranks that --nproc leaves")
    _ = add("--micro-batches", type=int, default=None, metavar="N", help="micro-batches of a step (default: 1)")
    _ = add("--recompute", action="store_true", help="blocks keep their inputs alone: accel.checkpoint_activations")
    _ = add("--sequence", action="store_true", help="ranks along tp share tokens: Plan(sequence=True)")
    _ = add("--context", metavar="NAME", help=f"along cp: {', '.join(CONTEXT_METHODS)} (default: gather)")


def check_without_mesh(known: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags of a mesh without one."""
    given = {
        "--micro-batches": known.micro_batches is not None,
        "--recompute": known.recompute,
        "--sequence": known.sequence,
        "--context": known.context is not None,
    }
    if named := [flag for flag, is_given in given.items() if is_given]:
        raise ConfigError(
            "flags of a step on a mesh have no effect without one",
            got=", ".join(named),
            where="accel estimate",
            fix="Name the mesh: --mesh dp=8.",
        )


def run_mesh(known: argparse.Namespace, limit: int | None) -> int:
    """Print the estimate of a step on a mesh; return the exit status, 1 if it does not fit."""
    model = read_transformer(_config(known.source))
    axes = _axes(known)
    plan = _plan(known)
    step = _step(known)
    problem = mesh_problem(axes, model, plan, tokens=step.tokens)
    if problem is not None:
        raise ConfigError(problem.problem, expected=problem.expected, got=problem.got, where=f"--mesh {known.mesh}")
    memory = rank_memory(model, axes, step, plan)
    report = MeshReport(
        source=known.source,
        parameters=model.count,
        mesh=str(axes),
        ranks=axes.world_size,
        memory=memory,
        total=memory.total,
        traffic=step_traffic(model, axes, step, plan, stage=memory.stage),
        fits=None if limit is None else memory.total <= limit,
    )
    if known.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print(_text(report, model, step, limit))
    return int(report.fits is False)


def _config(source: str) -> Path:
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file() and file.suffix == ".json" and not file.name.endswith(".index.json"):
        return file
    raise ConfigError(
        "a mesh needs the sizes of a model",
        expected="a config.json of Hugging Face's transformers, or a folder with one",
        got=repr(source),
        where="--mesh",
        fix="Leave --mesh out for other sources.",
    )


def _axes(known: argparse.Namespace) -> Axes:
    sizes = mesh_sizes(known.mesh, where="--mesh")
    is_open = -1 in sizes.values()
    ranks = known.nproc if is_open or known.nproc > 1 else math.prod(sizes[name] for name in sizes if name != "ep")
    return fit_axes(known.mesh, ranks, where="--mesh") or Axes(dp=known.nproc)


def _plan(known: argparse.Namespace) -> Plan:
    context = known.context or "gather"
    check_choice(context, CONTEXT_METHODS, "unknown kind of context parallelism", where="--context")
    return Plan(sequence=known.sequence, context=cast(ContextMethod, context))


def _step(known: argparse.Namespace) -> Step:
    given = known.input or [_DEFAULT_INPUT]
    match = _ROWS.fullmatch(given[0])
    if match is None or len(given) > 1:
        expected = "sequences of a micro-batch and their tokens, such as 1x8192"
        raise ConfigError("not the input of a step on a mesh", expected=expected, got=" ".join(given), where="--input")
    for flag, names in (("--precision", known.precision), ("--strategy", known.strategy)):
        if names and len(names) > 1:
            raise ConfigError("one answer for a mesh", expected="one", got=" and ".join(names), where=flag)
    strategy = known.strategy[0] if known.strategy else "fsdp"
    check_choice(strategy, ["ddp", "fsdp"], "not a strategy of a mesh", where="--strategy")
    return Step(
        rows=int(match[1]),
        tokens=int(match[2]),
        micro_batches=1 if known.micro_batches is None else known.micro_batches,
        precision=cast(PrecisionName, known.precision[0] if known.precision else "bf16"),
        optimizer=known.optimizer,
        strategy=cast(StrategyName, strategy),
        recompute=known.recompute,
    )


def _text(report: MeshReport, model: Transformer, step: Step, limit: int | None) -> str:
    several = f"{step.micro_batches} micro-batches of " if step.micro_batches > 1 else ""
    ranks = f"{report.ranks} rank{'' if report.ranks == 1 else 's'}"
    work = f"{several}{step.rows} x {step.tokens} tokens in {step.precision} with {step.optimizer}"
    lines = [
        f"{report.source}: {report.parameters / 1e9:.2f} billion parameters, {model.layers} blocks",
        f"A step of {work} on {ranks}, {step.strategy}:",
        "",
    ]
    memory = report.memory
    rows = [("MEMORY", "BYTES"), *((name, show_size(getattr(memory, name))) for name in _PARTS)]
    verdict = "" if limit is None else f", {'within' if report.fits else 'more than'} {show_size(limit)}"
    lines += [show_table([*rows, ("total", show_size(report.total) + verdict)])]
    lines += [f"Largest at: {memory.moment}" + (f", on rank {memory.stage} along pp" if "pp=" in report.mesh else "")]
    if report.traffic:
        titles = ("AXIS", "RANKS", "COLLECTIVE", "CALLS", "BYTES", "SENT")
        lines += ["", show_table([titles, *map(_cells, report.traffic)])]
    return "\n".join(lines)


def _cells(each: Traffic) -> tuple[str, ...]:
    return (each.axis, str(each.ranks), each.operation, str(each.calls), show_size(each.bytes), show_size(each.sent))
