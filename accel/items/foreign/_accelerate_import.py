# SPDX-License-Identifier: Apache-2.0
"""A checkpoint from a folder of Hugging Face Accelerate, without live objects."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch

from accel.checkpoint import Content, Item, ItemKind, check_tensor, encode, save
from accel.context import single
from accel.errors import CheckpointError
from accel.items._rng import capture_row
from accel.items.foreign._accelerate import read_saved
from accel.storage import RemotePath, as_place, open_directory, read_reference

_MODULE = re.compile(r"(model(?:_[0-9]+)?)\.safetensors", re.ASCII)
_STATEFUL = re.compile(r"(scheduler(?:_[0-9]+)?|custom_checkpoint_[0-9]+)\.(bin|pkl)", re.ASCII)


def import_accelerate(
    folder: str | os.PathLike[str], out: str | os.PathLike[str] | RemotePath, *, step: int
) -> Path | RemotePath:
    """Convert a folder of Accelerate's `save_state` to a checkpoint. No communication.

    Items are named after the files: `model`, `model_1`, `scheduler`, `custom_checkpoint_0`. Optimizers are left out:
    their files number parameters and do not name them, so only `load_accelerate_state`, with live ones, loads them. The
    logger `accel.checkpoint` lists what is left out. Everything is in memory at once.

    Args:
        folder: folder such as `checkpoint_3`; its pickles are read by torch's weights-only loader, which runs no code.
        out: folder or URL of the run's checkpoints.
        step: step of the checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: no model as safetensors, a file that holds more than weights and plain values, or a disk that
            failed.
    """
    source = Path(folder)
    tensors: dict[str, torch.Tensor] = {}
    items: dict[str, Item] = {}
    with open_directory(source) as opened:
        names = opened.names()
        for file in names:
            if (match := _MODULE.fullmatch(file)) is not None:
                for key, tensor in read_reference(opened, file).items():
                    check_tensor(tensor, f"{match[1]}.{key}")
                    tensors[f"{match[1]}.{key}"] = tensor
                items[match[1]] = _item("module", {})
            elif (match := _STATEFUL.fullmatch(file)) is not None:
                items[match[1]] = _item("stateful", encode(read_saved(source / file), match[1], tensors))
            else:
                logging.getLogger("accel.checkpoint").warning("not taken from %s: %s", source, file)
        if not any(item.kind == "module" for item in items.values()):
            raise CheckpointError(
                "no model.safetensors",
                expected="a folder that Accelerate's save_state wrote",
                got=", ".join(names[:8]) or "an empty folder",
                where=str(source),
                fix="Only models that were saved as safetensors are taken.",
            )
        content = Content(shared={}, main=tensors, own={}, loose={}, items=items, row=capture_row(single(), {}))
        return save(single(), as_place(out), content, step=step, keep=None, metrics={})


def _item(kind: ItemKind, value: object) -> Item:
    return Item(kind=kind, type="", value=value)  # the files name no classes
