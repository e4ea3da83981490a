# SPDX-License-Identifier: Apache-2.0
"""Images, figures, tables, texts and histograms of runs on a page: found, chosen within its room, checked, and made
inert."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from accel.opening import open_regular
from accel.report._run_data import MediaFile
from accel.report._tables import NONE, Html, element, folded, seen_text, show_number
from accel.run_folder import MediaKind
from accel.terminal import natural_key, show_size

MEDIA_ROOM = 20_000_000  # bytes of media on a page
_KINDS: tuple[MediaKind, ...] = ("images", "figure", "table", "text", "histogram")
_MOST_STEPS = 1000  # of a name in a run: a slider has no more places
_MOST_DRAWN = 200  # of a histogram's name, all of which are drawn at once
_MOST_OPEN = 6  # histograms that are not folded
_MOST_IMAGES = 64  # of a step
_LONGEST_TEXT = 50_000  # characters of a text
_LONGEST_CELL = 1000
_MOST_ROWS, _MOST_COLUMNS = 200, 40  # of a table
_MOST_BINS = 4096
_LARGEST_JSON = 8_000_000  # bytes
_LARGEST_IMAGE = 2**25  # bytes of its pixels: 3840 x 2160 of four channels
_LARGEST_STEP = 2**28  # bytes of the pixels of all images of a step, which a browser shows at once
_INFLATED = 200  # bytes of pixels that a page unpacks to check them, for each byte of room
_OVERHEAD = 60  # bytes of a step in addition to its contents


class MediaContent(NamedTuple):
    """A file as the page's script shows it."""

    key: str  # name of the content; equal contents have one
    data: bytes  # JSON, or nothing for a file that cannot be shown
    problem: str = ""  # reason why it cannot
    pixels: int = 0  # bytes of an image's pixels


class PageMedia(NamedTuple):
    """The media of a page."""

    series: Sequence[dict[str, Any]]  # for the script, of each name its kind and its steps by the number of the run
    notes: Sequence[str]  # of each name, the records that are not on the page, in words
    contents: Mapping[str, bytes]  # JSON of each content by its key
    summary: str  # all records that are not on the page, in words


class _Record(NamedTuple):
    """The files of one call."""

    step: int
    files: Sequence[MediaFile]


_Series = dict[int, list[_Record]]  # of a name, by run


class MediaShelf:
    """The media on a page, each read and checked once however often the page is made.

    Args:
        room: bytes on the page.
    """

    def __init__(self, room: int = MEDIA_ROOM) -> None:
        self.room = room
        self._known: dict[MediaFile, MediaContent] = {}

    def fill(self, listed: Sequence[Sequence[MediaFile]]) -> PageMedia:
        """Return what of the runs' files has room: of each name and run the newest, then ever more evenly spaced."""
        series = _sorted_series(listed)
        chosen = _Choice(self.room, self._known)
        queues = [
            (at, run, _spread(records)) for at, each in enumerate(series.values()) for run, records in each.items()
        ]
        for row in zip_longest(*(records for *_, records in queues)):
            for (at, run, _), record in zip(queues, row, strict=True):
                if record is not None:
                    chosen.take(at, run, record)
        self._known = chosen.used
        made = [
            {"name": seen_text(name), "kind": kind, "runs": chosen.shown(at, each)}
            for at, ((kind, name), each) in enumerate(series.items())
        ]
        return PageMedia(made, [chosen.note(at) for at in range(len(made))], chosen.contents, chosen.summary())


def _sorted_series(listed: Sequence[Sequence[MediaFile]]) -> dict[tuple[MediaKind, str], _Series]:
    """Return the records of runs by kind and name."""
    found: dict[tuple[MediaKind, str], dict[int, dict[int, list[MediaFile]]]] = {}
    for run, files in enumerate(listed):
        for file in files:
            steps = found.setdefault((file.name.kind, file.name.name), {}).setdefault(run, {})
            steps.setdefault(file.name.step, []).append(file)
    order = sorted(found, key=lambda key: (_KINDS.index(key[0]), natural_key(key[1])))
    return {
        key: {
            run: [_Record(step, sorted(steps[step], key=lambda file: file.name.at)) for step in sorted(steps)]
            for run, steps in found[key].items()
        }
        for key in order
    }


