# SPDX-License-Identifier: Apache-2.0
"""A model's tensors as targets of a load: names, this rank's part, device, dtype; and how the weights differ."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accel.bigmodel._arguments import ONLY_READ, check_dtype, device_of, dtype_of
from accel.bigmodel.plan import STORES, DeviceMap, check_map
from accel.checkpoint import Recipe
from accel.checkpoint._boxes import Box, whole
from accel.checkpoint._live_tensors import held_box
from accel.errors import CheckpointError, ConfigError, StreamError
from accel.parallel._empty import is_unknown
from accel.parallel._modules import (
    check_module,
    clean_name,
    is_pipelined,
    memory_of,
    note_tensor,
    reshard,
    unwrap_model,
)
from accel.parallel.axes.pipeline import pipeline_of
from accel.storage import WEIGHT_FLOATS
from accel.tensors import become, is_absent, is_dtensor, local_part, packed_weights, split_dims

DeviceChoice = DeviceMap | int | str | torch.device | None

_WHERE = "load_checkpoint_in_model(device_map=)"


class Destination(NamedTuple):
    """The place that a tensor is loaded to."""

    device: torch.device | None  # the device; None for a tensor that stays in files
    dtype: torch.dtype | None = None  # dtype that its home has for it; None where that is the model's
    is_planned: bool = False  # whether by a device map, and not by one device for all


def find_destinations(device_map: DeviceChoice, default: torch.device) -> Callable[[str], Destination]:
    """Return the function that gives the destination of a tensor by its name; None for the default device.

    The function raises `ConfigError` for a tensor that the map does not have.
    """
    if not isinstance(device_map, DeviceMap):
        everywhere = Destination(default if device_map is None else _one_device(device_map))
        return lambda name: everywhere
    found = _of_map(device_map)

    def find(name: str) -> Destination:
        if name not in found:
            raise ConfigError(
                "the device map is of another model",
                got=f"no {name!r}",
                where=_WHERE,
                fix="Make the map of this model: infer_device_map(describe(model), ...).",
            )
        return found[name]

    return find


def _of_map(device_map: DeviceMap) -> dict[str, Destination]:
    devices = {name: device_of(name, where=_WHERE) for name in {*device_map.devices, "cpu"}}
    found: dict[str, Destination] = {}
    for segment in device_map.skeleton.segments:
        home, runs = device_map.home[segment.name], device_map.runs[segment.name]
        for weight in segment.weights:
            moves = weight.moves and segment.movable
            place = home if moves else runs
            is_cast = segment.casts(weight) if home == runs else moves and weight.storage_dtype is not None
            dtype = dtype_of(cast("str", weight.storage_dtype)) if is_cast else None
            destination = Destination(None if place in STORES else devices[place], dtype, True)
            found |= dict.fromkeys((weight.name, *weight.tied), destination)
    return found


def _one_device(choice: object) -> torch.device:
    is_name = isinstance(choice, torch.device) or type(choice) is int
    if isinstance(choice, str):
        with contextlib.suppress(RuntimeError):
            is_name = bool(torch.device(choice))
    if not is_name:
        check_map(choice, where=_WHERE)
    return device_of(cast("int | str | torch.device", choice), where=_WHERE)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A tensor of a model that a checkpoint holds."""

    names: tuple[str, ...]  # its names, several of a tied one
    live: torch.Tensor  # the tensor
    dtype: torch.dtype  # dtype after the load
    device: torch.device | None  # device after the load; None for a tensor that stays in files
    box: Box | None  # this rank's part; None if it has none

    @property
    def is_empty(self) -> bool:
        """Whether it is on the meta device."""
        return self.live.is_meta

    @property
    def is_unknown(self) -> bool:
        """Whether it has memory but no values yet, as `prepare` leaves a model that was built empty."""
        part = local_part(self.live)
        if self.is_empty or not part.numel() or not part.is_floating_point():
            return False
        return bool(part[(0,) * part.dim()].isnan()) and is_unknown(self.live)  # most are known by one element

    @property
    def is_copied(self) -> bool:
        """Whether other ranks hold the same elements."""
        return not is_dtensor(self.live) or len(split_dims(self.live)) < sum(n > 1 for n in self.live.device_mesh.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of this rank's part."""
        return tuple(local_part(self.live).shape)


def find_targets(
    model: nn.Module, device_map: DeviceChoice, dtype: torch.dtype | None, default: torch.device
) -> list[LoadTarget]:
    """List what a load fills: parameters and persistent buffers, tied ones once.

    `default` is the device of empty tensors without a map; a dtype of None keeps the dtype of each tensor.
    """
    check_module(model, where="load_checkpoint_in_model")
    check_dtype(dtype, where="dtype=")
    destination_of = find_destinations(device_map, default)
    reshard(model)
    for name in packed_weights(model):
        raise ConfigError(
            "a load into quantized weights",
            expected="a model without them",
            got=f"{name!r}, a quantizer's",
            where="load_checkpoint_in_model",
            fix="Build the model anew, then accel.engines.quantized.load_quantized(ctx, model, weights, config=...).",
        )
    named: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for raw, value in model.state_dict(keep_vars=True).items():
        if is_absent(value):
            raise StreamError(
                "a load into a model with weights that dispatch_model has put elsewhere",
                where=f"load_checkpoint_in_model, {raw!r}",
                fix="Build it anew by accel.init_empty_weights; or close it, and dispatch it again with source=path.",
            )
        if isinstance(value, torch.Tensor):
            named.setdefault(id(value), []).append(clean_name(model, raw))
            tensors[id(value)] = value
    inner = unwrap_model(model)
    pipeline = pipeline_of(inner) if is_pipelined(inner) else None
    for tied in pipeline.names if pipeline is not None else ():  # across stages
        for names in named.values():
            if not set(tied).isdisjoint(names):
                names += [name for name in tied if name not in names]
    return [
        _target(tuple(names), tensors[key], destination_of(names[0]), dtype, default) for key, names in named.items()
    ]


def place_others(model: nn.Module, device_map: DeviceChoice, filled: bool, default: torch.device) -> None:
    """Move tensors with values that no load fills, such as rotary frequencies, to the device of their module.

    `filled`: the load gave memory to empty tensors. Mutates the model.
    """
    if device_map is None and not filled:
        return
    destination_of = find_destinations(device_map, default)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or is_dtensor(tensor):
            continue
        device = destination_of(clean_name(model, name)).device
        if device is not None and tensor.device != device:
            tensor.data = tensor.data.to(device)


def fill(target: LoadTarget, made: torch.Tensor) -> None:
    """Give a live tensor its values. Mutates it, or swaps it in place for one on another device or of another dtype."""
    live = target.live
    if not target.is_empty:
        with torch.no_grad():
            _ = local_part(live).copy_(made)
        return
    there = made
    if is_dtensor(live):
        there = cast(Any, type(live)).from_local(
            made, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
        )
    if isinstance(live, nn.Parameter):
        there = nn.Parameter(there, live.requires_grad)
    become(live, there)
    if is_dtensor(live):
        note_tensor(live, memory=memory_of(live))


def _target(
    names: tuple[str, ...],
    live: torch.Tensor,
    destination: Destination,
    dtype: torch.dtype | None,
    default: torch.device,
) -> LoadTarget:
    wanted = dtype if dtype is not None and live.is_floating_point() else live.dtype
    if live.is_meta and destination.dtype is not None:
        wanted = destination.dtype
    if wanted != live.dtype and not live.is_meta:
        raise ConfigError(
            "another dtype than the tensor, which has values",
            expected=str(live.dtype),
            got=str(wanted),
            where=f"dtype=, {names[0]}",
            fix="Build the model by accel.init_empty_weights, or convert it first: model.to(dtype).",
        )
    device = destination.device if live.is_meta and not is_dtensor(live) else live.device
    if live.is_meta and is_dtensor(live):
        kind = live.device_mesh.device_type
        device = default if kind == default.type else torch.device(kind)
        place = destination.device.type if destination.device is not None else None
        if destination.is_planned and (place != kind or destination.dtype is not None):
            device = None  # `dispatch_model` reads values of another device than the mesh's, or of another dtype
    box = held_box(live, names[0]) if is_dtensor(live) else whole(live.shape)
    return LoadTarget(names, live, wanted, device, box)


_MOST_LINES = 20  # of each kind in an error
_FLOATS = WEIGHT_FLOATS | ONLY_READ.keys()

Patterns = str | Iterable[str]


class TensorFacts(NamedTuple):
    """A tensor as a model or a file has it."""

    names: Sequence[str]  # its names, several of a tied one
    dtype: str  # safetensors' name
    shape: tuple[int, ...]  # its sizes
    where: str = ""  # the file; "" for a model


class Match(NamedTuple):
    """Weights found for a model."""

    # Stored names of each of the model's tensors, in its order; none of a missing one that is allowed.
    found: list[tuple[str, ...]]
    unused: list[str]  # stored names that nothing takes
    problems: list[str]  # differences, a line each, without unused names
    missing: list[str]  # names of the model that no weight has


def match(model: Sequence[TensorFacts], stored: Mapping[str, TensorFacts], allow_missing: Patterns) -> Match:
    """Find the weights of a model's tensors; names that match `allow_missing`, by `fnmatch`, may be missing."""
    may_miss = _patterns(allow_missing, "allow_missing=")
    found: list[tuple[str, ...]] = []
    problems: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    for facts in model:
        names = tuple(name for name in facts.names if name in stored)
        used |= set(names)
        if not names and not all(_allowed(name, may_miss) for name in facts.names):
            missing.append(facts.names[0])
        fitting: list[str] = []
        for name in names:
            problem = _difference(name, facts, stored[name])
            problems += [problem] if problem else []
            fitting += [] if problem else [name]
        found.append(tuple(fitting))
    unused = [name for name in stored if name not in used]
    facts_of = {facts.names[0]: facts for facts in model}
    near = [_missing(facts_of[name], unused) for name in missing[:_MOST_LINES]]
    differ = _shortened(problems[:_MOST_LINES], len(problems), "that differ")
    return Match(found, unused, _shortened(near, len(missing), "missing") + differ, missing)


def refusal(
    matched: Match, unused: Sequence[str], stored: Mapping[str, TensorFacts], allow_unexpected: Patterns, where: str
) -> CheckpointError | None:
    """Make the error that lists all differences, None if the weights fit; `unused` has the names that no rank takes."""
    allowed = _patterns(allow_unexpected, "allow_unexpected=")
    odd = [name for name in unused if not _allowed(name, allowed)]
    lines = [f"unexpected {name!r} {list(stored[name].shape)} in {stored[name].where}" for name in odd[:_MOST_LINES]]
    lines = matched.problems + _shortened(lines, len(odd), "unexpected")
    if not lines:
        return None
    return CheckpointError(
        "the weights do not fit the model; nothing has been changed" + "".join(f"\n  {line}" for line in lines) + "\n ",
        where=where,
        fix=_recipes_of_experts(matched.missing, odd)
        or "Map names by rename=; allow_missing= and allow_unexpected= take names and patterns such as 'lm_head.*'.",
    )


def expert_recipes(
    *, block: str = "mlp", stored_block: str = "", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Recipe, ...]:
    """Return the recipes of a mixture of experts of transformers 5, for `rename=` of loads and of `save_model`.

    The defaults fit Qwen, DeepSeek, OLMoE, GLM and others; for Mixtral pass `stored_block="block_sparse_moe"`,
    `gate="w1"`, `up="w3"` and `down="w2"`.

    Args:
        block: name of the module of the experts in the model.
        stored_block: its name in the checkpoint; "" for the same.
        gate, up, down: names of an expert's projections in the checkpoint.

    Returns:
        Recipes that stack the experts as `experts.gate_up_proj` and `experts.down_proj`.

    Reference: `MergeModulelist` and `Concatenate` of transformers.core_model_loading.
    """
    into = f"{{before...}}.{block}.experts"
    renamed = Recipe("rename", f"{{before...}}.{stored_block}.{{after...}}", f"{{before...}}.{block}.{{after...}}")
    return (
        *((renamed,) if stored_block else ()),
        Recipe("stack", f"{into}.{{expert}}.{gate}.weight", f"{into}.gate"),
        Recipe("stack", f"{into}.{{expert}}.{up}.weight", f"{into}.up"),
        Recipe("concat", (f"{into}.gate", f"{into}.up"), f"{into}.gate_up_proj", dim=1),
        Recipe("stack", f"{into}.{{expert}}.{down}.weight", f"{into}.down_proj"),
    )


_STACKED = re.compile(r"(?:.*\.)?(\w+)\.experts\.gate_up_proj")
_ONE_EXPERT = re.compile(r"(?:.*\.)?(\w+)\.experts\.\d+\.(\w+)\.weight")
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up, down, as models name them


def _recipes_of_experts(missing: Iterable[str], unused: Iterable[str]) -> str:
    """Return the line to write for stacked experts that are stored one by one; empty for other names."""
    stacked = next(filter(None, map(_STACKED.fullmatch, missing)), None)
    single = [found for name in unused if (found := _ONE_EXPERT.fullmatch(name)) is not None]
    if stacked is None or not single:
        return ""
    block, stored_block = stacked[1], single[0][1]
    names = {each[2] for each in single}
    known = next((each for each in _PROJECTIONS if names == set(each)), None)
    options = [f'block="{block}"'] * (block != "mlp") + [f'stored_block="{stored_block}"'] * (stored_block != block)
    if known is None:
        options += ["gate=", "up=", "down="]
    elif known != _PROJECTIONS[0]:
        options += [f'{key}="{name}"' for key, name in zip(("gate", "up", "down"), known, strict=True)]
    return f"The model stacks its experts: pass rename=accel.bigmodel.expert_recipes({', '.join(options)})."


def _difference(name: str, model: TensorFacts, stored: TensorFacts) -> str:
    if stored.shape != model.shape:
        return f"{name!r}: expected shape {list(model.shape)}, got {list(stored.shape)} in {stored.where}"
    if stored.dtype != model.dtype and not (stored.dtype in _FLOATS and model.dtype in _FLOATS):
        return f"{name!r}: expected {model.dtype}, got {stored.dtype} in {stored.where}"
    return ""


def _missing(facts: TensorFacts, unused: Sequence[str]) -> str:
    near = next((each for name in facts.names for each in difflib.get_close_matches(name, unused, 1)), "")
    tied = f", tied to {', '.join(facts.names[1:])}" if len(facts.names) > 1 else ""
    return f"missing {facts.names[0]!r} {list(facts.shape)}{tied}" + (f"; did you mean {near!r}?" if near else "")


def _shortened(lines: list[str], count: int, kind: str) -> list[str]:
    return lines + ([f"and {count - len(lines)} more {kind}"] if count > len(lines) else [])


def _allowed(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


def _patterns(given: object, where: str) -> tuple[str, ...]:
    """Return a name or pattern, or several, as a tuple."""
    listed: tuple[object, ...] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, str):
        listed = tuple(cast("Iterable[object]", given))
    names = tuple(each for each in listed if isinstance(each, str))
    if len(names) < len(listed):
        raise ConfigError(
            "the names are not valid",
            expected="a name or pattern, or several",
            got=", ".join(map(repr, listed)),
            where=where,
            fix='"*" allows all.',
        )
    return names
