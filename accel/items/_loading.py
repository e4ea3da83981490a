# SPDX-License-Identifier: Apache-2.0
"""What loading will do, gathered while nothing is changed: what is read of the files, and what then changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from accel.checkpoint import Box, Saved, held_box, is_sharded, like, local_part
from accel.errors import CheckpointError

Action = Callable[[], object]


@dataclass(slots=True)
class Changes:
    """What loading will do, in order.

    Attributes:
        wanted: names of tensors, and which part of each this rank reads; None for all of it.
        makers: what makes values and the next two lists of what is read.
        risky: the item, a change of it that runs code of others, and what makes it undone.
        copies: live tensors and the names of what is copied into them; cannot fail.
        values: what `load_state` returns.
    """

    wanted: list[tuple[str, Box | None]] = field(default_factory=list[tuple[str, Box | None]])
    makers: list[Action] = field(default_factory=list[Action])
    risky: list[tuple[str, Action, Action]] = field(default_factory=list[tuple[str, Action, Action]])
    copies: list[tuple[torch.Tensor, str]] = field(default_factory=list[tuple[torch.Tensor, str]])
    values: dict[str, object] = field(default_factory=dict[str, object])

    def want(self, name: str, template: torch.Tensor | None) -> None:
        """Note that this rank reads what lies like a live tensor; all of a tensor if there is none."""
        box = held_box(template, name) if template is not None and is_sharded(template) else None
        if box is not None or template is None or not is_sharded(template):
            self.wanted.append((name, box))

    def risk(self, where: str, change: Action, back: Action) -> None:
        """Note a change that can fail, and what makes it undone."""
        self.risky.append((where, change, back))


def read_like(saved: Saved, name: str, template: torch.Tensor | None) -> torch.Tensor:
    """Return a stored tensor in new memory: spread as a live DTensor is, else whole and on the CPU.

    Args:
        saved: the checkpoint.
        name: the tensor's.
        template: the live tensor, of the same shape if it is a DTensor; None for none.
    """
    if template is None or not is_sharded(template):
        return saved.read(name)
    part = torch.empty(local_part(template).shape, dtype=saved.stub(name).dtype)
    box = held_box(template, name)
    if box is not None and part.numel():
        saved.read_into(part, name, box)
    return like(part, template, template.shape)


def read_parts(saved: Saved, copies: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Copy what this rank holds of stored tensors into live ones. Mutates them.

    Args:
        saved: the checkpoint.
        copies: live tensors, each of which tells the part, and the names of stored ones.
    """
    parts = ((local_part(live), name, held_box(live, name)) for live, name in copies)
    saved.read_all((part, name, box) for part, name, box in parts if box is not None and part.numel())


def try_risky(changes: Changes) -> list[Action]:
    """Make the changes that can fail; return what undoes them, last first. Undoes all if one fails.

    Raises:
        CheckpointError: an object refused its state; `where` names the item.
    """
    undo: list[Action] = []
    for where, change, back in changes.risky:
        undo.insert(0, back)
        try:
            change()
        except Exception as error:
            kept = "nothing has been changed" if rollback(undo) else "it did not take its former state back either"
            raise CheckpointError(
                f"an object refused its state: {type(error).__name__}: {error}",
                where=where,
                fix=f"Build it the way it was when it was saved; {kept}.",
            ) from error
    return undo


def rollback(undo: list[Action]) -> bool:
    """Undo changes, each whether or not another one can be undone; return whether all were."""
    undone = True
    for back in undo:
        try:
            back()
        except Exception:
            undone = False
    return undone
