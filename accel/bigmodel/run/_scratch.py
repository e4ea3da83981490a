# SPDX-License-Identifier: Apache-2.0
"""Values of the model whose home is "disk", in files of the run's own that nothing outlives."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from accel.bigmodel._source import StoredTensor, WeightSource
from accel.bigmodel.load import open_weights
from accel.bigmodel.run._places import has_values
from accel.bigmodel.run._supplies import Task, stored_as
from accel.bigmodel.run._supply import Mappable
from accel.errors import CheckpointError, ConfigError
from accel.storage import write_tensors


class ScratchSource:
    """Files of values of the model, before another source.

    Attributes:
        entries: tensors by name, of both.
        written: names of those in the files.
    """

    def __init__(self, files: WeightSource, other: WeightSource | None) -> None:
        self._files = files
        self._other = other
        self.written = frozenset(files.entries)
        self.entries: Mapping[str, StoredTensor] = {**(other.entries if other is not None else {}), **files.entries}

    def read(self, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill tensors; see `WeightSource`."""
        self._files.read([each for each in targets if each[0] in self.written])
        if self._other is not None:
            self._other.read([each for each in targets if each[0] not in self.written])

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor whose pages are read when they are touched.

        Raises:
            ConfigError: one that cannot be mapped.
        """
        source = self._files if name in self.written else self._other
        if not isinstance(source, Mappable):
            raise ConfigError("a source that maps no files", where=name, fix="Use the home 'disk' or 'cpu'.")
        return source.mapped(name)

    def close(self) -> None:
        """Close the files, which frees their space."""
        self._files.close()


def with_scratch(
    tasks: Sequence[Task], source: WeightSource | None, folder: str | os.PathLike[str], opened: ExitStack
) -> WeightSource | None:
    """Write the values of the model whose home is "disk" to files; return a source that has them before others.

    The files have no names once they are open, so that their space is free after the run, however it ends.

    Args:
        tasks: the weights.
        source: the other weights.
        folder: an existing folder, on a local disk.
        opened: closes the files.

    Raises:
        CheckpointError: the disk is full, fails or forbids it; nothing stays in the folder.
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for task in tasks:
        if task.home == "disk" and task.way != "resident" and has_values(task.places[0].tensor):
            groups.setdefault(task.segment.name, {})[task.weight.name] = stored_as(task)
    if not groups:
        return source
    try:
        stage = Path(tempfile.mkdtemp(prefix="accel-scratch-", dir=folder))
    except OSError as error:
        raise _refused(folder, str(error)) from error
    try:
        for at, tensors in enumerate(groups.values()):
            write_tensors(stage, f"weights-{at:06d}.safetensors", tensors)
        files = open_weights(stage)
    except CheckpointError as error:
        raise _refused(folder, error.problem) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    opened.callback(files.close)
    return ScratchSource(files, source)


def _refused(folder: object, problem: str) -> CheckpointError:
    return CheckpointError(
        "values of the model cannot be written for the home 'disk'",
        got=problem,
        where=f"dispatch_model(scratch={str(folder)!r})",
        fix="Free space there or name another folder; or give files that have these values: source=path.",
    )
