# SPDX-License-Identifier: Apache-2.0
"""A model's tensors as its checkpoint has them, by the recipes that lead from there to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from accel.checkpoint import Recipe, Strided, apply_recipes, check_recipes, in_file, inverse
from accel.storage import stored_dtype, torch_dtypes

_WHERE = "save_model, rename="


class StoredTensors:
    """The tensors that recipes were made from, made again one at a time.

    Attributes:
        facts: tensors on the meta device, by stored name.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], whole: Callable[[str], torch.Tensor], rename: Sequence[Recipe]
    ) -> None:
        """Plan by names and shapes alone.

        Args:
            tensors: the model's tensors by name.
            whole: returns one of them whole; a collective, which every rank calls alike.
            rename: recipes from stored tensors to the model's.

        Raises:
            CheckpointError: a recipe does not fit the model.
            ConfigError: `rename` is no sequence of recipes.
        """
        check_recipes(rename, "a sequence of accel.Recipe, which lead in both directions")
        model: dict[str, Strided] = {}
        for name, tensor in tensors.items():
            dtype = stored_dtype(tensor.dtype)
            assert dtype is not None, name
            model[name] = in_file(dtype, tensor.shape, tensor.element_size(), name, 0)
        self._stored = apply_recipes(model, inverse(rename), _WHERE)
        self._whole = whole
        self._last: tuple[str, torch.Tensor] | None = None
        dtypes = torch_dtypes()
        self.facts = {
            name: torch.empty(each.shape, dtype=dtypes[each.dtype], device="meta")
            for name, each in self._stored.items()
        }

    def whole(self, name: str) -> torch.Tensor:
        """Return a stored tensor, in memory of its own unless the model has it as it is. A collective."""
        stored = self._stored[name]
        made: torch.Tensor | None = None
        for part in stored.parts:
            source = self._source(part.file)
            itemsize = source.element_size()
            strides = [stride // itemsize for stride in part.strides]
            view = source.as_strided(part.box.shape, strides, source.storage_offset() + part.start // itemsize)
            if part.box.shape == stored.shape:
                return view.contiguous()
            if made is None:
                made = torch.empty(stored.shape, dtype=source.dtype, device=source.device)
            index = tuple(slice(at, at + n) for at, n in zip(part.box.offset, part.box.shape, strict=True))
            _ = made[index].copy_(view)
        return torch.empty_like(self.facts[name], device="cpu") if made is None else made

    def _source(self, name: str) -> torch.Tensor:
        """Return a tensor of the model whole; the last one is kept, as its parts mostly follow each other."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._whole(name).contiguous()
        return self._last[1]
