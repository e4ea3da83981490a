# SPDX-License-Identifier: Apache-2.0
"""Values of numpy and paths, to JSON and back, exactly and by type. numpy is imported only for its own values."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast

import torch

from accel.errors import MissingExtraError
from accel.storage import stored_dtype

_PURE = {"PurePosixPath": PurePosixPath, "PureWindowsPath": PureWindowsPath}
_KINDS = "biufcSUMm"  # numpy's letters of dtypes whose bytes are their values


def is_special(value: Any) -> bool:
    """Return whether a value is a path, or a scalar or an array of numpy, of a kind that `take_apart` accepts."""
    if isinstance(value, PurePath):
        return type(value) in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    if type(value) is numpy.ndarray:
        return value.dtype.kind in _KINDS
    return isinstance(value, numpy.generic) and value.dtype.kind in _KINDS and type(_scalar(value)) is type(value)


def take_apart(value: Any) -> tuple[str, list[str], torch.Tensor | None]:
    """Return the tag of a special value, its texts, and the tensor of an array.

    An array of a torch dtype becomes a tensor of it; any other one of bytes, with one more dimension at the end.
    """
    if isinstance(value, PurePath):
        return "$path", [type(value).__name__ if type(value).__name__ in _PURE else "Path", str(value)], None
    numpy: Any = sys.modules["numpy"]
    if isinstance(value, numpy.generic):
        return "$scalar", [value.dtype.str, value.tobytes().hex()], None
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
    """Make a scalar of numpy.

    Raises:
        ValueError, TypeError: not a scalar of numpy.
        MissingExtraError: numpy is not installed.
    """
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
