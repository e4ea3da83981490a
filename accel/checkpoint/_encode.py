# SPDX-License-Identifier: Apache-2.0
"""Nested values to JSON, exactly and by type; tensors are taken out by name.

What JSON has stays as it is. Everything else is an object with one key that begins with "$": tuples, keys that are
no text, bytes, complex numbers, integers beyond 64 bits, floats that are not finite, tensors, records, members of
enums, paths, values of numpy.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from typing import Any, cast

import torch

from accel.checkpoint._live_tensors import check_tensor
from accel.checkpoint._records import JoinsRanks, class_name, fields_of, is_record
from accel.checkpoint._values import is_special, take_apart
from accel.errors import CheckpointError

_PLAIN_STEP = re.compile(r"[A-Za-z0-9_\-]+", re.ASCII)
_WORD = 2**63

Kept = dict[str, object]  # by path: records and members of enums, each with a class of its own


def encode(value: object, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None = None) -> Any:
    """Encode a value as JSON.

    Args:
        value: None, bool, int, float, complex, str, bytes, tensor, record, member of an enum, path, scalar or array of
            numpy, or a list, tuple, dict, OrderedDict or Counter of such; of exactly these types.
        path: path of the value; names of its tensors begin with it.
        tensors: receives the tensors by name.
        kept: receives records and members of enums by path.

    Raises:
        CheckpointError: a value of another type, with its path.
    """
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if -_WORD <= value < _WORD else {"$int": hex(value)}
    if type(value) is float:
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
    if isinstance(value, enum.Enum):
        return _encode_member(value, path, tensors, kept)
    if is_special(value):
        tag, texts, tensor = take_apart(value)
        held = [encode(text, path, tensors) for text in texts]
        return {tag: held if tensor is None else [*held, encode(tensor, path, tensors)]}
    raise _unsaveable(value, path)


def encode_record(
    value: object, path: str, tensors: dict[str, torch.Tensor], kept: Kept | None = None
) -> dict[str, Any]:
    """Encode a record as fields by name, without the name of its class.

    Raises:
        CheckpointError: as `encode`.
    """
    if kept is not None:
        kept[path] = value
    if isinstance(value, JoinsRanks):
        value = value.without_rank_part()  # rank 0's numbers are not all ranks'
    return {name: encode(child, f"{path}.{name}", tensors, kept) for name, child in fields_of(value, path).items()}


def _take(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    check_tensor(tensor, path)
    if path in tensors:
        raise CheckpointError("two tensors have the same path", where=path, fix="Rename one of the keys.")
    tensors[path] = tensor.detach()
    return path


def _encode_mapping(value: dict[object, object], path: str, tensors: dict[str, torch.Tensor], kept: Kept | None) -> Any:
    kinds = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
    if type(value) is dict and all(type(key) is str and _is_unicode(key) and key[:1] != "$" for key in value):
        return {str(key): encode(child, path + key_step(key), tensors, kept) for key, child in value.items()}
    pairs: list[Any] = []
    for key, child in value.items():
        if isinstance(key, torch.Tensor) or is_record(key):
            raise _unsaveable(key, f"a key of {path}")
        pairs.append([encode(key, f"a key of {path}", {}, kept), encode(child, path + key_step(key), tensors, kept)])
    return {kinds[type(value)]: pairs}


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
        "set": "Use sorted(...), a list.",
        "frozenset": "Use sorted(...), a list.",
        "ndarray": "Use an array of numbers, texts, bytes or dates.",
        "defaultdict": "Use dict(...).",
        "deque": "Use list(...).",
        "bytearray": "Use bytes(...).",
    }
    known = fixes.get(name)
    if callable(getattr(value, "load_state_dict", None)) and not isinstance(value, type):
        known = "Pass it as an item of its own, or what its state_dict() returns."
    return CheckpointError(
        f"a {name} cannot be stored",
        expected="None, bool, int, float, complex, str, bytes, a tensor, a record, an enum, a path, a scalar or array "
        "of numpy, or a list, tuple or dict of such",
        got=f"{name} of {type(value).__module__}",
        where=path,
        fix=known or "Give it state_dict() and load_state_dict(), or store plain values.",
    )
