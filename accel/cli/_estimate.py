# SPDX-License-Identifier: Apache-2.0
"""`accel estimate`: the memory that training a model takes, per precision and strategy, before it is loaded."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

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
from accel.cli._parser import Parser
from accel.errors import ConfigError, check_choice
from accel.estimate import (
    OPTIMIZERS,
    STRATEGIES,
    Memory,
    Model,
    cached_model,
    fewest_ranks,
    has_weights,
    is_model_name,
    plan_memory,
)
from accel.formats import PrecisionName
from accel.storage import parse_size
from accel.terminal import show_size, show_table

if TYPE_CHECKING:
    from accel.estimate._build import Input

_USAGE = """accel estimate SOURCE [--input SHAPE] [--nproc N] [--memory SIZE] [flags]
       accel estimate SOURCE --mesh TEXT --input ROWSxTOKENS [flags]
       accel estimate SOURCE --device-map TEXT [flags]"""
_ABOUT = """Estimate the memory of a training step on each rank; no weights are read.

SOURCE is one of
  module:function     makes the model; it takes no arguments
  config.json         of Hugging Face's transformers (extra `transformers`)
  model.safetensors   or pytorch_model.bin, or an index of several; only headers
                      are read, so activations are left out
  a folder            with such files; config.json counts if --input is given
  organisation/model  in the local cache of the Hub; nothing is downloaded
  timm/NAME           a model of timm (extra `timm`)"""
_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "bf16", "pure-bf16")
NAMES: Mapping[str, tuple[str, ...]] = {
    "--precision": get_args(PrecisionName),
    "--strategy": tuple(STRATEGIES),
    "--optimizer": tuple(OPTIMIZERS),
    "--context": CONTEXT_METHODS,
    "--placement": PLACEMENTS,
    "--fill": FILLS,
}
_TIMM = "timm/"
_ALONE = ("ddp",)  # one rank divides nothing
_INPUT = re.compile(r"([1-9][0-9]*(?:x[1-9][0-9]*)*)(?::([a-z]+[0-9]*))?")
_TITLES = ("PRECISION", "STRATEGY", "PARAMETERS", "GRADIENTS", "OPTIMIZER", "ACTIVATIONS", "WORKING", "TOTAL")
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
        raise ConfigError("no rank would train", expected="1 or above", got=str(known.nproc), where="--nproc")
    limit = None if known.memory is None else _limit(known.memory, known.reserve)
    if known.mesh is not None:
        return run_mesh(known, limit)
    check_without_mesh(known)
    model = _read(known.source, known.input or ())
    shown = STRATEGIES if known.nproc > 1 or limit is not None else _ALONE
    rows = [
        _row(model, known, precision, strategy, limit)
        for precision in known.precision or _PRECISIONS
        for strategy in known.strategy or shown
    ]
    if known.json:
        found = {"source": model.source, "parameters": model.count, "nproc": known.nproc, "rows": rows}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(_text(model, known, rows))
    return int(limit is not None and not any(row.fits for row in rows))


def parser() -> Parser:
    """Return the parser of the command's words."""
    built = Parser("accel estimate", usage=_USAGE, description=_ABOUT)
    add = built.add_argument
    _ = add("source", metavar="SOURCE", help=argparse.SUPPRESS)
    _ = add(
        "--input",
        action="append",
        metavar="SHAPE",
        help="shape of an input tensor of one rank, such as 16x3x224x224 or 8x512:int64; once for each"
        " (default: :float32; for a config.json :int64)",
    )
    _ = add("--nproc", type=int, default=1, metavar="N", help="ranks that share the work (default: 1)")
    _ = add(
        "--memory",
        metavar="SIZE",
        help="memory of one GPU, such as 24GB: rows show what fits",
    )
    _ = add("--reserve", default="1GB", metavar="SIZE", help="part of it for CUDA and fragments (default: 1GB)")
    _ = add("--optimizer", default="adamw", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default: adamw)")
    _ = add("--precision", action="append", metavar="NAME", help=f"rows to show (default: {', '.join(_PRECISIONS)})")
    _ = add("--strategy", action="append", metavar="NAME", help=f"rows to show (default: {', '.join(STRATEGIES)})")
    _ = add("--json", action="store_true", help="for programs")
    add_mesh_flags(built)
    add_device_map_flags(built)
    return built


def _limit(memory: str, reserve: str) -> int:
    left = parse_size(memory, "--memory") - parse_size(reserve, "--reserve")
    if left <= 0:
        got = f"--memory {memory} --reserve {reserve}"
        raise ConfigError("nothing is left of the memory", got=got, fix="Reserve less.")
    return left


