# SPDX-License-Identifier: Apache-2.0
"""Nested values to JSON and back, exactly and by type; tensors are taken out by name."""

from __future__ import annotations

import base64
import binascii
import enum
import importlib
import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast

import torch

from accel.checkpoint._live_tensors import check_tensor
from accel.checkpoint._manifest import is_list, is_object
from accel.checkpoint._records import (
    Classes,
    JoinsRanks,
    MisfitError,
    class_name,
    fields_of,
    is_record,
    make_record,
    record_tag,
)
from accel.comm._marks import Uncompared
from accel.errors import CheckpointError, MissingExtraError
from accel.errors._checks import with_article
from accel.storage import stored_dtype

_PURE = {"PurePosixPath": PurePosixPath, "PureWindowsPath": PureWindowsPath}
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)  # each is written as its text
_KINDS = "biufcSUMm"  # numpy's letters of dtypes that are stored as their bytes


def is_special(value: Any) -> bool:
    """Return whether a value is a path, or a scalar or an array of numpy, of a kind that `take_apart` accepts."""
    if isinstance(value, PurePath):
        return type(value) in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    # a subclass would come back as a plain array
    if type(value) is numpy.ndarray:
        return value.dtype.kind in _KINDS
    return isinstance(value, numpy.generic) and value.dtype.kind in _KINDS and type(_scalar(value)) is type(value)


def take_apart(value: Any) -> tuple[str, list[str], torch.Tensor | None]:
    """Return the tag of a special value, its texts, and the tensor of an array. Bytes of a dtype that torch lacks get
    one more dimension at the end."""
    if isinstance(value, PurePath):
        return "$path", [type(value).__name__ if type(value).__name__ in _PURE else "Path", str(value)], None
    numpy: Any = sys.modules["numpy"]
    if isinstance(value, numpy.generic):
        return "$scalar", [value.dtype.str, value.tobytes().hex()], None
    # torch shares the memory of a writable, contiguous array; others are copied
    whole = value if value.flags.writeable and value.flags.c_contiguous else value.copy(order="C")
    try:
        tensor = cast("Any", torch).from_numpy(whole) if whole.dtype.isnative else None
    except TypeError:  # torch has no such dtype
        tensor = None
    if tensor is not None and stored_dtype(tensor.dtype) is not None:
        return "$array", [""], tensor
    flat = torch.frombuffer(bytearray(whole.tobytes()), dtype=torch.uint8) if whole.nbytes else torch.empty(0).byte()
    return "$array", [whole.dtype.str], flat.view(*whole.shape, whole.dtype.itemsize)


def make_path(kind: str, text: str) -> PurePath:
    """Make a path."""
    return Path(text) if kind == "Path" else _PURE[kind](text)


def make_scalar(dtype: str, data: str) -> Any:
    """Make a scalar of numpy; raises ValueError or TypeError for other texts."""
    return _numpy().ndarray((), _dtype(dtype), bytes.fromhex(data))[()]


