# SPDX-License-Identifier: Apache-2.0
"""Train on a stream of text in shards, and resume in the middle of a shard after a crash, without reading it anew.

    python examples/streaming.py
    accel launch --nproc-per-node 2 examples/streaming.py

An `IterableDataset` with `state_dict` and `load_state_dict` reports its position: shard and line. The checkpoint holds
the position of the batch, not of samples that were read ahead. With `stream="dispatch"` rank 0 reads and sends each
rank its part, so the batches are the same on any number of processes. With `stream="shards"` each rank reads separate
shards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, IterableDataset

import accel

LENGTH = 64  # bytes of a line that the model sees


class Lines(IterableDataset[bytes]):
    """Lines of the files of a folder, which come in another order in each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.epoch, self.shard, self.line = folder, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; `batches` calls it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[bytes]:
        paths = sorted(self.folder.glob("*.txt"))
        while self.shard < len(paths):
            path = paths[accel.data.order(0, self.epoch, len(paths))[self.shard]]
            lines = path.read_bytes().splitlines()
            while self.line < len(lines):
                self.line += 1  # before the line is handed on: the state is that after it
                yield lines[self.line - 1]
            self.shard, self.line = self.shard + 1, 0
        self.shard = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position behind the latest line."""
        return {"shard": self.shard, "line": self.line}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self.shard, self.line = state["shard"], state["line"]


def collate(lines: list[bytes]) -> Tensor:
    """Return lines as bytes [lines, LENGTH], with zeros behind shorter ones."""
    rows = [torch.tensor(list(line[:LENGTH].ljust(LENGTH, b"\0"))) for line in lines]
    return torch.stack(rows)


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a model of `size` channels to tell the next byte of each line, for so many steps."""
    accel.seeding.set_seed(ctx, 0)
    with accel.main_process_first(ctx):  # rank 0 writes the shards, the others find them
        write_shards(Path(out, "shards"))
    net = NextByte(size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    plain = DataLoader(Lines(Path(out, "shards")), batch_size=32, collate_fn=collate)
    loader = accel.prepare_loader(ctx, plain, stream="dispatch", global_batch=32)
    model, optimizer = accel.prepare(ctx, net, optimizer)

    every = max(1, steps // 20)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every)]
    with accel.tracking(ctx, "streaming", to=to, config={"size": size}, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            lines = batch.data * batch.mask.to(ctx.device)[:, None]  # a placeholder has no byte that counts
            count = (lines != 0).sum()
            pair = {"inputs": lines, "targets": lines}
            state, loss = accel.train_step(ctx, state, batch, model, optimizer, loss_sum, weight=count, **pair)
            values, _ = accel.metrics.running_metrics(loss="mean").add(count, loss=loss).read(ctx)
            accel.log(ctx, trackers, values, step=state.updates)
            if state.updates % every == 0 or state.updates == steps:
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of all bytes but those behind the end of a line."""
    return cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")


def write_shards(folder: Path) -> None:
    """Write Python's manual as eight files of lines, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line for name in sorted(topics) for line in topics[name].splitlines() if line.strip()]
    for shard in range(8):
        path = folder / f"{shard}.txt"
        if not path.exists():
            path.write_text("\n".join(lines[shard::8]))


class NextByte(nn.Module):
    """A causal convolution over the bytes before: logits [lines, LENGTH, 256] of each byte of a line."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size)
        self.layers = nn.ModuleList(nn.Conv1d(size, size, 4, dilation=4**depth) for depth in range(2))
        self.head = nn.Linear(size, 256)

    def forward(self, lines: Tensor) -> Tensor:
        hidden = self.bytes(pad(lines, (1, -1))).mT  # each place sees the bytes before it
        for layer in self.layers:
            hidden = hidden + layer(pad(hidden, (3 * layer.dilation[0], 0))).relu()
        return self.head(hidden.mT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--size", type=int, default=96, help="channels of the model")
    parser.add_argument("--out", default="runs/streaming", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
