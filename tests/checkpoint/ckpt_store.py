# SPDX-License-Identifier: Apache-2.0
"""A store of objects as fsspec sees one, in memory: an upload appears when it is closed, and any operation may fail."""

import io
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

Fault = Callable[[str, Callable[[], Any]], Any]


class Store(AbstractFileSystem):
    """What `objects://` reaches.

    Attributes:
        objects: by name, with the time of their writing.
        fault: gets the kind of every operation, and the operation, which it may do, or not, or raise instead.
    """

    protocol = "objects"
    cachable = False
    objects: ClassVar[dict[str, tuple[bytes, float]]] = {}
    fault: ClassVar[Fault | None] = None

    def do(self, kind: str, work: Callable[[], Any]) -> Any:
        return work() if Store.fault is None else Store.fault(kind, work)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        start = f"{self._strip_protocol(path)}/"

        def work() -> list[dict[str, Any]]:
            inside = {name: value for name, value in self.objects.items() if name.startswith(start)}
            if not inside:
                raise FileNotFoundError(path)
            found: dict[str, dict[str, Any]] = {}
            for name, (data, written) in inside.items():
                first, _, rest = name.removeprefix(start).partition("/")
                kind = "directory" if rest else "file"
                found[first] = {"name": start + first, "size": len(data), "type": kind, "mtime": written}
            return list(found.values())

        return self.do("list", work)

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> dict[str, Any]:
        """As stores do it that know no folders: in one request."""
        start = f"{self._strip_protocol(path)}/"

        def work() -> dict[str, Any]:
            return {
                name: {"name": name, "size": len(data), "type": "file", "mtime": written}
                for name, (data, written) in list(self.objects.items())
                if name.startswith(start)
            }

        return self.do("list", work)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "Upload":
        assert mode == "wb"
        return Upload(self, path, options["block_size"])

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        key = self._strip_protocol(path)

        def work() -> None:
            if mode == "create" and key in self.objects:
                raise FileExistsError(path)
            self.objects[key] = bytes(value), time.time()

        self.do("put", work)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        key = self._strip_protocol(path)

        def work() -> bytes:
            if key not in self.objects:
                raise FileNotFoundError(path)
            return self.objects[key][0][start:end]

        return self.do("get", work)

    def rm_file(self, path: str) -> None:
        key = self._strip_protocol(path)

        def work() -> None:
            if self.objects.pop(key, None) is None:
                raise FileNotFoundError(path)

        self.do("delete", work)


class Upload(io.BytesIO):
    """An upload in parts."""

    def __init__(self, store: Store, key: str, block_size: int) -> None:
        super().__init__()
        self.store, self.key, self.block_size, self.dropped = store, key, block_size, False

    def write(self, data: Any) -> int:
        assert len(data) <= self.block_size
        return int(self.store.do("part", lambda: io.BytesIO.write(self, data)))

    def discard(self) -> None:
        self.dropped = True

    def close(self) -> None:
        if self.closed or self.dropped:
            return
        data = self.getvalue()
        self.dropped = True
        self.store.do("complete", lambda: self.store.objects.update({self.key: (data, time.time())}))
        super().close()


class Crash(BaseException):
    """The end of a process, which nothing handles."""


class Breaking:
    """Lets the operation of a number fail, before or after it was done, and those that come later as well."""

    def __init__(self, moment: int, error: Callable[[], BaseException], *, after: bool, for_ever: bool = True) -> None:
        self.moment, self.error, self.after, self.for_ever = moment, error, after, for_ever
        self.count, self.lock = 0, threading.Lock()

    def __call__(self, kind: str, work: Callable[[], Any]) -> Any:
        with self.lock:
            at, self.count = self.count, self.count + 1
        if at < self.moment or (at > self.moment and not self.for_ever):
            return work()
        if at == self.moment and self.after:
            work()
        raise self.error()

    @property
    def reached(self) -> bool:
        return self.count > self.moment


def register() -> None:
    fsspec.register_implementation("objects", Store, clobber=True)
    Store.objects.clear()
    Store.fault = None
