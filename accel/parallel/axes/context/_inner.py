# SPDX-License-Identifier: Apache-2.0
"""Models of transformers inside of a user's module: they get own positions, and the code around them gets parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accel.parallel.axes.context._positions import PositionRanks
from accel.parallel.axes.context._split import is_cut
from accel.parallel.parts import PartTensor
from accel.parallel.parts._part import tensors_of
from accel.tree import map_tensors


class InnerModels:
    """Models that attend across ranks, with hooks that connect them to code that computes with parts of positions.

    Attributes:
        models: these models.
        ranks: of the parts.
        given: for each call that runs, whether it was given parts.
        made: tensors that calls returned, while they are noted.
        has_loss: whether a call returned a loss, which is of this rank's tokens.
    """

    def __init__(self, ranks: PositionRanks, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.ranks = ranks
        self.given: list[bool] = []
        self.made: list[Tensor] | None = None
        self.has_loss = False
        for each in models:
            _ = each.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
            _ = each.register_forward_hook(self.leave)

    def enter(
        self, _module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give a model own positions for parts, as its hook."""
        self.given.append(any(isinstance(each, PartTensor) for each in tensors_of((inputs, keywords))))
        return map_tensors(self.ranks.left, (inputs, dict(keywords)))

    def leave(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
        """Return parts for own positions if the model was given parts, as its hook."""
        if self.given.pop():
            output = map_tensors(self._part, output)
        found = listed(output)
        self.has_loss |= any(not each.dim() for each in found)
        if self.made is not None:
            self.made += found
        return output

    def _part(self, each: Tensor) -> Tensor:
        is_own = each.dim() > 1 and is_cut(self.ranks.ctx, each.shape[1])
        return self.ranks.part(each, 1) if is_own else each

    def is_alike(
        self,
        own: Callable[[], Any],
        whole: Callable[[], Any],
        difference: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], str],
    ) -> bool:
        """Return whether the code around the models gives the same for own positions, plain, as for all: it works on
        positions one by one. Outputs without positions do not show it, nor does a call that fails for own ones. A
        collective.

        `difference`: returns a line on parts that differ from tensors of all positions.
        """
        parts: list[Tensor] | None = None
        with contextlib.suppress(Exception):
            parts = [self._part(each) for each in self._around(own)]
        if not self.ranks.agree(parts is not None) or parts is None:
            return False
        expected = self._around(whole)
        is_alike = len(parts) == len(expected) and all(isinstance(each, PartTensor) for each in parts)
        return self.ranks.agree(is_alike and not (parts and difference(expected, parts, [])))

    def _around(self, call: Callable[[], Any]) -> list[Tensor]:
        """The floating-point outputs of a call, except tensors that the models returned."""
        self.made = []
        try:
            found = [each for each in listed(call()) if each.is_floating_point()]
            return [each for each in found if all(each is not mine for mine in self.made)]
        finally:
            self.made = None


def listed(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found
