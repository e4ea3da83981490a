# SPDX-License-Identifier: Apache-2.0
"""What a call through the door to streams adds to the call of torch behind it.

    python tests/benchmarks/streams.py

Streams, events and tensors are stand-ins that do nothing, so the difference is the door's own Python. Printed is the
least time of a call in 31 alternating blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from accel.comm._streams import TorchStreams

CALLS, BLOCKS = 20_000, 31


class Nothing:
    """A stream, an event and a tensor without a device."""

    device = torch.device("cpu")

    def record_event(self) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_stream(self, stream: object) -> None: ...
    def copy_(self, source: object, *, non_blocking: bool) -> None: ...


def pairs() -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return each call by torch alone and through the door."""
    door, it = TorchStreams(torch.device("cpu")), Nothing()
    given: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "record": (it.record_event, lambda: door.record(it)),
        "wait": (lambda: it.wait_event(it), lambda: door.wait(it, it)),
        "synchronize": (it.synchronize, lambda: door.synchronize(it)),
        "copy": (lambda: it.copy_(it, non_blocking=True), lambda: door.copy(it, it)),  # type: ignore[arg-type]
        "last_use": (lambda: it.record_stream(it), lambda: door.last_use(it, it)),  # type: ignore[arg-type]
        "on": (lambda: it, lambda: door.on(it)),
        "holds": (lambda: it.device == door.device, lambda: door.holds(it)),  # type: ignore[arg-type]
    }
    return given


def spent(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        _ = call()
    return (time.perf_counter() - began) / CALLS * 1e6


def main() -> None:
    for name, (alone, through) in pairs().items():
        found = [(spent(alone), spent(through)) for _ in range(BLOCKS)]
        least = [min(each) for each in zip(*found, strict=True)]
        print(
            f"{name:12s} {least[0]:6.3f} us alone, {least[1]:6.3f} us through the door: {least[1] - least[0]:+.3f} us"
        )


if __name__ == "__main__":
    main()
