# SPDX-License-Identifier: Apache-2.0
"""A model without its values: names, shapes, dtypes and ties of its weights, and the segments that move together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

import msgspec

from accel.errors import ConfigError
from accel.errors._checks import check_choice, did_you_mean
from accel.storage import DTYPE_NAMES, FLOATS, MEMORY_BITS, WEIGHT_FLOATS, tensor_bytes
from accel.terminal import natural_key

if TYPE_CHECKING:
    import torch


ALIGNMENT = 512  # bytes to which torch's CUDA allocator rounds each tensor


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter or buffer.

    Attributes:
        name: its path in the model; the first one, if it has several.
        shape: sizes.
        dtype: safetensors' name of the dtype that it has in memory, such as "BF16"; "C128" for complex128.
        tied: its further paths.
        stored: whether checkpoints hold it; False for a non-persistent buffer.
        moves: whether it streams with its segment. Others stay on the segment's computing device: buffers below 1 MiB,
            buffers that are not stored, and weights that another segment uses too.
        storage_dtype: dtype that it has in its home; a computing device is such a home for a smaller dtype alone. None
            for `dtype`.

    Raises:
        ConfigError: an unknown dtype, a negative size, a weight that moves but is not stored, or a storage dtype of a
            weight that does not move or is not of floating point.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied: tuple[str, ...] = ()
    stored: bool = True
    moves: bool = True
    storage_dtype: str | None = None

    def __post_init__(self) -> None:
        where = f"Weight {self.name!r}"
        if self.dtype not in MEMORY_BITS:
            raise ConfigError(
                "unknown dtype", got=repr(self.dtype), where=where, fix=did_you_mean(self.dtype, MEMORY_BITS)
            )
        if any(type(size) is not int or size < 0 for size in self.shape):
            raise ConfigError("the shape is not valid", expected="sizes from 0", got=repr(self.shape), where=where)
        if self.moves and not self.stored:
            raise ConfigError("a weight that moves must be stored", got="stored=False, moves=True", where=where)
        if self.storage_dtype is not None:
            _check_storage(self, where)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return tensor_bytes(self.shape, self.dtype)

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory: `nbytes` rounded up to 512."""
        return _aligned(self.nbytes)

    @property
    def is_cast(self) -> bool:
        """Whether it has another dtype in its home than where it computes."""
        return self.storage_dtype not in (None, self.dtype)

    @property
    def narrows(self) -> bool:
        """Whether its storage dtype has fewer bits than its own."""
        return self.storage_dtype is not None and MEMORY_BITS[self.storage_dtype] < MEMORY_BITS[self.dtype]

    @property
    def home_memory(self) -> int:
        """Bytes that it takes in a home other than its computing device, in units of 512."""
        return _aligned(tensor_bytes(self.shape, self.storage_dtype or self.dtype))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_storage(weight: Weight, where: str) -> None:
    if weight.storage_dtype not in WEIGHT_FLOATS:
        raise ConfigError(
            "a weight cannot be stored in this dtype",
            expected=", ".join(sorted(WEIGHT_FLOATS)),
            got=repr(weight.storage_dtype),
            where=f"{where}, storage_dtype",
        )
    if weight.dtype not in FLOATS or not weight.moves:
        what = f"dtype={weight.dtype!r}, moves={weight.moves}"
        raise ConfigError("a storage dtype is for floating-point weights that move", got=what, where=where)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that move together: a block of the model, or weights outside of blocks.

    Attributes:
        name: the module's path; "" for the model itself.
        weights: each once, in the first segment that has it.
        movable: whether the segment may stream. A parent's own parameters may not: the parent would hold them while it
            waits for its blocks. Modules without submodules below 1 MiB do not either.
        rows: whether the module is an embedding: away from its device only the rows that are looked up move, and it
            takes no slot.
        aliases: further paths of the module, if the model holds it in several places.

    Raises:
        ConfigError: a segment that moves by rows and may not move.
    """

    name: str
    weights: tuple[Weight, ...]
    movable: bool = True
    rows: bool = False
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rows and not self.movable:
            raise ConfigError("rows of a segment that may not move", got="rows=True", where=f"Segment {self.name!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of all weights."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def moving(self) -> int:
        """Bytes of memory of the weights that move: the least size of a slot."""
        return sum(weight.memory for weight in self.weights if weight.moves) if self.movable else 0

    @property
    def home_memory(self) -> int:
        """Bytes of the weights that move in a home other than the computing device: `moving`, or what casts leave."""
        return sum(weight.home_memory for weight in self.weights if weight.moves) if self.movable else 0

    @property
    def is_cast(self) -> bool:
        """Whether a weight that moves has another dtype in its home."""
        return self.movable and any(weight.is_cast for weight in self.weights)

    @property
    def resident_memory(self) -> int:
        """Bytes of the weights that move, where the computing device is home: in a smaller storage dtype, if any."""
        if not self.movable or self.rows:
            return self.moving
        return sum(weight.home_memory if weight.narrows else weight.memory for weight in self.weights if weight.moves)

    @property
    def casting(self) -> int:
        """Bytes that a call takes to cast weights kept on the computing device in a smaller dtype."""
        return sum(weight.memory for weight in self.weights if self.casts(weight))

    def casts(self, weight: Weight) -> bool:
        """Return whether a weight is cast for each call where the computing device is the segment's home."""
        return self.movable and not self.rows and weight.moves and weight.narrows

    @property
    def fixed(self) -> int:
        """Bytes of memory of the weights that stay on the computing device."""
        return sum(weight.memory for weight in self.weights if not (weight.moves and self.movable))

    def offsets(self, *, resident: bool = False) -> Mapping[str, int]:
        """Return the first byte of each weight by name in a slot: of those that move, or that a resident segment casts.

        Args:
            resident: whether the segment's home is its computing device.
        """
        found = dict[str, int]()
        at = 0
        for weight in self.weights:
            if self.casts(weight) if resident else weight.moves and self.movable:
                found[weight.name] = at
                at += weight.memory
        return found


