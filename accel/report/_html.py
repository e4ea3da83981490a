# SPDX-License-Identifier: Apache-2.0
"""Markup in which every text is escaped unless it is markup itself."""

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
    """Return an element.

    Args:
        tag: its name.
        content: markup, or texts to escape; None for nothing.
        attributes: attributes; a trailing "_" is dropped, other "_" become "-".
    """
    shown = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    return Html(f"<{tag}{shown}>" if tag in _ALONE else f"<{tag}{shown}>{join(content)}</{tag}>")


def join(content: Iterable[str | None]) -> Html:
    """Return pieces of markup and texts as one piece of markup."""
    return Html("".join(each if isinstance(each, Html) else _escaped(each) for each in content if each is not None))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, marked: Iterable[int] = ()) -> Html:
    """Return a table that scrolls sideways where it is too wide; the first cell of each row is its title.

    Args:
        head: titles of the columns.
        rows: cells, markup or texts.
        marked: rows to mark, counted from 0.
    """
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