def make_array(dtype: str, tensor: object) -> Any:
    """Make an array of numpy; raises as `make_scalar`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("not a tensor")
    numpy = _numpy()
    whole = tensor.detach().cpu()
    if not dtype:
        return whole.numpy()
    wanted = _dtype(dtype)
    shape = tuple(whole.shape[:-1])
    if whole.dtype != torch.uint8 or whole.dim() == 0 or whole.shape[-1] != wanted.itemsize:
        raise ValueError("not the bytes of such an array")
    return numpy.frombuffer(whole.numpy().tobytes(), wanted, math.prod(shape)).reshape(shape).copy()


def make_torch(text: str) -> Any:
    """Return the dtype, layout or memory format of a name such as "torch.float32", or else a device; raises TypeError
    for other texts."""
    prefix, _, name = text.partition(".")
    try:
        found: object = getattr(torch, name) if prefix == "torch" else torch.device(text)
    except RuntimeError as error:
        raise TypeError(f"not a device: {text!r}") from error
    if type(found) not in _TORCH:
        raise TypeError(f"not a value of torch: {text!r}")
    return found


def make_generator(state: object) -> torch.Generator:
    """Make a generator of the CPU at a state; raises ValueError or TypeError for anything else."""
    if not isinstance(state, torch.Tensor):
        raise TypeError("not a tensor")
    generator = torch.Generator()
    try:
        _ = generator.set_state(state.detach().cpu())
    except RuntimeError as error:
        raise ValueError("not a state of a generator") from error
    return generator


def _scalar(value: Any) -> Any:
    return make_scalar(value.dtype.str, value.tobytes().hex())


def _dtype(text: str) -> Any:
    dtype = _numpy().dtype(text)
    if dtype.kind not in _KINDS:
        raise ValueError(f"no dtype of plain values: {text!r}")
    return dtype


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise MissingExtraError("the checkpoint holds values of numpy", fix="pip install numpy") from error


_PLAIN_STEP = re.compile(r"[A-Za-z0-9_\-]+", re.ASCII)
_WORD = 2**63

Kept = dict[str, object]  # by path: records and members of enums, of any class


def encode(value: object, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None = None) -> Any:
    """Encode a value as JSON: of exactly the types below, as others would come back as another type. Its tensors go to
    `tensors` by names that begin with its path, records and members of enums to `kept` by path."""
    # exact types: an instance of a subclass would come back as a plain one
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        # readers of JSON take 64 bits at most
        return value if -_WORD <= value < _WORD else {"$int": hex(value)}
    if type(value) is float:
        # JSON has neither infinity nor NaN; the bits of a NaN count too
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if type(value) is str:
        return value if _is_unicode(value) else {"$text": _base64(value.encode("utf-8", "surrogatepass"))}
    if type(value) is bytes:
        return {"$bytes": _base64(value)}
    if type(value) is complex:
        return {"$complex": [encode(part, path, tensors) for part in (value.real, value.imag)]}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _take(value, path, tensors)}
    if type(value) is list or type(value) is tuple:
        sequence = cast("list[object] | tuple[object, ...]", value)
        children = [encode(child, f"{path}[{i}]", tensors, kept) for i, child in enumerate(sequence)]
        return children if type(sequence) is list else {"$tuple": children}
    if is_record(value):
        return {"$record": [class_name(type(value)), encode_record(value, path, tensors, kept)]}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_mapping(cast("dict[object, object]", value), path, tensors, kept)
    if type(value) is set or type(value) is frozenset:
        return {f"${type(cast(object, value)).__name__}": _encode_set(cast("set[object]", value), path, kept)}
    if type(value) is deque:
        queue = cast("deque[object]", value)
        return {
            "$deque": [[encode(child, f"{path}[{i}]", tensors, kept) for i, child in enumerate(queue)], queue.maxlen]
        }
    if type(value) is torch.Generator and value.device.type == "cpu":
        return {"$generator": encode(value.get_state(), path, tensors)}
    if isinstance(value, enum.Enum):
        return _encode_member(value, path, tensors, kept)
    if type(value) is torch.Size:
        return {"$size": list(value)}
    if type(value) in _TORCH:
        return {"$torch": str(value)}
    if is_special(value):
        tag, texts, tensor = take_apart(value)
        held = [encode(text, path, tensors) for text in texts]
        return {tag: held if tensor is None else [*held, encode(tensor, path, tensors)]}
    raise _unsaveable(value, path)


def encode_record(
    value: object, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None = None
) -> dict[str, Any]:
    """Encode a record as fields by name, without the name of its class."""
    if kept is not None:
        kept[path] = value
    if isinstance(value, JoinsRanks):
        value = value.without_rank_part()  # rank 0's numbers are not all ranks'
    fields = {name: child for name, child in fields_of(value, path).items() if not isinstance(child, Uncompared)}
    return {name: encode(child, f"{path}.{name}", tensors, kept) for name, child in fields.items()}


def _take(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    check_tensor(tensor, path)
    if path in tensors:
        raise CheckpointError("two tensors have the same path", where=path, fix="Rename one of the keys.")
    # live memory, not a copy: it is written before the caller continues
    tensors[path] = tensor.detach()
    return path


def _encode_mapping(value: dict[object, object], path: str, tensors: dict[str, torch.Tensor], kept: Kept | None) -> Any:
    kinds = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
    # a key with "$" in front would read as a tag
    if type(value) is dict and all(type(key) is str and _is_unicode(key) and key[:1] != "$" for key in value):
        return {str(key): encode(child, path + key_step(key), tensors, kept) for key, child in value.items()}
    pairs: list[Any] = []
    for key, child in value.items():
        if isinstance(key, torch.Tensor) or is_record(key):
            raise _unsaveable(key, f"a key of {path}")
        pairs.append([encode(key, f"a key of {path}", {}, kept), encode(child, path + key_step(key), tensors, kept)])
    return {kinds[type(value)]: pairs}


def _encode_set(value: set[object], path: str, kept: Kept | None) -> list[Any]:
    """Return the elements in an order that no hash decides, as ranks must agree."""
    for element in value:
        if isinstance(element, torch.Tensor) or is_record(element):
            raise _unsaveable(element, f"an element of {path}")
    elements = [encode(element, f"an element of {path}", {}, kept) for element in value]
    return sorted(elements, key=lambda element: json.dumps(element, sort_keys=True))


def _encode_member(value: enum.Enum, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None) -> Any:
    if kept is not None:
        kept[path] = value
    combined = isinstance(value, enum.Flag) and value.name not in type(value).__members__
    chosen = [None, encode(value.value, path, tensors)] if combined else [value.name, None]
    return {"$enum": [class_name(type(value)), *chosen]}


def key_step(key: object) -> str:
    """Return the step of a path that leads to the value of a mapping's key."""
    if type(key) is str:
        return f".{key}" if _PLAIN_STEP.fullmatch(key) else f"[{json.dumps(key)}]"
    return f"[{key!r}]"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unsaveable(value: object, path: str) -> CheckpointError:
    name = type(value).__name__
    fixes = {
        "function": "Leave functions out of the state and pass them to the constructor again.",
        "Generator": "Store its get_state(), a tensor.",
        "ndarray": "Use an array of numbers, texts, bytes or dates.",
        "defaultdict": "Use dict(...).",
        "bytearray": "Use bytes(...).",
    }
    known = fixes.get(name)
    if callable(getattr(value, "load_state_dict", None)) and not isinstance(value, type):
        known = "Pass it as a separate item, or pass the result of its state_dict()."
    return CheckpointError(
        f"{with_article(name)} cannot be stored",
        expected="None, bool, int, float, complex, str, bytes, a tensor, a record, an enum, a path, a scalar or array "
        "of numpy, or a list, tuple, deque, set or dict of such",
        got=f"{name} of {type(value).__module__}",
        where=path,
        fix=known or "Give it state_dict() and load_state_dict(), or store plain values.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """Makes records of stored fields."""

    kept: Mapping[str, object]  # live records by path: a record at the same path has the class of that one
    classes: Classes  # else its class by name
    own: Callable[[str, object], object]  # maps path and record to the final record
    # Whether records inside values have the names of their classes, as since format 4; else a dict in the place
    # of a live record is one.
    exact: bool

    def record(self, name: str, fields: dict[str, Any], path: str) -> object:
        """Make a record; raises `MisfitError` if there is no class of that name, or it takes no such fields."""
        return self.own(path, make_record(self._class(name, path), fields, path))

    def member(self, name: str, member: str | None, value: Any, path: str) -> object:
        """Return a member of an enum, by its name or, of a combination of flags, its value; raises as `record`."""
        kind = cast("type[enum.Enum]", self._class(name, path))
        try:
            return kind(value) if member is None else kind[member]
        except (KeyError, ValueError, TypeError) as error:
            expected = f"a member of {kind.__qualname__}"
            raise MisfitError(path, expected=expected, got=str(value if member is None else member)) from error

    def _class(self, name: str, path: str) -> type:
        live = self.kept.get(path)
        # the class of the live record first: several classes of one name may be in a run
        found = (type(live),) if live is not None and class_name(type(live)) == name else self.classes.get(name, ())
        if len(found) != 1:
            shown = name.removeprefix("accel.")
            if not found:
                expected = f"a live {shown} in its place or as an item, which gives the class"
                got = f"{with_article(shown)} in the file, and no such value passed"
                raise MisfitError(path, expected=expected, got=got)
            expected = f"one class {shown} among the values that are passed"
            raise MisfitError(path, expected=expected, got=f"{len(found)} such classes")
        return found[0]


def decode(
    value: Any, where: str, tensors: Mapping[str, torch.Tensor], path: str = "", making: Making | None = None
) -> Any:
    """Decode a value of `encode` from JSON of any origin; raises `MisfitError` if a class does not fit. `where` is for
    errors, `path` as in `encode`. Without `making`, records come back as dicts of their fields."""
    if is_list(value):
        return [decode(child, where, tensors, f"{path}[{i}]", making) for i, child in enumerate(value)]
    if not is_object(value):
        return value
    tag = next(iter(value), "")
    # `encode` writes a tag as the only key of its object
    if len(value) != 1 or not tag.startswith("$"):
        made = {key: decode(child, where, tensors, path + key_step(key), making) for key, child in value.items()}
        if making is None or making.exact or not is_record(live := making.kept.get(path)):
            return made
        made = {key: child for key, child in made.items() if key not in record_tag(live)}
        return make_record(type(live), made, path, exact=False)
    try:
        # a manifest is input: whatever stands in it must end as one kind of error
        return _decode_tagged(tag, value[tag], where, tensors, path, making)
    except (TypeError, ValueError, LookupError, AttributeError, binascii.Error, struct.error) as error:
        raise CheckpointError(f"the stored value is not valid: {tag}", where=where) from error


def _decode_tagged(
    tag: str, inner: Any, where: str, tensors: Mapping[str, torch.Tensor], path: str, making: Making | None
) -> Any:
    def child(value: Any, step: str = "") -> Any:
        return decode(value, where, tensors, path + step, making)

    def pairs(value: list[Any]) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        for stored, held in value:
            key = decode(stored, where, tensors, f"a key of {path}", making)
            found.append((key, child(held, key_step(key))))
        return found

    def record(value: Any) -> object:
        name, stored = value
        fields = {str(key): child(held, f".{key}") for key, held in stored.items()}
        return fields if making is None else making.record(str(name), fields, path)

    def real(value: Any) -> float:
        number = child(value)
        if type(number) is not float:
            raise TypeError
        return number

    def member(value: Any) -> object:
        name, chosen = str(value[0]), value[1]
        stored = child(value[2])
        if making is None:
            return stored if chosen is None else chosen
        return making.member(name, chosen, stored, path)

    def elements(value: list[Any]) -> list[Any]:
        return [decode(each, where, tensors, f"an element of {path}", making) for each in value]

    makers: dict[str, Callable[[Any], Any]] = {
        "$tuple": lambda value: tuple(child(part, f"[{i}]") for i, part in enumerate(value)),
        "$set": lambda value: set(elements(value)),
        "$frozenset": lambda value: frozenset(elements(value)),
        "$deque": lambda value: deque((child(part, f"[{i}]") for i, part in enumerate(value[0])), value[1]),
        "$generator": lambda value: make_generator(child(value)),
        "$record": record,
        "$enum": member,
        "$path": lambda value: make_path(value[0], child(value[1])),
        "$scalar": lambda value: make_scalar(*map(str, value)),
        "$array": lambda value: make_array(str(value[0]), child(value[1])),
        "$dict": lambda value: dict(pairs(value)),
        "$ordered": lambda value: OrderedDict(pairs(value)),
        "$counter": lambda value: Counter(dict(pairs(value))),
        "$int": lambda value: int(value, 16),
        "$float": lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
        "$text": lambda value: base64.b64decode(value, validate=True).decode("utf-8", "surrogatepass"),
        "$bytes": lambda value: base64.b64decode(value, validate=True),
        "$complex": lambda value: complex(real(value[0]), real(value[1])),
        "$tensor": lambda value: tensors[value],
        "$size": lambda value: torch.Size(map(int, value)),
        "$torch": lambda value: make_torch(str(value)),
    }
    return makers[tag](inner)
