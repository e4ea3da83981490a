# SPDX-License-Identifier: Apache-2.0
"""The page of a report in a real browser without a network: elements, zoom, hover, hostile names, phone, dark."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sample_runs import (
    PNG_DEPTHS,
    look_at,
    make_picture,
    png_of_form,
    write_everything,
    write_launch,
    write_media,
    write_metrics,
    write_run,
)

from accel.report import FollowedRun, FoundRuns, LiveReport, ReportServer, name_runs, report_page
from accel.run_folder import encode_line

pytestmark = pytest.mark.slow
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<script>window.hit=1</script><img src=x onerror=window.hit=1>@x{safe} $$x$$ \"'&"
# pixels of each chart in sight, to see that a click or a zoom changed it
PIXELS = "() => report.charts.filter((each) => each.isVisible).map((each) => each.canvas.toDataURL())"
VIEW = "() => report.currentView()"
TOP = "(each) => each.getBoundingClientRect().top"
# what stands on the page, from above
OUTLINE = """() => [...document.querySelectorAll("main h1, main h2, main h3, main summary, main [id]")]
    .map((each) => each.id || each.textContent)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if PROGRAM is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield opened
        opened.close()


def wait_for(page: Any, condition: str) -> None:
    """Wait in the page, over a reload too; the browser's own wait needs an eval, which the policy forbids."""
    for _ in range(600):
        try:
            if page.evaluate(condition):
                return
        except importlib.import_module("playwright.sync_api").Error as error:
            if "context was destroyed" not in str(error):
                raise
        page.wait_for_timeout(100)
    raise AssertionError(condition)


