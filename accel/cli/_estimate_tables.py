# SPDX-License-Identifier: Apache-2.0
"""`accel estimate --device-map` and `--mesh`: homes of blocks, memory by kind, and traffic by axis."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import msgspec

from accel.bigmodel.plan import (
    DeviceMap,
    Fill,
    Placement,
    Skeleton,
    explain,
    format_name,
    guess_skeleton,
    infer_device_map,
    torch_name,
)
from accel.cli._parser import Parser, add_saving_flags, given_flags, saving_plan
from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.estimate import (
    EstimatedStep,
    Transformer,
    find_source,
    mesh_problem,
    rank_memory,
    read_transformer,
    step_traffic,
)
from accel.estimate._build import built, quiet_fakes, read_config
from accel.estimate._cost import Traffic
from accel.estimate._memory import RankMemory, largest_parts
from accel.estimate._sources import describe_source, name_headers, read_headers
from accel.formats import PrecisionName, StrategyName
from accel.storage import parse_size
from accel.terminal import show_count, show_size, show_table
from accel.topology import Axes, Balance, ContextMethod, Plan, fit_axes, mesh_sizes

if TYPE_CHECKING:
    from torch import nn


PLACEMENTS: tuple[str, ...] = get_args(Placement)
FILLS: tuple[str, ...] = get_args(Fill)


class _Stored(NamedTuple):
    """Storage of matrices at home."""

    dtype: str | None  # safetensors' name of their dtype; None for their own
    skip: tuple[str, ...]  # names of weights that keep theirs, or patterns


class _FoundModel(NamedTuple):
    """A model that a source gives."""

    source: str  # origin, in words
    skeleton: Skeleton  # the model
    dtype: str | None  # name of the dtype of its weights, if it is another


def add_device_map_flags(built: Parser) -> None:
    """Give a parser the flags of a device map."""
    group = built.group("inference within limits, without --input")
    group.value(
        "--device-map",
        "TEXT",
        "memory limit of each place, such as 0=20GB,cpu=60GB,disk, as for accel.infer_device_map",
    )
    group.value("--dtype", "NAME", "dtype of weights, such as bfloat16 (default: as in the file)")
    group.value("--storage-dtype", "NAME", "dtype in which matrices are stored between calls, such as float8_e4m3fn")
    group.value("--storage-skip", "NAMES", "weights that keep --dtype, by name or pattern: *.router.*,head.weight")
    group.value(
        "--slots", "N", "number of streamed blocks on a device at a time (default: 2, or 1)", type=int, default=None
    )
    group.value("--placement", "NAME", f"placement of streamed blocks: {', '.join(PLACEMENTS)} (default: spread)")
    group.value("--fill", "NAME", f"order in which devices are filled: {', '.join(FILLS)} (default: the best)")
    group.value(
        "--bandwidth", "SIZE", "bytes per second into a device, such as 20GB; adds the seconds of a forward pass"
    )


def check_without_device_map(known: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags of a device map without one."""
    names = ("dtype", "storage_dtype", "storage_skip", "slots", "placement", "fill", "bandwidth")
    if named := given_flags(known, names):
        raise ConfigError(
            "flags of a device map have no effect without one",
            got=", ".join(named),
            where="accel estimate",
            fix="Give limits: --device-map 0=20GB,cpu=60GB,disk.",
        )


def run_device_map(known: argparse.Namespace) -> int:
    """Print the device map of a model; return the exit status."""
    _check_without_step(known)
    placement = known.placement or "spread"
    check_choice(placement, PLACEMENTS, "unknown placement", where="--placement")
    if known.fill is not None:
        check_choice(known.fill, FILLS, "unknown way to fill devices", where="--fill")
    limits = _limits(known.device_map)
    found = _skeleton(known.source, _stored(known.storage_dtype, known.storage_skip))
    device_map = infer_device_map(
        found.skeleton,
        limits,
        slots=known.slots,
        placement=placement,
        fill=known.fill,
        dtype=known.dtype or found.dtype,
    )
    print(device_map.encode().decode() if known.json else _text(found, device_map, known.bandwidth))
    return 0


def _check_without_step(known: argparse.Namespace) -> None:
    names = ("input", "memory", "mesh", "precision", "strategy")
    if named := [*given_flags(known, names), *(["--nproc"] if known.nproc != 1 else [])]:
        raise ConfigError(
            "flags of a training step together with a device map",
            got=", ".join(named),
            where="--device-map",
            fix="Leave them out: a device map is for inference.",
        )


def _limits(text: str) -> dict[int | str, int | str | None]:
    limits: dict[int | str, int | str | None] = {}
    for part in text.split(","):
        name, given, size = part.strip().partition("=")
        key = int(name) if name.isdecimal() else name
        if key in limits:
            raise ConfigError("a place with two limits", got=repr(name), where="--device-map")
        limits[key] = size if given else None
    return limits


