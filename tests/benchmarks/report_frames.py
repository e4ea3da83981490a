# SPDX-License-Identifier: Apache-2.0
"""Frames of a report's page in headless Chromium: `python tests/benchmarks/report_frames.py [--limit-ms 100]`.

Pages of one run of 200,000 steps with 20 MB of media, and of 50 runs, are panned and zoomed, all visible charts in each
frame. The script
prints the median time from frame to frame, and that of the page's own script in it; it ends with 1 beyond the limit.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import struct
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from accel.cli import main as accel
from accel.run_folder import MediaName, encode_line

METRICS = 12
FRAMES = 60
# each frame shows another part of the whole range, once moved and once narrowed
MOVE = """async (count) => {
  const { report } = window;
  report.setView(null);
  const [from, to] = report.currentView();
  const length = (to - from) / 2;
  const next = () => new Promise((done) => requestAnimationFrame(done));
  const [all, own] = [[], []];
  let last = await next();
  for (let at = 0; at < count; at += 1) {
    const start = from + (at / count) * length;
    report.setView([start, start + length * (at % 2 ? 1 : 0.8)]);
    const now = await next();
    all.push(now - last);
    own.push(report.frames.at(-1));
    last = now;
  }
  return [all, own, report.charts.filter((each) => each.isVisible).length];
}"""


def write_run(folder: Path, steps: int, seed: int) -> None:
    """Write a run's metrics, a line a step."""
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(steps):
            decay = math.exp(-5 * step / steps)
            values = {f"train/metric{at}": at + decay + 0.2 * noise.random() for at in range(METRICS)}
            _ = file.write(encode_line(step, values, {"at": 1e9 + step / 20}))


def write_images(folder: Path, count: int) -> None:
    """Write images of noise, some 50 kB each."""
    noise = random.Random(0)
    (folder / "media").mkdir()
    for step in range(count):
        rows = b"".join(b"\0" + noise.randbytes(3 * 128) for _ in range(128))
        chunks = (
            (b"IHDR", struct.pack(">IIBBBBB", 128, 128, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(rows)),
            (b"IEND", b""),
        )
        parts = [
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        ]
        (folder / "media" / MediaName("samples", "images", step).file).write_bytes(
            b"\x89PNG\r\n\x1a\n" + b"".join(parts)
        )


def medians(browser: Any, page: Path) -> tuple[float, float, int]:
    """Return the median milliseconds of a frame and of the script in it, and the number of visible charts."""
    opened = browser.new_page(viewport={"width": 1400, "height": 1000})
    opened.goto(page.as_uri())
    opened.locator(".card canvas").first.scroll_into_view_if_needed()
    opened.wait_for_timeout(500)
    opened.evaluate(MOVE, 5)
    every, own, visible = opened.evaluate(MOVE, FRAMES)
    opened.close()
    return statistics.median(every), statistics.median(own), visible


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-ms", type=float, default=100.0)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    known = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory() as name, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=known.chromium, args=["--no-sandbox"])
        for title, count, steps in (
            ("a run of 200,000 steps with media", 1, 200_000),
            ("50 runs of 2,000 steps", 50, 2000),
        ):
            folder = Path(name, str(count))
            for at in range(count):
                write_run(folder / f"run-{at}", steps, at)
            if count == 1:
                write_images(folder / "run-0", 350)
            page = folder / "report.html"
            if accel(["report", str(folder), "--output", str(page)]):
                return 2
            frame, own, visible = medians(browser, page)
            print(f"{title}: {frame:.1f} ms a frame, {own:.1f} ms of it the page's script, {visible} charts in sight")
            status = max(status, int(frame > known.limit_ms))
        browser.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
