# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes that call different things both say so within a second, and go on together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import free_port, script_ranks

SCRIPT = """
import collections, json, sys, time
import torch
import accel

X, Y = torch.zeros(2, 3), torch.zeros(2, 4)
Pair, Other = collections.namedtuple("Pair", "a b"), collections.namedtuple("Other", "a b")
BIG, BIGGER = torch.zeros(300_000), torch.zeros(300_001)

CASES = {
    "another operation": (lambda c: accel.gather(c, X), lambda c: accel.reduce(c, X)),
    "a barrier": (lambda c: accel.gather(c, X), accel.wait_for_everyone),
    "an object": (lambda c: accel.gather(c, X), lambda c: accel.gather_object(c, X)),
    "a vote": (lambda c: accel.any_rank(c, True), accel.wait_for_everyone),
    "another reduction": (lambda c: accel.reduce(c, X), lambda c: accel.reduce(c, X, "max")),
    "another dst": (lambda c: accel.gather(c, X, dst=0), lambda c: accel.gather(c, X, dst=1)),
    "dst or all": (lambda c: accel.gather(c, X), lambda c: accel.gather(c, X, dst=1)),
    "another src": (lambda c: accel.broadcast(c, X, src=0), lambda c: accel.broadcast(c, X, src=1)),
    "another dtype": (lambda c: accel.gather(c, {"a": X}), lambda c: accel.gather(c, {"a": X.double()})),
    "another shape": (lambda c: accel.gather(c, {"a": X}), lambda c: accel.gather(c, {"a": Y})),
    "another shape to reduce": (lambda c: accel.reduce(c, BIG), lambda c: accel.reduce(c, BIGGER)),
    "no dimension": (lambda c: accel.gather(c, [X[0, 0]]), lambda c: accel.gather(c, [X[0]])),
    "another container": (lambda c: accel.gather(c, [X]), lambda c: accel.gather(c, (X,))),
    "another class": (lambda c: accel.gather(c, Pair(X, X)), lambda c: accel.gather(c, Other(X, X))),
    "another key": (lambda c: accel.gather(c, {"a": X}), lambda c: accel.gather(c, {"b": X})),
    "another order of keys": (lambda c: accel.gather(c, {"a": X, "b": X}), lambda c: accel.gather(c, {"b": X, "a": X})),
    "fewer leaves": (lambda c: accel.gather(c, [X, X]), lambda c: accel.gather(c, [X])),
    "no tensor": (lambda c: accel.gather(c, [X]), lambda c: accel.gather(c, [None])),
    "large or small": (lambda c: accel.gather(c, {"a": BIG}), lambda c: accel.gather(c, {"a": X})),
    "another dim to pad": (
        lambda c: accel.pad_across_processes(c, X), lambda c: accel.pad_across_processes(c, X, dim=1)
    ),
    "another value to pad with": (
        lambda c: accel.pad_across_processes(c, X), lambda c: accel.pad_across_processes(c, X, pad_index=1)
    ),
    "another size beside the padded": (
        lambda c: accel.pad_across_processes(c, X), lambda c: accel.pad_across_processes(c, Y)
    ),
    "longer lists": (
        lambda c: accel.broadcast_object_list(c, [1]), lambda c: accel.broadcast_object_list(c, [None, None])
    ),
    "another order of calls": (
        lambda c: (accel.gather(c, X), accel.any_rank(c, True)), lambda c: (accel.any_rank(c, True), accel.gather(c, X))
    ),
    "a call too many": (
        lambda c: [accel.gather(c, X) for _ in range(3)] and accel.wait_for_everyone(c),
        lambda c: [accel.gather(c, X) for _ in range(2)] and accel.wait_for_everyone(c),
    ),
}

said = {}
with accel.session(device="cpu", timeout_s=20) as ctx:
    ctx.comm.most_gathered = int(sys.argv[2])
    for name, calls in CASES.items():
        accel.wait_for_everyone(ctx)
        began = time.monotonic()
        try:
            calls[ctx.rank](ctx)
        except accel.errors.CollectiveMismatch as error:
            said[name] = [time.monotonic() - began, error.expected, error.got]
with open(f"{sys.argv[1]}-{ctx.rank}", "w") as file:
    json.dump(said, file)
"""
SAID = {
    "another operation": ("gather", "reduce"),
    "a barrier": ("gather", "wait_for_everyone"),
    "an object": ("gather", "gather_object"),
    "a vote": ("any_rank", "wait_for_everyone"),
    "another reduction": ("(op=sum)", "(op=max)"),
    "another dst": ("(dst=0)", "(dst=1)"),
    "dst or all": ("(dst=None)", "(dst=1)"),
    "another src": ("(src=0)", "(src=1)"),
    "another dtype": ("($.a: float32[*, 3])", "($.a: float64[*, 3])"),
    "another shape": ("($.a: float32[*, 3])", "($.a: float32[*, 4])"),
    "another shape to reduce": ("($: float32[300000])", "($: float32[300001])"),
    "no dimension": ("($[0]: float32[])", "($[0]: float32[*])"),
    "another container": ("($: list)", "($: tuple)"),
    "another class": ("($: Pair)", "($: Other)"),
    "another key": ("($.a: float32[*, 3])", "($.b: float32[*, 3])"),
    "another order of keys": ("($.a: float32[*, 3])", "($.b: float32[*, 3])"),
    "fewer leaves": ("($[1]: float32[*, 3])", "(nothing)"),
    "no tensor": ("($[0]: float32[*, 3])", "($[0]: NoneType)"),
    "large or small": ("($.a: float32[*])", "($.a: float32[*, 3])"),
    "another dim to pad": ("(dim=0, pad_index=0,", "(dim=1, pad_index=0,"),
    "another value to pad with": ("(dim=0, pad_index=0,", "(dim=0, pad_index=1,"),
    "another size beside the padded": ("($: float32[*, 3])", "($: float32[*, 4])"),
    "longer lists": ("(1 objects)", "(2 objects)"),
    "another order of calls": ("gather", "any_rank"),
    "a call too many": ("gather", "wait_for_everyone"),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("most_gathered", [1, 64], ids=["large group", "small group"])
def test_every_mismatch_is_told_on_both_ranks_within_a_second(tmp_path: Path, most_gathered: int) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(SCRIPT)
    port = free_port()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environs = [common | {"RANK": str(rank)} for rank in range(2)]
    with script_ranks(script, environs, tmp_path / "said", most_gathered, folder=tmp_path) as processes:
        assert [each.wait(120) for each in processes] == [0, 0], [each.said() for each in processes]
    ranks = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    for name, (left, right) in SAID.items():
        for said in ranks:
            assert name in said, f"{name}: no error"
            took_s, expected, got = said[name]
            assert took_s < 10  # milliseconds, usually; the time-out is at 20
            assert expected.startswith("rank 0: ")
            assert got.startswith("rank 1: ")
            assert left in expected
            assert right in got
            assert all(" at wrong.py:" in text and "in <" in text for text in (expected, got))
