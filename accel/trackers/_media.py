# SPDX-License-Identifier: Apache-2.0
"""The media that trackers receive: images, tables, figures, texts, histograms and artifacts."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from accel.devices import wide_dtype
from accel.errors import ConfigError

Cell = str | int | float | bool | None

_COLORS = {1: 0, 3: 2, 4: 6}  # channels to PNG's types: grey, RGB, RGBA


class Images(msgspec.Struct, frozen=True):
    """Images of one name.

    Attributes:
        name: their name.
        tensors: each [height, width, channels], uint8, on the CPU; 1, 3 or 4 channels.
    """

    name: str
    tensors: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return sum(tensor.numel() for tensor in self.tensors)


class Table(msgspec.Struct, frozen=True):
    """A table of texts and numbers.

    Attributes:
        name: its name.
        columns: their names.
        rows: one value a column each.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return sum(64 + (len(cell) if isinstance(cell, str) else 0) for row in self.rows for cell in row)


class Figure(msgspec.Struct, frozen=True):
    """A drawn figure.

    Attributes:
        name: its name.
        png: the picture as a PNG file.
    """

    name: str
    png: bytes

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return len(self.png)


class TextRecord(msgspec.Struct, frozen=True):
    """A text.

    Attributes:
        name: its name.
        text: the text.
    """

    name: str
    text: str

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return 64 + len(self.text)


class Histogram(msgspec.Struct, frozen=True):
    """The counts of values in intervals of one width.

    Attributes:
        name: its name.
        low, high: least and largest finite value.
        counts: finite values in each interval from `low` to `high`.
        nonfinite: other values.
    """

    name: str
    low: float
    high: float
    counts: tuple[int, ...]
    nonfinite: int = 0

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return 200 + 32 * len(self.counts)

    @property
    def middles(self) -> list[float]:
        """Middles of the intervals."""
        return [(left + right) / 2 for left, right in pairwise(self.edges)]

    @property
    def edges(self) -> list[float]:
        """Edges of the intervals, one more than these."""
        bins = len(self.counts)
        return [self.low + (self.high - self.low) * at / bins for at in range(bins)] + [self.high]


class Artifact(msgspec.Struct, frozen=True):
    """A file or folder to be stored with the run.

    Attributes:
        name: its name.
        path: absolute path of a file or folder, read in the background.
    """

    name: str
    path: Path


Media = Images | Table | Figure | TextRecord | Histogram | Artifact


def split_images(name: str, images: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of single images: [N, C, H, W], [C, H, W] or [H, W], or a sequence of the last two; uint8, bool, or
    floats from 0 to 1."""
    if isinstance(images, torch.Tensor):
        images = list(images) if images.ndim == 4 else [images]
    single = images if isinstance(images, Sequence) else [images]  # pyright: ignore[reportUnnecessaryIsInstance]
    for image in single:
        _check_image(name, image)
    return list(single)


def make_images(name: str, images: Sequence[torch.Tensor]) -> Images:
    """Copy images of `split_images` to bytes on the CPU."""
    return Images(name, tuple(_pixels(image) for image in images))


def make_table(name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Copy a table; raise `ConfigError` for a row of another length, or a value other than text or number."""
    made = tuple(tuple(_cell(name, value) for value in row) for row in rows)
    for at, row in enumerate(made):
        if len(row) != len(columns):
            raise ConfigError(
                "a row does not fit the columns",
                expected=f"{len(columns)} values",
                got=str(len(row)),
                where=f"log_table, {name}, row {at}",
            )
    return Table(name, tuple(columns), made)


def make_histogram(name: str, values: torch.Tensor, bins: int) -> Histogram:
    """Count the values of a tensor on its device; waits for it. One value, or none, is in the first interval."""
    flat = values.detach().reshape(-1).to(wide_dtype(values.device))
    finite = flat[flat.isfinite()]
    nonfinite = flat.numel() - finite.numel()
    if not finite.numel():
        return Histogram(name, 0.0, 0.0, (0,) * bins, nonfinite)
    ends: Any = torch.stack(finite.aminmax())
    low, high = cast("list[float]", ends.tolist())
    width = (high - low) / bins or 1.0
    places = finite.sub(low).div_(width).to(torch.int64).clamp_(0, bins - 1)
    counts: Any = torch.bincount(places, minlength=bins)
    return Histogram(name, low, high, tuple(counts.tolist()), nonfinite)


def make_figure(name: str, figure: object) -> Figure:
    """Draw a figure of matplotlib, or of another class with `savefig(file, format="png")`."""
    if not callable(getattr(figure, "savefig", None)):
        raise ConfigError(
            "the figure cannot be drawn",
            expected="a figure of matplotlib",
            got=type(figure).__name__,
            where=f"log_figure, {name}",
            fix="Draw it into a tensor, and use log_images.",
        )
    file = io.BytesIO()
    cast(Any, figure).savefig(file, format="png")
    return Figure(name, file.getvalue())


def make_artifact(name: str | None, path: str | os.PathLike[str]) -> Artifact:
    """Return the record of a file or folder, under its own name by default."""
    absolute = Path(os.path.abspath(path))
    return Artifact(name or absolute.name, absolute)


def png_of(pixels: torch.Tensor) -> bytes:
    """Encode [height, width, channels] of uint8 as a PNG file (https://www.w3.org/TR/png/)."""
    height, width, channels = pixels.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.reshape(height, -1)], dim=1)  # filter 0 a row
    head = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    data = zlib.compress(bytes(rows.untyped_storage()), 6)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _check_image(name: str, image: torch.Tensor) -> None:
    if not isinstance(image, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        facts = {"expected": "tensors", "got": type(image).__name__, "where": f"log_images, {name}"}
        raise ConfigError("the value is not an image", fix="Pass torch.as_tensor(...) of it, [C, H, W].", **facts)
    channels = 1 if image.ndim == 2 else image.shape[0] if image.ndim == 3 else 0
    if channels not in _COLORS or not image.numel():
        raise ConfigError(
            "the value is not an image",
            expected="[C, H, W] with 1, 3 or 4 channels, or [H, W]",
            got=f"shape {list(image.shape)}",
            where=f"log_images, {name}",
            fix="Turn [H, W, C] by permute(2, 0, 1)." if image.ndim == 3 and image.shape[2] in _COLORS else "",
        )
    if not image.is_floating_point() and image.dtype not in (torch.uint8, torch.bool):
        raise ConfigError(
            "images of this dtype have no known range",
            expected="uint8, bool, or floats from 0 to 1",
            got=str(image.dtype),
            where=f"log_images, {name}",
        )


def _pixels(image: torch.Tensor) -> torch.Tensor:
    image = image.detach()
    if image.ndim == 2:
        image = image.unsqueeze(0)
    if image.is_floating_point():
        image = image.float().nan_to_num(0.0).clamp(0, 1).mul(255).round()
    elif image.dtype == torch.bool:
        image = image.to(torch.uint8).mul(255)
    return image.to("cpu", torch.uint8, copy=True).permute(1, 2, 0).contiguous()


def _cell(name: str, value: object) -> Cell:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    item = getattr(value, "item", None)  # scalars of numpy
    if callable(item) and getattr(value, "ndim", None) == 0:
        return cast(Cell, item())
    raise ConfigError(
        "tables hold texts and numbers", got=type(value).__name__, where=f"log_table, {name}", fix="Use str(...)."
    )
