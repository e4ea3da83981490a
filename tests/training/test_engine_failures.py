# SPDX-License-Identifier: Apache-2.0
"""A rank that fails between the collectives of an engine: its peers are told within seconds, not at the time-out."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import job, script_ranks

SCRIPT = """
import sys, time
import msgspec, torch, torch.distributed as dist
from torch import nn

sys.path.insert(0, sys.argv[1])
import accel, fake_engine
from accel.parallel._engines import ENGINES

torch.set_num_threads(1)
fails = set()
groups = []


def prepare(ctx, objects):
    groups.append(dist.new_group())  # as DeepSpeed has one of its own
    return fake_engine.make(ctx).prepare(ctx, objects)


def items(ctx, items):
    for turn in range(3):
        if turn == 1 and ctx.rank in fails:
            raise ValueError("exp_avg not found")
        dist.all_reduce(torch.ones(1000), group=groups[0])
    return fake_engine.make(ctx).items(ctx, items)


def make(ctx):
    return msgspec.structs.replace(fake_engine.make(ctx), prepare=prepare, items=items)


def told(ctx, call):
    try:
        call()
    except Exception as error:
        print(ctx.rank, type(error).__name__, str(error).replace(chr(10), " "), flush=True)
    else:
        print(ctx.rank, "went on", flush=True)


ENGINES["deepspeed"] = ("__main__", "make")
with accel.session(device="cpu", timeout_s=300) as opened:
    ctx = accel.replace(opened, strategy="deepspeed")
    model = accel.prepare_model(ctx, nn.Linear(30, 30))
    save = lambda: accel.save_state(ctx, sys.argv[2], {"model": model}, step=1)
    gather = lambda: accel.gather(ctx, torch.ones(2))
    fails |= {0, 1, 2}
    told(ctx, save)
    told(ctx, gather)
    fails.clear()
    told(ctx, save)
    fails |= {1}
    began = time.monotonic()
    told(ctx, save)
    print(ctx.rank, "after", time.monotonic() - began, flush=True)
    told(ctx, gather)
"""


@pytest.mark.multiprocess
def test_peers_hear_of_the_error_and_the_context_refuses_further_calls(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT)
    helpers = Path(__file__).parent.parent / "helpers"
    with script_ranks(script, job(3), helpers, tmp_path / "run", folder=tmp_path) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0, 0, 0], [rank.said() for rank in ranks]
        said = [rank.said() for rank in ranks]
    for rank, text in enumerate(said):
        alike, after, saved, alone, seconds, last = [line for line in text.splitlines() if line.startswith(f"{rank} ")]
        assert "exp_avg not found" in alike
        assert after == saved == f"{rank} went on"  # all ranks failed, so nobody waits: the context serves as before
        assert ("ValueError exp_avg" if rank == 1 else "PeerError rank 1 failed in save_state at fails.py") in alone
        assert "exp_avg not found" in alone
        assert float(seconds.split()[-1]) < 30
        assert "PeerError the ranks of this context no longer communicate" in last
        assert "rank 1 failed in save_state" in last