class Skeleton(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its segments.

    Attributes:
        segments: in the order of execution.

    Raises:
        ConfigError: two segments or two weights with one name, or a weight that moves although another segment uses it.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        _refuse_twice("segments", (path for segment in self.segments for path in (segment.name, *segment.aliases)))
        _refuse_twice("weights", (name for weight in self.weights() for name in (weight.name, *weight.tied)))
        names = self._names()
        for segment in self.segments:
            for weight in segment.weights:
                users = {segment.name, *(_holder(names, path) for path in weight.tied)} if weight.tied else ()
                if len(users) > 1 and weight.moves and segment.movable:
                    raise ConfigError(
                        "a weight moves with one segment while another uses it",
                        got=" and ".join(map(repr, sorted(users))),
                        where=f"Weight {weight.name!r}",
                        fix="Give it moves=False.",
                    )

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of all weights."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the elements of the weights that checkpoints hold."""
        return sum(weight.nbytes for weight in self.weights() if weight.stored)

    @property
    def memory(self) -> int:
        """Bytes that the model takes on one device; with casts, also the bytes of the largest call."""
        casting = max((segment.casting for segment in self.segments), default=0)
        return casting + sum(segment.resident_memory + segment.fixed for segment in self.segments)

    def weights(self) -> Iterator[Weight]:
        """Yield the weights of all segments."""
        for segment in self.segments:
            yield from segment.weights

    def segment_of(self, path: str) -> str:
        """Return the name of the segment that contains the path of a weight or a module; "" if no other does."""
        return _holder(self._names(), path)

    def tied_segments(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of segments that use common weights, in order: each group computes on one device."""
        names = self._names()
        group_of = {segment.name: [segment.name] for segment in self.segments}
        for segment in self.segments:
            for path in (path for weight in segment.weights for path in weight.tied):
                group, other = group_of[segment.name], group_of.get(_holder(names, path), [])
                if other and other is not group:
                    group += other
                    group_of |= dict.fromkeys(other, group)
        order = {segment.name: at for at, segment in enumerate(self.segments)}
        groups = {id(group): sorted(group, key=order.__getitem__) for group in group_of.values() if len(group) > 1}
        return tuple(sorted(map(tuple, groups.values()), key=lambda group: order[group[0]]))

    def cast(self, dtype: str) -> Skeleton:
        """Return the skeleton with floating-point weights of 16 to 64 bits in another dtype, others as they are."""
        segments = (
            msgspec.structs.replace(segment, weights=tuple(_cast(weight, dtype) for weight in segment.weights))
            for segment in self.segments
        )
        return Skeleton(segments=tuple(segments))

    def store(self, dtype: str, *, skip: str | Collection[str] = ()) -> Skeleton:
        """Return the skeleton with matrices in another dtype at home.

        Where that is their computing device, this holds of a smaller dtype alone: a call casts its block's matrices.

        Weights of less than two dimensions, those that do not move and segments that move by rows stay as they are.

        Args:
            dtype: safetensors' name of the dtype, such as "F8_E4M3".
            skip: names of further weights that stay, or patterns such as "*.router.*".
        """
        skip = (skip,) if isinstance(skip, str) else skip
        names = frozenset(skip)
        patterns = [each for each in skip if any(mark in each for mark in "*?[")]
        segments = (
            segment
            if segment.rows or not segment.movable
            else msgspec.structs.replace(
                segment, weights=tuple(_store(weight, dtype, names, patterns) for weight in segment.weights)
            )
            for segment in self.segments
        )
        return Skeleton(segments=tuple(segments))

    def _names(self) -> Mapping[str, str]:
        """Return the name of each segment by its paths."""
        return {path: segment.name for segment in self.segments for path in (segment.name, *segment.aliases)}


def _cast(weight: Weight, dtype: str) -> Weight:
    return msgspec.structs.replace(weight, dtype=dtype) if weight.dtype in FLOATS else weight


def _store(weight: Weight, dtype: str, skip: Collection[str], patterns: Collection[str]) -> Weight:
    if not weight.moves or weight.dtype not in FLOATS or len(weight.shape) < 2:
        return weight
    for name in (weight.name, *weight.tied):
        if name in skip or any(fnmatchcase(name, each) for each in patterns):
            return weight
    return msgspec.structs.replace(weight, storage_dtype=dtype)


def _holder(names: Mapping[str, str], path: str) -> str:
    """Return the innermost segment around a path; "" for none."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return names.get(path, path)


def _refuse_twice(kind: str, names: Iterator[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"two {kind} with one name", got=", ".join(map(repr, twice[:5])), where="Skeleton")


_NAMES = {name: known for name, known in DTYPE_NAMES.items() if known in WEIGHT_FLOATS}


def torch_name(name: str) -> str:
    """Return torch's name of a dtype by the name in safetensors, as `format_name` returns it."""
    return next(key for key, known in _NAMES.items() if known == name)


def format_name(dtype: torch.dtype | str, *, where: str) -> str:
    """Return safetensors' name of a floating-point dtype, "BF16" of torch.bfloat16; others are a `ConfigError`."""
    name = str(dtype).removeprefix("torch.")
    if name in _NAMES.values():
        return name
    check_choice(name, list(_NAMES), "the dtype of the weights is unknown", where=where)
    return _NAMES[name]


_BLOCK = re.compile(r"((?:.*?\.)?[0-9]+)\.")
_SMALL_BYTES = 2**20  # modules outside of blocks that do not stream


class Entry(Protocol):
    """Shape and safetensors' dtype of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def guess_skeleton(entries: Mapping[str, Entry]) -> Skeleton:
    """Return the skeleton of a model from the tensors of its checkpoint. Pure.

    Names give no order of execution, embeddings, ties or unstored buffers: describe the model where it can be built.
    """
    groups: dict[str, list[Weight]] = {}
    blocks = set[str]()
    for name, entry in entries.items():
        match = _BLOCK.match(name)  # "model.layers.7" is taken for a block, other paths for modules
        path = name.rpartition(".")[0] if match is None else match[1]
        blocks |= {path} if match is not None else set()
        groups.setdefault(path, []).append(Weight(name=name, shape=entry.shape, dtype=entry.dtype))
    segments: list[Segment] = []
    for path in sorted(groups, key=natural_key):
        large = sum(weight.memory for weight in groups[path]) >= _SMALL_BYTES
        movable = path in blocks or (large and path != "")
        segments.append(Segment(name=path, weights=tuple(groups[path]), movable=movable))
    return Skeleton(segments=tuple(segments))