def _spread(records: Sequence[_Record]) -> list[_Record]:
    """Return records in order of their weight: the newest, then those at multiples of ever smaller powers of two.

    What has been chosen stays so while newer ones come.
    """
    last = len(records) - 1

    def weight(at: int) -> tuple[bool, int, int]:
        return at != last, -((at & -at) or 1 << 62), -at

    return [records[at] for at in sorted(range(len(records)), key=weight)]


class _Choice:
    """Records that have room on a page, and those that have none."""

    def __init__(self, room: int, known: Mapping[MediaFile, MediaContent]) -> None:
        self.contents: dict[str, bytes] = {}
        self.used: dict[MediaFile, MediaContent] = {}
        self._known = known
        self._room = room
        self._left = room
        self._patience = room  # bytes of files that are read and cannot be shown
        self._inflatable = _INFLATED * room
        self._steps: dict[tuple[int, int], list[tuple[int, list[str]]]] = {}
        self._counts: dict[int, list[int]] = {}  # of a name: records, those without room
        self._bad: dict[int, list[str]] = {}
        self._cut: dict[int, bool] = {}

    def take(self, at: int, run: int, record: _Record) -> None:
        """Take a record of a name and run if it has room."""
        steps = self._steps.setdefault((at, run), [])
        counts = self._counts.setdefault(at, [0, 0])
        counts[0] += 1
        files = record.files[:_MOST_IMAGES]
        is_full = self._left < _OVERHEAD + sum(map(_least, files)) or min(self._patience, self._inflatable) <= 0
        if is_full or len(steps) >= (_MOST_DRAWN if record.files[0].name.kind == "histogram" else _MOST_STEPS):
            counts[1] += 1
            return
        found = self._contents(files)
        self._cut[at] = self._cut.get(at, False) or len(found) < len(record.files)
        good = {each.key: each.data for each in found if not each.problem}
        for file, each in zip(files, found, strict=False):
            if each.problem:
                self._patience -= file.size if _is_read(file) else 0
                self._bad.setdefault(at, []).append(f"{os.path.basename(file.path)}: {each.problem}")
        if not good:
            counts[0] -= 1
            return
        fresh = {key: data for key, data in good.items() if key not in self.contents}
        cost = _OVERHEAD + sum(map(len, fresh.values()))
        if cost > self._left:
            counts[1] += 1
            return
        self._left -= cost
        self.contents |= fresh
        steps.append((record.step, [each.key for each in found if not each.problem]))

    def _contents(self, files: Sequence[MediaFile]) -> list[MediaContent]:
        """Return the contents of a step's files, as many as a browser shows at once."""
        found: list[MediaContent] = []
        for file in files:
            if sum(each.pixels for each in found) >= _LARGEST_STEP:
                break
            found.append(self._content(file))
        return found

    def _content(self, file: MediaFile) -> MediaContent:
        found = self._known.get(file) or self.used.get(file)
        if found is None:
            try:
                found = self._read(file)
            except (OSError, ValueError, RecursionError) as error:  # of msgspec, too
                found = MediaContent("", b"", _reason(error))
        self.used[file] = found
        return found

    def _read(self, file: MediaFile) -> MediaContent:
        pixels = 0
        if file.name.kind in ("images", "figure"):
            picture = clean_png(_bytes_of(file))
            pixels = picture.size
            self._inflatable -= pixels
            value: object = [base64.b64encode(picture.png).decode(), picture.width, picture.height]
        elif file.name.kind == "text":
            value = _text_of(file)
        elif not _is_read(file):
            raise ValueError(f"larger than {show_size(_LARGEST_JSON)}")
        elif file.name.kind == "table":
            value = _table_of(_bytes_of(file))
        else:
            value = _histogram_of(_bytes_of(file))
        data = msgspec.json.encode(value)
        key = base64.urlsafe_b64encode(hashlib.blake2b(data, digest_size=12).digest()).decode()
        return MediaContent(key, data, pixels=pixels)

    def shown(self, at: int, runs: _Series) -> dict[str, list[tuple[int, list[str]]]]:
        """Return the steps of a name by run, in order."""
        return {str(run): sorted(steps) for run in sorted(runs) if (steps := self._steps.get((at, run)))}

    def note(self, at: int) -> str:
        """Return what of a name is not on the page, in words; empty for nothing."""
        count, left = self._counts.get(at, (0, 0))
        bad = self._bad.get(at, [])
        parts = [f"{count - left} of {count} on the page"] if left else []
        parts += [f"the first images of a step, {_MOST_IMAGES} at most"] if self._cut.get(at) else []
        if bad:
            more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
            parts.append(f"cannot be shown: {bad[0]}{more}")
        return "; ".join(parts)

    def summary(self) -> str:
        """Return what of all names is not on the page, in words; empty for nothing."""
        count = sum(each[0] for each in self._counts.values())
        left = sum(each[1] for each in self._counts.values())
        if not left:
            return ""
        kept = ": the newest of each name, and evenly spaced ones before" if left < count else ""
        room = f"{show_size(self._room)} (--media MB), and {_MOST_STEPS} steps of a name, {_MOST_DRAWN} of a histogram"
        return f"{count - left} of {count} records are on the page{kept}. It has room for {room}."