class Opened:
    """A page, and all that it complained about or asked for."""

    def __init__(
        self, browser: Any, path: Path | str, *, scheme: str = "light", width: int = 1200, touch: bool = False
    ):
        size = {"width": width, "height": 900}
        is_file = isinstance(path, Path)
        self.context = browser.new_context(viewport=size, color_scheme=scheme, offline=is_file, has_touch=touch)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri() if isinstance(path, Path) else path)
        wait_for(self.page, "report.frames.length > 0")
        self.page.wait_for_timeout(300)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def canvas(self, title: str) -> Any:
        """The canvas of a chart, scrolled into sight."""
        found = self.page.locator(f'canvas[aria-label="Curves of {title}"]')
        found.scroll_into_view_if_needed()
        self.page.wait_for_timeout(200)
        return found

    def hover(self, canvas: Any, x: float, y: float, **options: int) -> None:
        """Move the mouse to a part of a canvas."""
        box = canvas.bounding_box()
        self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], **options)

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def save_page(folder: Path, folders: list[Path]) -> Path:
    runs = [look_at(name, each) for name, each in zip(name_runs(folders), folders, strict=True)]
    path = folder / "report.html"
    path.write_text(report_page(runs))
    return path


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 768), ("light", 390)])
def test_curves_zoom_together_and_say_values(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    opened = Opened(browser, save_page(tmp_path, write_everything(tmp_path)), scheme=scheme, width=width)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) > 380) == (scheme == "light")
    assert page.locator(".badge.failed").count() == 1
    assert "not finite" in page.locator(".marks").first.inner_text()
    canvas = opened.canvas("loss")
    opened.hover(canvas, 0.4, 0.6)
    page.wait_for_timeout(200)
    assert "step 1" in page.locator(".tip").inner_text()
    assert {"plain", "wide"} <= set(page.locator(".tip .name").all_inner_texts())
    whole = page.evaluate(VIEW)
    before = page.evaluate(PIXELS)
    opened.hover(canvas, 0.35, 0.5)
    page.mouse.down()
    opened.hover(canvas, 0.6, 0.7, steps=5)
    page.mouse.up()
    page.wait_for_timeout(200)
    low, high = page.evaluate(VIEW)
    assert whole[0] < low < high < whole[1]
    assert all(one != other for one, other in zip(before, page.evaluate(PIXELS), strict=True))
    page.keyboard.down("Shift")
    opened.hover(canvas, 0.5, 0.5)
    page.mouse.down()
    opened.hover(canvas, 0.4, 0.5, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    moved = page.evaluate(VIEW)
    assert moved[0] > low
    assert moved[1] - moved[0] == pytest.approx(high - low)
    canvas.dblclick()
    assert page.evaluate(VIEW) == whole
    canvas.focus()
    page.keyboard.press("+")
    assert page.evaluate(VIEW)[0] > whole[0]
    page.locator("#reset").click()
    assert page.evaluate(VIEW) == whole
    opened.close()


@pytest.mark.parametrize("width", [1400, 768, 390])
def test_a_sole_chart_of_a_group_fills_its_row(browser: Any, tmp_path: Path, width: int) -> None:
    lines = [encode_line(step, {"train/loss": 1 / (1 + step), "eval/loss": step}) for step in range(9)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    opened = Opened(browser, save_page(tmp_path, [tmp_path]), width=width)
    parts = "(all) => all.map((each) => each.clientWidth / each.closest('.cards').clientWidth)"
    assert min(opened.page.locator(".card[data-metric]").evaluate_all(parts)) > 0.97
    opened.close()


def test_a_wide_table_keeps_its_names_in_sight(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, save_page(tmp_path, write_everything(tmp_path)), width=390)
    name = opened.page.locator(".few tbody th").first
    left = name.bounding_box()["x"]
    box = opened.page.locator(".few .wide")
    box.evaluate("(each) => { each.scrollLeft = 300; }")
    assert box.evaluate("(each) => each.scrollLeft") == 300
    assert abs(name.bounding_box()["x"] - left) < 2
    assert name.bounding_box()["width"] < 0.5 * 390
    opened.close()


def test_one_legend_acts_on_every_chart_and_a_run_keeps_its_colour(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, save_page(tmp_path, write_everything(tmp_path)), width=1400)
    page = opened.page
    shown = "() => report.charts.map((each) => (each.draw(), each.drawn.lines.map((line) => line.run).sort()))"
    colors = "() => [...document.querySelectorAll('#legend .dot')].map((each) => each.style.background)"
    before = page.evaluate(colors)
    assert page.evaluate(shown) == [[0, 1, 2]] * 5
    page.locator(".chip", has_text="wide").click()
    assert page.evaluate(shown) == [[0, 2]] * 5
    assert page.locator("#count").inner_text() == "2 of 3 runs"
    page.locator(".chip", has_text="wide").click()
    page.locator(".chip", has_text="plain").click(modifiers=["Shift"])
    assert page.evaluate(shown) == [[0]] * 5
    page.locator(".chip", has_text="plain").click(modifiers=["Shift"])
    filters = {"wide": [1], "model.width=128": [0], "model.width<300": [0], "model.width>=128": [0, 1], "": [0, 1, 2]}
    for text, found in filters.items():
        page.locator("#filter").fill(text)
        assert page.evaluate(shown) == [found] * 5, text
    assert page.evaluate(colors) == before
    opened.close()


def test_axes_and_smoothing_change_the_curves(browser: Any, tmp_path: Path) -> None:
    lines: list[bytes] = []
    for step in range(5000):
        loss = 1e-4 + (step % 5) * 0.2 + 10 * 0.999**step
        at = 1e9 + 0.5 * step + 5000 * (step >= 2500)
        lines.append(encode_line(step, {"loss": loss, "samples": 64 * step, "lr": 1e-3}, {"at": at}))
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    opened = Opened(browser, save_page(tmp_path, [tmp_path]), width=1400)
    page = opened.page
    _ = opened.canvas("loss")
    assert page.evaluate(VIEW) == [0, 4999]
    band = "() => { const [{ part }] = report.charts[0].drawn.lines; return part.x.length; }"
    assert 50 < page.evaluate(band) < 500
    plain = page.evaluate(PIXELS)[0]
    page.locator("#axis").select_option("time")
    assert page.evaluate(VIEW) == [0, pytest.approx(7499.5)]
    page.locator("#axis").select_option("samples")
    assert page.evaluate(VIEW) == [0, 64 * 4999]
    page.locator("#axis").select_option("step")
    rough = (
        "() => { const { mean } = report.charts[0].drawn.lines[0].part; let sum = 0; "
        "for (let at = 1; at < mean.length; at += 1) sum += Math.abs(mean[at] - mean[at - 1]); return sum; }"
    )
    page.wait_for_timeout(100)
    before = page.evaluate(rough)
    page.locator("#smooth").fill("60")
    page.wait_for_timeout(100)
    assert page.evaluate(rough) < before
    page.locator("#smooth").fill("0")
    page.locator("#log").check()
    page.wait_for_timeout(100)
    assert page.evaluate(PIXELS)[0] != plain
    assert page.locator("details.group:not([open]) summary").all_inner_texts() == ["constants and counters (2)"]
    opened.close()


def test_a_finger_on_a_curve_scrolls_the_page_and_zooms_nothing(browser: Any, tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 200)
    opened = Opened(browser, save_page(tmp_path, [tmp_path / "run"]), width=390, touch=True)
    canvas = opened.canvas("loss")
    before = opened.page.evaluate(VIEW)
    canvas.tap(position={"x": 200, "y": 80})
    opened.page.wait_for_timeout(200)
    assert "step " in opened.page.locator(".tip").inner_text()
    assert opened.page.evaluate(VIEW) == before
    assert opened.page.evaluate("getComputedStyle(document.querySelector('canvas')).touchAction") == "pan-y pinch-zoom"
    opened.close()


NAMES = ("sgd", "adamw")


def write_sweep(folder: Path, count: int) -> list[Path]:
    """Runs whose loss ends at their learning rate."""
    found: list[Path] = []
    for at in range(count):
        run = folder / f"run-{at:02}"
        run.mkdir(parents=True)
        rate = (at * 7 % count + 1) / 1000
        lines = [
            encode_line(step, {"loss": 1 / (1 + step) + rate, "eval/accuracy": 1 - rate - 0.1 / (1 + step)})
            for step in range(60)
        ]
        (run / "metrics.jsonl").write_bytes(b"".join(lines))
        write_run(
            run,
            config={"lr": rate, "name": HOSTILE if at == 3 else NAMES[at % 2], "depth": 4, "out": f"runs/{run.name}"},
        )
        found.append(run)
    return found


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 390)])
def test_many_runs_are_a_table_that_sorts_filters_and_lights_curves(
    browser: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    opened = Opened(browser, save_page(tmp_path, write_sweep(tmp_path, 20)), scheme=scheme, width=width)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    heads = page.locator("#rows thead th").all_inner_texts()
    assert heads[:4] == ["run", "state", "lr", "name"]
    assert "loss best" in heads
    assert not any("depth" in each or "out" in each for each in heads)  # alike, and the run's name again
    rates = (
        "() => [...document.querySelectorAll('#rows tbody tr')].filter((e) => !e.hidden).map((e) => +e.cells[2].title)"
    )
    page.locator("#rows thead button", has_text="lr").click()
    assert page.evaluate(rates) == [at / 1000 for at in range(1, 21)]
    page.locator("#rows thead button", has_text="lr").click()
    assert page.evaluate(rates) == [at / 1000 for at in range(20, 0, -1)]
    best = page.locator("#rows td.best")
    assert {each.evaluate("(e) => e.parentElement.cells[0].textContent") for each in best.all()} == {"run-00"}
    page.locator("#filter").fill("lr<0.005 sgd")
    assert page.evaluate(rates) == [0.003, 0.001]
    assert page.locator("#parallel .lines path:not(.off)").count() == 2
    page.locator("#filter").fill("")
    page.locator("#rows tbody tr").nth(2).hover()
    run = page.evaluate("report.state.lit")
    assert page.locator("#rows tr.lit th").inner_text() == f"run-{run:02}"
    assert page.locator(".chip.lit").inner_text() == f"run-{run:02}"
    assert page.locator("#parallel .top path").count() >= 1
    page.locator("#columns summary").click()
    page.locator("#columns input[type=number]").fill("9")
    row = page.locator("#columns .metrics > div").filter(has=page.locator(".name", has_text="loss")).first
    row.get_by_label("at step").check()
    column = page.locator("#rows thead th").all_inner_texts().index("loss at step 9")
    cell = page.locator("#rows tbody tr", has_text="run-00").locator(f":nth-child({column + 1})")
    assert float(cell.get_attribute("title")) == pytest.approx(0.1 + 0.001, rel=1e-4)
    page.locator("#against").select_option(label="eval/accuracy, last")
    assert page.locator("#parallel .title").last.text_content() == "eval/accuracy"
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0
    opened.close()


ODD = {
    "huge": [f'{{"step":{2**62 + at},"loss":{"-" * (at % 2)}1e308,"big":{2**63 + at}}}' for at in range(9000)],
    "rounded": ['{"step":1,"loss":123456789012345678901234567890}', '{"step":2,"loss":1e400}', '{"step":-5,"loss":2}'],
    "nan": [f'{{"step":{at},"loss":"nan"}}' for at in range(10)],
    "clocks": [f'{{"step":{at},"time":{{"at":{100 - at},"step_s":0.1}}}}' for at in range(10)],
    "tiny": [f'{{"step":{at},"loss":{at}e-320,"eval/loss":{1 + 1e-15 * at}}}' for at in range(10)],
    "one": ['{"step":5,"loss":1}'],
    "begun": [],
}


@pytest.mark.parametrize("count", [1, 6, 7])
def test_odd_runs_draw_without_a_complaint(browser: Any, tmp_path: Path, count: int) -> None:
    for name, lines in list(ODD.items())[:count]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    opened = Opened(browser, save_page(tmp_path, sorted(each for each in tmp_path.iterdir() if each.is_dir())))
    page = opened.page
    for axis in page.locator("#axis option").evaluate_all("(all) => all.map((each) => each.value)"):
        page.locator("#axis").select_option(axis)
        for step in ("check", "uncheck"):
            getattr(page.locator("#log"), step)()
            page.locator("#smooth").fill("50" if step == "check" else "0")
            opened.hover(page.locator(".card canvas").first, 0.5, 0.5)
            page.wait_for_timeout(100)
    opened.close()


def test_a_row_goes_with_its_curve(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, save_page(tmp_path, write_sweep(tmp_path, 8)), width=1400)
    canvas = opened.canvas("eval/accuracy")
    opened.hover(canvas, 0.5, 0.04)
    opened.page.wait_for_timeout(200)
    assert opened.page.locator("#rows tr.lit th").inner_text() == "run-00"
    opened.close()


def test_hostile_texts_are_shown_as_they_are(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "|")
    folder.mkdir()
    lines = [encode_line(step, {HOSTILE: float(step), "nan": float("nan")}, {HOSTILE: 1.0}) for step in range(50)]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    (folder / "code.diff").write_text(HOSTILE)
    write_run(folder, config={HOSTILE: HOSTILE}, status="failed", error=HOSTILE)
    write_launch(folder, failed=f"{HOSTILE}: {HOSTILE}")
    write_metrics(tmp_path / "other", 500)
    opened = Opened(browser, save_page(tmp_path, [folder, tmp_path / "other"]))
    page = opened.page
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    canvas = page.locator('.card[data-metric="0"] canvas')
    canvas.scroll_into_view_if_needed()
    for part in (0.7, 0.3, 0.18):
        opened.hover(canvas, part, 0.6)
        page.wait_for_timeout(200)
    assert HOSTILE.replace("/", "|") in page.locator(".tip").text_content()
    page.locator("#filter").fill("<script>")
    assert page.evaluate("window.hit") is None
    assert HOSTILE in page.locator("main").inner_text()
    assert page.locator("img").count() == 0
    opened.close()


def write_all_media(folder: Path, steps: range, *, mark: int = 0) -> None:
    """Images and texts at each step, a table and a figure at every second one, histograms."""
    for step in steps:
        for at in range(2):
            write_media(folder, "images", "eval/samples", step, make_picture(16, 12, step + mark), at)
        write_media(folder, "text", "said", step, f"{folder.name} says {step} {HOSTILE}")
        counts = {"edges": [0, step, 2 * step], "counts": [1, step], "nonfinite": step % 2}
        write_media(folder, "histogram", "weights", step, counts)
        if step % 2 == 0:
            table = {"columns": ["a", HOSTILE], "rows": [[step, HOSTILE], [0.5, None]]}
            write_media(folder, "table", "words", step, table)
            write_media(folder, "figure", "confusion", step, make_picture(400, 300, step + mark))


STEP = "() => [document.getElementById('media-at').value, document.getElementById('media-step').textContent]"


def panels(page: Any, name: str) -> list[str]:
    """Texts of the panels of a card, in sight."""
    card = page.locator(".card.medium").filter(has=page.get_by_role("heading", name=name, exact=True))
    card.scroll_into_view_if_needed()
    page.wait_for_timeout(200)
    return card.locator(".panel").all_inner_texts()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 768), ("light", 390)])
