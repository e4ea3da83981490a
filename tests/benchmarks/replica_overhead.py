# SPDX-License-Identifier: Apache-2.0
"""Time of one step of two replica groups against torchft used by hand.

    OMP_NUM_THREADS=1 accel launch --device cpu --nproc-per-node 2 tests/benchmarks/replica_overhead.py

Each of the two processes is a replica group. Both ways train the same transformer blocks on the same batches, and clip,
in blocks of steps that alternate within one run. By hand the groups agree as accel has them do, before the forward, so
that whoever joins takes part at once; "by hand, meanwhile" is torchft's default, which agrees during the forward.
Printed are the median times of a step, the median over blocks of the ratio to "by hand" in the same round, and the
least CPU time of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from fsdp import Loop, make_batch, make_model, measure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.engines import torchft

BY_HAND = "by hand"


@contextlib.contextmanager
def by_hand(rank: int, lighthouse: str, shape: tuple[int, int], *, meanwhile: bool) -> Generator[Loop]:
    """The loop of torchft's documentation."""
    import torchft as ft

    net = make_model(*shape)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    exchange = ft.ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = ft.Manager(
        pg=exchange,
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=meanwhile,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"hand{rank}",
        hostname=socket.gethostname(),
    )
    model = ft.DistributedDataParallel(manager, net)
    optimizer = ft.Optimizer(manager, inner)
    inputs, targets = make_batch(accel.single(), shape[0])

    def loop(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()  # begins the step
            nn.functional.cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()

    try:
        yield loop
    finally:
        manager.shutdown(wait=False)
        exchange.shutdown()


@contextlib.contextmanager
def with_accel(rank: int, lighthouse: str, shape: tuple[int, int]) -> Generator[Loop]:
    """The loop of the page on replica groups, its batch made once."""
    ctx = accel.single()
    model = make_model(*shape)
    model, optimizer = accel.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    tensors = make_batch(ctx, shape[0])
    rows = len(tensors[0])
    loader = accel.prepare_loader(ctx, DataLoader(TensorDataset(*tensors), rows), global_batch=rows)
    start = accel.Cursor()
    batch = msgspec.structs.replace(next(iter(accel.batches(ctx, loader))), start=start, next=start, is_last=False)
    items = {"model": model, "optimizer": optimizer}
    with torchft.replica(ctx, lighthouse=lighthouse, name=f"accel{rank}", min_replicas=2) as group:
        state = accel.train_state(ctx)

        def loop(count: int) -> None:
            nonlocal state
            for _ in range(count):
                turn = torchft.begin_step(group, state, items)
                state = turn.state.next(batch)
                with accel.accumulate(ctx, state, model):
                    inputs, targets = batch.data
                    state = accel.backward(ctx, nn.functional.cross_entropy(model(inputs), targets), state)
                state, report = torchft.optimizer_step(group, turn, optimizer, state, max_norm=1.0)
                assert report.groups == 2

        yield loop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--count", type=int, default=20, help="steps in a block")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = given.width, given.depth
    with accel.session() as ctx, contextlib.ExitStack() as opened:
        places = [""] * 3
        if ctx.is_main_process:
            places = [opened.enter_context(torchft.lighthouse(min_replicas=2)) for _ in places]
        first, second, third = accel.broadcast_object_list(ctx, places)
        loops = {
            "accel": opened.enter_context(with_accel(ctx.rank, first, shape)),
            BY_HAND: opened.enter_context(by_hand(ctx.rank, second, shape, meanwhile=False)),
            "by hand, meanwhile": opened.enter_context(by_hand(ctx.rank, third, shape, meanwhile=True)),
        }
        times, cpu = measure(loops, given.rounds, given.count)
        for name, each in times.items():
            ratio = statistics.median(own / hand for own, hand in zip(each, times[BY_HAND], strict=True))
            wall = f"{statistics.median(each) * 1e3:8.2f} ms  {ratio:5.2f}x"
            accel.print(ctx, f"{name:20} {wall}  CPU {cpu[name] * 1e3:8.2f} ms")
        accel.wait_for_everyone(ctx)


if __name__ == "__main__":
    main()
