# SPDX-License-Identifier: Apache-2.0
"""Refusals of a tensor without memory: whoever asks for its address, or for a copy that holds it, is told the way."""

from __future__ import annotations

from typing import NoReturn, Protocol

from accel.errors import StreamError


class Named(Protocol):
    """An origin of values, by the name of its weight."""

    name: str


class NoMemory:
    """Base of tensors without memory, before `torch.Tensor`.

    Attributes:
        origin: the place of the values.
    """

    origin: Named

    def untyped_storage(self) -> NoReturn:
        """Refuse: safetensors and save_pretrained of transformers ask for it."""
        self._refuse()

    def storage(self) -> NoReturn:
        """Refuse, as `untyped_storage`."""
        self._refuse()

    def data_ptr(self) -> NoReturn:
        """Refuse: a kernel would be given the address 0."""
        self._refuse()

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse, as `untyped_storage`."""
        self._refuse()

    def tolist(self) -> NoReturn:
        """Refuse, as `untyped_storage`."""
        self._refuse()

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse_copy(self.origin.name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_pickle(self.origin.name)

    def _refuse(self) -> NoReturn:
        raise StreamError(
            "a weight that is not in memory has no address, as save_pretrained, save_file and kernels want it",
            where=self.origin.name,
            fix="Save with accel.save_model(ctx, model, folder) and model.config.save_pretrained(folder), which "
            "from_pretrained reads; weight.clone() has memory.",
        )


def refuse_copy(name: str) -> NoReturn:
    """Refuse to copy a model.

    Args:
        name: a weight or a block of it whose values are elsewhere.

    Raises:
        StreamError: always.
    """
    raise StreamError(
        "a weight that is not in memory cannot be copied with its model",
        where=name,
        fix="Copy the model before dispatch_model or after run.close(); weight.clone() copies one weight.",
    )


def refuse_pickle(name: str, what: str = "a weight that is not in memory") -> NoReturn:
    """Refuse to pickle a model.

    Args:
        name: a weight, a block or a device of it.
        what: the part of the model that is met first.

    Raises:
        StreamError: always.
    """
    raise StreamError(
        f"{what} cannot be pickled",
        where=name,
        fix="Save with accel.save_model(ctx, run.model, folder), or the tensors of run.tensors() one by one.",
    )
