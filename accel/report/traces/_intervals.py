# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of sets of intervals, each a sorted list of disjoint spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return spans in any order, which may overlap, as a set of intervals. Empty spans vanish."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the part of a set that is not in another one."""
    rest: list[Span] = []
    first = 0
    for start, end in left:
        while first < len(right) and right[first][1] <= start:
            first += 1
        at = first
        while at < len(right) and right[at][0] < end:
            if right[at][0] > start:
                rest.append((start, right[at][0]))
            start = max(start, right[at][1])
            at += 1
        if start < end:
            rest.append((start, end))
    return rest


def intersect(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the part of a set that is in another one, too."""
    return subtract(left, subtract(left, right))


def length(spans: Iterable[Span]) -> float:
    """Return the length of a set."""
    return sum(end - start for start, end in spans)
