# SPDX-License-Identifier: Apache-2.0
"""Stores of process groups: without their prefixes, and with a time limit for answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage] - documented

T = TypeVar("T")

SILENCE_S = 2.0  # limit for the answer of a store


def bare_store(store: Store) -> Store:
    """Return the store inside of prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def append_note(store: Store, key: str, note: str) -> None:
    """Add a note without spaces to those under a key."""
    cast(Any, store).append(key, f"{note} ")


def read_notes(store: Store, key: str) -> list[str]:
    """Return the notes under a key, in the order of their coming."""
    return store.get(key).decode().split() if store.check([key]) else []


def answer_of(question: Callable[[], T], seconds: float = SILENCE_S) -> T | None:
    """Return the answer of a store; None after the limit.

    A thread asks, because a stopped server keeps its clients waiting for ever.
    """
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
