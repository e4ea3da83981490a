# SPDX-License-Identifier: Apache-2.0
"""Memory of a load: the result, and a chunk for each reader."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
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
    accel.load_checkpoint_in_model(accel.single("cpu"), model, tmp_path, dtype=dtype, readers=READERS)
    ended.set()
    watcher.join()
    result = sum(each.nbytes for each in model.parameters())
    assert result <= anonymous() - base + MIB
    assert peak - base <= result + READERS * 8 * MIB + 8 * MIB


def test_loads_show_a_bar_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"weight": torch.randn(4, 4)}, tmp_path / "model.safetensors")
    model = nn.Linear(4, 4, bias=False)
    accel.load_checkpoint_in_model(accel.single("cpu"), model, tmp_path, show=True)
    assert capsys.readouterr().err == ""  # no terminal, and done at once