def test_one_slider_turns_the_media_of_all_runs(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    for mark, name in enumerate(("one", "two")):
        write_metrics(tmp_path / name, 200)
        write_all_media(tmp_path / name, range(1, 6 - mark), mark=100 * mark)
    opened = Opened(browser, save_page(tmp_path, [tmp_path / "one", tmp_path / "two"]), scheme=scheme, width=width)
    page = opened.page
    page.locator("#media-at").scroll_into_view_if_needed()
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    assert page.evaluate(STEP) == ["4", "step 5, the newest"]
    one, two = panels(page, "said")
    assert one.split()[:4] == ["one", "one", "says", "5"]
    assert two.split()[:6] == ["two", "step", "4", "two", "says", "4"]
    page.locator("#media-at").focus()
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    assert panels(page, "said")[1].split()[:4] == ["two", "two", "says", "3"]
    assert page.evaluate(STEP) == ["2", "step 3, 3 of 5"]
    assert "step 2" in panels(page, "words")[0]
    assert HOSTILE in panels(page, "words")[0]
    assert "0 to 6, 1 not finite" in panels(page, "weights")[0]
    page.locator("#media-before").click()
    page.locator("#media-before").click()
    page.wait_for_timeout(100)
    assert page.locator("#media-before").is_disabled()
    assert [text.split("\n")[1] for text in panels(page, "confusion")] == ["first at step 2"] * 2
    page.locator("#media-after").click()
    assert len(panels(page, "eval/samples")) == 2
    sizes = "(all) => all.map((each) => [each.naturalWidth, each.naturalHeight, Math.round(each.clientWidth)])"
    assert page.locator("img[alt^='eval/samples at step 2']").evaluate_all(sizes) == [[16, 12, 96]] * 4
    _ = panels(page, "confusion")
    (wide, high, shown), _ = page.locator("img[alt^='confusion at step 2']").evaluate_all(sizes)
    assert (wide, high) == (400, 300)
    assert 100 < shown <= 400
    drawn = "(each) => new Set(each.getContext('2d').getImageData(60, 20, 200, 100).data).size"
    _ = panels(page, "weights")
    assert page.locator(".spread").first.evaluate(drawn) > 3
    page.locator(".chip", has_text="two").click()
    assert len(panels(page, "said")) == 1
    page.locator(".chip", has_text="two").click()
    assert len(panels(page, "said")) == 2
    page.locator(".card.medium", has_text="said").locator(".panel").last.hover()
    assert page.evaluate("report.state.lit") == 1
    assert page.evaluate("window.hit") is None
    opened.close()


def test_hostile_media_stay_inert_and_what_is_left_out_is_said(browser: Any, tmp_path: Path) -> None:
    write_metrics(tmp_path, 100)
    write_media(tmp_path, "text", HOSTILE, 1, HOSTILE * 100)
    write_media(tmp_path, "images", HOSTILE, 1, f"<svg onload='{HOSTILE}'/>")
    write_media(tmp_path, "images", "lie", 1, b"\x89PNG\r\n\x1a\n" + HOSTILE.encode())
    write_media(tmp_path, "table", "t", 1, {"columns": [HOSTILE], "rows": [[HOSTILE]]})
    write_media(
        tmp_path, "histogram", "huge", 10**14, {"edges": [-1e308, 1e308], "counts": [2**63], "nonfinite": 2**63}
    )
    write_media(tmp_path, "histogram", "none", 0, {"edges": [0, 0], "counts": [0]})
    opened = Opened(browser, save_page(tmp_path, [tmp_path]))
    page = opened.page
    assert HOSTILE in panels(page, "t")[0]
    page.locator(".media").scroll_into_view_if_needed()
    page.wait_for_timeout(200)
    assert HOSTILE in page.locator(".panel pre").text_content()
    assert "no finite values" in panels(page, "none")[0]
    assert "-1e308 to 1e308" in panels(page, "huge")[0]
    assert "lie-00000001-0.png: a PNG that is cut off" in page.locator("main").inner_text()
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hit") is None
    opened.close()


FORMS = [(color, depth) for color, depths in PNG_DEPTHS.items() for depth in depths]


def test_the_browser_decodes_each_form_of_png_that_the_page_keeps(browser: Any, tmp_path: Path) -> None:
    write_metrics(tmp_path, 100)
    for at, (color, depth) in enumerate(FORMS):
        for interlaced in (0, 1):
            write_media(
                tmp_path, "images", "forms", 1, png_of_form(11, 7, depth, color, interlaced), 2 * at + interlaced
            )
    opened = Opened(browser, save_page(tmp_path, [tmp_path]))
    _ = panels(opened.page, "forms")
    sizes = "(all) => all.map((each) => [each.complete, each.naturalWidth, each.naturalHeight])"
    found = opened.page.locator(".panel img").evaluate_all(sizes)
    assert found == [[True, 11, 7]] * 2 * len(FORMS)
    opened.close()


def test_more_than_six_histograms_are_folded(browser: Any, tmp_path: Path) -> None:
    write_metrics(tmp_path, 100)
    for at in range(9):
        write_media(tmp_path, "histogram", f"layer {at}", 1, {"edges": [0, at + 1], "counts": [1]})
    opened = Opened(browser, save_page(tmp_path, [tmp_path]))
    page = opened.page
    assert not page.get_by_role("heading", name="layer 3").is_visible()
    page.locator("details.media summary", has_text="histograms (9)").click()
    assert panels(page, "layer 3") == ["0 to 4"]
    opened.close()


def test_media_of_many_runs_are_those_that_the_filter_leaves(browser: Any, tmp_path: Path) -> None:
    runs = write_sweep(tmp_path, 9)
    for run in runs:
        write_media(run, "text", "said", 10, f"hello from {run.name}")
    opened = Opened(browser, save_page(tmp_path, runs), width=1400)
    page = opened.page
    assert len(panels(page, "said")) == 6
    assert "6 of 9 runs" in page.locator(".panels .more").inner_text()
    page.locator("#filter").fill("lr<0.003")
    shown = panels(page, "said")
    assert [text.split()[-1] for text in shown] == [text.split()[0] for text in shown]
    assert len(shown) == 2
    assert page.locator(".panels .more").count() == 0
    opened.close()


def test_a_run_of_media_alone_has_a_page(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path, config={"lr": 1})
    write_all_media(tmp_path, range(2, 3))
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(save_page(tmp_path, [tmp_path]).as_uri())
    assert panels(page, "said")[0].startswith(f"{tmp_path.name} says 2")
    assert page.locator("#media-after").is_disabled()
    context.close()


def serve(report: LiveReport, port: int = 0) -> ReportServer:
    server = ReportServer(report, "a-token-of-24-characters", port=port)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


def end(server: ReportServer) -> None:
    server.shutdown()
    server.server_close()


def append(folder: Path, step: int, values: dict[str, float]) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        _ = file.write(encode_line(step, values, {"at": 1.795e9 + step}))


def live_report(folder: Path) -> LiveReport:
    follow = lambda each: FollowedRun(each.name, each, lambda _: [], lambda _: "")  # noqa: E731

    def find() -> FoundRuns:
        return FoundRuns(sorted(each for each in folder.iterdir() if each.is_dir()))

    return LiveReport(find, follow, every_s=0.1)


def test_a_served_page_stays_fresh_and_keeps_what_its_reader_chose(browser: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_metrics(tmp_path / name, 2000)
        for at in range(8):
            append(tmp_path / name, 2000, {f"eval/m{at}": 1.0})
            append(tmp_path / name, 2001, {f"eval/m{at}": 2.0 + at})
    server = serve(live_report(tmp_path))
    opened = Opened(browser, server.url)
    page = opened.page
    page.evaluate("window.kept = 1")
    page.locator(".chip", has_text="two").click()
    page.locator("#filter").fill("o")
    canvas = opened.canvas("loss")
    canvas.focus()
    page.keyboard.press("+")
    page.locator("details.group summary", has_text="eval/").click()
    page.locator("#smooth").fill("30")
    page.wait_for_timeout(100)
    opened.canvas("grad_norm").evaluate("(each) => { each.drawnBefore = 1; }")
    page.evaluate("scrollTo(0, 200)")
    view, pixels = page.evaluate(VIEW), page.evaluate(PIXELS)
    append(tmp_path / "one", 2100, {"loss": 0.1234, "fresh": 1.0})
    append(tmp_path / "one", 2101, {"loss": 0.1235, "fresh": 2.0})
    wait_for(page, "document.querySelector('.few').textContent.includes('0.1235')")
    page.wait_for_timeout(200)
    assert page.evaluate(VIEW) == view
    assert page.evaluate("scrollY") == 200
    assert page.evaluate("[report.state.smooth > 0, [...report.state.hidden], window.kept]") == [True, [1], 1]
    assert page.locator("#filter").input_value() == "o"
    assert page.locator(".chip[aria-pressed=false]").all_inner_texts() == ["two"]
    assert page.locator("details.group", has_text="eval/").first.get_attribute("open") is None
    assert opened.canvas("grad_norm").evaluate("(each) => each.drawnBefore") == 1
    assert len(page.evaluate(PIXELS)) >= len(pixels)
    drawn = "(each) => report.charts.find((chart) => chart.canvas === each).drawn.lines.map((line) => line.run)"
    assert opened.canvas("fresh").evaluate(drawn) == [0]
    page.locator("#reset").click()
    assert page.evaluate(VIEW) == [0, 2101]
    write_metrics(tmp_path / "a third", 3000)
    wait_for(page, "document.querySelectorAll('.chip').length === 3")
    page.locator("#filter").fill("")
    assert page.evaluate("report.currentView()") == [0, 2990]
    assert page.locator(".chip").all_inner_texts() == ["one", "two", "a third"]
    end(server)
    wait_for(page, "document.getElementById('live').textContent.includes('Not connected since')")
    # a server that starts anew has the runs by name, and the charts of "a third" first
    append(tmp_path / "a third", 3001, {"last": 0.25, "loss": 0.4321})
    append(tmp_path / "a third", 3002, {"last": 0.5, "loss": 0.4321})
    server = serve(live_report(tmp_path), server.server_address[1])
    wait_for(page, "document.getElementById('live').hidden")
    wait_for(page, "document.querySelector('.few').textContent.includes('0.4321')")
    page.wait_for_timeout(200)
    assert page.evaluate("window.kept") == 1
    assert page.locator(".chip").all_inner_texts() == ["one", "two", "a third"]
    assert page.locator(".chip[aria-pressed=false]").all_inner_texts() == ["two"]
    colours = page.locator(".chip .dot").evaluate_all("(all) => all.map((each) => each.style.background)")
    rows = page.locator(".few tbody th")
    assert rows.all_inner_texts() == ["a third", "one", "two"]
    dots = rows.locator(".dot").evaluate_all("(all) => all.map((each) => each.style.background)")
    assert dots == [colours[2], colours[0], colours[1]]
    assert opened.canvas("fresh").evaluate(drawn) == [0]
    assert opened.canvas("last").evaluate(drawn) == [2]
    assert opened.canvas("loss").evaluate(drawn) == [0, 2]
    end(server)
    assert opened.complaints
    assert all("ERR_CONNECTION_REFUSED" in each for each in opened.complaints)
    opened.context.close()


def test_a_served_page_fetches_media_that_are_looked_at_and_takes_new_ones(browser: Any, tmp_path: Path) -> None:
    write_metrics(tmp_path / "one", 200)
    write_all_media(tmp_path / "one", range(1, 4))
    server = serve(live_report(tmp_path))
    opened = Opened(browser, server.url)
    page = opened.page
    page.evaluate("window.kept = 1")
    assert panels(page, "said")[0].startswith("one says 3")
    write_all_media(tmp_path / "one", range(4, 7))
    wait_for(page, "document.getElementById('media-step').textContent === 'step 6, the newest'")
    assert panels(page, "said")[0].startswith("one says 6")
    page.locator("#media-at").focus()
    page.keyboard.press("Home")
    assert panels(page, "said")[0].startswith("one says 1")
    write_media(tmp_path / "one", "text", "loss", 9, "of the same name as a chart")
    wait_for(page, "document.querySelectorAll('.card.medium').length === 6")
    assert page.evaluate(STEP) == ["0", "step 1, 1 of 7"]  # what its reader looks at stays
    assert panels(page, "said")[0].startswith("one says 1")
    assert panels(page, "loss") == ["first at step 9"]
    assert opened.canvas("loss").count() == 1
    assert page.evaluate("[window.kept, window.hit ?? null]") == [1, None]
    assert opened.complaints == []
    end(server)
    wait_for(page, "document.getElementById('live').textContent.includes('Not connected since')")
    page.locator("#media-at").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    wait_for(page, "document.querySelector('.media').textContent.includes('not connected')")
    server = serve(live_report(tmp_path), server.server_address[1])
    wait_for(page, "document.getElementById('live').hidden")
    assert panels(page, "said")[0].startswith("one says 5")
    end(server)
    opened.context.close()


def test_a_served_page_of_many_runs_takes_new_ones_and_keeps_its_columns(browser: Any, tmp_path: Path) -> None:
    _ = write_sweep(tmp_path, 8)
    server = serve(live_report(tmp_path))
    opened = Opened(browser, server.url, width=1400)
    page = opened.page
    page.evaluate("window.kept = 1")
    page.locator("#rows thead button", has_text="lr").click()
    page.locator("#columns summary").click()
    page.locator("#columns .boxes label", has_text="name").locator("input").uncheck()
    page.locator("#against").select_option(label="eval/accuracy, last")
    write_metrics(tmp_path / "run-08", 200)
    write_run(tmp_path / "run-08", config={"lr": 0.5, "name": HOSTILE, "depth": 4})
    wait_for(page, "document.querySelectorAll('#rows tbody tr').length === 9")
    assert page.locator("#rows thead th").all_inner_texts()[:3] == ["run", "state", "lr ↑"]
    assert page.locator("#rows tbody tr th").last.inner_text() == "run-08"
    assert page.locator("#against").evaluate("(each) => each.selectedOptions[0].textContent") == "eval/accuracy, last"
    assert page.locator("#parallel .lines path").count() == 9
    assert page.locator(".card", has_text="grad_norm").count() == 1
    assert page.evaluate("[window.kept, window.hit ?? null]") == [1, None]
    assert opened.complaints == []
    opened.context.close()
    end(server)


def test_a_served_page_grows_from_nothing_to_one_run_and_to_many(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    server = serve(live_report(tmp_path))
    context = browser.new_context(viewport={"width": 1200, "height": 400})
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    page.evaluate("window.kept = 1")
    assert "Nothing of a run is in" in page.locator("main").inner_text()
    write_metrics(tmp_path / "run", 200)
    wait_for(page, "report.charts.length > 0 && report.charts[0].drawn")
    page.locator("#log").check()
    assert page.evaluate("report.state.log")
    write_all_media(tmp_path / "run", range(1, 9))
    wait_for(page, "document.querySelectorAll('.card.medium').length === 5")
    assert panels(page, "weights") == ["0 to 16"]
    below = "document.getElementById('media-at').getBoundingClientRect().top - bar.getBoundingClientRect().bottom"
    assert 0 <= page.evaluate(below) < 60  # the slider sticks below the bar
    for at in range(2, 9):
        write_metrics(tmp_path / f"run {at}", 400)
        if at == 2:
            wait_for(page, "document.querySelectorAll('.chip').length === 2")
            page.locator("#filter").fill("2")
            assert page.evaluate("[report.state.matching.size, window.kept]") == [1, 1]
            page.locator("canvas").first.focus()
            page.keyboard.press("+")
            view = page.evaluate(VIEW)
            canvas = page.locator("canvas").first
            canvas.evaluate("(each) => { each.drawnBefore = 1; scrollBy(0, each.getBoundingClientRect().top - 100); }")
            assert round(canvas.evaluate(TOP)) == 100
    wait_for(page, "document.querySelectorAll('#rows tbody tr').length === 8")
    # from curves side by side to a table, without a reload
    assert page.evaluate("[window.kept, report.state.matching.size, report.state.log]") == [1, 1, True]
    assert page.locator("#filter").input_value() == "2"
    assert page.evaluate(VIEW) == view
    assert canvas.evaluate("(each) => each.drawnBefore") == 1
    assert abs(canvas.evaluate(TOP) - 100) < 2  # while a table came above it
    assert page.locator("#rows tbody tr:not([hidden])").count() == 1
    assert page.locator("#parallel").inner_text() == "Choose a setting that differs to see it against a metric."
    page.locator("#filter").fill("")
    page.locator("#reset").click()
    assert page.evaluate("report.currentView()") == [0, 390]
    assert page.locator("#rows tbody tr:not([hidden])").count() == 8
    head = page.locator("#rows thead button", has_text="loss").first
    was = head.inner_text()
    head.click()
    assert page.locator("#rows thead button", has_text="loss").first.inner_text() != was
    page.locator("#rows tbody tr").nth(3).hover()
    assert page.locator("#rows tbody tr.lit").count() == page.locator(".chip.lit").count() == 1
    write_metrics(tmp_path / "run 9", 400)
    write_run(tmp_path / "run 9", config={"lr": 0.5})
    wait_for(page, "document.querySelectorAll('#rows tbody tr').length === 9")
    fresh = context.new_page()
    fresh.goto(server.url)
    wait_for(fresh, "document.querySelectorAll('#rows tbody tr').length === 9")
    assert page.evaluate(OUTLINE) == fresh.evaluate(OUTLINE)
    assert complaints == []
    context.close()
    end(server)


INK = """() => report.charts.map(({ canvas }) => {
  const copy = document.createElement("canvas");
  const { width, height } = Object.assign(copy, { width: canvas.width, height: canvas.height });
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const { data } = pen.getImageData(0, 0, width, height);
  const colors = new Set();
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] > 200) colors.add(data[at] >> 5 << 6 | data[at + 1] >> 5 << 3 | data[at + 2] >> 5);
  }
  return colors.size;
})"""
HOVERED = """async (count) => {
  const { canvas } = report.charts[0];
  canvas.scrollIntoView({ block: "center" });
  await new Promise((done) => setTimeout(done, 500));
  const box = canvas.getBoundingClientRect();
  const taken = [];
  for (let at = 0; at < count; at += 1) {
    const began = performance.now();
    const place = { clientX: box.left + 60 + 8 * at, clientY: box.top + 20 + 3 * at, pointerType: "mouse" };
    canvas.dispatchEvent(new PointerEvent("pointermove", place));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    taken.push(performance.now() - began);
  }
  return taken;
}"""


def test_paper_has_all_charts_in_light_colours_and_nothing_wide(browser: Any, tmp_path: Path) -> None:
    lines = [encode_line(60 + step, {f"g{at}/m": step % 7 + at for at in range(9)}) for step in range(50)]
    runs = write_sweep(tmp_path, 8)
    for each in runs:
        with (each / "metrics.jsonl").open("ab") as file:
            _ = file.write(b"".join(lines))
    opened = Opened(browser, save_page(tmp_path, runs), scheme="dark", width=1400)
    page = opened.page
    closed = "document.querySelectorAll('main details:not([open])').length"
    before = page.evaluate(closed)
    assert min(page.evaluate(INK)) == 0  # folded, or out of sight
    text = page.evaluate("getComputedStyle(document.body).color")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(closed) == 0
    assert min(page.evaluate(INK)) > 2
    assert page.evaluate("getComputedStyle(document.body).color") != text
    page.set_viewport_size({"width": 720, "height": 900})
    page.emulate_media(media="print")
    sizes = page.locator(".card[data-metric] canvas").evaluate_all(
        "(all) => all.map((each) => [each.clientWidth / each.clientHeight, each.width / each.height])"
    )
    assert all(shown == pytest.approx(drawn, rel=0.02) for shown, drawn in sizes)  # no letter is stretched
    assert page.locator("#rows, svg.parallel").evaluate_all("(all) => all.every((each) => each.clientWidth <= 720)")
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(closed) == before
    assert page.evaluate("getComputedStyle(document.body).color") == text
    # a picture and its mask for each chart: blank charts would share one
    assert page.pdf().count(b"/Subtype /Image") >= 2 * page.evaluate("report.charts.length")
    opened.close()


def test_a_pointer_over_500_runs_takes_less_than_100_ms(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, save_page(tmp_path, write_sweep(tmp_path, 500)), width=1400)
    taken = sorted(opened.page.evaluate(HOVERED, 30))
    assert taken[len(taken) // 2] < 100  # the handler, the styles and the paint that follow it
    opened.close()


def test_a_link_shows_what_its_sender_saw(browser: Any, tmp_path: Path) -> None:
    page_of = save_page(tmp_path, write_sweep(tmp_path, 9))
    opened = Opened(browser, page_of, width=1400)
    page = opened.page
    assert "#" not in page.url
    page.locator("#filter").fill("lr<0.008")
    page.locator(".chip", has_text="run-00").click()
    page.locator("#log").check()
    page.locator("#axis").select_option("step")
    page.locator("#smooth").fill("40")
    page.locator("#against").select_option(label="eval/accuracy, last")
    opened.canvas("loss").focus()
    page.keyboard.press("+")
    seen = """() => [report.currentView(), report.state.log, report.state.smooth, [...report.state.hidden],
      [...report.state.matching], document.getElementById("filter").value, document.getElementById("against").value,
      Object.fromEntries([...document.querySelectorAll(".chip")].map((each) =>
        [each.textContent, each.firstChild.style.background]))]"""
    before = page.evaluate(seen)
    link = page.url
    assert before[3:6:2] == [[0], "lr<0.008"]
    fresh = Opened(browser, link, width=1400)
    assert fresh.page.evaluate(seen) == before
    fresh.page.locator("#reset").click()
    assert "view" not in fresh.page.url
    fresh.close()
    # an earlier run shifts the others' numbers, and not their colors
    write_metrics(tmp_path / "a", 100)
    folders = sorted(each for each in tmp_path.iterdir() if each.is_dir())
    with_earlier = Opened(browser, save_page(tmp_path, folders).as_uri() + "#" + link.partition("#")[2], width=1400)
    now = with_earlier.page.evaluate(seen)
    assert {name: color for name, color in now[7].items() if name != "a"} == before[7]
    assert now[0] == before[0]
    with_earlier.close()
    opened.close()


def test_a_group_has_mean_and_spread_a_row_and_a_line(browser: Any, tmp_path: Path) -> None:
    folders: list[Path] = []
    for at in range(12):
        folder = tmp_path / f"run-{at:02}"
        write_metrics(folder, 400, seed=at, rate=(0.01, 0.03)[at % 2])
        write_run(folder, config={"lr": (0.1, 0.2)[at % 2], "seed": at // 2})
        folders.append(folder)
    opened = Opened(browser, save_page(tmp_path, folders), width=1400)
    page = opened.page
    page.locator("#group").select_option(label="all but the seed")
    assert page.locator("#rows tbody tr:not([hidden])").count() == 2
    assert "±" in page.locator("#rows tbody tr").first.inner_text()
    canvas = opened.canvas("loss")
    lines = "(each) => report.charts.find((chart) => chart.canvas === each).drawn.lines.map(({ run }) => run)"
    assert sorted(canvas.evaluate(lines)) == [0, 1]
    opened.hover(canvas, 0.5, 0.5)
    page.wait_for_timeout(200)
    assert page.locator(".tip", has_text="lr=0.1").inner_text().count("6 runs") == 2
    opened.close()


def test_a_chart_is_a_picture_and_a_table_for_other_programs(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, save_page(tmp_path, write_everything(tmp_path)), width=1400)
    page = opened.page
    card = page.locator(".card[data-metric]").first
    files: dict[str, str] = {}
    for kind in ("SVG", "CSV"):
        with page.expect_download() as begun:
            card.locator(".export", has_text=kind).click()
        files[begun.value.suggested_filename] = Path(begun.value.path()).read_text()
    assert sorted(files) == ["loss.csv", "loss.svg"]
    assert files["loss.csv"].splitlines()[0] == "run,step,mean,least,most"
    assert len(files["loss.csv"].splitlines()) > 100
    colors = page.locator("#legend .dot").evaluate_all("(all) => all.map((each) => each.style.background)")
    shown = page.locator(".few tbody tr").evaluate_all(
        "(all) => all.map((row) => [...row.querySelectorAll('.spark')].map((each) => getComputedStyle(each).stroke))"
    )
    assert len(shown) == len(colors) == 3
    assert all(set(strokes) == {color} for strokes, color in zip(shown, colors, strict=True))
    picture = browser.new_context().new_page()
    (tmp_path / "loss.svg").write_text(files["loss.svg"])
    picture.goto((tmp_path / "loss.svg").as_uri())
    assert picture.locator("path").count() > 3
    strokes = picture.locator("path").evaluate_all("(all) => all.map((each) => getComputedStyle(each).stroke)")
    assert set(colors) <= set(strokes)
    picture.context.close()
    opened.close()


@pytest.mark.parametrize("width", [1400, 900, 400])
def test_labels_of_parallel_coordinates_are_next_to_their_axis(browser: Any, tmp_path: Path, width: int) -> None:
    opened = Opened(browser, save_page(tmp_path, write_sweep(tmp_path, 8)), width=width)
    axes, labels = opened.page.evaluate(
        """() => ["line.axis", "text:not(.title)"].map((words) => [...document.querySelectorAll(`#parallel ${words}`)]
          .map((each) => each.getBoundingClientRect()).map(({ left, right }) => [left, right]))"""
    )
    assert len(axes) == 3
    gaps = [min(min(abs(left - at), abs(right - at)) for at, _ in axes) for left, right in labels]
    assert max(gaps) < 9
    opened.close()
