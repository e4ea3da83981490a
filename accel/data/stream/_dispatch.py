# SPDX-License-Identifier: Apache-2.0
"""Dispatch: ranks that read the whole stream send the others their batches as bytes, several steps to a message."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import torch

from accel.collectives import check_packable, flat_bytes, is_large, pack, unpack
from accel.comm import Call, broadcast_bytes, exchange, inline_bytes, receive_flat, send_flat, shared_failure
from accel.context import DistContext
from accel.data.stream._prefetch import AgreedStep, ReadStep
from accel.data.stream._reader import LocalBatch
from accel.errors import DataError, TreeError
from accel.tree._walk import is_its_values

_LEAVES = (str, bytes, bool, int, float, type(None))
_KEYS = (str, bytes, bool, int, type(None))
_PLAIN = {"list": list, "tuple": tuple, "dict": dict, "OrderedDict": OrderedDict}

Spec = list[Any]  # ["float32"] a tensor, [] another leaf, [kind, keys, specs] a container


class _BatchHeader(msgspec.Struct, frozen=True, array_like=True):
    """A batch's shapes, its other leaves, and its structure if that has changed."""

    spec: Spec | None
    shapes: list[list[int]]
    values: list[Any]


class PackedBatches(msgspec.Struct, frozen=True, eq=False):
    """Batches as bytes."""

    header_bytes: int  # length of the headers, which come before the tensors
    buffer: torch.Tensor  # uint8 on the CPU, shape [length]
    # Bytes of each large tensor, uint8 on the CPU, shape [bytes]. They are sent without the buffer, because copying
    # them into it costs more.
    large: list[torch.Tensor] = []


class BatchPacker:
    """Packs batches for one peer, and remembers the structure that the peer has."""

    def __init__(self) -> None:
        self._known: Spec | None = None

    def pack(self, batches: Sequence[object], *, whole: bool = False) -> PackedBatches:
        """Return batches as bytes; large tensors share memory with them, unless `whole`. `TreeError` for objects."""
        tensors: list[torch.Tensor] = []
        headers: list[_BatchHeader] = []
        for batch in batches:
            first = len(tensors)
            values: list[Any] = []
            spec = _describe(batch, "$", tensors, values)
            changed = spec != self._known
            self._known = spec
            shapes = [list(tensor.shape) for tensor in tensors[first:]]
            headers.append(_BatchHeader(spec if changed else None, shapes, values))
        text = msgspec.msgpack.encode(headers)
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        by_itself = [not whole and is_large(tensor.dtype, tensor.numel()) for tensor in tensors]
        small = [tensor for tensor, alone in zip(tensors, by_itself, strict=True) if not alone]
        large = [flat_bytes(tensor.cpu()) for tensor, alone in zip(tensors, by_itself, strict=True) if alone]
        return PackedBatches(len(text), pack([head, *small], torch.device("cpu")), large)


class BatchUnpacker:
    """Unpacks the packed batches of one `BatchPacker`, in the order in which it packed them."""

    def __init__(self) -> None:
        self._known: Spec = []

    def unpack(self, packed: PackedBatches) -> list[Any]:
        """Return the batches; their tensors share the buffer's memory."""
        text = ctypes.string_at(packed.buffer.data_ptr(), packed.header_bytes)
        headers = msgspec.msgpack.decode(text, type=list[_BatchHeader])
        specs: list[Spec] = []
        for header in headers:
            self._known = self._known if header.spec is None else header.spec
            specs.append(self._known)
        kinds = [dtype for spec in specs for dtype in _dtypes(spec)]
        tensors = _tensors(packed, kinds, [shape for header in headers for shape in header.shapes])
        return [_build(spec, tensors, iter(header.values)) for spec, header in zip(specs, headers, strict=True)]