def _stored(dtype: str | None, skip: str | None) -> _Stored:
    if dtype is None and skip is not None:
        problem = "--storage-skip has no effect without --storage-dtype"
        raise ConfigError(problem, got=repr(skip), fix="Give --storage-dtype float8_e4m3fn.")
    names = tuple(name.strip() for name in (skip or "").split(",") if name.strip())
    return _Stored(None if dtype is None else format_name(dtype, where="--storage-dtype"), names)


def _skeleton(text: str, stored: _Stored) -> _FoundModel:
    source = find_source(text)
    if source.kind == "function":
        sys.path.insert(0, os.getcwd())  # as `python -m` would have it
    if source.kind != "headers":
        described = describe_source(source)
        return _FoundModel(described.source, _described(described.make, described.source, stored), described.dtype)
    headers = read_headers(source.path)
    entries = {name: entry for header in headers for name, entry in header.tensors.items()}
    skeleton = guess_skeleton(entries)
    if stored.dtype is not None:
        skeleton = skeleton.store(stored.dtype, skip=stored.skip)
    return _FoundModel(f"{name_headers(source.path, headers)}; blocks by name", skeleton, None)


def _described(make: Callable[[], nn.Module], source: str, stored: _Stored) -> Skeleton:
    import torch

    from accel.bigmodel import describe

    dtype = None if stored.dtype is None else getattr(torch, torch_name(stored.dtype))
    with built(make, source) as model:
        return describe(model, storage_dtype=dtype, storage_skip=stored.skip)


def _text(found: _FoundModel, device_map: DeviceMap, bandwidth: str | None) -> str:
    skeleton = device_map.skeleton
    dtypes = ", ".join(sorted({weight.dtype for weight in skeleton.weights()}))
    stored = sorted({str(weight.storage_dtype) for weight in skeleton.weights() if weight.is_cast})
    dtypes += f", matrices stored in {', '.join(stored)}" if stored else ""
    speed = None if bandwidth is None else float(parse_size(bandwidth, "--bandwidth"))
    weights = f"weights only: {show_size(skeleton.weight_bytes)} of {dtypes}"
    lines = [found.source, weights, f"{len(skeleton.segments)} segments, {skeleton.memory:,} bytes in memory", ""]
    return "\n".join([*lines, explain(device_map, bandwidth=speed, picture=True)])


CONTEXT_METHODS: tuple[str, ...] = get_args(ContextMethod)
_ROWS = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)(:int64)?")


class MeshReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for programs."""

    source: str  # the configuration
    parameters: int  # number of elements of the model
    mesh: str  # sizes of the axes
    ranks: int  # number of ranks
    memory: RankMemory  # bytes on the rank that needs most
    largest: Mapping[str, int | None]  # the most bytes of each part, whenever in the step and on whichever rank
    total: int  # the sum of `memory`
    traffic: Sequence[Traffic]  # messages of this rank in a step
    fits: bool | None  # True within the limit; None without one


def add_mesh_flags(built: Parser) -> None:
    """Give a parser the flags of a step on a mesh."""
    group = built.group("a step on a mesh, for a config.json only; --input is then ROWSxTOKENS")
    group.value("--mesh", "TEXT", "sizes by axis, such as dp=16,tp=4; -1 takes the ranks that --nproc leaves")
    group.value("--micro-batches", "N", "micro-batches of a step (default: 1)", type=int, default=None)
    group.switch("--recompute", "recompute blocks in backward, as accel.checkpoint_activations")
    group.value("--keep", "NAME", "with --recompute: products keeps the outputs of matmuls and attention")
    group.switch("--sequence", "sequence parallelism along tp, as Plan(sequence=True)")
    group.value("--context", "NAME", f"method along cp: {', '.join(CONTEXT_METHODS)} (default: gather)")
    add_saving_flags(group)
    group.value(
        "--balance",
        "NAME",
        f"quantity that balances the stages along pp: {', '.join(get_args(Balance))} (default: time)",
    )


def check_without_mesh(known: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags of a mesh without one."""
    names = ("micro_batches", "recompute", "keep", "sequence", "context", "balance")
    names += ("logits", "offload", "offload_activations", "chunks")
    if named := given_flags(known, names):
        raise ConfigError(
            "flags of a step on a mesh have no effect without one",
            got=", ".join(named),
            where="accel estimate",
            fix="Name the mesh: --mesh dp=8.",
        )


