# SPDX-License-Identifier: Apache-2.0
"""The figures of comparison.py as docs/comparison.md shows them; `python tests/benchmarks/comparison_table.py`.

The figures of the last run are in comparison.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).with_name("comparison.json")
PAGE = Path(__file__).parents[2] / "docs" / "comparison.md"
LIBRARIES = ("torch", "accel", "Accelerate", "Fabric")
QUIET = 0.5  # load of the machine, from which times are not shown
BEGIN, END = "<!-- figures -->\n\n", "\n\n<!-- end of figures -->"


def table(figures: dict[str, Any]) -> str:
    """The figures as they are on the page; times only of a machine that did nothing else."""
    if figures.get("load", QUIET) >= QUIET:
        return _after_a_resume(figures)
    lines = ["| | torch, by hand | accel | Accelerate | Fabric |", "|---|---|---|---|---|"]
    for name, row in figures["rows"].items():
        ratios = " | ".join(
            f"{middle:.2f}x ({low:.2f} to {high:.2f})" for low, middle, high in (row[n] for n in LIBRARIES[1:])
        )
        lines.append(f"| {name} | {duration(row['torch'][0])} | {ratios} |")
    return "\n".join([*lines, "", _after_a_resume(figures)])


def _after_a_resume(figures: dict[str, Any]) -> str:
    rows = [f"| {name} | {found} |" for name, found in figures["resume"].items()]
    return "\n".join(["| a run that is resumed in its second epoch | reads |", "|---|---|", *rows])


def duration(seconds: float) -> str:
    if seconds < 1e-2:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def page(text: str, figures: dict[str, Any]) -> str:
    """The page's text with the table of these figures."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{table(figures)}{END}{rest.split(END)[1]}"


def write(figures: dict[str, Any]) -> None:
    """Keep the figures, and put their table into the page."""
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), figures))


if __name__ == "__main__":
    write(json.loads(FIGURES.read_text()))