def _located(source: str, environ: Mapping[str, str]) -> str:
    """Return the folder of a model that is named as on the Hub; another source as it is."""
    named = not os.path.exists(source) and ":" not in source and not source.startswith(_TIMM)
    return str(cached_model(source, environ)) if named and is_model_name(source) else source


def _read(source: str, inputs: Sequence[str]) -> Model:
    path = Path(source)
    if source.startswith(_TIMM) and not path.exists():
        from accel.estimate import from_timm

        return from_timm(source.removeprefix(_TIMM), [_input(each, "float32") for each in inputs])
    if not path.exists() and ":" in source:
        from accel.estimate import from_function

        sys.path.insert(0, os.getcwd())  # as `python -m` would have it
        return from_function(source, [_input(each, "float32") for each in inputs])
    if path.is_dir() and (path / "config.json").is_file() and (inputs or not has_weights(path)):
        path /= "config.json"
    if path.is_file() and path.suffix == ".json" and not path.name.endswith(".index.json"):
        from accel.estimate import from_config

        return from_config(path, [_input(each, "int64") for each in inputs])
    if not path.exists():
        fix = "`accel estimate --help` lists what SOURCE may be."
        raise ConfigError("there is no such source", expected="a path or module:function", got=repr(source), fix=fix)
    if inputs:
        fix = "Name a config.json or module:function, or leave --input out."
        raise ConfigError("headers lack the activations of a forward", got="--input", where=str(path), fix=fix)
    from accel.estimate import from_headers

    return from_headers(path)


def _input(text: str, dtype: str) -> Input:
    from accel.estimate import Input

    match = _INPUT.fullmatch(text)
    if match is None:
        expected = "sizes and a dtype, such as 8x512:int64"
        raise ConfigError("not a shape", expected=expected, got=repr(text), where="--input")
    check_choice(match[2] or dtype, _DTYPES, "unknown dtype", where="--input")
    return Input(tuple(map(int, match[1].split("x"))), match[2] or dtype)


class EstimateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table.

    Attributes:
        precision, strategy: names of both.
        memory: bytes on each rank.
        total: their sum.
        fits: True within the limit; None without one.
        fewest_ranks: ranks with which it would fit, 0 for never; None if it fits.
    """

    precision: PrecisionName
    strategy: str
    memory: Memory
    total: int
    fits: bool | None = None
    fewest_ranks: int | None = None

    @property
    def verdict(self) -> str:
        """The last column."""
        if self.fits is None:
            return ""
        return "yes" if self.fits else f"from {self.fewest_ranks} ranks" if self.fewest_ranks else "no"


def _row(
    model: Model, known: argparse.Namespace, precision: PrecisionName, strategy: str, limit: int | None
) -> EstimateRow:
    chosen: dict[str, Any] = {"precision_name": precision, "strategy": strategy, "optimizer": known.optimizer}
    memory = plan_memory(model, nproc=known.nproc, **chosen)
    row = EstimateRow(precision=precision, strategy=strategy, memory=memory, total=memory.total)
    if limit is None:
        return row
    fits = memory.total <= limit
    fewest = None if fits else fewest_ranks(model, limit, least=known.nproc, **chosen)
    return msgspec.structs.replace(row, fits=fits, fewest_ranks=fewest)


def _text(model: Model, known: argparse.Namespace, rows: Sequence[EstimateRow]) -> str:
    units = {name: sum(each.count for each in each_of) for name, each_of in model.units.items() if name}
    largest = max(units, key=lambda name: units[name], default="")
    blocks = f"; largest of {len(units)} blocks: {largest} with {_short(units[largest])}" if units else ""
    sizes = {name: show_size(model.count * size) for name, size in (("fp32", 4), ("bf16", 2), ("int8", 1))}
    ranks = f"each of {known.nproc} ranks" if known.nproc > 1 else "one rank"
    given = f", called with {' '.join(known.input)}" if known.input else ""
    lines = [
        model.source,
        f"{_short(model.count)} parameters in {len(model.parameters)} tensors{blocks}",
        "weights alone: " + ", ".join(f"{size} in {name}" for name, size in sizes.items()),
        "",
        f"A step with {known.optimizer} on {ranks}{given}:",
        show_table([(*_TITLES, "" if rows[0].fits is None else "FITS"), *map(_cells, rows)]),
    ]
    if not model.activations:
        lines.append("Activations are not known: name an --input, with a config.json or module:function.")
    return "\n".join(lines)


def _cells(row: EstimateRow) -> list[str]:
    memory = row.memory
    known = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.working, row.total)
    sizes = ["?" if part is None else show_size(part) for part in known]
    return [row.precision, row.strategy, *sizes, row.verdict]


def _short(count: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
