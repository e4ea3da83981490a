# SPDX-License-Identifier: Apache-2.0
"""`accel estimate`: the memory that training a model takes, per precision and strategy, before it is loaded."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

import msgspec

from accel.cli._estimate_tables import (
    CONTEXT_METHODS,
    FILLS,
    PLACEMENTS,
    add_device_map_flags,
    add_mesh_flags,
    check_without_device_map,
    check_without_mesh,
    run_device_map,
    run_mesh,
)
from accel.cli._parser import RESERVED, RESERVED_FOR, Parser, memory_limit
from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.estimate import EstimatedStep, find_source, rank_memory, read_source
from accel.estimate._memory import PARTS, STRATEGIES, RankMemory, fewest_ranks, largest_parts
from accel.estimate._model import Model, units_of
from accel.estimate._sources import cached_model, is_model_name
from accel.estimate._step import OPTIMIZERS
from accel.formats import PrecisionName
from accel.terminal import show_count, show_size, show_table
from accel.topology import Axes, Balance

if TYPE_CHECKING:
    from accel.estimate._build import Input

_USAGE = """accel estimate SOURCE [--input SHAPE] [--nproc N] [--memory SIZE] [flags]
       accel estimate SOURCE --mesh TEXT --input ROWSxTOKENS [flags]
       accel estimate SOURCE --device-map TEXT [flags]"""
_ABOUT = """Estimate the memory of a training step on each rank; no weights are read.

SOURCE is one of
  module:function     a function without arguments that makes the model
  config.json         a configuration of transformers (extra `transformers`)
  model.safetensors   weights, also pytorch_model.bin, or an index of several
                      files; only headers are read, without activations
  a folder            with such files; config.json is used if --input is given
  organisation/model  a model in the local cache of the Hub; nothing is
                      downloaded
  timm/NAME           a model of timm (extra `timm`)"""
_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "bf16", "pure-bf16")
NAMES: Mapping[str, tuple[str, ...]] = {
    "--precision": get_args(PrecisionName),
    "--strategy": tuple(STRATEGIES),
    "--optimizer": tuple(OPTIMIZERS),
    "--context": CONTEXT_METHODS,
    "--balance": get_args(Balance),
    "--placement": PLACEMENTS,
    "--fill": FILLS,
}
_ALONE = ("ddp",)  # one rank divides nothing
_INPUT = re.compile(r"([1-9][0-9]*(?:x[1-9][0-9]*)*)(?::([a-z]+[0-9]*))?")
_TITLES = ("PRECISION", "STRATEGY", *map(str.upper, PARTS), "TOTAL", "AT")
_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the estimate; return the exit status, 1 if nothing fits."""
    known = parser().read(words)
    known.source = _located(known.source, environ)
    given = {"--precision": known.precision, "--strategy": known.strategy, "--optimizer": [known.optimizer]}
    for flag, names in given.items():
        for name in names or ():
            check_choice(name, NAMES[flag], f"unknown {flag.removeprefix('--')}", where=flag)
    if known.device_map is not None:
        return run_device_map(known)
    check_without_device_map(known)
    if known.nproc < 1:
        raise ConfigError(
            "the number of ranks is not valid", expected="1 or above", got=str(known.nproc), where="--nproc"
        )
    limit = None if known.memory is None else memory_limit(known.memory, known.reserve)
    if known.mesh is not None:
        return run_mesh(known, limit)
    check_without_mesh(known)
    model = _read(known.source, known.input or ())
    step = _step(model, known)
    shown = STRATEGIES if known.nproc > 1 or limit is not None else _ALONE
    rows = [
        _row(model, msgspec.structs.replace(step, precision=precision), strategy, known.nproc, limit)
        for precision in known.precision or _PRECISIONS
        for strategy in known.strategy or shown
    ]
    if known.json:
        found = {
            "source": model.source,
            "parameters": model.count,
            "weights": _weights(model),
            "nproc": known.nproc,
            "rows": rows,
        }
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(_text(model, step, known, rows))
    return int(limit is not None and not any(row.fits for row in rows))


def parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel estimate", usage=_USAGE, description=_ABOUT)
    built.value("source", "SOURCE", argparse.SUPPRESS)
    built.value(
        "--input",
        "SHAPE",
        "shape of an input tensor of one rank, such as 16x3x224x224 or 8x512:int64; once for each"
        " (default: :float32; for a config.json :int64)",
        action="append",
    )
    built.value("--nproc", "N", "ranks that share the work (default: 1)", type=int, default=1)
    built.value("--memory", "SIZE", "memory of one GPU, such as 24GB; the table then shows what fits")
    built.value("--reserve", "SIZE", f"memory kept for {RESERVED_FOR} (default: {RESERVED})", default=RESERVED)
    built.value("--optimizer", "NAME", f"{', '.join(OPTIMIZERS)} (default: adamw)", default="adamw")
    built.value("--precision", "NAME", f"precisions to show (default: {', '.join(_PRECISIONS)})", action="append")
    built.value("--strategy", "NAME", f"strategies to show (default: {', '.join(STRATEGIES)})", action="append")
    built.switch("--json", "print JSON")
    add_mesh_flags(built)
    add_device_map_flags(built)
    return built


