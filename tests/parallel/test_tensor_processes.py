# SPDX-License-Identifier: Apache-2.0
"""Two real processes that share each layer train as one does, and one process goes on from their checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from processes import job, script_ranks

import accel

SCRIPT = """
import sys

sys.path.insert(0, {folder!r})

import torch
from tensor_models import loader, made, plans, shares_tokens, train

import accel
from accel.parallel.axes.tensor import _overlap


def run(ctx, name, out, overlap=False):
    model = made(fused=True, tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = accel.parallel.Plan(tensor=plans(fused=True)[name], sequence=shares_tokens(name), overlap=overlap)
    model, optimizer, data = accel.prepare(ctx, model, optimizer, loader(7, 4), plan=plan)
    norms = train(ctx, model, optimizer, data, 2, divided=True)
    accel.save_state(ctx, out, {{"model": model, "optimizer": optimizer}}, step=1)
    return norms


if __name__ == "__main__":
    torch.set_num_threads(1)
    with accel.session(device="cpu") as ctx:
        assert ctx.axis("tp").size == 2
        _overlap._LEAST_ROWS = 1
        for name in ("ends", "sequence, ends"):
            run(ctx, name, f"{{sys.argv[1]}}-{{name[:3]}}")
            run(ctx, name, f"{{sys.argv[1]}}-{{name[:3]}}-beside", overlap=True)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SCRIPT.format(folder=str(Path(__file__).parent))
    script, both = tmp_path / "train_divided.py", str(tmp_path / "both")
    script.write_text(source)
    with script_ranks(script, job(2, ACCEL_MESH="tp=2"), both, folder=tmp_path) as ranks:
        assert [rank.wait(200) for rank in ranks] == [0, 0], [rank.said() for rank in ranks]

    monkeypatch.setattr(sys, "path", list(sys.path))
    names = {"__name__": "train_divided"}
    exec(source, names)
    names["run"](accel.single(), "ends", str(tmp_path / "alone"))
    outs = ("alone", "both-end", "both-seq", "both-end-beside", "both-seq-beside")
    ends = [names["made"](2, fused=True, tied=True) for _ in outs]
    for model, out in zip(ends, outs, strict=True):
        accel.load_state(accel.single(), accel.latest_checkpoint(tmp_path / out), {"model": model}, strict=False)
    for model in ends[1:]:
        torch.testing.assert_close(model.state_dict(), ends[0].state_dict(), rtol=0, atol=1e-10)