def _is_read(file: MediaFile) -> bool:
    return file.name.kind not in ("table", "histogram") or file.size <= _LARGEST_JSON


def _least(file: MediaFile) -> int:
    """Return about the bytes that a file takes on the page, unless it is another's copy."""
    if file.name.kind in ("images", "figure"):
        return file.size * 4 // 3
    return 0 if file.name.kind == "table" else min(file.size, _LONGEST_TEXT)


def _reason(error: Exception) -> str:
    return str(error.strerror or error) if isinstance(error, OSError) else seen_text(str(error))[:200] or "nested"


def _bytes_of(file: MediaFile, most: int | None = None) -> bytes:
    """Read a file as it was listed; raise `OSError` for a link or another kind of file in its place."""
    with open(open_regular(file.path, follow=False), "rb") as stream:
        return stream.read(file.size if most is None else min(most, file.size))


def _text_of(file: MediaFile) -> dict[str, str]:
    read = _bytes_of(file, 4 * _LONGEST_TEXT).decode(errors="replace")
    text = read[:_LONGEST_TEXT]
    rest = max(1, file.size - len(text.encode()))
    is_whole = len(read) <= _LONGEST_TEXT and file.size <= 4 * _LONGEST_TEXT
    return {"text": seen_text(text.replace("\r\n", "\n")), "more": "" if is_whole else f"{show_size(rest)} more"}


class _TableFile(msgspec.Struct):
    columns: list[str]
    rows: list[list[str | int | float | bool | None]]


def _table_of(data: bytes) -> dict[str, Any]:
    table = msgspec.json.decode(data, type=_TableFile)
    wide = len(table.columns)
    if any(len(row) != wide for row in table.rows):
        raise ValueError("rows of different lengths")
    rows = [row[:_MOST_COLUMNS] for row in table.rows[:_MOST_ROWS]]
    numbers = [at for at in range(min(wide, _MOST_COLUMNS)) if _is_numeric([row[at] for row in rows])]
    more = [f"{_MOST_ROWS} of {len(table.rows)} rows"] if len(table.rows) > _MOST_ROWS else []
    more += [f"{_MOST_COLUMNS} of {wide} columns"] if wide > _MOST_COLUMNS else []
    return {
        "columns": [_cell(each) for each in table.columns[:_MOST_COLUMNS]],
        "rows": [[_cell(each) for each in row] for row in rows],
        "numbers": numbers,
        "more": ", ".join(more),
    }


