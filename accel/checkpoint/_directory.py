# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders on one rank: which are committed, which is the newest, and everything that one holds."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from accel.checkpoint._manifest import MANIFEST, Manifest, decode_manifest
from accel.errors import CheckpointError
from accel.storage import (
    OpenDirectory,
    disk_errors,
    dtype_name,
    leftovers,
    open_directory,
    read_tensors,
    sha256,
)

_LARGEST_MANIFEST = 64 * 2**20
_STEP = re.compile(r"step-([0-9]{8,18})", re.ASCII)
_HASHERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that has been read and checked in full.

    Attributes:
        path: the folder.
        manifest: its contents.
        digest: the manifest's, in hex; it stands for every byte of the checkpoint.
        tensors: by name, aliases included; views on the files, to be copied from.
    """

    path: Path
    manifest: Manifest
    digest: str
    tensors: Mapping[str, torch.Tensor]


def step_name(step: int) -> str:
    """Return the folder's name of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a folder's name stands for, None if it is not the name of one."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match is not None and step_name(int(match[1])) == name else None


def latest_checkpoint(out: str | os.PathLike[str]) -> Path | None:
    """Return the newest committed checkpoint by step, None if there is none. No communication.

    A folder whose manifest or files are missing, cut or damaged in the manifest is skipped with a warning of the logger
    `accel.checkpoint`. Bytes of files are checked by `load_state`, not here.

    Args:
        out: the folder that was given to `save_state`; it need not exist.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    folder = Path(out)
    if not os.path.lexists(folder):
        return None
    seen = None
    while (candidates := _candidates(folder)) != seen:  # a writer may replace all of them while they are looked at
        for step, _, path in candidates:
            try:
                inspect(path, step)
            except CheckpointError as error:
                logging.getLogger("accel.checkpoint").warning("%s is not a checkpoint and is skipped: %s", path, error)
            else:
                return path
        seen = candidates
    return None


def committed(out: Path) -> list[tuple[int, Path]]:
    """List the steps under `out` that are committed, with their folders, newest first."""
    with disk_errors(out):
        steps = [(step, out / name) for name in os.listdir(out) if (step := step_of(name)) is not None]
    return [(step, path) for step, path in sorted(steps, reverse=True) if is_committed(path, step)]


def is_committed(path: Path, step: int | None = None) -> bool:
    """Whether a folder is a checkpoint (of that step) with a valid manifest and every file of the right size."""
    try:
        inspect(path, step)
    except CheckpointError:
        return False
    return True


def is_exactly_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint and holds nothing that its manifest does not list."""
    try:
        with open_directory(path, follow=False) as folder:
            manifest, _ = _manifest(folder)
            return folder.names() == sorted([MANIFEST, *manifest.files])
    except CheckpointError:
        return False


def inspect(path: Path, step: int | None) -> Manifest:
    """Check a folder's manifest and the sizes of its files; not through a symbolic link.

    Raises:
        CheckpointError: why it is not a committed checkpoint of that step.
    """
    with open_directory(path, follow=False) as folder:
        manifest, _ = _manifest(folder)
        if step is not None and manifest.step != step:
            raise folder.refusal(MANIFEST, "of another step", expected=f"step {step}", got=f"step {manifest.step}")
        for name, entry in manifest.files.items():
            if (size := folder.size(name)) != entry.size:
                raise folder.refusal(name, "wrong size", expected=f"{entry.size} bytes", got=f"{size} bytes")
    return manifest


def read_checkpoint(path: Path) -> Saved:
    """Read a checkpoint and check every byte of it.

    Raises:
        CheckpointError: the folder is no checkpoint, or a file is missing or damaged; the file is named.
    """
    with open_directory(path) as folder:
        manifest, digest = _manifest(folder)
        files = {name: folder.read(name, size=entry.size) for name, entry in manifest.files.items()}
    with ThreadPoolExecutor(_HASHERS) as pool:
        digests = dict(zip(files, pool.map(_digest, files.values()), strict=True))
    tensors: dict[str, torch.Tensor] = {}
    for name, data in files.items():
        if digests[name] != manifest.files[name].sha256:
            raise folder.refusal(name, "damaged: the digest does not fit the contents")
        expected = {key for key, entry in manifest.tensors.items() if entry.pieces[0].file == name}
        found = read_tensors(data, str(path / name))
        if found.keys() != expected:
            differing = ", ".join(sorted(found.keys() ^ expected))
            raise folder.refusal(name, "other tensors than the manifest lists", got=differing)
        tensors |= {key: _as_listed(folder, manifest, key, tensor) for key, tensor in found.items()}
    tensors |= {name: tensors[target] for name, target in manifest.aliases.items()}
    return Saved(path=path, manifest=manifest, digest=digest, tensors=tensors)


def _candidates(folder: Path) -> list[tuple[int, bool, Path]]:
    """What may be a checkpoint by its name, newest first: step, whether it has its final name, path."""
    with disk_errors(folder):
        named = [(step_of(name), True, folder / name) for name in os.listdir(folder)]
    # a writer that died between two renames left the former checkpoint of its step aside
    aside = [(step_of(left.target), False, left.path) for left in leftovers(folder) if left.kind == "old"]
    found = [(step, final, path) for step, final, path in named + aside if step is not None]
    return sorted(found, reverse=True)


def _digest(data: memoryview) -> str:
    return sha256([data])


def _manifest(folder: OpenDirectory) -> tuple[Manifest, str]:
    if MANIFEST not in folder.names():
        raise CheckpointError(
            "no checkpoint, or a half-written one",
            expected=f"a folder with {MANIFEST}",
            got=f"a folder of {len(folder.names())} entries without it",
            where=str(folder.path),
            fix="Pass the folder of one step, such as latest_checkpoint(out) returns.",
        )
    return decode_manifest(folder.read(MANIFEST, limit=_LARGEST_MANIFEST), str(folder.path / MANIFEST))


def _as_listed(folder: OpenDirectory, manifest: Manifest, key: str, tensor: torch.Tensor) -> torch.Tensor:
    entry = manifest.tensors[key]
    pair = entry.dtype == "complex128" and tensor.dtype == torch.float64 and tensor.shape[-1:] == (2,)
    tensor = torch.view_as_complex(tensor) if pair else tensor
    if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
        expected, got = f"{entry.dtype} {list(entry.shape)}", f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        raise folder.refusal(
            entry.pieces[0].file, f"tensor {key!r} is not what the manifest lists", expected=expected, got=got
        )
    return tensor
