# SPDX-License-Identifier: Apache-2.0
"""Each rank's random streams, as its row of the checkpoint holds them, checked before any stream is touched."""

from __future__ import annotations

import importlib
import random

import torch

from accel import xla
from accel.checkpoint import RANKS, Saved
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.items._rows import Row
from accel.random import Key, RngState, restore_rng, seed_rng

_NUMPY_WORDS = 624


def check_rng(ctx: DistContext, saved: Saved, row: Row | None) -> RngState | None:
    """Return this rank's stored streams, None if the run was another set-up, whose streams have no meaning here.

    Raises:
        CheckpointError: they are nothing that the streams take.
    """
    if row is None:
        return None
    state, where = row.rng, f"{saved.path}, tensor {RANKS}"
    try:
        _rehearse(state, ctx.device)
    except (ValueError, TypeError, RuntimeError, OverflowError, ImportError) as error:
        raise CheckpointError(f"not a state of random streams: {error}", where=where) from error
    here = [] if ctx.device.type == "cpu" else [ctx.device.type]
    return state if [kind for kind, _ in state.devices] == here else None


def apply_rng(ctx: DistContext, saved: Saved, state: RngState | None) -> None:
    """Put this rank's streams back, or seed them from the checkpoint's digest and the rank's place. Mutates them."""
    if state is not None:
        restore_rng(state, ctx.device)
        return
    seed = int(saved.digest[:15], 16)
    place, places = ctx.data_parallel
    seed_rng(Key(seed).fold_in("load_state", places, place), ctx.device)


def _rehearse(state: RngState, device: torch.device) -> None:
    """Set streams that nobody draws from, so that setting the real ones cannot fail."""
    version, words, gauss = state.python
    random.Random().setstate((version, words, gauss))
    torch.Generator().set_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    for kind, data in state.devices:
        if kind == "xla" and len(data) != xla.STATE_BYTES:
            raise ValueError(f"XLA's has {xla.STATE_BYTES} bytes")
        if kind == device.type != "xla":
            torch.Generator(device).set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if state.numpy is not None:
        importlib.import_module("numpy")  # the state says that the run used it
        key, position, _, _ = state.numpy
        if len(key) != _NUMPY_WORDS * 4 or not 0 <= position <= _NUMPY_WORDS:
            raise ValueError("numpy's words or position are out of range")
