# SPDX-License-Identifier: Apache-2.0
"""Families of models on meshes: which cells train as a plain loop of one process does.

    python tests/benchmarks/families.py [--meshes tp=2 ...] [--families BERT ...] [--write]

A cell is equal (parameters, losses and norms to 1e-10, see `tests/parallel/families.py`), refused with the error's
first line, or wrong by a number. It is compared with the table of docs/families.md: one that is equal there and not
here is an error at the end. `--write` puts the cells of this run into the table.
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
        off, cut = table.compared(simulator, name, table.MESHES[mesh])
    except Exception as error:  # whatever refuses the cell
        return "refused: " + " ".join(str(error).split(" - at ")[0].split())[:90].replace("|", "/")
    if off > table.TOLERANCE or off != off:
        return f"wrong by {off:.0e}"
    return ", ".join(filter(None, (EQUAL, cut, f"{shares.last} %" if shares.last else "")))


def read(text: str) -> tuple[list[str], dict[tuple[str, str], str]]:
    """Return the meshes and the cells of a page's table."""
    lines = [
        [each.strip() for each in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
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
    parser.add_argument("--meshes", nargs="*", default=list(table.MESHES), choices=list(table.MESHES))
    parser.add_argument("--families", nargs="*", default=list(table.FAMILIES), choices=list(table.FAMILIES))
    parser.add_argument("--write", action="store_true", help="put the cells into the page's table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    shares = Shares()
    logging.getLogger("accel.parallel").addHandler(shares)
    logging.getLogger("accel.parallel").propagate = False
    text = PAGE.read_text()
    meshes, before = read(text)
    cells = dict(before)
    worse: list[str] = []
    with Simulator() as simulator:
        for name in options.families:
            for mesh in options.meshes:
                begin = time.perf_counter()
                now = outcome(simulator, name, mesh, shares)
                print(f"{name}, {mesh}: {now} ({time.perf_counter() - begin:.1f} s)", flush=True)
                if before.get((name, mesh), "").startswith(EQUAL) and not now.startswith(EQUAL):
                    worse.append(f"{name}, {mesh}: {now}")
                cells[name, mesh] = now
    ran = [cells[name, mesh] for name in options.families for mesh in options.meshes]
    equal = sum(each.startswith(EQUAL) for each in ran)
    wrong = sum(each.startswith("wrong") for each in ran)
    print(f"{equal} of {len(ran)} cells equal, {len(ran) - equal - wrong} refused, {wrong} wrong")
    if options.write:
        old = [line for line in text.splitlines() if line.startswith("|")]
        new = written(list(dict.fromkeys([*meshes, *options.meshes])), cells)
        block = "\n".join(old)
        _ = PAGE.write_text(text.replace(block, new) if block else f"{text.rstrip()}\n\n{new}\n")
    if worse:
        sys.exit("equal on the page, and not any more: " + "; ".join(worse))


if __name__ == "__main__":
    main()