def _tensors(
    packed: PackedBatches, dtypes: Sequence[torch.dtype], shapes: Sequence[list[int]]
) -> Iterator[torch.Tensor]:
    """View the tensors of packed batches: large ones have separate memory, the others are in the buffer."""
    has_large = bool(packed.large)
    by_itself = [has_large and is_large(dtype, math.prod(shape)) for dtype, shape in zip(dtypes, shapes, strict=True)]
    listed = list(zip(dtypes, shapes, by_itself, strict=True))
    inside = [(dtype, shape) for dtype, shape, alone in listed if not alone]
    inside_dtypes = [torch.uint8, *(dtype for dtype, _ in inside)]
    inside_shapes = [[packed.header_bytes], *(shape for _, shape in inside)]
    small = iter(unpack(packed.buffer, inside_dtypes, inside_shapes)[1:])
    large = iter(packed.large)
    return (next(large).view(dtype).view(shape) if alone else next(small) for dtype, shape, alone in listed)


def _describe(node: Any, path: str, tensors: list[torch.Tensor], values: list[Any]) -> Spec:
    if isinstance(node, torch.Tensor):
        check_packable(path, node, node.device)
        tensors.append(node)
        return [str(node.dtype).removeprefix("torch.")]
    if type(node) in _LEAVES:
        if not _is_plain(node):
            raise _unsendable(node, path)
        values.append(node)
        return []
    kind, keys, children = _node_parts(node, path)
    steps = [f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in keys or range(len(children))]
    inner = [_describe(child, path + step, tensors, values) for child, step in zip(children, steps, strict=True)]
    return [kind, keys, inner]


def _is_plain(value: object) -> bool:
    """Return whether MessagePack can hold a number or a text; names of files may be no Unicode."""
    if type(value) is int:
        return -(2**63) <= value < 2**64
    if type(value) is str and not value.isascii():
        return value == value.encode(errors="replace").decode()
    return True


def _node_parts(node: Any, path: str) -> tuple[str, list[Any], Sequence[Any]]:
    """Return a container's kind, keys and children."""
    kind = cast(Any, type(node))
    if kind in (list, tuple):
        return kind.__name__, [], node
    if kind in (dict, OrderedDict) and all(type(key) in _KEYS and _is_plain(key) for key in node):
        return kind.__name__, list(node), list(node.values())
    names: Sequence[str] | None = None
    if issubclass(kind, tuple):
        names = getattr(cast(Any, kind), "_fields", None)
    elif issubclass(kind, msgspec.Struct):
        names = kind.__struct_fields__
    elif dataclasses.is_dataclass(cast(Any, kind)):
        names = [field.name for field in dataclasses.fields(cast(Any, kind))]
    mapping = cast("Mapping[Any, Any]", node) if names is None and _is_sendable_mapping(node) else None
    if mapping is None and names is None:
        raise _unsendable(node, path)
    where = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in where or _find(where) is not kind:
        raise TreeError(
            "other ranks cannot import the class by its name",
            expected="a class at the top of a module",
            got=where,
            where=path,
            fix="Move the class out of the function, or use a dict.",
        )
    if mapping is not None:
        return where, list(mapping), list(mapping.values())
    return where, list(names or ()), [getattr(node, name) for name in names or ()]


def _is_sendable_mapping(node: object) -> bool:
    """Return whether a mapping that is no dict, such as a UserDict, is made again from its keys and values alone."""
    if not isinstance(node, Mapping) or isinstance(node, dict):
        return False
    mapping = cast("Mapping[Any, Any]", node)
    return all(type(key) in _KEYS and _is_plain(key) for key in mapping) and is_its_values(mapping)


