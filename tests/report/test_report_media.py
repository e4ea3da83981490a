# SPDX-License-Identifier: Apache-2.0
"""Media of a page without a browser: PNG that decodes and no other, the room, the order, what is said of the rest."""

from __future__ import annotations

import json
import os
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from sample_runs import (
    PNG_DEPTHS,
    look_at,
    make_picture,
    make_png,
    png_chunk,
    png_head,
    png_of_form,
    png_rows,
    write_media,
)

from accel.cli import main
from accel.report import report_page
from accel.report._media import Picture, clean_png
from accel.report._tables import NONE
from accel.run_folder import encode_line

FORMATS = [(color, depth) for color, depths in PNG_DEPTHS.items() for depth in depths]


@given(st.sampled_from(FORMATS), st.integers(1, 20), st.integers(1, 20), st.integers(0, 1), st.integers(1, 3))
def test_each_form_of_a_png_is_kept_as_it_is(
    form: tuple[int, int], width: int, height: int, interlaced: int, parts: int
) -> None:
    color, depth = form
    whole = png_of_form(width, height, depth, color, interlaced, parts)
    found = clean_png(whole)
    assert (found.png, found.width, found.height) == (whole, width, height)


def test_what_is_beside_the_picture_is_left_out() -> None:
    head, pixels = png_head(3, 2), png_chunk(b"IDAT", zlib.compress(png_rows(3, 2, 24)))
    extra = [png_chunk(kind, b"<script>") for kind in (b"tEXt", b"iCCP", b"eXIf", b"acTL")]
    found = clean_png(make_png(head, *extra, pixels, extra[0]) + b"PK an archive")
    assert found.png == make_png(head, pixels)


GOOD = zlib.compress(png_rows(3, 2, 24))
BAD = {
    "not a PNG": b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
    "a PNG that is cut off": make_picture()[:-3],
    "a checksum that does not fit": make_picture().replace(b"IHDR\0\0\0\3", b"IHDR\0\0\0\4"),
    "chunks out of order": make_png(png_chunk(b"IDAT", GOOD), png_head(3, 2)),
    "an unknown chunk": make_png(png_head(3, 2), png_chunk(b"EVIL", b""), png_chunk(b"IDAT", GOOD)),
    "an unknown head": make_png(png_head(3, 2, depth=3), png_chunk(b"IDAT", GOOD)),
    "a palette that does not fit": make_png(png_head(3, 2, color=3), png_chunk(b"IDAT", GOOD)),
    "pixels that do not unpack": make_png(png_head(3, 2), png_chunk(b"IDAT", b"x" + GOOD)),
    "pixels of another number": make_png(png_head(3, 3), png_chunk(b"IDAT", GOOD)),
    "an unknown filter": make_png(png_head(1, 1), png_chunk(b"IDAT", zlib.compress(b"\5abc"))),
    "60000 x 60000 pixels are too many": make_png(png_head(60000, 60000), png_chunk(b"IDAT", GOOD)),
}
MORE = [
    (make_png(png_head(3, 2)), "chunks out of order"),
    (make_png(png_head(3, 2), png_head(3, 2), png_chunk(b"IDAT", GOOD)), "chunks out of order"),
    (
        make_png(png_head(3, 2), png_chunk(b"IDAT", GOOD[:4]), png_chunk(b"tIME", b""), png_chunk(b"IDAT", GOOD[4:])),
        "order",
    ),
    (make_png(png_head(3, 2), png_chunk(b"IDAT", GOOD), png_chunk(b"PLTE", b"abc")), "chunks out of order"),
    (make_png(png_head(0, 2), png_chunk(b"IDAT", GOOD)), "an unknown head"),
    (make_png(png_head(3, 2), png_chunk(b"IDAT", GOOD + b"more")), "pixels of another number"),
    (make_png(png_head(3, 2), png_chunk(b"IDAT", zlib.compress(b"\0" * 10**6))), "pixels of another number"),
    (make_png(png_head(3, 2), png_chunk(b"tRNS", b"ab"), png_chunk(b"IDAT", GOOD)), "a transparency that does not fit"),
    (b"", "not a PNG"),
]


@pytest.mark.parametrize(("data", "reason"), [*((data, reason) for reason, data in BAD.items()), *MORE])
def test_a_png_that_does_not_decode_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _ = clean_png(data)


