# SPDX-License-Identifier: Apache-2.0
"""The page of a report in a real browser without a network: elements, zoom, hover, hostile names, phone, dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_everything, write_launch, write_metrics, write_run

from accel.report import name_runs, read_data, report_page
from accel.run_folder import encode_line

pytestmark = pytest.mark.slow
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<script>window.hit=1</script><img src=x onerror=window.hit=1>@x{safe} $$x$$ \"'&"
# open shadow roots hide what bokeh draws from selectors
IN_SHADOW = """(css) => { const find = (root) => [...root.querySelectorAll('*')].flatMap((e) =>
    [...(e.matches(css) ? [e] : []), ...(e.shadowRoot ? find(e.shadowRoot) : [])]);
    return find(document).map((e) => (e.shadowRoot ?? e).textContent); }"""
RANGES = "() => Bokeh.documents.flatMap((d) => d.roots()).map((f) => [f.x_range.start, f.x_range.end])"

DRAGS = "() => Bokeh.documents.flatMap((d) => d.roots()).map((f) => f.toolbar.active_drag !== null)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if PROGRAM is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page, and all that it complained about or asked for."""

    def __init__(self, browser: Any, path: Path, *, scheme: str = "light", width: int = 1200, touch: bool = False):
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, offline=True, has_touch=touch)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(".bk-Figure", state="attached")
        self.page.wait_for_timeout(500)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def save_page(folder: Path, folders: list[Path]) -> Path:
    runs = [read_data(name, each) for name, each in zip(name_runs(folders), folders, strict=True)]
    path = folder / "report.html"
    path.write_text(report_page(runs))
    return path


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_curves_zoom_together_and_tell_values(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    opened = Opened(browser, save_page(tmp_path, write_everything(tmp_path)), scheme=scheme, width=width)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) > 380) == (scheme == "light")
    assert page.locator(".badge.failed").count() == 1
    assert "not finite" in page.locator(".marks").first.inner_text()
    assert all(page.evaluate(DRAGS))
    before = page.evaluate(RANGES)
    assert len(before) == 5
    page.locator(".bk-Figure").first.scroll_into_view_if_needed()
    box = page.locator(".bk-Figure").first.bounding_box()

    def move(x: float, y: float, **options: int) -> None:
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], **options)

    move(0.4, 0.6)
    page.wait_for_timeout(300)
    assert any("plain" in text for text in page.evaluate(IN_SHADOW, ".bk-Tooltip"))
    move(0.35, 0.5)
    page.mouse.down()
    move(0.6, 0.7, steps=5)
    page.mouse.up()
    page.wait_for_timeout(300)
    after = page.evaluate(RANGES)
    assert all(start < low < high < end for (start, end), (low, high) in zip(before, after, strict=True))
    assert len({tuple(each) for each in after}) == 1
    opened.close()


def test_a_finger_on_a_curve_zooms_nothing(browser: Any, tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 200)
    opened = Opened(browser, save_page(tmp_path, [tmp_path / "run"]), width=390, touch=True)
    opened.page.wait_for_function(f"({DRAGS})().every((drag) => !drag)")
    opened.close()


def test_hostile_texts_are_shown_as_they_are(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "|")
    folder.mkdir()
    lines = [encode_line(step, {HOSTILE: float(step), "nan": float("nan")}, {HOSTILE: 1.0}) for step in range(50)]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    write_run(folder, config={HOSTILE: HOSTILE}, status="failed", error=HOSTILE)
    write_launch(folder, failed=f"{HOSTILE}: {HOSTILE}")
    write_metrics(tmp_path / "other", 500)
    opened = Opened(browser, save_page(tmp_path, [folder, tmp_path / "other"]))
    page = opened.page
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    box = page.locator(".bk-Figure").first.bounding_box()
    for part in (0.3, 0.5, 0.7):
        page.mouse.move(box["x"] + part * box["width"], box["y"] + 0.6 * box["height"])
        page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    assert HOSTILE in page.locator("main").inner_text()
    assert page.locator("img").count() == 0
    opened.close()
