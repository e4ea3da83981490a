# SPDX-License-Identifier: Apache-2.0
"""Memory of a load: the result, and a chunk for each reader; and of a run: the slots beside that."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from processes import patience
from safetensors.torch import save_file
from torch import nn

import accel

MIB = 1 << 20
READERS = 2


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_peak_is_the_result_and_a_chunk_a_reader(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({f"{at}.weight": torch.randn(4096, 4096).bfloat16() for at in range(3)}, tmp_path / "model.safetensors")
    model = accel.init_empty_weights(lambda: nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(3)]))
    gc.collect()
    base = peak = anonymous()
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), model, tmp_path, dtype=dtype, readers=READERS)
    ended.set()
    watcher.join()
    result = sum(each.nbytes for each in model.parameters())
    assert result <= anonymous() - base + MIB
    assert peak - base <= result + READERS * 8 * MIB + 8 * MIB


RUN = """
import gc
from pathlib import Path
import torch
from torch import nn
import accel

def status(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024

class Net(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

def run(folder, width, blocks):
    model = accel.init_empty_weights(lambda: Net(width, blocks))
    skeleton = accel.bigmodel.describe(model)
    home = {{each.name: "disk" if at > 1 else "cpu" for at, each in enumerate(skeleton.segments)}}
    device_map = accel.bigmodel.DeviceMap(skeleton=skeleton, home=home, runs=dict.fromkeys(home, "cpu"), slots=2)
    with accel.load_checkpoint_and_dispatch(accel.single("cpu"), model, folder, device_map) as run:
        for _ in range(2):
            with torch.no_grad():
                run.model(torch.ones(1, width))
        run.model.requires_grad_(False)
        x = torch.ones(1, width, requires_grad=True)
        run.model(x).sum().backward()  # fetches weights again
        return device_map.used("cpu"), run.stats().moved_bytes

run({small!r}, 512, 4)  # what torch makes once
gc.collect()
base = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
used, moved = run({large!r}, 2048, 12)
print(status("VmHWM") - base, used, moved)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_peak_of_a_run_is_what_the_map_says_and_a_chunk_a_reader(tmp_path: Path) -> None:
    for name, width, blocks in (("small", 512, 4), ("large", 2048, 12)):
        state = {f"blocks.{at}.weight": torch.full((width, width), 1 / width) for at in range(blocks)}
        state |= {f"blocks.{at}.bias": torch.zeros(width) for at in range(blocks)}
        save_file(state, tmp_path / f"{name}.safetensors")
    code = RUN.format(small=str(tmp_path / "small.safetensors"), large=str(tmp_path / "large.safetensors"))
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}  # else glibc keeps some of what is given free
    ended = subprocess.run(
        [sys.executable, "-c", code], timeout=patience(100), capture_output=True, text=True, env=environ
    )
    assert not ended.returncode, ended.stderr
    peak, used, moved = map(int, ended.stdout.split())
    assert moved > 2 * 10 * 16 * MIB
    assert used < 5 * 17 * MIB  # two blocks that stay, two slots
    fetched = 2 * 16 * MIB  # weights that the backward pass fetches: one in use, one to come
    assert peak <= used + fetched + MIB, (peak, used)


def test_loads_show_a_bar_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"weight": torch.randn(4, 4)}, tmp_path / "model.safetensors")
    model = nn.Linear(4, 4, bias=False)
    accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), model, tmp_path, show=True)
    assert capsys.readouterr().err == ""  # no terminal, and done at once
