# SPDX-License-Identifier: Apache-2.0
"""The table of axes in docs/plan.md: each row is what the formulas give."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.estimate import Job, Transformer, choose_meshes

PAGE = Path(__file__).parent.parent.parent / "docs" / "plan.md"
LLAMA = {
    "1B": Transformer(
        layers=16, width=2048, heads=32, kv_heads=8, head_width=64, inner=8192, vocabulary=128256, tied=True
    ),
    "8B": Transformer(layers=32, width=4096, heads=32, kv_heads=8, head_width=128, inner=14336, vocabulary=128256),
    "70B": Transformer(layers=80, width=8192, heads=64, kv_heads=8, head_width=128, inner=28672, vocabulary=128256),
}
TOKENS = 8192


def speed(seconds: float) -> str:
    """Tokens a second of a GPU; a batch has one sequence for each."""
    return f"{TOKENS / seconds:.0f}"


def row(name: str, ranks: int) -> str:
    """A row of the table."""
    fitting = choose_meshes(LLAMA[name], Job(ranks=ranks, memory=77 * 10**9, tokens=TOKENS)).fitting

    def best_along(axis: str) -> str:
        """The fastest mesh of data parallelism and this axis alone."""
        others = {"tp", "cp", "pp"} - {axis}
        found = [each for each in fitting if all(getattr(each.axes, other) == 1 for other in others)]
        found = [each for each in found if axis == "dp" or getattr(each.axes, axis) > 1]
        return speed(min(each.time.total for each in found)) if found else "-"

    first = f"`{fitting[0].axes}` | {fitting[0].memory.total / 1e9:.0f} GB" if fitting else "none fits | -"
    return f"| {name} | {ranks} | {first} | " + " | ".join(map(best_along, ("dp", "cp", "tp", "pp"))) + " |"


@pytest.mark.slow
@pytest.mark.parametrize("name", LLAMA)
def test_rows_are_what_the_formulas_give(name: str) -> None:
    lines = PAGE.read_text().splitlines()
    rows = [row(name, ranks) for ranks in (8, 64, 1024)]
    assert [line for line in lines if line.startswith(f"| {name} |")] == rows, "\n".join(rows)
