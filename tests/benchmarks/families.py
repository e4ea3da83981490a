# SPDX-License-Identifier: Apache-2.0
"""Families of models on meshes: which cells train as a plain loop of one process does.

    python tests/benchmarks/families.py [--more] [--meshes tp=2 ...] [--families BERT ...] [--write]

A cell is equal (parameters, losses and norms to 1e-10, see `tests/parallel/families.py`), refused with the error's
first line, wrong by a number, or broken by an error that is not accel's. It is compared with the tables of
docs/families.md: one that is equal there and not here is an error at the end. `--more` takes the families of the
second table; `--write` puts the cells of this run into a table.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "parallel"), str(TESTS / "helpers")]

import families as table  # noqa: E402 - of the folder that the line above adds

import accel  # noqa: E402
from accel.testing import Simulator  # noqa: E402

PAGE = TESTS.parent / "docs" / "families.md"
EQUAL = "equal"
_DIVIDED = re.compile(r"(\d+)% of the parameters")


class Shares(logging.Handler):
    """The share of parameters that `prepare` said last that it divides."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if found := _DIVIDED.search(record.getMessage()):
            self.last = found[1]


def outcome(simulator: Simulator, name: str, mesh: str, shares: Shares) -> str:
    """Run a cell and return what the table says of it."""
    shares.last = ""
    try:
        off = table.cell(simulator, name, table.MESHES[mesh])
    except Exception as error:  # whatever refuses the cell
        kind = "refused" if isinstance(error, accel.AccelError) else "broken"
        return f"{kind}: " + " ".join(str(error).split(" - at ")[0].split())[:90].replace("|", "/")
    if off > table.TOLERANCE or off != off:
        return f"wrong by {off:.0e}"
    return ", ".join(filter(None, (EQUAL, f"{shares.last} %" if shares.last else "")))


def block(text: str, *, more: bool) -> str:
    """Return the lines of a page's first or second table; none where it has no such table."""
    found = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    return found[more].rstrip() if len(found) > more else ""


def read(text: str) -> tuple[list[str], dict[tuple[str, str], str]]:
    """Return the meshes and the cells of a table."""
    lines = [[each.strip() for each in line.strip("|").split("|")] for line in text.splitlines()]
    if not lines:
        return [], {}
    meshes = [each.strip("`") for each in lines[0][1:]]
    return meshes, {(line[0], mesh): each for line in lines[2:] for mesh, each in zip(meshes, line[1:], strict=True)}


def written(meshes: list[str], cells: Mapping[tuple[str, str], str]) -> str:
    """Return the table."""
    names = list(dict.fromkeys(name for name, _ in cells))
    head = ["family", *(f"`{mesh}`" for mesh in meshes)]
    rows = [[name, *(cells.get((name, mesh), "") for mesh in meshes)] for name in sorted(names, key=str.lower)]
    return "\n".join("| " + " | ".join(each) + " |" for each in [head, ["---"] * len(head), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--more", action="store_true", help="families of the page's second table")
    parser.add_argument("--meshes", nargs="*", choices=list(table.MESHES))
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--write", action="store_true", help="put the cells into the page's table")
    options = parser.parse_args()
    known = list(table.MORE if options.more else table.FAMILIES)
    families = options.families or known
    ran_on = options.meshes or list(table.MESHES)[: 4 if options.more else None]
    if unknown := set(families) - set(known):
        parser.error(f"unknown families: {sorted(unknown)}")
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    shares = Shares()
    logging.getLogger("accel.parallel").addHandler(shares)
    logging.getLogger("accel.parallel").propagate = False
    text = PAGE.read_text()
    old = block(text, more=options.more)
    meshes, before = read(old)
    cells = dict(before)
    worse: list[str] = []
    with Simulator() as simulator:
        for name in families:
            for mesh in ran_on:
                begin = time.perf_counter()
                now = outcome(simulator, name, mesh, shares)
                print(f"{name}, {mesh}: {now} ({time.perf_counter() - begin:.1f} s)", flush=True)
                if before.get((name, mesh), "").startswith(EQUAL) and not now.startswith(EQUAL):
                    worse.append(f"{name}, {mesh}: {now}")
                cells[name, mesh] = now
    ran = [cells[name, mesh] for name in families for mesh in ran_on]
    count = {kind: sum(each.startswith(kind) for each in ran) for kind in (EQUAL, "refused", "wrong", "broken")}
    print(f"{len(ran)} cells: " + ", ".join(f"{number} {kind}" for kind, number in count.items()))
    if options.write:
        new = written(list(dict.fromkeys([*meshes, *ran_on])), cells)
        _ = PAGE.write_text(text.replace(old, new) if old else f"{text.rstrip()}\n\n{new}\n")
    if worse:
        sys.exit("equal on the page, and not any more: " + "; ".join(worse))


if __name__ == "__main__":
    main()
