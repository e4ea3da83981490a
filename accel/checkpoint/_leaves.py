# SPDX-License-Identifier: Apache-2.0
"""Values without children that JSON lacks: as tagged JSON, as texts or as a tensor, and back. Others are refused."""

from __future__ import annotations

import base64
import importlib
import math
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast

import torch

from accel.checkpoint._manifest import is_object
from accel.errors import CheckpointError, MissingExtraError
from accel.errors._checks import with_article
from accel.storage import stored_dtype

_PURE = {"PurePosixPath": PurePosixPath, "PureWindowsPath": PureWindowsPath}
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)  # each is written as its text
_KINDS = "biufcSUMm"  # numpy's letters of dtypes that are stored as their bytes


def encode_leaf(value: object, path: str) -> Any:
    """Encode a value that JSON lacks; raise `CheckpointError` for one that cannot be stored."""
    if type(value) is int:
        return {"$int": hex(value)}
    if type(value) is float:
        return _encode_float(value)
    if type(value) is str:
        return {"$text": _base64(value.encode("utf-8", "surrogatepass"))}
    if type(value) is bytes:
        return {"$bytes": _base64(value)}
    if type(value) is complex:
        return {"$complex": [_encode_float(value.real), _encode_float(value.imag)]}
    if type(value) is torch.Size:
        return {"$size": list(value)}
    if type(value) in _TORCH:
        return {"$torch": str(value)}
    raise unsaveable(value, path)


def unsaveable(value: object, path: str) -> CheckpointError:
    """Return the error for a value that cannot be stored."""
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


def _encode_float(value: float) -> Any:
    # JSON has neither infinity nor NaN; the bits of a NaN count too
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _decode_float(value: str) -> float:
    return struct.unpack(">d", bytes.fromhex(value))[0]


def _part(value: Any) -> float:
    """Return a part of a complex number."""
    number = _decode_float(value["$float"]) if is_object(value) else value
    if type(number) is not float:
        raise TypeError("not a number")
    return number


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# By tag: functions of what the tag holds. They raise ValueError, TypeError or another error for anything else.
LEAVES: Mapping[str, Callable[[Any], Any]] = {
    "$int": lambda value: int(value, 16),
    "$float": _decode_float,
    "$text": lambda value: base64.b64decode(value, validate=True).decode("utf-8", "surrogatepass"),
    "$bytes": lambda value: base64.b64decode(value, validate=True),
    "$complex": lambda value: complex(_part(value[0]), _part(value[1])),
    "$scalar": lambda value: make_scalar(*map(str, value)),
    "$size": lambda value: torch.Size(map(int, value)),
    "$torch": lambda value: make_torch(str(value)),
}