def with_recorded_calls(model: Transformer, file: Path) -> Transformer:
    """Return a model's sizes with the calls that `prepare` cuts into stages: transformers builds the model without
    memory, and its forward is recorded.

    Without transformers, for a model with an encoder of images, which has unknown inputs, and for a file that
    transformers does not build, stages follow from the sizes.
    """
    if model.tower is not None or find_spec("transformers") is None:
        return model
    file = file / "config.json" if file.is_dir() else file
    torch = import_module("torch")
    stages = import_module("accel.parallel.axes.pipeline._stages")
    with quiet_fakes():
        try:
            with torch.device("meta"):
                built_model = read_config(file).make()
            calls = stages.recorded_calls(built_model)
        except Exception:  # whatever transformers raises for a file that the sizes do not need
            return model
    return msgspec.structs.replace(model, calls=calls if sum(each.blocks for each in calls) == model.layers else ())


def run_mesh(known: argparse.Namespace, limit: int | None) -> int:
    """Print the estimate of a step on a mesh; return the exit status, 1 if it does not fit."""
    file = _config(known.source)
    axes = _axes(known)
    model = read_transformer(file)
    model = with_recorded_calls(model, file) if axes.pp > 1 else model
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
        largest=largest_parts(model, axes, step, plan),
        total=memory.total,
        traffic=step_traffic(model, axes, step, plan, stage=memory.stage),
        fits=None if limit is None else memory.total <= limit,
    )
    if known.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print(_mesh_text(report, model, step, limit))
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
    own = saving_plan(known)
    return msgspec.structs.replace(own, sequence=known.sequence, context=cast(ContextMethod, context))


def _step(known: argparse.Namespace) -> EstimatedStep:
    usual = EstimatedStep()
    given = known.input or [f"{usual.rows}x{usual.tokens}"]
    match = _ROWS.fullmatch(given[0])
    if match is None or len(given) > 1:
        expected = "sequences of a micro-batch and their tokens, such as 1x8192"
        raise ConfigError(
            "the input does not fit a step on a mesh", expected=expected, got=" ".join(given), where="--input"
        )
    for flag, names in (("--precision", known.precision), ("--strategy", known.strategy)):
        if names and len(names) > 1:
            raise ConfigError("one answer for a mesh", expected="one", got=" and ".join(names), where=flag)
    strategy = known.strategy[0] if known.strategy else "fsdp"
    check_choice(strategy, ["ddp", "fsdp"], "the strategy does not fit a mesh", where="--strategy")
    balance = known.balance or "time"
    check_choice(balance, get_args(Balance), "unknown balance of stages", where="--balance")
    return EstimatedStep(
        rows=int(match[1]),
        tokens=int(match[2]),
        micro_batches=1 if known.micro_batches is None else known.micro_batches,
        precision=cast(PrecisionName, known.precision[0] if known.precision else "bf16"),
        optimizer=known.optimizer,
        strategy=cast(StrategyName, strategy),
        recompute=known.recompute,
        balance=cast(Balance, balance),
        keep=cast(Literal["", "products"], known.keep or ""),
        offload=known.offload_activations,
        chunks=1 if known.chunks is None else known.chunks,
    )


def _mesh_text(report: MeshReport, model: Transformer, step: EstimatedStep, limit: int | None) -> str:
    several = f"{step.micro_batches} micro-batches of " if step.micro_batches > 1 else ""
    ranks = f"{report.ranks} rank{'' if report.ranks == 1 else 's'}"
    work = f"{several}{step.rows} x {step.tokens} tokens in {step.precision} with {step.optimizer}"
    lines = [
        f"{report.source}: {show_count(report.parameters)} parameters, {model.layers} blocks",
        f"A step of {work} on {ranks}, {step.strategy}:",
        "",
    ]
    memory = report.memory
    parts = {name: (largest or 0, getattr(memory, name)) for name, largest in report.largest.items()}
    rows = [("MEMORY", "LARGEST", "TOGETHER"), *((name, *map(show_size, sizes)) for name, sizes in parts.items())]
    verdict = "" if limit is None else f", {'within' if report.fits else 'more than'} {show_size(limit)}"
    lines += [show_table([*rows, ("total", "", show_size(report.total) + verdict)])]
    where = f", on rank {memory.stage} along pp" if "pp=" in report.mesh else ""
    lines += [f"Most together at: {memory.moment}{where}"]
    if memory.host:
        lines += [f"In the host's memory then: {show_size(memory.host)}"]
    if report.traffic:
        titles = ("AXIS", "RANKS", "COLLECTIVE", "CALLS", "BYTES", "SENT")
        lines += ["", show_table([titles, *map(_cells, report.traffic)])]
    return "\n".join(lines)


def _cells(each: Traffic) -> tuple[str, ...]:
    return (each.axis, str(each.ranks), each.operation, str(each.calls), show_size(each.bytes), show_size(each.sent))
