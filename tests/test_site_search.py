# SPDX-License-Identifier: Apache-2.0
"""Search on the built site: the first hit of common queries, by the site's own search worker in node."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import patience

HERE = Path(__file__).parent
QUERIES = HERE / "search_queries.txt"
WORKER = HERE / "helpers" / "site_search.js"
SITE = HERE.parent / "build" / "site"
LEAST_RIGHT = 26
MOST_BYTES = 300_000  # of the index, compressed


def accepted() -> dict[str, list[str]]:
    """The pages that answer each query."""
    rows = [line.partition(": ") for line in QUERIES.read_text().splitlines() if not line.startswith("#")]
    return {query: pages.split() for query, _, pages in rows}


@pytest.fixture(scope="module")
def site() -> Path:
    versions = sorted(SITE.glob("*/search/search_index.json"))
    if not versions:
        pytest.skip("there is no site in build/site: python docs/build.py")
    return versions[-1].parent.parent


def test_the_table_of_queries_names_pages_that_exist() -> None:
    table = accepted()
    assert len(table) == 30
    docs = HERE.parent / "docs"
    lost = {page for pages in table.values() for page in pages if not (docs / f"{page.rstrip('/')}.md").is_file()}
    assert not lost


@pytest.mark.slow
def test_the_first_hit_answers_the_query(site: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no node on this machine")
    table = accepted()
    done = subprocess.run(
        ["node", WORKER, site],
        input=json.dumps([*table]),
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=True,
    )
    found = json.loads(done.stdout)
    wrong = {query: found[query][:2] for query, pages in table.items() if not {*found[query][:1]} & {*pages}}
    assert len(table) - len(wrong) >= LEAST_RIGHT, wrong


@pytest.mark.slow
def test_the_index_is_small_and_has_neither_reference_nor_scripts(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_bytes()
    assert len(gzip.compress(index)) <= MOST_BYTES
    entries = json.loads(index)["docs"]
    assert not [entry["location"] for entry in entries if entry["location"].startswith("api/")]
    scripts = [entry["location"] for entry in entries if entry["location"].startswith("recipes/")]
    assert len(scripts) >= 20
    assert not [place for place in scripts if place.endswith("#the-script")]
