# SPDX-License-Identifier: Apache-2.0
"""`accel plan`: meshes on which a model can be trained, the fastest first, and why others do not fit."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from accel.cli._parser import Parser
from accel.cli._show_choices import show_choices
from accel.errors import ConfigError, check_choice
from accel.estimate import OPTIMIZERS, Choice, Choices, Hosts, Job, choose_meshes, read_transformer
from accel.formats import PrecisionName
from accel.storage import parse_size

_USAGE = "accel plan CONFIG --ranks N --memory SIZE [flags]"
_ABOUT = """List the meshes of N ranks on which a model can be trained, the fastest first,
and why others do not fit. No model is built and no GPU is needed. The exit
status is 1 if nothing fits.

CONFIG is a config.json of Hugging Face's transformers, or a folder with one."""
NAMES: Mapping[str, tuple[str, ...]] = {"--precision": get_args(PrecisionName), "--optimizer": tuple(OPTIMIZERS)}
_MOST_RANKS = 1 << 14
_SEARCHED_RANKS = 1 << 8


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for programs.

    Attributes:
        source: the configuration.
        parameters: number of elements of the model.
        ranks: number of ranks.
        limit: bytes that a rank may use.
        fitting: meshes that fit, the fastest first.
        too_large: meshes that do not, the smallest need first.
        refused: number of meshes by the reason for which they are impossible.
    """

    source: str
    parameters: int
    ranks: int
    limit: int
    fitting: Sequence[PlanRow]
    too_large: Sequence[PlanRow]
    refused: Mapping[str, int]


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mesh.

    Attributes:
        mesh: text for `--mesh`.
        options: the choice, with the memory and time of a step.
        memory: bytes on the rank that needs most.
        step_s: seconds of a step.
    """

    mesh: str
    options: Choice
    memory: int
    step_s: float


def run(words: Sequence[str], _environ: Mapping[str, str]) -> int:
    """Print the meshes; return the exit status, 1 if nothing fits."""
    known = parser().read(words)
    job = _job(known)
    model = read_transformer(Path(known.config))
    found = choose_meshes(model, job)
    if known.json:
        report = PlanReport(
            source=known.config,
            parameters=model.count,
            ranks=job.ranks,
            limit=job.memory,
            fitting=list(map(_row, found.fitting)),
            too_large=list(map(_row, found.too_large)),
            refused=dict(Counter(str(each.problem) for each in found.refused)),
        )
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        more = next(_enough(job, found, known), None)
        print(show_choices(known.config, model, job, found, most=known.top, more=more))
    return int(not found.fitting)


def parser() -> Parser:
    """Return the parser of the command's words."""
    hosts = Hosts()
    built = Parser("accel plan", usage=_USAGE, description=_ABOUT)
    add = built.add_argument
    _ = add("config", metavar="CONFIG", help=argparse.SUPPRESS)
    _ = add("--ranks", type=int, required=True, metavar="N", help="number of GPUs")
    _ = add("--memory", required=True, metavar="SIZE", help="memory of one GPU, such as 80GB")
    _ = add("--reserve", default="3GB", metavar="SIZE", help="part of it for CUDA, NCCL and fragments (default: 3GB)")
    _ = add("--tokens", type=int, default=4096, metavar="N", help="length of a sequence (default: 4096)")
    _ = add("--batch", type=int, metavar="N", help="sequences of a step, of all ranks (default: one for each rank)")
    _ = add("--rows", type=int, default=1, metavar="N", help="sequences of a micro-batch (default: 1)")
    _ = add("--precision", default="bf16", metavar="NAME", help=f"{', '.join(NAMES['--precision'])} (default: bf16)")
    _ = add("--optimizer", default="adamw", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default: adamw)")
    _ = add("--host", type=int, default=hosts.ranks, metavar="N", help=f"GPUs of a host (default: {hosts.ranks})")
    _ = add(
        "--link",
        default="450GB,50GB",
        metavar="SIZE,SIZE",
        help="bytes a second of a GPU inside its host, and to other hosts (default: 450GB,50GB)",
    )
    _ = add(
        "--tflops",
        type=float,
        default=hosts.flops / 1e12,
        metavar="N",
        help=f"10^12 operations a second that a GPU reaches in large products (default: {hosts.flops / 1e12:.0f})",
    )
    _ = add("--top", type=int, default=10, metavar="N", help="meshes to show (default: 10)")
    _ = add("--json", action="store_true", help="all meshes, for programs")
    return built


def _job(known: argparse.Namespace) -> Job:
    for flag, names in NAMES.items():
        name = getattr(known, flag.removeprefix("--"))
        check_choice(name, names, f"unknown {flag.removeprefix('--')}", where=flag)
    for flag in ("ranks", "tokens", "batch", "rows", "host", "top"):
        count = getattr(known, flag)
        if count is not None and count < 1:
            raise ConfigError("not a number to plan with", expected="1 or above", got=str(count), where=f"--{flag}")
    if known.ranks > _MOST_RANKS:
        got = str(known.ranks)
        raise ConfigError(
            "too many ranks to list meshes of", expected=f"{_MOST_RANKS} at most", got=got, where="--ranks"
        )
    limit = parse_size(known.memory, "--memory") - parse_size(known.reserve, "--reserve")
    if limit <= 0:
        got = f"--memory {known.memory} --reserve {known.reserve}"
        raise ConfigError("nothing is left of the memory", got=got, fix="Reserve less.")
    return Job(
        ranks=known.ranks,
        memory=limit,
        tokens=known.tokens,
        batch=known.batch,
        rows=known.rows,
        precision=known.precision,
        optimizer=known.optimizer,
        hosts=_hosts(known),
    )


def _hosts(known: argparse.Namespace) -> Hosts:
    inside, comma, between = known.link.partition(",")
    if not comma:
        expected = "two sizes, such as 450GB,50GB"
        raise ConfigError("not the speeds of links", expected=expected, got=repr(known.link), where="--link")
    return Hosts(
        ranks=known.host,
        inside=parse_size(inside, "--link"),
        between=parse_size(between, "--link"),
        flops=known.tflops * 1e12,
    )


def _enough(job: Job, found: Choices, known: argparse.Namespace) -> Iterator[tuple[int, Choice]]:
    """Yield larger numbers of ranks with which the model would fit."""
    model = read_transformer(Path(known.config))
    ranks = job.ranks
    while not found.fitting and ranks * 2 <= _SEARCHED_RANKS:
        ranks *= 2
        more = choose_meshes(model, msgspec.structs.replace(job, ranks=ranks))
        if more.fitting:
            yield ranks, more.fitting[0]


def _row(choice: Choice) -> PlanRow:
    return PlanRow(mesh=str(choice.axes), options=choice, memory=choice.memory.total, step_s=choice.time.total)
