# SPDX-License-Identifier: Apache-2.0
"""Messages and bytes of checked calls, a save and a load, counted on 2 to 1,024 simulated ranks.

    python tests/benchmarks/many_ranks.py [--ranks 2 8 64 128 256 512 1024] [--calls "one flag" reduce]

Every call is made twice: with the first message of every rank sent to all, as up to 64 ranks, and as it is made. A
figure is that of the rank with most, before that of the median rank where this differs. Each transfer counts as its
backend makes it:

- a message between two ranks is one message of its size;
- an all-to-all, and a ring all-gather of gloo or NCCL, send and receive W - 1 messages of a rank's size;
- gloo's all-reduce goes round a ring twice, in 2 (W - 1) messages of a part each; NCCL's small ones use a tree;
- a broadcast goes down a binomial tree.

Steps are the messages that wait for one another: 1 for an all-to-all, W - 1 for a ring.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import accel
from accel.comm import Comm, _message, _torch
from accel.comm._rounds import gather_rounds, gather_to_rounds, reduction_rounds
from accel.testing import Simulator
from accel.testing._group import SimulatedGroup

RANKS = (2, 8, 64, 128, 256, 512, 1024)


@dataclass
class Count:
    """What one rank has sent and received."""

    sent: int = 0
    received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    steps: int = 0

    def add(self, sent: int, received: int, size: int, steps: int) -> None:
        """Add messages of one size."""
        self.sent += sent
        self.received += received
        self.sent_bytes += sent * size
        self.received_bytes += received * size
        self.steps += steps

    @property
    def messages(self) -> int:
        """The larger of both directions, which a link carries at once."""
        return max(self.sent, self.received)

    @property
    def nbytes(self) -> int:
        """The larger of both directions."""
        return max(self.sent_bytes, self.received_bytes)


class Network:
    """Counts the transfers of all ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.counts = [Count() for _ in range(ranks)]

    def clear(self) -> None:
        """Begin to count anew."""
        self.counts = [Count() for _ in range(self.ranks)]

    def first_to_all(self, comm: Comm, message: bytearray) -> None:
        """Count the first message of a small group."""
        self._to_all(comm.rank, len(message), at_once=len(message) * comm.size <= _torch._AT_ONCE_BYTES)

    def first_reduced(self, comm: Comm, message: bytearray, *_: Any) -> None:
        """Count the first message of a large group, whose schedule is that of real ranks."""
        rounds = reduction_rounds(comm.rank, comm.size)
        sent = sum(each.target is not None for each in rounds)
        received = sum(each.source is not None for each in rounds)
        self.counts[comm.rank].add(sent, received, len(message), len(rounds))

    def rounds(self, comm: Comm, _: torch.Tensor, mine: torch.Tensor, *, dst: int | None = None) -> None:
        """Count a gather in rounds."""
        rank, size = comm.rank, comm.size
        for block in gather_rounds(rank, size) if dst is None else gather_to_rounds(rank, size, dst):
            sent, received = block.target is not None, block.source is not None
            count = self.counts[comm.rank]
            count.add(int(sent), int(received), 0, 1)
            count.sent_bytes += block.sent * mine.nbytes
            count.received_bytes += block.received * mine.nbytes

    def all_to_all(self, group: SimulatedGroup, output: torch.Tensor, *_: Any) -> None:
        """Count one message to each."""
        self._to_all(group.rank(), output.nbytes // self.ranks, at_once=True)

    def all_gather(self, group: SimulatedGroup, _: Any, inputs: list[torch.Tensor], *__: Any) -> None:
        """Count a ring."""
        self._to_all(group.rank(), inputs[0].nbytes, at_once=False)

    def all_reduce(self, group: SimulatedGroup, tensors: list[torch.Tensor], _: Any) -> None:
        """Count gloo's ring, twice round."""
        others = self.ranks - 1
        part = -(-tensors[0].nbytes // self.ranks)
        self.counts[group.rank()].add(2 * others, 2 * others, part, 2 * others)

    def broadcast(self, group: SimulatedGroup, tensors: list[torch.Tensor], options: Any) -> None:
        """Count a binomial tree."""
        rounds = gather_to_rounds(group.rank(), self.ranks, options.rootRank)  # the same tree the other way
        sent = sum(each.source is not None for each in rounds)
        received = sum(each.target is not None for each in rounds)
        self.counts[group.rank()].add(sent, received, tensors[0].nbytes, (self.ranks - 1).bit_length())

    def send(self, group: SimulatedGroup, tensors: list[torch.Tensor], *_: Any) -> None:
        """Count a message sent."""
        self.counts[group.rank()].add(1, 0, tensors[0].nbytes, 1)

    def receive(self, group: SimulatedGroup, tensors: list[torch.Tensor], *_: Any) -> None:
        """Count a message received; several come at once, in the step of their senders."""
        self.counts[group.rank()].add(0, 1, tensors[0].nbytes, 0)

    def _to_all(self, rank: int, size: int, *, at_once: bool) -> None:
        others = self.ranks - 1
        self.counts[rank].add(others, others, size, 1 if at_once else others)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count during the block."""
        places: list[tuple[Any, str, Callable[..., None]]] = [
            (_message, "start_gathered", self.first_to_all),
            (_message, "start_range", self.first_reduced),
            (_torch, "start_gather", self.rounds),
            (SimulatedGroup, "all_to_all_single", self.all_to_all),
            (SimulatedGroup, "all_gather_single_coalesced", self.all_gather),
            (SimulatedGroup, "allreduce", self.all_reduce),
            (SimulatedGroup, "broadcast", self.broadcast),
            (SimulatedGroup, "send", self.send),
            (SimulatedGroup, "recv", self.receive),
        ]
        with ExitStack() as stack:
            for owner, name, count in places:
                _ = stack.enter_context(patch.object(owner, name, _counted(getattr(owner, name), count)))
            yield


def _counted(run: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
    def counted(*values: Any, **options: Any) -> Any:
        count(*values, **options)
        return run(*values, **options)

    return counted


def _items() -> dict[str, Any]:
    model = nn.Linear(16, 16)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


X = torch.zeros(4)
CALLS: dict[str, Callable[[accel.DistContext, str], object]] = {
    "one flag": lambda ctx, _: accel.any_rank(ctx, False),
    "reduce": lambda ctx, _: accel.reduce(ctx, X),
    "broadcast": lambda ctx, _: accel.broadcast(ctx, X),
    "gather": lambda ctx, _: accel.gather(ctx, X),
    "gather_object": lambda ctx, _: accel.gather_object(ctx, {"loss": float(ctx.rank)}),
    "save_state": lambda ctx, folder: accel.save_state(ctx, folder, _items(), step=1),
    "load_state": lambda ctx, folder: accel.load_state(ctx, folder, _items()),
}


def measure(ranks: int, names: list[str], *, large: bool) -> dict[str, str]:
    """Return messages, bytes and steps by call, as text."""
    network = Network(ranks)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, Simulator() as simulator, network.watching():
        for name in names:

            def body(ctx: accel.DistContext, name: str = name) -> None:
                if not large:
                    ctx.comm.most_gathered = ranks
                _ = CALLS[name](ctx, folder)

            network.clear()
            _ = simulator.run(body, ranks, timeout_s=600)
            counts = network.counts
            messages = _most([count.messages for count in counts])
            found[name] = f"{messages}, {_most([count.nbytes for count in counts], _size)}, {counts[-1].steps}"
    return found


def _most(values: list[int], text: Callable[[int], str] = str) -> str:
    """Return the largest as text, and the median where it is not the same."""
    most, usual = text(max(values)), text(int(median(values)))
    return most if most == usual else f"{most} / {usual}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1024:.3g} KiB" if nbytes < 1000 * 1024 else f"{nbytes / 1024 / 1024:.3g} MiB"


def main() -> None:
    """Print two lines for each call."""
    parser = argparse.ArgumentParser(description="Messages and bytes of calls, by number of ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    flags = parser.parse_args()
    names = [name for name in CALLS if name in flags.calls]
    if "load_state" in names and "save_state" not in names:
        names.insert(-1, "save_state")
    ways = {"to all": False, "as it is": True}
    found = {way: [measure(ranks, names, large=large) for ranks in flags.ranks] for way, large in ways.items()}
    print(f"| call | | {' | '.join(map(str, flags.ranks))} |\n|---|---|{'---|' * len(flags.ranks)}")
    for name in names:
        for way in ways:
            print(f"| {name} | {way} | {' | '.join(counts[name] for counts in found[way])} |")


if __name__ == "__main__":
    main()
