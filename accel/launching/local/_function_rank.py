# SPDX-License-Identifier: Apache-2.0
"""The module that each rank of a launched function runs: functions and values, pickled between it and its parent."""

from __future__ import annotations

import io
import linecache
import os
import pickle
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from accel.errors import ConfigError, MissingExtraError
from accel.errors._checks import not_pickled, not_unpickled
from accel.launching.reports._failure import frames_below

_CALL, _VALUE, _ERROR = "call", "value-{}", "error-{}"


class SentError(NamedTuple):
    """An exception that a rank has sent."""

    error: BaseException | None  # the exception; None if it cannot be pickled
    traceback: str  # its text, from the first frame of the function on


def pack(obj: object, where: str) -> bytes:
    """Pickle an object; functions and classes of no module go by value, which takes the extra `notebook`."""
    try:
        if find_spec("cloudpickle") is not None:
            return import_module("cloudpickle").dumps(obj)
        buffer = io.BytesIO()
        _ByReference(buffer).dump(obj)
        return buffer.getvalue()
    except MissingExtraError:
        raise
    except Exception as error:
        raise not_pickled(obj, error, where, "numbers, text, tensors, lists and dicts of them") from error


def unpack(data: bytes, where: str) -> Any:
    """Return the object that `pack` has packed."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise not_unpickled(error, where) from error


def send_call(folder: str, call: bytes) -> None:
    """Write a packed call for the ranks, with this process's import path and sources that are in no file."""
    # With them a rank's traceback shows lines of notebook cells.
    sources = {name: linecache.getlines(name) for name in list(linecache.cache) if not os.path.exists(name)}
    # Two layers: the import path must be in place before the inner one, which imports, is unpickled.
    _ = Path(folder, _CALL).write_bytes(pickle.dumps((sys.path, sources, call)))


def read_call(folder: str) -> bytes:
    """Return what `send_call` has written, as it is, for a folder on another host."""
    return Path(folder, _CALL).read_bytes()


def receive_call(folder: str) -> bytes:
    """Return the packed call; take over the parent's import path and the sources of its notebook's cells."""
    sys.path[:], sources, call = pickle.loads(Path(folder, _CALL).read_bytes())
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # without a time it is never looked for
    return call


def send_value(folder: str, rank: int, value: bytes) -> None:
    """Write a packed value for the parent."""
    _ = Path(folder, _VALUE.format(rank)).write_bytes(value)


def receive_value(folder: str, rank: int) -> bytes | None:
    """Read what `send_value` has written; None if there is no value."""
    path = Path(folder, _VALUE.format(rank))
    return path.read_bytes() if path.exists() else None


def send_error(folder: str, rank: int, error: BaseException, traceback: str) -> None:
    """Write an exception for the parent; only the traceback if it cannot be pickled."""
    try:
        packed = pack(error, "an exception")
        # Some exceptions pickle and come back as nothing or another class: the parent could not find out.
        packed = packed if type(unpack(packed, "an exception")) is type(error) else None
    except (ConfigError, MissingExtraError):
        packed = None
    _ = Path(folder, _ERROR.format(rank)).write_bytes(pickle.dumps((packed, traceback)))


def receive_error(folder: str, rank: int) -> SentError | None:
    """Read what `send_error` has written; None if there is no exception."""
    path = Path(folder, _ERROR.format(rank))
    if not path.exists():
        return None
    packed, traceback = pickle.loads(path.read_bytes())
    try:
        return SentError(None if packed is None else unpack(packed, "an exception"), traceback)
    except ConfigError:
        return SentError(None, traceback)


def drop_results(folder: str) -> None:
    """Remove the values and exceptions of ranks that start again."""
    for kind in (_VALUE, _ERROR):
        for path in Path(folder).glob(kind.format("*")):
            path.unlink()


class _ByReference(pickle.Pickler):
    """A pickler that refuses at once what the other end could not import."""

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, type | FunctionType) and (obj.__module__ == "__main__" or "<" in obj.__qualname__):
            raise MissingExtraError(
                "a function or class of a notebook, a script or another function cannot be sent by name",
                got=f"{obj.__module__}.{obj.__qualname__}",
                fix="Run `pip install accel-torch[notebook]`, or move it into a module and import it.",
            )
        return NotImplemented


def main(folder: str) -> None:
    """Call the function in a folder, and write its value or exception there."""
    rank = int(os.environ["RANK"])
    try:
        value = _call(receive_call(folder))
    except BaseException as error:
        raised = traceback.TracebackException(
            type(error), error, frames_below(error.__traceback__, __file__), compact=True
        )
        send_error(folder, rank, error, "".join(raised.format()))
        raise
    # After the session: a rank that fails while it closes has returned nothing.
    send_value(folder, rank, value)


def _call(call: bytes) -> bytes:
    from accel.context import session

    fn, args = unpack(call, "the function that was launched")
    with session(os.environ) as ctx:
        # Within the session, as pickling may read what it closes, such as a sharded tensor's group.
        return pack(fn(ctx, *args), "the value that the function returned")


if __name__ == "__main__":
    main(sys.argv[1])