def _located(source: str, environ: Mapping[str, str]) -> str:
    """Return the folder of a model that is named as on the Hub; another source as it is."""
    named = not os.path.exists(source) and ":" not in source and not source.startswith("timm/")
    return str(cached_model(source, environ)) if named and is_model_name(source) else source


def _read(text: str, inputs: Sequence[str]) -> Model:
    source = find_source(text, by_config=bool(inputs))
    if source.kind == "function":
        sys.path.insert(0, os.getcwd())  # as `python -m` would have it
    dtype = "int64" if source.kind == "config" else "float32"
    return read_source(source, [_input(each, dtype) for each in inputs])


def _step(model: Model, known: argparse.Namespace) -> EstimatedStep:
    """Return the step of one rank; its tokens count for a transformer alone."""
    step = EstimatedStep(optimizer=known.optimizer)
    if model.sizes is None or not known.input:
        return step
    rows, tokens = _input(known.input[0], "int64").shape
    return msgspec.structs.replace(step, rows=rows, tokens=tokens)


def _input(text: str, dtype: str) -> Input:
    from accel.estimate import Input

    match = _INPUT.fullmatch(text)
    if match is None:
        expected = "sizes and a dtype, such as 8x512:int64"
        raise ConfigError("the shape is not valid", expected=expected, got=repr(text), where="--input")
    check_choice(match[2] or dtype, _DTYPES, "unknown dtype", where="--input")
    return Input(tuple(map(int, match[1].split("x"))), match[2] or dtype)


class EstimateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    precision: PrecisionName  # name of the precision
    strategy: str  # name of the strategy
    memory: RankMemory  # bytes on the rank that needs most, at the moment when it does
    largest: Mapping[str, int | None]  # the most bytes of each part, whenever in the step
    total: int  # the sum of `memory`
    fits: bool | None = None  # True within the limit; None without one
    fewest_ranks: int | None = None  # ranks with which it would fit, 0 for never; None if it fits

    @property
    def verdict(self) -> str:
        """The last column."""
        if self.fits is None:
            return ""
        return "yes" if self.fits else f"from {self.fewest_ranks} ranks" if self.fewest_ranks else "no"


def _row(model: Model, step: EstimatedStep, strategy: str, nproc: int, limit: int | None) -> EstimateRow:
    how = STRATEGIES[strategy]
    chosen = model, Axes(dp=nproc), how.of(step), how.plan
    memory = rank_memory(*chosen)
    row = EstimateRow(
        precision=step.precision, strategy=strategy, memory=memory, largest=largest_parts(*chosen), total=memory.total
    )
    if limit is None:
        return row
    fits = memory.total <= limit
    fewest = None if fits else fewest_ranks(model, limit, strategy, step, least=nproc)
    return msgspec.structs.replace(row, fits=fits, fewest_ranks=fewest)


def _weights(model: Model) -> dict[str, int]:
    """Bytes of what a checkpoint holds, by the format of floating-point values."""
    formats = {"stored": None, "fp32": "F32", "bf16": "BF16", "int8": "I8"}
    return {name: model.weight_bytes(dtype) for name, dtype in formats.items()}


def _text(model: Model, step: EstimatedStep, known: argparse.Namespace, rows: Sequence[EstimateRow]) -> str:
    parts = units_of(model.parameters)
    units = {name: sum(each.count for each in each_of) for name, each_of in parts.items() if name}
    largest = max(units, key=lambda name: units[name], default="")
    blocks = f"; largest of {len(units)} blocks: {largest} with {show_count(units[largest])}" if units else ""
    weights = _weights(model)
    formats = [name for name in weights if name != "stored" or weights["stored"] not in (weights["fp32"], 0)]
    sizes = ", ".join(f"{show_size(weights[name])} {'as' if name == 'stored' else 'in'} {name}" for name in formats)
    ranks = f"each of {known.nproc} ranks" if known.nproc > 1 else "one rank"
    called = [f"{step.rows}x{step.tokens}"] if model.sizes is not None else known.input
    given = f", called with {' '.join(called)}" if called else ""
    lines = [
        model.source,
        f"{show_count(model.count)} parameters in {len(model.parameters)} tensors{blocks}",
        f"weights only: {sizes}",
        "",
        f"A step with {known.optimizer} on {ranks}{given}:",
        show_table([(*_TITLES, "" if rows[0].fits is None else "FITS"), *map(_cells, rows)]),
    ]
    if not model.knows_activations:
        lines.append("Activations are not known: name an --input, with a config.json or module:function.")
    return "\n".join(lines)


def _cells(row: EstimateRow) -> list[str]:
    sizes = ["?" if part is None else show_size(part) for part in (*row.largest.values(), row.total)]
    return [row.precision, row.strategy, *sizes, row.memory.moment, row.verdict]