def _build(spec: Spec, tensors: Iterator[torch.Tensor], values: Iterator[Any]) -> Any:
    if not spec:
        return next(values)
    if len(spec) == 1:
        return next(tensors)
    kind, keys, inner = spec
    children = [_build(each, tensors, values) for each in inner]
    if kind in _PLAIN:
        return cast(Any, _PLAIN[kind])(zip(keys, children, strict=True) if keys else children)
    found = _find(kind)
    if issubclass(found, tuple):
        return cast(Any, found)._make(children)
    if issubclass(found, Mapping):
        return cast(Any, found)(dict(zip(keys, children, strict=True)))
    if issubclass(found, msgspec.Struct):
        return found(**dict(zip(keys, children, strict=True)))
    made = object.__new__(found)  # as it was, without running its constructor again
    for name, child in zip(keys, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def _find(where: str) -> type[Any]:
    module, _, name = where.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _dtypes(spec: Spec) -> Iterator[torch.dtype]:
    if len(spec) == 1:
        yield getattr(torch, spec[0])
    elif spec:
        for each in spec[2]:
            yield from _dtypes(each)


def _unsendable(node: object, path: str) -> TreeError:
    return TreeError(
        "a leaf of a batch cannot be sent to another rank",
        expected="tensors, numbers up to 64 bits, Unicode text, bytes and None in dicts, lists, tuples, namedtuples, "
        "dataclasses, Structs or mappings such as UserDict",
        got=f"{type(node).__name__} {node!r:.40}",
        where=path,
        fix="Let the collate function make tensors and plain containers.",
    )


_ALIGN = 16


class _StepHeader(msgspec.Struct, frozen=True, array_like=True):
    """A reader's facts of one step."""

    counts: list[int]  # real samples by data-parallel rank
    more: bool  # whether another step follows
    rows: list[int]  # samples of each served rank's batch, placeholders included


class _MessageHeader(msgspec.Struct, frozen=True, array_like=True):
    """A reader's facts of the next steps; lists by served rank hold 0 for the reader itself."""

    steps: list[_StepHeader]  # none at the end of an empty stream
    header_sizes: list[int]  # bytes before the tensors, of each rank's packed batches
    sizes: list[int]  # bytes of the buffer, which holds the batches of all these steps
    large: list[list[int]]  # bytes of each tensor outside of the buffer
    inline: bool  # whether the packed batches follow in this message


class Dispatcher:
    """Assigns a reader to each rank, and sends its batches.

    Attributes:
        step_bytes: bytes that readers packed for a step of the last message.

    Args:
        ctx: the context.
        call: each message, as all ranks name it.
        groups: a number by rank; ranks of one number share a reader, the lowest of them.
        data_ranks: data-parallel rank by rank.
    """

    def __init__(self, ctx: DistContext, call: Call, groups: list[int], data_ranks: list[int]) -> None:
        self._ctx = ctx
        self._call = call
        self._data_ranks = data_ranks
        self._readers = [groups.index(group) for group in groups]
        self._only = self._readers[0] if len(set(self._readers)) == 1 else None
        self._served = [rank for rank, reader in enumerate(self._readers) if reader == ctx.rank]
        self._packers = {rank: BatchPacker() for rank in self._served if rank != ctx.rank}
        self._unpacker = BatchUnpacker()
        self.step_bytes = 0

    @property
    def readers(self) -> list[int]:
        """The reader of each rank."""
        return self._readers

    @property
    def reads(self) -> bool:
        """Whether this rank reads."""
        return bool(self._served)

    @property
    def mine(self) -> tuple[int, ...]:
        """The data-parallel ranks that this rank reads for, itself included."""
        return tuple(sorted({self._data_ranks[rank] for rank in self._served}))

    def agree(self, steps: list[ReadStep]) -> list[AgreedStep]:
        """Send and receive the next steps, as many as all readers have read; return this rank's batches. A collective.

        Raises on every rank: `TreeError` for a batch that cannot be sent, `DataError` for readers of different streams.
        """
        ctx = self._ctx
        with shared_failure(ctx.comm, Call("batches")):
            packed = {rank: packer.pack(self._data(steps, rank)) for rank, packer in self._packers.items()}
        messages = self._exchange(self._message(steps, packed))
        headers = {reader: _read_header(messages[reader]) for reader in sorted(set(self._readers))}
        known = _known_steps({reader: header.steps for reader, (header, _) in headers.items()})
        reader = self._readers[ctx.rank]
        header, end = headers[reader]
        at = [rank for rank, its in enumerate(self._readers) if its == reader].index(ctx.rank)
        if self.reads:
            if not header.inline:
                send_flat(ctx.comm, {rank: [each.buffer, *each.large] for rank, each in packed.items()})
            batches = self._data(steps, ctx.rank)
        else:
            batches = self._unpacker.unpack(self._receive(header, at, messages[reader][end:], reader))
        sent = [(sum(each.sizes) + sum(map(sum, each.large)), len(each.steps)) for each, _ in headers.values()]
        self.step_bytes = max(size // max(count, 1) for size, count in sent)
        return [
            AgreedStep(
                LocalBatch(batches[i], step.rows[at]),
                samples=step.counts[self._data_ranks[ctx.rank]],
                total=sum(step.counts),
                is_last=not step.more,
                position=steps[i].position if self.reads else None,
            )
            for i, step in enumerate(header.steps[:known])
        ]

    def _exchange(self, mine: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """Send the readers' messages to all ranks; return them by reader. A collective."""
        if self._only is not None:
            return {self._only: broadcast_bytes(self._ctx.comm, self._call, mine, source=self._only)}
        return dict(enumerate(exchange(self._ctx.comm, self._call, mine)))

    def _data(self, steps: list[ReadStep], rank: int) -> list[Any]:
        return [step.batches[self._data_ranks[rank]].data for step in steps]

    def _message(self, steps: list[ReadStep], packed: dict[int, PackedBatches]) -> torch.Tensor:
        """Return the header, and the packed batches if they fit."""
        if not self.reads:
            return torch.empty(0, dtype=torch.uint8)
        rows = [[step.batches[self._data_ranks[rank]].rows for rank in self._served] for step in steps]
        step_headers = [_StepHeader(step.counts, step.more, own) for step, own in zip(steps, rows, strict=True)]
        header_sizes = [packed[rank].header_bytes if rank in packed else 0 for rank in self._served]
        sizes = [packed[rank].buffer.numel() if rank in packed else 0 for rank in self._served]
        large = [[each.numel() for each in packed[rank].large] if rank in packed else [] for rank in self._served]
        head = _aligned_bytes(_MessageHeader(step_headers, header_sizes, sizes, large, inline=True))
        if any(large) or head.numel() + sum(sizes) > inline_bytes(self._ctx.comm):
            return _aligned_bytes(_MessageHeader(step_headers, header_sizes, sizes, large, inline=False))
        return torch.cat([head, *(each.buffer for each in packed.values())])

    def _receive(self, header: _MessageHeader, at: int, inline: torch.Tensor, reader: int) -> PackedBatches:
        """Return this rank's packed batches, number `at` of the reader's."""
        if header.inline:
            begin = sum(header.sizes[:at])
            return PackedBatches(header.header_sizes[at], inline[begin : begin + header.sizes[at]].clone())
        streams = self._ctx.streams
        empty = streams.pinned if streams.is_pinnable else torch.empty
        sizes = [header.sizes[at], *header.large[at]]
        buffer, *large = [empty((size,), dtype=torch.uint8) for size in sizes]
        receive_flat(self._ctx.comm, [buffer, *large], source=reader)
        return PackedBatches(header.header_sizes[at], buffer, large)


def _known_steps(headers: dict[int, list[_StepHeader]]) -> int:
    """Return the number of steps that all readers have read; raise if they differ in one of them."""
    ends = {True: "more follows", False: "the end"}
    texts = {
        reader: [f"{step.counts}, {ends[step.more]}" for step in steps] or ["nothing"]
        for reader, steps in headers.items()
    }
    first, *others = texts
    for reader in others:
        for mine, theirs in zip(texts[first], texts[reader], strict=False):
            if mine != theirs:
                raise DataError(
                    "nodes read different streams",
                    expected=f"samples by rank as on rank {first}: {mine}",
                    got=f"on rank {reader}: {theirs}",
                    where="batches",
                    fix='Let every node read the same data in the same order, or use stream="dispatch".',
                )
    return min(len(steps) for steps in headers.values())


def _aligned_bytes(header: _MessageHeader) -> torch.Tensor:
    """Return a header's length and the header, padded so that tensors may follow."""
    text = msgspec.msgpack.encode(header)
    head = len(text).to_bytes(_ALIGN, "little") + text
    return torch.frombuffer(bytearray(head.ljust(-(-len(head) // _ALIGN) * _ALIGN, b"\0")), dtype=torch.uint8)


def _read_header(message: torch.Tensor) -> tuple[_MessageHeader, int]:
    """Return a reader's header, and its length in the message."""
    start = message.data_ptr()
    length = int.from_bytes(ctypes.string_at(start, _ALIGN), "little")
    header = msgspec.msgpack.decode(ctypes.string_at(start + _ALIGN, length), type=_MessageHeader)
    return header, -(-(_ALIGN + length) // _ALIGN) * _ALIGN