def _is_numeric(cells: Sequence[object]) -> bool:
    known = [each for each in cells if each is not None]
    return bool(known) and all(isinstance(each, int | float) and not isinstance(each, bool) for each in known)


def _cell(value: str | float | bool | None) -> str:
    if isinstance(value, str):
        return seen_text(value if len(value) <= _LONGEST_CELL else f"{value[:_LONGEST_CELL]}…")
    if isinstance(value, bool) or value is None:
        return NONE if value is None else str(value).lower()
    return str(value) if isinstance(value, int) else show_number(value)


class _HistogramFile(msgspec.Struct):
    edges: list[float]
    counts: list[int]
    nonfinite: int = 0


def _histogram_of(data: bytes) -> dict[str, Any]:
    found = msgspec.json.decode(data, type=_HistogramFile)
    if not found.counts or len(found.counts) > _MOST_BINS or len(found.edges) != len(found.counts) + 1:
        raise ValueError("edges that do not fit the counts")
    low, high = found.edges[0], found.edges[-1]
    if not (math.isfinite(low) and math.isfinite(high)) or low > high or min(found.counts) < 0:
        raise ValueError("edges or counts that are none")
    return {"low": low, "high": high, "counts": found.counts, "nonfinite": found.nonfinite}


_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLORS = {0: (1, (1, 2, 4, 8, 16)), 2: (3, (8, 16)), 3: (1, (1, 2, 4, 8)), 4: (2, (8, 16)), 6: (4, (8, 16))}
_TRANSPARENT = {0: 2, 2: 6}  # bytes of tRNS; of a palette up to one a color
_INTERLACED = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


class Picture(NamedTuple):
    """A PNG that decodes."""

    png: bytes  # the file
    width: int  # pixels of a row
    height: int  # number of rows
    size: int  # bytes of its unpacked pixels


