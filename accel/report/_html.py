# SPDX-License-Identifier: Apache-2.0
"""Markup in which every text is escaped unless it is markup itself, and the style sheet of a report."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_ALONE = ("br", "meta")
# controls, turns of the direction of writing, halves of characters
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Html(str):
    """Markup, which needs no escape."""

    __slots__ = ()


def element(tag: str, *content: str | None, **attributes: str) -> Html:
    """Return an element of markup, or of texts to escape; a trailing "_" of an attribute is dropped, other "_" become
    "-"."""
    shown = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    return Html(f"<{tag}{shown}>" if tag in _ALONE else f"<{tag}{shown}>{join(content)}</{tag}>")


def join(content: Iterable[str | None]) -> Html:
    """Return pieces of markup and texts as one piece of markup."""
    return Html("".join(each if isinstance(each, Html) else _escaped(each) for each in content if each is not None))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, marked: Iterable[int] = ()) -> Html:
    """Return a table that scrolls sideways where it is too wide; the first cell of each row is its title, `marked` rows
    are shown so."""
    emphasized = set(marked)
    lines = [
        element(
            "tr",
            element("th", cells[0], scope="row"),
            *(element("td", cell) for cell in cells[1:]),
            **({"class_": "differs"} if at in emphasized else {}),
        )
        for at, cells in enumerate(rows)
    ]
    titles = element("tr", *(element("th", title, scope="col") for title in head))
    body = element("table", element("thead", titles), element("tbody", *lines))
    return element("div", body, class_="wide", tabindex="0")


def _escaped(text: str) -> str:
    return html.escape(_UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text))


STYLE = """
:root {
  color-scheme: light dark;
  --page: light-dark(#f6f7f9, #15171b);
  --card: light-dark(#ffffff, #1d2026);
  --text: light-dark(#1b1f24, #e4e6ea);
  --soft: light-dark(#59636e, #9aa4b0);
  --line: light-dark(#d9dee4, #343a43);
  --mark: light-dark(#fff4d6, #3a3220);
  --good: light-dark(#1a7f37, #4ac26b);
  --bad: light-dark(#cf222e, #ff7b72);
  --work: light-dark(#0969da, #6cb6ff);
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 90rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h4 { font-size: .95rem; margin: 1rem 0 .3rem; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; min-width: 6rem; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 600; overflow-wrap: anywhere; }
thead tr:not(:has(th:not(:empty))) { display: none; }
tbody th { font-weight: 500; color: var(--soft); white-space: nowrap; }
tr.differs > td { background: var(--mark); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
.cards { margin-top: 1rem; }
.card { min-width: 0; padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.marks { margin: .3rem 0 0; font-size: .85rem; color: var(--bad); }
.alert { margin: .8rem 0; padding: .6rem .9rem; border-left: 4px solid var(--bad); background: var(--card); }
.alert, pre { overflow-wrap: anywhere; }
pre { margin: .4rem 0 0; overflow-x: auto; font: .82rem/1.4 ui-monospace, monospace; white-space: pre-wrap; }
pre.table { white-space: pre; }
code { font: .85rem ui-monospace, monospace; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; margin-bottom: .5rem; }
summary span { font-weight: 400; color: var(--soft); }
.badge { font-weight: 600; }
.badge.finished { color: var(--good); }
.badge.failed, .badge.lost { color: var(--bad); }
.badge.running { color: var(--work); }
@media (max-width: 30rem) { main { padding: .6rem; } th, td { padding: .3rem .5rem; } }
"""
