# SPDX-License-Identifier: Apache-2.0
"""The built site in a real browser, light and dark, on a phone: its requests, its fonts, its bytes."""

from __future__ import annotations

import gzip
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.slow
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SITE = Path(__file__).parent.parent / "build" / "site"
PAGES = ("", "tutorial/", "api/accel/", "api/accel-training/", "concepts/cursor/", "gallery/", "comparison/")
MOST_BYTES = 300_000  # compressed, as a web server sends them, without the index that the search loads behind the page
INDEX = "search_index.json"


class Server(SimpleHTTPRequestHandler):
    """Sends files compressed, as hosts of documentation do."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            self.send_error(404)
            return
        body = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    versions = sorted(SITE.glob("*/index.html"))
    if not versions:
        pytest.skip("there is no site in build/site: python docs/build.py")
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *each: Server(*each, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{versions[-1].parent.name}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if PROGRAM is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_on_a_phone_asks_no_other_host_and_is_small(browser: Any, address: str, page: str, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    opened = context.new_page()
    responses: list[Any] = []
    complaints: list[str] = []
    opened.on("response", lambda response: responses.append(response))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("requestfailed", lambda request: complaints.append(request.url))
    opened.goto(address + page, wait_until="networkidle")
    hosts = {urlsplit(each.url).netloc for each in responses if not each.url.startswith(("data:", "blob:"))}
    sent = {each.url: int(each.headers["content-length"]) for each in responses if each.status == 200}
    fonts = opened.evaluate("[...document.fonts].map((font) => font.family)")
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    wider = opened.evaluate("document.documentElement.scrollWidth - innerWidth")
    context.close()
    assert complaints == []
    assert [each.url for each in responses if each.status != 200] == []
    assert hosts == {urlsplit(address).netloc}
    assert fonts == []  # none is loaded: the system's own
    assert (sum(map(int, background[4:-1].split(",")[:3])) > 380) == (scheme == "light")
    assert wider == 0
    assert sum(size for url, size in sent.items() if not url.endswith(INDEX)) <= MOST_BYTES


@pytest.mark.parametrize("page", ["tutorial/", "launch/", "collectives/", "recipes/dpo/", "api/accel-training/"])
def test_code_does_not_scroll_in_a_window_of_1400_pixels(browser: Any, address: str, page: str) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    opened = context.new_page()
    opened.goto(address + page, wait_until="domcontentloaded")
    rooms = opened.evaluate("[...document.querySelectorAll('pre code')].map((e) => [e.scrollWidth, e.clientWidth])")
    context.close()
    assert rooms
    assert [each for each in rooms if each[0] > each[1] + 1] == []
