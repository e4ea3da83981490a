"""Sources of weights: any memory, any layout of files, one truth; and files that are not what they were."""

from __future__ import annotations

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from safetensors.torch import save_file

from accel.bigmodel import WeightSource, open_weights
from accel.errors import CheckpointError, ConfigError
from accel.storage import PAGE, encode_index, stored_dtype

TENSORS = {
    "a": torch.arange(70_000, dtype=torch.float32).view(7, 10_000),
    "b": torch.randn(3, 5, dtype=torch.float64),
    "c": torch.randn(300_001).bfloat16(),
    "d": torch.tensor([True, False, True]),
    "e": torch.tensor(7),
    "f": torch.empty(0, 4),
    "g": torch.randint(0, 255, (5_000_003,), dtype=torch.uint8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    save_file(TENSORS, folder / "model.safetensors")
    sharded = folder / "sharded"
    sharded.mkdir()
    names = [("a", "d", "f"), ("b", "c"), ("e", "g")]
    for at, inside in enumerate(names):
        save_file({name: TENSORS[name] for name in inside}, sharded / f"model-{at + 1:05d}-of-00003.safetensors")
    sizes = {name: tensor.nbytes for name, tensor in TENSORS.items()}
    (sharded / "model.safetensors.index.json").write_bytes(encode_index(names, sizes))
    return folder


def somewhere(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return empty memory for a tensor, at a multiple of its itemsize past a page's start."""
    memory = torch.empty(tensor.nbytes + 2 * PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE + offset // tensor.element_size() * tensor.element_size()
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def assert_law(source: WeightSource, offset: int) -> None:
    targets = {name: somewhere(tensor, offset) for name, tensor in TENSORS.items()}
    source.read(list(targets.items()))
    for name, tensor in TENSORS.items():
        assert torch.equal(targets[name], tensor), name


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("path", ["model.safetensors", "sharded", "sharded/model.safetensors.index.json", "."])
def test_every_layout_gives_the_same_tensors(folder: Path, path: str, direct: bool, cold: bool) -> None:
    if cold:
        for file in folder.rglob("*.safetensors"):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    with open_weights(folder / path, direct=direct) as source:
        assert {name: (entry.dtype, entry.shape) for name, entry in source.entries.items()} == {
            name: (stored_dtype(tensor.dtype), tuple(tensor.shape)) for name, tensor in TENSORS.items()
        }
        offset = source.entries["g"].page_offset
        assert offset is not None
        for place in (0, 8, offset):
            assert_law(source, place)


def test_threads_share_a_source(folder: Path) -> None:
    with open_weights(folder) as source, ThreadPoolExecutor(4) as pool:
        list(pool.map(assert_law, itertools.repeat(source, 8), range(0, 64, 8)))


def test_names_can_be_mapped(folder: Path) -> None:
    with open_weights(folder, rename=lambda name: f"model.{name}") as source:
        assert list(source.entries) == [f"model.{name}" for name in sorted_by_file(folder)]
    with assert_raises(ConfigError, problem="rename gives two tensors the name 'x'"):
        open_weights(folder, rename=lambda name: "x")


def sorted_by_file(folder: Path) -> list[str]:
    with open_weights(folder) as source:
        return list(source.entries)


def test_targets_must_fit(folder: Path) -> None:
    with open_weights(folder) as source:
        for name, tensor in [
            ("a", torch.empty(7, 9_999)),
            ("a", torch.empty(7, 10_000, dtype=torch.float64)),
            ("a", torch.empty(10_000, 7).t()),
            ("a", torch.empty(7, 10_000, device="meta")),
        ]:
            with assert_raises(ConfigError, expected=r"a contiguous CPU tensor of F32 \[7, 10000\]"):
                source.read([(name, tensor)])
        with assert_raises(ConfigError, problem="no such weight"):
            source.read([("z", torch.empty(1))])


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_shrinks_or_changes_is_refused_and_a_replaced_one_stays_the_same(
    tmp_path: Path, direct: bool
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    with open_weights(path, direct=direct) as source:
        (tmp_path / "new").write_bytes(b"other")
        os.replace(tmp_path / "new", path)
        assert_law(source, 0)
    save_file(TENSORS, path)
    with open_weights(path, direct=direct) as source:
        with open(path, "r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"x")
        with assert_raises(CheckpointError, problem="the file changed while it was read", where=r"model\.safetensors"):
            assert_law(source, 0)
    with open_weights(path, direct=direct) as source:
        os.truncate(path, 1_000_000)
        with assert_raises(CheckpointError, problem="too short", where=r"model\.safetensors"):
            assert_law(source, 0)
    with assert_raises(CheckpointError, problem="ends before its tensors do"):
        open_weights(path)


def test_what_is_no_weights_says_so(tmp_path: Path, folder: Path) -> None:
    with assert_raises(ConfigError, problem="no weights at the path"):
        open_weights(tmp_path)
    with assert_raises(ConfigError, got="nothing"):
        open_weights(tmp_path / "nowhere")
    (tmp_path / "model.safetensors.index.json").write_bytes(encode_index([("a",), ("b",)], {"a": 4, "b": 4}))
    with assert_raises(CheckpointError, problem="2 of 2 files are missing"):
        open_weights(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("one", "two"):
        save_file({"same": torch.zeros(2)}, other / f"{name}.safetensors")
    with assert_raises(CheckpointError, problem="two files hold 'same'", got=r"one\.safetensors and two\.safetensors"):
        open_weights(other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_reads_too(folder: Path) -> None:
    with open_weights(folder) as source:
        assert_law(source, 0)  # starts the readers, which the child does not have
        weight = torch.empty_like(TENSORS["b"])
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            source.read([("b", weight)])
            os._exit(0 if weight.equal(TENSORS["b"]) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert_law(source, 0)
