# SPDX-License-Identifier: Apache-2.0
"""The same collectives on two real gloo processes and on two simulated ranks give the same numbers."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from accel.testing import simulate_groups

FLOATS, INTEGERS = ("float32", "float64", "bfloat16"), ("int32", "int64", "uint8")
ROUNDS = 60


def _program(seed: int) -> list[dict]:
    """Draw calls; both sides read this list."""
    draw = random.Random(seed)
    calls = []
    for number in range(ROUNDS):
        dtype = draw.choice(FLOATS + INTEGERS)
        ops = ["SUM", "PRODUCT", "MIN", "MAX", *(["AVG"] if dtype in FLOATS else ["BAND", "BOR", "BXOR"])]
        names = ["all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "gather", "scatter"]
        names += ["reduce_scatter", "reduce_scatter_single", "all_to_all_single", "objects", "messages"]
        shape = [draw.randint(0, 3) for _ in range(draw.randint(1, 3))]
        call = {"name": draw.choice(names), "dtype": dtype, "op": draw.choice(ops), "root": draw.randint(0, 1)}
        calls.append({**call, "shape": shape, "seed": number, "async": draw.random() < 0.5})
    return calls


def _run(group, calls: list[dict]) -> list[list]:
    return [_one(group, call) for call in calls]


def _one(group, call: dict) -> list:
    rank, size, root = group.rank(), group.size(), call["root"]
    generator = torch.Generator().manual_seed(call["seed"] * 2 + rank)
    shape, dtype = tuple(call["shape"]), getattr(torch, call["dtype"])
    op, later = getattr(dist.ReduceOp, call["op"]), call["async"]
    x = torch.randint(1, 9, (size, *shape), generator=generator).to(dtype)
    row, rows = x[0].clone(), [torch.zeros_like(x[0]) for _ in range(size)]
    flat = x.new_zeros(size * row.numel())
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    parts = [part.clone() for part in x]
    mine = rank == root
    match call["name"]:
        case "all_reduce":
            work, out = dist.all_reduce(row, op, group, later), [row]
        case "reduce":
            work, out = dist.reduce(row, op=op, group=group, async_op=later, group_dst=root), [row] if mine else []
        case "broadcast":
            work, out = dist.broadcast(row, group=group, async_op=later, group_src=root), [row]
        case "all_gather":
            work, out = dist.all_gather(rows, row, group, later), rows
        case "all_gather_single":
            work, out = gather_single(flat, row.reshape(-1), group=group, async_op=later), [flat]
        case "gather":
            work = dist.gather(row, rows if mine else None, group=group, async_op=later, group_dst=root)
            out = rows
        case "scatter":
            work = dist.scatter(row, parts if mine else None, group=group, async_op=later, group_src=root)
            out = [row]
        case "reduce_scatter":
            work, out = dist.reduce_scatter(row, parts, op, group, later), [row]
        case "reduce_scatter_single":
            work, out = scatter_single(row.reshape(-1), x.reshape(-1), op=op, group=group, async_op=later), [row]
        case "all_to_all_single":
            out = [torch.zeros_like(x)]
            work = dist.all_to_all_single(out[0], x, group=group, async_op=later)
        case "objects":
            found = [None] * size
            dist.all_gather_object(found, {"rank": rank, "shape": list(shape)}, group=group)
            return found
        case _:
            sending = dist.isend(row, group=group, group_dst=1 - rank)
            work, out = dist.irecv(rows[0], group=group, group_src=1 - rank), [rows[0]]
            sending.wait()
    if work is not None:
        work.wait()
    return [tensor.double().tolist() for tensor in out]


def _process(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    print(json.dumps(_run(dist.group.WORLD, json.loads(sys.stdin.read()))), flush=True)
    dist.destroy_process_group()


@pytest.mark.multiprocess
def test_simulated_ranks_equal_gloo_processes():
    calls = _program(seed=2026)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # finds a free port
    port = store.port
    del store
    command = [sys.executable, "-W", "ignore", __file__]
    processes = [
        subprocess.Popen([*command, str(rank), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        process.stdin.write(json.dumps(calls))
        process.stdin.close()
    real = []
    for process in processes:
        real.append(json.loads(process.stdout.read()))
        process.stdout.close()
        assert process.wait(timeout=30) == 0
    for rank, got in enumerate(simulate_groups(lambda group: _run(group, calls), 2, seed=1)):
        for call, simulated, expected in zip(calls, got, real[rank], strict=True):
            assert simulated == expected, f"rank {rank}: {call}"


if __name__ == "__main__":
    _process(int(sys.argv[1]), int(sys.argv[2]))
