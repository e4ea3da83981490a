# SPDX-License-Identifier: Apache-2.0
"""Packages of trackers: looked for when a run opens, imported in the background when it starts."""

from __future__ import annotations

import importlib
import importlib.util
import io
from collections.abc import Callable
from typing import Any

import torch

from accel.errors import MissingExtraError
from accel.trackers._media import Table
from accel.trackers._tracker import Run


def needs(tracker: str, *modules: str, extra: str = "", where: str = "to=") -> Callable[[Run], None]:
    """Return a tracker's `check`: it raises if a package is missing, naming the extra and the argument of `tracking`,
    and imports nothing."""

    def check(run: Run) -> None:
        del run
        for module in modules:
            found = importlib.util.find_spec(module)
            if found is None or found.origin is None:  # a folder of that name, such as wandb's own files, is no package
                raise MissingExtraError(
                    f"the tracker {tracker} needs a package that is not installed",
                    expected=module,
                    where=f"tracking, {where}",
                    fix=f"Run `pip install 'accel-torch[{extra or tracker}]'`, or leave the tracker out.",
                )

    return check


def load(module: str) -> Any:
    """Import a module, in the tracker's thread."""
    return importlib.import_module(module)


def own_name(run: Run) -> str:
    """Return the run's name, with a part of its identity: two runs may have one name."""
    mark = run.id[:6]
    return run.name if run.name.endswith(mark) else f"{run.name}-{mark}"


def rank_name(run: Run) -> str:
    """Return the name of this process."""
    return f"rank-{run.rank}"


def picture(png: bytes) -> Any:
    """Open a PNG file as a PIL image."""
    image = load("PIL.Image").open(io.BytesIO(png))
    image.load()
    return image


def array(pixels: torch.Tensor) -> Any:
    """Return [height, width, channels] as an array of numpy; without the last dimension for grey images."""
    _ = load("PIL.Image")  # whole, before packages look whether some other thread has begun to import it
    values = pixels.numpy()
    return values[:, :, 0] if values.shape[2] == 1 else values


def verbatim(text: str) -> str:
    """Return a text as Markdown that shows it as it is: indented, so that nothing in it ends the block."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
