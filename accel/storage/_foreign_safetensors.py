# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of other writers, read by the format's own library, which knows every dtype of the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from accel.errors import CheckpointError
from accel.storage._reading import OpenDirectory
from accel.storage._safetensors import read_header


def read_reference(folder: OpenDirectory, name: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a file in an open folder, in memory that the file backs."""
    where = str(folder.path / name)
    found = dict[str, torch.Tensor]()
    header = read_header(folder.read(name), where)  # bounded in time and memory, unlike the library's own
    with folder.descriptor(name) as path:
        try:
            with cast(Any, safe_open)(path, framework="pt") as file:
                for key in header.tensors:
                    tensor: torch.Tensor = file.get_tensor(key)
                    # a byte that is neither 0 nor 1 would be a bool that is neither true nor false
                    found[key] = tensor.view(torch.uint8).ne(0) if tensor.dtype == torch.bool else tensor
        except (SafetensorError, OSError, AttributeError, TypeError) as error:  # the last two: no such dtype in torch
            raise CheckpointError("cannot be read", expected="safetensors", got=str(error), where=where) from error
    return found