@given(st.data())
def test_a_damaged_png_decodes_or_is_refused_and_nothing_else_happens(data: st.DataObject) -> None:
    whole = bytearray(make_picture(5, 4, 99))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(8, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = clean_png(bytes(whole))
    except ValueError:
        return
    assert isinstance(found, Picture)


def page_of(folder: Path, room: int = 20_000_000) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """The page of a run, and the series and contents in it."""
    if not (folder / "metrics.jsonl").exists():
        (folder / "metrics.jsonl").write_bytes(encode_line(0, {"loss": 1.0}))
    page = report_page([look_at("run", folder)], room)
    stored = dict(re.findall(r'<script id="(data|contents)" type="application/json">(.*?)</script>', page, re.DOTALL))
    return page, json.loads(stored["data"])["media"], json.loads(stored.get("contents", "{}"))


def test_a_page_has_each_kind_by_step_and_equal_contents_once(tmp_path: Path) -> None:
    for at in (1, 2, 10):
        write_media(tmp_path, "text", f"layer{at}", 1, "")
    for step in (1, 2, 30):
        write_media(tmp_path, "images", "eval/in", step, make_picture(value=step), at=0)
        write_media(tmp_path, "images", "eval/in", step, make_picture(value=1), at=1)
    write_media(tmp_path, "figure", "fig", 2, make_picture(40, 30))
    write_media(tmp_path, "text", "said", 2, "one\r\ntwo \u202e\x1b[2J<b>")
    rows = [["cat", 0.1 + 0.2, True], ["dog", None, False]]
    write_media(tmp_path, "table", "words", 2, {"columns": ["a", "b", "c"], "rows": rows})
    edges = {"edges": [0.0, 1.0, 2.0], "counts": [3, 4], "nonfinite": 5}
    write_media(tmp_path, "histogram", "w", 2, edges)
    page, series, contents = page_of(tmp_path)
    assert [each["name"] for each in series if each["name"].startswith("layer")] == ["layer1", "layer2", "layer10"]
    series = [each for each in series if not each["name"].startswith("layer")]
    kinds = {each["name"]: (each["kind"], [step for step, _ in each["runs"]["0"]]) for each in series}
    assert kinds == {
        "eval/in": ("images", [1, 2, 30]),
        "fig": ("figure", [2]),
        "words": ("table", [2]),
        "said": ("text", [2]),
        "w": ("histogram", [2]),
    }

    def at(name: str, step: int) -> list[Any]:
        [runs] = [each["runs"]["0"] for each in series if each["name"] == name]
        return [contents[key] for key in dict(map(tuple, runs))[step]]

    assert len(at("eval/in", 30)) == 2
    assert at("eval/in", 1)[0] == at("eval/in", 30)[1]
    assert at("fig", 2)[0][1:] == [40, 30]
    assert at("said", 2) == [{"text": "one\ntwo \ufffd\ufffd[2J<b>", "more": ""}]
    [table] = at("words", 2)
    assert (table["rows"], table["numbers"]) == ([["cat", "0.3", "true"], ["dog", NONE, "false"]], [1])
    assert at("w", 2) == [{"low": 0.0, "high": 2.0, "counts": [3, 4], "nonfinite": 5}]
    assert len(contents) == 3 + 5
    assert "<b>" not in page
    assert "records are on the page" not in page


@given(st.integers(1, 300), st.integers(0, 60))
def test_the_newest_and_evenly_spaced_steps_have_the_room(count: int, most: int) -> None:
    from accel.report._media import _Record, _spread

    order = [record.step for record in _spread([_Record(step, ()) for step in range(count)])]
    assert sorted(order) == list(range(count))
    assert order[0] == count - 1
    kept = sorted(order[: most + 2])
    gaps = [after - before for before, after in pairwise(kept)]
    widest = max(gaps, default=0)
    assert widest <= 2 * (count / (most + 1)) + 1
    later = [record.step for record in _spread([_Record(step, ()) for step in range(count + 1)])]
    assert [step for step in later if step < count - 1] == [step for step in order if step < count - 1]  # stays chosen


def test_no_more_than_the_room_is_on_the_page_and_the_rest_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(100):
        noise = os.urandom(3 * 30 * 30)
        rows = b"".join(b"\0" + noise[at : at + 90] for at in range(0, len(noise), 90))
        write_media(tmp_path, "images", "in", step, make_png(png_head(30, 30), png_chunk(b"IDAT", zlib.compress(rows))))
        write_media(tmp_path, "text", "said", step, f"at {step}")
    page, series, contents = page_of(tmp_path, 100_000)
    steps = {each["name"]: [step for step, _ in each["runs"]["0"]] for each in series}
    assert 60_000 < sum(len(json.dumps(each)) for each in contents.values()) < 100_000
    assert len(page) < 200_000
    assert 10 < len(steps["in"]) < 30
    assert {0, 99} <= {*steps["in"]}
    assert len(steps["said"]) >= len(steps["in"])
    assert f"{len(steps['in'])} of 100 on the page" in page
    assert f"{len(steps['in']) + len(steps['said'])} of 200 records are on the page: the newest" in page
    assert "It has room for 100 kB" in page
    page, series, contents = page_of(tmp_path, 0)
    assert contents == {}
    assert "0 of 200 records are on the page" in page
    assert main(["report", str(tmp_path), "--media", "0.1"]) == 0
    assert (tmp_path / "report.html").stat().st_size < 200_000
    for wrong in ("-1", "many", "nan", "10001"):
        assert main(["report", str(tmp_path), "--media", wrong]) == 2
        assert f"argument --media: expected 0 to 10000, got {wrong!r}" in capsys.readouterr().err


def test_a_step_has_no_more_images_than_a_browser_shows_at_once(tmp_path: Path) -> None:
    large = png_of_form(2800, 2800, 8, 6, 0)
    for at in range(10):
        write_media(tmp_path, "images", "large", 1, large, at)
    for at in range(70):
        write_media(tmp_path, "images", "many", 1, make_picture(), at)
    page, series, _ = page_of(tmp_path)
    assert {each["name"]: len(each["runs"]["0"][0][1]) for each in series} == {"large": 9, "many": 64}
    assert page.count("the first images of a step, 64 at most") == 2


def test_hostile_files_are_counted_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("only here")
    folder = tmp_path / "run"
    good = write_media(folder, "text", "said", 1, "hello")
    good.with_name("said-00000002.txt").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(good.with_name("said-00000003.txt"))
    good.with_name("said-00000004.txt").mkdir()
    write_media(folder, "table", "deep", 1, "[" * 100_000)
    write_media(folder, "table", "odd", 1, '{"columns": ["a"], "rows": [[1, 2]]}')
    write_media(folder, "table", "wide", 1, {"columns": ["c"] * 90, "rows": [["x" * 1500, *["y"] * 89]] * 900})
    write_media(folder, "histogram", "h", 1, '{"edges": [0, 1e999], "counts": [1]}')
    write_media(folder, "histogram", "h", 2, '{"edges": [0, 1], "counts": []}')
    for odd in (
        b"caf\xe9-00000001.txt",
        b"x-" + b"9" * 200 + b".txt",
        b"line\nbreak-00000001.txt",
        b"%FF%00-00000001.txt",
    ):
        Path(os.fsdecode(os.fsencode(folder / "media") + b"/" + odd)).write_text("")
    write_media(folder, "histogram", "counts", 1, f'{{"edges": [0, 1], "counts": [{2**70}], "nonfinite": {2**90}}}')
    write_media(folder, "images", "in", 1, b"<svg/>")
    write_media(folder, "table", "large", 1, b"[" + b" " * 8_000_001)
    os.truncate(write_media(folder, "images", "huge", 1, b""), 10**11)
    write_media(folder, "text", "long", 1, "y" * 1_000_000)
    write_media(folder, "text", "</script><img src=x>", 1, "</script><img src=x onerror=alert(1)>")
    page, series, contents = page_of(folder)
    shown = {each["name"] for each in series if each["runs"]}
    names = {"said", "wide", "long", "</script><img src=x>", "caf\ufffd", "line\nbreak", "\ufffd\ufffd", "counts"}
    assert shown == names
    assert "only here" not in page
    assert "<img" not in page
    assert page.count("</script>") == 3
    for text in (
        "deep-00000001.json: ",
        "rows of different lengths",
        "larger than 8.0 MB",
        "0 of 1 on the page",
        "not a PNG",
        "h-00000002.histogram.json: edges",
    ):
        assert text in page
    assert "200 of 900 rows, 40 of 90 columns" in msgspec.json.encode(contents).decode()
    assert "950 kB more" in msgspec.json.encode(contents).decode()
    (folder / "media").rename(tmp_path / "elsewhere")
    (folder / "media").symlink_to(tmp_path / "elsewhere")
    assert page_of(folder)[1] == []


def test_media_of_many_runs_share_the_room(tmp_path: Path) -> None:
    for run in range(9):
        for step in range(50):
            write_media(tmp_path / f"run-{run}", "text", "said", step, f"{run} at {step} " + "x" * 900)
        (tmp_path / f"run-{run}" / "metrics.jsonl").write_bytes(encode_line(0, {"loss": 1.0}))
    page = report_page([look_at(f"run-{run}", tmp_path / f"run-{run}") for run in range(9)], 100_000)
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    [series] = json.loads(found[1])["media"]
    counts = [len(series["runs"][str(run)]) for run in range(9)]
    assert max(counts) - min(counts) <= 1
    assert all(steps[-1][0] == 49 for steps in series["runs"].values())
