# SPDX-License-Identifier: Apache-2.0
"""Loading a checkpoint into memory, from a cold and a warm page cache, beside Accelerate and transformers if installed.

    OMP_NUM_THREADS=1 python tests/benchmarks/big_load.py --gigabytes 1.5 --rounds 3

A Llama with random weights is saved once as safetensors. Each way then builds the model empty, loads it and touches
every page, in turns: "same" in the stored dtype, "cast" from bfloat16 to float32. Printed are the median time, its
ratios to reading the same bytes by O_DIRECT in the round, into one buffer a thread ("reading") and into new memory once
a model is built ("by hand", which casts as well), processor seconds, and the peak of anonymous memory over the size of
the result.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import accel

CHUNK = 8 << 20
READERS = 4


class Row(NamedTuple):
    """One load: seconds until every page is there, processor seconds, peak of anonymous memory over the result."""

    seconds: float
    processor: float
    peak: float


def config(gigabytes: float) -> LlamaConfig:
    """A Llama of about that many bytes in float32."""
    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * 32000 * 1024) / 12.5e6))
    return LlamaConfig(
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        architectures=["LlamaForCausalLM"],
    )


def prepare_cache(folder: Path, *, warm: bool) -> None:
    """Fill the page cache with the files of a folder, or free it of them."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        if warm:
            while os.read(file, CHUNK):
                pass
        else:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_all(folder: Path) -> None:
    """Read the files by O_DIRECT into a buffer for each thread: what the disk takes."""
    jobs = [(path, at) for path in folder.glob("*.safetensors") for at in range(0, path.stat().st_size, CHUNK)]
    buffers = threading.local()
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in jobs}

    def read(job: tuple[Path, int]) -> None:
        if not hasattr(buffers, "memory"):
            buffers.memory = mmap.mmap(-1, CHUNK)
        _ = os.preadv(files[job[0]], [buffers.memory], job[1])

    with ThreadPoolExecutor(READERS) as pool:
        _ = list(pool.map(read, jobs))
    for file in files.values():
        os.close(file)


def by_hand(folder: Path, made: LlamaConfig) -> list[torch.Tensor]:
    """Build empty, and read the files by O_DIRECT into new float32 memory, whatever lies where: what a load takes."""
    with torch.device("meta"):
        _ = LlamaForCausalLM(made)
    stored: torch.dtype = getattr(torch, folder.name)
    buffers = threading.local()
    results: list[torch.Tensor] = []

    def read(file: int, start: int, memory: torch.Tensor) -> None:
        if stored == torch.float32:
            _ = os.preadv(file, [memory.numpy()], start)
            return
        if not hasattr(buffers, "memory"):
            buffers.memory = mmap.mmap(-1, CHUNK)
        got = os.preadv(file, [buffers.memory], start)
        values = torch.frombuffer(buffers.memory, dtype=stored, count=got // stored.itemsize)
        _ = memory[: values.numel()].copy_(values)

    with ThreadPoolExecutor(READERS) as pool:
        jobs: list[Future[None]] = []
        files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in folder.glob("*.safetensors")]
        for file in files:
            size = -(-os.fstat(file).st_size // 4096) * 4096 // stored.itemsize
            memory = mmap.mmap(-1, size * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            results.append(torch.frombuffer(memory, dtype=torch.float32))
            parts = results[-1].split(CHUNK // stored.itemsize)
            jobs += [pool.submit(read, file, at * CHUNK, part) for at, part in enumerate(parts)]
        for job in jobs:
            job.result()
    for file in files:
        os.close(file)
    return results


def by_accel(folder: Path, made: LlamaConfig, dtype: torch.dtype) -> nn.Module:
    """Build empty and load by accel."""
    model = accel.init_empty_weights(lambda: LlamaForCausalLM(made))
    return accel.bigmodel.load_checkpoint_in_model(accel.single("cpu"), model, folder, dtype=dtype, readers=READERS)


def by_accelerate(folder: Path, made: LlamaConfig, dtype: torch.dtype) -> nn.Module:
    """Build empty and load by Accelerate."""
    accelerate: Any = importlib.import_module("accelerate")
    with accelerate.init_empty_weights():
        model = LlamaForCausalLM(made)
    model.model.rotary_emb = type(model.model.rotary_emb)(made)
    return accelerate.load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}, dtype=dtype)


def by_transformers(folder: Path, _made: LlamaConfig, dtype: torch.dtype) -> nn.Module:
    """Load by transformers."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype)


def memory(kind: str) -> int:
    """Bytes of this process's memory of a kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) * 1024


def measure(load: Callable[[], nn.Module | list[torch.Tensor] | None]) -> Row:
    """Load once, and touch every page of the result."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base = peak = memory("RssAnon")
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.004):
            peak = max(peak, memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    processor = time.process_time()
    began = time.perf_counter()
    made = load()
    parameters = list(made.parameters()) if isinstance(made, nn.Module) else made or []
    for parameter in parameters:
        _ = parameter.data.view(torch.uint8).view(-1)[::4096].sum()
    seconds = time.perf_counter() - began
    processor = time.process_time() - processor
    ended.set()
    watcher.join()
    size = sum(parameter.nbytes for parameter in parameters)
    return Row(seconds, processor, (peak - base) / size if size else 0.0)


def main() -> None:
    """Measure each way in turns, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    made = config(args.gigabytes)
    ways: dict[str, Callable[[Path, LlamaConfig, torch.dtype], nn.Module]] = {"accel": by_accel}
    if importlib.util.find_spec("accelerate") is not None:
        ways["Accelerate"] = by_accelerate
    ways["transformers"] = by_transformers
    with tempfile.TemporaryDirectory() as scratch:
        folders = dict(_save(made, Path(scratch)))
        print("case               way           seconds  to reading  to by hand  processor s  peak / result")
        for case, stored in (("same", torch.float32), ("cast", torch.bfloat16)):
            for warm in (False, True):
                rows: dict[str, list[Row]] = {name: [] for name in ("reading", "by hand", *ways)}
                for _ in range(args.rounds):
                    for name, taken in rows.items():
                        prepare_cache(folders[stored], warm=warm and name in ways)
                        taken.append(_one(folders[stored], made, name, ways.get(name)))
                _print(f"{case}, {'warm' if warm else 'cold'}", rows)


def _one(folder: Path, made: LlamaConfig, name: str, way: Callable[..., nn.Module] | None) -> Row:
    if name == "reading":
        return measure(lambda: read_all(folder))
    if way is None:
        return measure(lambda: by_hand(folder, made))
    return measure(lambda: way(folder, made, torch.float32))


def _save(made: LlamaConfig, scratch: Path) -> Iterator[tuple[torch.dtype, Path]]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(made)
    for dtype in (torch.float32, torch.bfloat16):
        folder = scratch / str(dtype).removeprefix("torch.")
        model.to(dtype).save_pretrained(folder, max_shard_size="500MB")
        yield dtype, folder


def _print(case: str, rows: dict[str, list[Row]]) -> None:
    for name, taken in rows.items():
        seconds = statistics.median(row.seconds for row in taken)
        first, second = (
            statistics.median(row.seconds / other.seconds for row, other in zip(taken, rows[way], strict=True))
            for way in ("reading", "by hand")
        )
        processor = statistics.median(row.processor for row in taken)
        peak = max(row.peak for row in taken)
        ratios = f"{first:9.2f}x  {second:9.2f}x"
        print(f"{case:18s} {name:13s} {seconds:7.2f}  {ratios}  {processor:11.2f}  {peak:12.2f}x", flush=True)


if __name__ == "__main__":
    main()
