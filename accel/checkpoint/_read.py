# SPDX-License-Identifier: Apache-2.0
"""Everything that a checkpoint holds, on one rank, each byte of it checked."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from accel.checkpoint._directory import read_manifest
from accel.checkpoint._manifest import Manifest
from accel.storage import OpenDirectory, dtype_name, open_directory, read_tensors, sha256

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


def read_checkpoint(path: Path) -> Saved:
    """Read a checkpoint and check every byte of it.

    Raises:
        CheckpointError: the folder is no checkpoint, or a file is missing or damaged; the file is named.
    """
    with open_directory(path) as folder:
        manifest, digest = read_manifest(folder)
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


def _digest(data: memoryview) -> str:
    return sha256([data])


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
