# SPDX-License-Identifier: Apache-2.0
"""Bytes of a training step on each rank, from shapes alone; pure.

Reference: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import msgspec

from accel.errors import ConfigError, check_choice
from accel.formats import PrecisionName, precision

_UNIT = re.compile(r"(?:.*?\.)?[0-9]+(?=\.)")
_MOST_RANKS = 1 << 16
COMPUTE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}

# Values of optimizer state for each value of a parameter, and whether each tensor has a step of 4 bytes.
OPTIMIZERS: Mapping[str, tuple[int, bool]] = {
    "adamw": (2, True),
    "adam": (2, True),
    "sgd": (0, False),
    "sgd-momentum": (1, False),
}


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter.

    Attributes:
        name: name in the model.
        shape: sizes.
        item_bytes: bytes of an element as stored.
        trained: whether the parameter has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int = 4
    trained: bool = True

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that a forward keeps for the backward.

    Attributes:
        saved: bytes of tensors that depend on the inputs.
        copies: bytes of copies of parameters in the compute format.
    """

    saved: int
    copies: int


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The shapes of a model.

    Attributes:
        source: origin, in words.
        parameters: each once, even if several modules share it.
        buffer_bytes: bytes of the buffers.
        activations: of one step on one rank, by compute format; empty without inputs.
    """

    source: str
    parameters: tuple[Parameter, ...]
    buffer_bytes: int = 0
    activations: Mapping[str, Activations] = {}

    @property
    def count(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.count for parameter in self.parameters)

    @property
    def units(self) -> dict[str, list[Parameter]]:
        """Parameters by the block for `fully_shard`, such as "layers.0"; "" for the others."""
        units: dict[str, list[Parameter]] = {}
        for parameter in self.parameters:
            match = _UNIT.match(parameter.name)
            units.setdefault(match[0] if match else "", []).append(parameter)
        return units


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """Sharding of a training step.

    Attributes:
        about: description.
        optimizer: whether optimizer state is sharded.
        gradients: whether gradients are sharded.
        parameters: whether parameters are sharded between uses.
        regathered: whether each block is gathered again for the backward.
    """

    about: str
    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    regathered: bool = False


STRATEGIES: Mapping[str, Strategy] = {
    "ddp": Strategy(about="every rank holds all"),
    "ddp-zero": Strategy(about="DDP with ZeroRedundancyOptimizer", optimizer=True),
    "fsdp-keep": Strategy(
        about="fully_shard(reshard_after_forward=False)", optimizer=True, gradients=True, parameters=True
    ),
    "fsdp": Strategy(about="fully_shard", optimizer=True, gradients=True, parameters=True, regathered=True),
}


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the rank that holds most, at the end of a forward.

    Attributes:
        parameters: of parameters and buffers.
        gradients: of gradients.
        optimizer: of optimizer state.
        activations: of tensors kept for the backward; None without inputs.
        working: of copies in the compute format, and of blocks gathered from other ranks.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None
    working: int

    @property
    def total(self) -> int:
        """The sum of all known parts."""
        return self.parameters + self.gradients + self.optimizer + (self.activations or 0) + self.working


def plan_memory(
    model: Model, *, precision_name: PrecisionName, strategy: str, optimizer: str = "adamw", nproc: int = 1
) -> Memory:
    """Return the memory of a training step on each rank.

    Args:
        model: shapes, with activations if known.
        precision_name: as in `accel.formats.precision`; fp8 counts as bf16.
        strategy: one of `STRATEGIES`. FSDP gathers in the compute format, as with
            `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.
        optimizer: one of `OPTIMIZERS`.
        nproc: number of ranks.

    Raises:
        ConfigError: an unknown name, or `nproc` below 1.
    """
    check_choice(strategy, list(STRATEGIES), "unknown strategy", where="strategy")
    check_choice(optimizer, list(OPTIMIZERS), "unknown optimizer", where="optimizer")
    if nproc < 1:
        raise ConfigError("not a number of ranks", expected="1 or above", got=str(nproc), where="nproc")
    chosen = precision(precision_name)
    compute_bytes = COMPUTE_BYTES[chosen.compute]
    stored = [_stored(parameter, chosen.params) for parameter in model.parameters]
    trained = [parameter for parameter in stored if parameter.trained]
    how = STRATEGIES[strategy]
    kept = model.activations.get(chosen.compute if chosen.params is None else "pure-bf16")
    return Memory(
        parameters=_bytes(stored, nproc if how.parameters else 1) + model.buffer_bytes,
        gradients=_bytes(trained, nproc if how.gradients else 1),
        optimizer=_state(trained, optimizer, how, nproc),
        activations=None if kept is None else kept.saved,
        working=_working(model, stored, how, compute_bytes, kept, nproc),
    )


def fewest_ranks(
    model: Model, limit: int, *, precision_name: PrecisionName, strategy: str, optimizer: str, least: int = 1
) -> int:
    """Return the smallest of `least`, twice that and so on, at which a step fits into `limit` bytes; 0 if none."""
    nproc = least
    while nproc <= _MOST_RANKS:
        memory = plan_memory(model, precision_name=precision_name, strategy=strategy, optimizer=optimizer, nproc=nproc)
        if memory.total <= limit:
            return nproc
        nproc *= 2
    return 0


def shard_count(parameter: Parameter, nproc: int) -> int:
    """Return the elements in the largest shard of a parameter, split along its first dimension."""
    if not parameter.shape:
        return 1
    return -(-parameter.shape[0] // nproc) * math.prod(parameter.shape[1:])


def _stored(parameter: Parameter, params: str | None) -> Parameter:
    return msgspec.structs.replace(parameter, item_bytes=2) if params == "bf16" and parameter.trained else parameter


def _bytes(parameters: Sequence[Parameter], nproc: int) -> int:
    return sum(shard_count(parameter, nproc) * parameter.item_bytes for parameter in parameters)


def _state(trained: Sequence[Parameter], optimizer: str, how: Strategy, nproc: int) -> int:
    values, counts_steps = OPTIMIZERS[optimizer]
    if how.parameters or not how.optimizer:
        return values * _bytes(trained, nproc if how.parameters else 1) + 4 * len(trained) * counts_steps
    # ZeroRedundancyOptimizer gives whole parameters, the largest first, each to the rank with the fewest elements
    counts = [0] * nproc
    sizes = [0] * nproc
    for parameter in sorted(trained, key=lambda each: each.count, reverse=True):
        rank = counts.index(min(counts))
        counts[rank] += parameter.count
        sizes[rank] += values * parameter.count * parameter.item_bytes + 4 * counts_steps
    return max(sizes)


def _working(
    model: Model, stored: Sequence[Parameter], how: Strategy, compute_bytes: int, kept: Activations | None, nproc: int
) -> int:
    if not how.parameters or nproc == 1:
        if kept is not None:
            return kept.copies
        return sum(
            each.count * compute_bytes for each in stored if each.item_bytes > compute_bytes and len(each.shape) > 1
        )
    blocks = {unit: sum(each.count for each in each_of) * compute_bytes for unit, each_of in model.units.items()}
    root = blocks.pop("", 0)
    largest = max(blocks.values(), default=0)
    if how.regathered:  # the current block, the prefetched one, and the gradients of one
        return root + 3 * largest
    return root + sum(blocks.values()) + largest