def clean_png(data: bytes, most: int = _LARGEST_IMAGE) -> Picture:
    """Return a PNG (https://www.w3.org/TR/png/) of nothing but its picture.

    Texts, profiles of colors, animations and whatever follows the end are left out.

    Raises:
        ValueError: it does not decode, or has more than `most` bytes of pixels.
    """
    if not data.startswith(_SIGNATURE):
        raise ValueError("not a PNG")
    kept: list[tuple[bytes, bytes]] = []
    last = b""
    for kind, body in _chunks(data):
        if (kind == b"IHDR") != (not last) or (kind == b"IDAT" and last != kind and kept[-1][0] == kind):
            raise ValueError("chunks out of order")
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            kept.append((kind, body))
        elif not kind[0] & 32:
            raise ValueError("an unknown chunk")
        last = kind
    head = kept[0][1]
    if len(head) != 13 or head[10:12] != b"\0\0" or head[12] > 1:
        raise ValueError("an unknown head")
    width, height, depth, color = struct.unpack(">IIBB", head[:10])
    channels, depths = _COLORS.get(color, (0, ()))
    if depth not in depths or not 0 < width < 2**31 or not 0 < height < 2**31:
        raise ValueError("an unknown head")
    _check_palette([each for each in kept if each[0] != b"IDAT"], [kind for kind, _ in kept], color)
    rows = list(_rows(width, height, depth * channels, interlaced=bool(head[12])))
    size = sum(count * each for count, each in rows)
    if size > most:
        raise ValueError(f"{width} x {height} pixels are too many")
    _check_pixels(b"".join(body for kind, body in kept if kind == b"IDAT"), rows)
    return Picture(_SIGNATURE + b"".join(_chunk(kind, body) for kind, body in kept), width, height, size)


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(_SIGNATURE)
    kind = b""
    while kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, at) if at + 12 <= len(data) else (2**32, b"")
        end = at + 8 + size
        if end + 4 > len(data):
            raise ValueError("a PNG that is cut off")
        if zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4]):
            raise ValueError("a checksum that does not fit")
        yield kind, data[at + 8 : end]
        at = end + 4


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _check_palette(others: Sequence[tuple[bytes, bytes]], kinds: Sequence[bytes], color: int) -> None:
    """Check palette and transparency, which come before the pixels, each once."""
    bodies = dict(others)
    palette = len(bodies.get(b"PLTE", b""))
    clear = len(bodies.get(b"tRNS", b""))
    before = kinds[: kinds.index(b"IDAT")] if b"IDAT" in kinds else ()
    order = [kind for kind in (b"IHDR", b"PLTE", b"tRNS") if kind in bodies]
    if len(others) != len(bodies) or list(before) != order or bodies[b"IEND"]:
        raise ValueError("chunks out of order")
    is_fit = palette % 3 == 0 and palette <= 768 and (b"PLTE" not in bodies or (palette > 0 and color in (2, 3, 6)))
    if not is_fit or (color == 3 and not palette):
        raise ValueError("a palette that does not fit")
    if b"tRNS" in bodies and (clear > palette // 3 if color == 3 else clear != _TRANSPARENT.get(color)):
        raise ValueError("a transparency that does not fit")


def _rows(width: int, height: int, bits: int, *, interlaced: bool) -> Iterator[tuple[int, int]]:
    """Yield number and bytes of the rows of each pass; the first byte of a row is its filter."""
    for left, top, across, down in _INTERLACED if interlaced else ((0, 0, 1, 1),):
        columns = (width - left + across - 1) // across
        rows = (height - top + down - 1) // down
        if columns > 0 and rows > 0:
            yield rows, 1 + (columns * bits + 7) // 8


def _check_pixels(packed: bytes, rows: Sequence[tuple[int, int]]) -> None:
    size = sum(count * each for count, each in rows)
    unpacking = zlib.decompressobj()
    try:
        pixels = unpacking.decompress(packed, size + 1)
    except zlib.error:
        raise ValueError("pixels that do not unpack") from None
    if len(pixels) != size or not unpacking.eof or unpacking.unused_data:
        raise ValueError("pixels of another number")
    start = 0
    for count, each in rows:
        if max(pixels[start : start + count * each : each]) > 4:
            raise ValueError("an unknown filter")
        start += count * each


def media_section(media: PageMedia) -> Html:
    """Return the group of media: a slider for all of them, and a card for each name, which the script fills."""
    shown = [at for at, series in enumerate(media.series) if series["runs"]]
    head = element("summary", "media", element("span", f" ({len(media.series)})"))
    slider = element(
        "div",
        element("button", "←", type="button", id="media-before", title="Earlier", aria_label="Earlier step"),
        element("input", type="range", id="media-at", min="0", max="0", value="0", aria_label="Step of the media"),
        element("button", "→", type="button", id="media-after", title="Later", aria_label="Later step"),
        element("output", id="media-step"),
        class_="controls steps",
    )
    cards = [_card(media, at) for at in range(len(media.series))]
    spreads = [card for card, each in zip(cards, media.series, strict=True) if each["kind"] == "histogram"]
    rest: list[Html] = []
    if len(spreads) > _MOST_OPEN:
        cards = cards[: -len(spreads)]
        rest = [folded("histograms", element("div", *spreads, class_="cards"), note=str(len(spreads)))]
    body = [slider] if shown else []
    body += [element("p", media.summary, class_="key")] if media.summary else []
    shelf = element("div", *cards, class_="cards")
    return element("details", head, *body, shelf, *rest, class_="group media", open="")


def _card(media: PageMedia, at: int) -> Html:
    name = media.series[at]["name"]
    kind = media.series[at]["kind"]
    button = element("button", "⤢", type="button", title="Widen", aria_label=f"Widen {name}")
    note = [element("p", media.notes[at], class_="key")] if media.notes[at] else []
    head = element("header", element("h3", name), button)
    places = element("div", class_="panels")
    return element("section", head, places, *note, class_="card medium", data_media=str(at), data_kind=kind)
