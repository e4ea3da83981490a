# SPDX-License-Identifier: Apache-2.0
"""Items of which each rank has a part: what it says of its own before a save, and what all of them make together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from accel.checkpoint import Content
from accel.training._optimizers import OptimizerValue, join_optimizers
from accel.training._zero import is_zero


def own_values(items: Mapping[str, object], content: Content) -> bytes:
    """Return this rank's value of every item of which it has a part; nothing if there is none. No communication."""
    own = {name: content.items[name].value for name, item in items.items() if is_zero(item)}
    return msgspec.msgpack.encode(own) if own else b""


def join_values(content: Content, said: Sequence[bytes]) -> Content:
    """Return what a rank brings to a checkpoint, with the values that all ranks make together.

    Args:
        content: this rank's.
        said: what each rank gave by `own_values`.

    Raises:
        CheckpointError: the parts do not go together; alike on every rank.
    """
    if not any(said):
        return content
    ranks = [msgspec.msgpack.decode(each, type=dict[str, Any]) for each in said if each]
    items = dict(content.items)
    for name in ranks[0]:
        values = [msgspec.convert(rank[name], OptimizerValue) for rank in ranks if name in rank]
        items[name] = msgspec.structs.replace(items[name], value=msgspec.to_builtins(join_optimizers(values, name)))
    return dataclasses.replace(content, items=items)
