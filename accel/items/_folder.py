# SPDX-License-Identifier: Apache-2.0
"""`Folder`: an item whose state is files, which functions of the user write and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Folder:
    """An item whose state is a folder of files: functions write it for a save, and read it for a load.

    Takes what another library saves its own way, such as an adapter of PEFT or an engine's checkpoint, into the same
    commit: the files are part of the checkpoint, their digests are in its manifest, and stores of objects take them.

    On a save, `save(folder)` runs on every rank, each with an empty folder of its own on its host, and may be a
    collective. The checkpoint gets the files of all ranks, by their paths in the folder; of a path that several ranks
    wrote, with as many bytes, the lowest rank's. Empty folders are not kept.

    On a load, after every check, `load(folder)` runs on every rank, with a folder of all files, or those of `select`.
    It runs after the other items have taken their state, but before the tensors of modules are copied in place. If it
    raises, or another rank fails, the other items get their former state back; what `load` did itself stays. The
    folders are deleted when the functions have returned, so nothing may keep files of them open.

    Attributes:
        save: writes files into a folder; None where only loads are made. It gets the folder's path.
        load: reads them; None where only saves are made.
        select: whether this rank needs the file at a path, such as "rank-3/model.pt"; None for all files.
        scratch: parent of the temporary folders, on a disk with room for the files; None for the system's folder of
            temporary files.

    Example:
        >>> adapter = accel.Folder(save=peft_model.save_pretrained, load=lambda path: load_adapter(peft_model, path))
        >>> accel.save_state(ctx, "runs/demo", {"adapter": adapter, "optimizer": optimizer}, step=3)
    """

    save: Callable[[Path], object] | None = None
    load: Callable[[Path], object] | None = None
    select: Callable[[str], bool] | None = None
    scratch: str | Path | None = None
