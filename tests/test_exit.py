# SPDX-License-Identifier: Apache-2.0
"""Closing is safe whatever the user still holds: processes that leave a session end with status 0."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from processes import ending, patience, same_path, script_ranks

from accel.comm import _lost

ROUNDS = """
import gc, os, sys
import torch, torch._dynamo, accel, accel.training
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from processes import free_port
from steps import begin_batch

def rank(number, port, mesh):
    environ = dict(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if adopted:
        os.environ.update(environ)
        dist.init_process_group("gloo")
        ctx = accel.from_group(dist.group.WORLD, device="cpu")
        train(ctx)
        accel.close(ctx)
        dist.destroy_process_group()
        kept.clear()  # the wrapped model frees the group, and holds the GIL while it does
        return
    with accel.session(environ, device="cpu", mesh=mesh) as ctx:
        if not mesh:
            ctx = accel.replace(ctx, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
        train(ctx)

def train(ctx):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = accel.train_state(ctx)
    for _ in range(3):
        state = accel.backward(ctx, model(torch.ones(2, 4)).sum(), begin_batch(ctx, state))
        state = accel.optimizer_step(ctx, optimizer, state)
        accel.gather(ctx, torch.ones(3))
    if starved:  # then only what nobody else wants to compute with is theirs: they come late to what follows
        for thread in os.listdir("/proc/self/task"):
            if "pt_gloo" in open(f"/proc/self/task/{thread}/comm").read():
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        accel.gather(ctx, torch.ones(3))
        dist.all_reduce(torch.ones(100_000))
    kept.append((ctx, model, optimizer))  # alive until the interpreter ends

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # what imports have made: collections of a child walk what the child has made
kept, statuses, starved, adopted = [], [], "starved" in sys.argv, "adopted" in sys.argv
for at in range(int(sys.argv[1])):
    port, children = free_port(), []
    for number in range(2):
        if not (child := os.fork()):
            rank(number, port, "dp=1,tp=2" if at % 2 else "")
            sys.exit(0)
        children.append(child)
    statuses += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert not any(statuses), statuses
print(len(statuses), "exits")
"""


ENDS = """
import gc
import torch, accel, accel.training
from accel.comm._lost import thread_states

def train():
    with accel.session(device="cpu", mesh="dp=1") as ctx:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=ctx.comm.group)
        model(torch.ones(2, 4)).sum().backward()
        assert thread_states(), "gloo's threads have another name now"

train()
gc.collect()
assert not thread_states(), "something holds the group"
"""


def run_rounds(tmp_path: Path, rounds: int, *words: str) -> str:
    script = tmp_path / "rounds.py"
    script.write_text(ROUNDS)
    command = [sys.executable, str(script), str(rounds), *words]
    done = subprocess.run(command, env=same_path(), capture_output=True, text=True, timeout=patience(600))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.multiprocess
@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.nightly)])
def test_exits_with_a_wrapped_model_and_a_mesh_alive(tmp_path: Path, rounds: int) -> None:
    assert f"{2 * rounds} exits" in run_rounds(tmp_path, rounds)


@contextlib.contextmanager
def busy_machine(processes: int) -> Generator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    with ending(others):
        yield


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux")
@pytest.mark.parametrize("group", ["opened", "adopted"])
def test_exits_while_gloo_s_threads_have_something_to_drop(group: str, tmp_path: Path) -> None:
    with busy_machine(1 + (os.cpu_count() or 1)):
        assert "10 exits" in run_rounds(tmp_path, 5, "starved", group)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux")
def test_a_group_ends_when_nothing_of_the_user_s_holds_it(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with script_ranks(script, [{}], folder=tmp_path) as (process,):
        assert process.wait(120) == 0, process.said()


@pytest.mark.parametrize(
    ("seen", "looks"),
    [([[]], 1), ([["S"], ["S"]], 2), ([["S", "R"], ["S", "S"], ["D", "S"], ["S", "S"], ["S", "S"]], 5)],
)
def test_closing_waits_until_threads_look_idle_twice(
    monkeypatch: pytest.MonkeyPatch, seen: list[list[str]], looks: int
) -> None:
    states = iter(seen)
    monkeypatch.setattr(_lost, "thread_states", lambda: next(states))
    _lost.await_idle_threads()
    assert len(seen) - len([*states]) == looks


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lost, "_LONGEST_S", 0.05)
    monkeypatch.setattr(_lost, "thread_states", lambda: ["R"])
    _lost.await_idle_threads()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux")
def test_a_thread_may_have_a_name_that_is_no_text() -> None:
    """The system cuts names after 15 bytes, in the middle of a letter if need be."""
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    before, known = name.read_bytes().rstrip(), len(_lost.thread_states())
    try:
        name.write_bytes("ä".encode()[:1])
        assert len(_lost.thread_states()) == known
    finally:
        name.write_bytes(before)
