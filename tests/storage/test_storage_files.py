# SPDX-License-Identifier: Apache-2.0
import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from catching import assert_raises
from hypothesis import given, strategies as st

from accel.errors import CheckpointError
from accel.storage import (
    commit,
    dtype_name,
    is_file_name,
    leftovers,
    make_folder,
    make_stage,
    open_directory,
    read_header,
    remove_flat,
    set_aside,
    stored_dtype,
    view_tensors,
    write_file,
    write_tensors,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def make(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    return torch.randint(0, 100, shape).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)


def test_names_of_files_cannot_leave_the_folder() -> None:
    assert all(map(is_file_name, ["manifest.json", "a", "A-1_b.c", "_x", "tensors-00000-of-00001.safetensors"]))
    bad = ["", ".", "..", ".hidden", "-x", "a/b", "../a", "/etc/passwd", "a\\b", "a\n", "a\0", "ä", "a b", "x" * 256]
    assert not any(map(is_file_name, bad))


@given(st.text())
def test_every_accepted_name_stays_inside(name: str) -> None:
    if is_file_name(name):
        assert Path("/folder", name).resolve().parent == Path("/folder")


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.booleans()),
        max_size=8,
    )
)
def test_tensors_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, specs: list) -> None:
    folder = tmp_path_factory.mktemp("t")
    tensors = {f"t{i}.{dtype}": make(dtype, shape) for i, (dtype, shape, _) in enumerate(specs)}
    tensors = {
        k: t.transpose(0, -1) if s[2] and t.dim() else t for (k, t), s in zip(tensors.items(), specs, strict=True)
    }
    entry = write_tensors(folder, "t.safetensors", tensors)
    data = bytearray((folder / "t.safetensors").read_bytes())
    assert entry.size == len(data)
    assert entry.sha256 == (hashlib.sha256(data).hexdigest(),)
    found = view_tensors(memoryview(data), read_header(memoryview(data), "t"))
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        got = torch.view_as_complex(found[key]) if tensor.dtype == torch.complex128 else found[key]
        assert same(got, tensor), key


def test_the_reference_implementation_reads_what_we_write_and_the_reverse(tmp_path: Path) -> None:
    tensors = {dtype_name(d): make(d, (3, 2)) for d in DTYPES if d != torch.complex128} | {"scalar": torch.tensor(2.5)}
    write_tensors(tmp_path, "ours", tensors)
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    assert all(same(theirs[key], tensor) for key, tensor in tensors.items())
    theirs = memoryview(bytearray(safetensors.torch.save(tensors)))
    ours = view_tensors(theirs, read_header(theirs, "theirs"))
    assert all(same(ours[key], tensor) for key, tensor in tensors.items())


def test_every_listed_dtype_has_a_name_and_odd_ones_have_none() -> None:
    assert all(stored_dtype(dtype) for dtype in DTYPES)
    assert stored_dtype(torch.quint8) is None


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_fail_otherwise_than_by_name(data: bytes) -> None:
    try:
        read_header(memoryview(bytearray(data)), "file.safetensors")
    except CheckpointError as error:
        assert error.where == "file.safetensors"  # noqa: PT017


@pytest.mark.parametrize("at_once", [1 << 16, 1 << 24])
def test_large_and_small_chunks_are_written_in_order(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel.storage._files._FLUSH_BYTES", at_once)
    chunks = [b"a", os.urandom(3 << 20), b"b" * 10, memoryview(b"c" * (1 << 20)), b"", b"d"]
    entry = write_file(tmp_path, "f", chunks)
    assert (tmp_path / "f").read_bytes() == b"".join(chunks)
    assert entry.size == sum(map(len, chunks))


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 199))
def test_every_part_of_a_file_has_a_digest_that_finds_damage(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], at: int
) -> None:
    path, data = tmp_path_factory.mktemp("t"), b"".join(chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accel.storage._files.SPAN_BYTES", 16)
        patch.setattr("accel.storage._files._HASH_BYTES", 5)
        entry = write_file(path, "f", chunks)
        spans = [("f", span) for span in entry.spans()]
    assert [data[span.start : span.stop] for _, span in spans] == [data[i : i + 16] for i in range(0, len(data), 16)]
    counted: list[int] = []
    with open_directory(path) as folder:
        folder.check_all(spans, counted.append)
        assert sum(counted) == len(data) == entry.size
        if not data:
            return
        at %= len(data)
        (path / "f").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with assert_raises(CheckpointError, problem="f: damaged", got=f"from {at // 16 * 16} to"):
            folder.check_all(spans)
        (path / "f").write_bytes(data[:at])
        with assert_raises(CheckpointError, problem="f: wrong size", got="its end"):
            folder.check_all(spans)


def test_memory_is_filled_from_anywhere_in_a_file(tmp_path: Path) -> None:
    write_file(tmp_path, "f", [bytes(range(100))])
    memory = bytearray(10)
    with open_directory(tmp_path) as folder:
        folder.read_into("f", 5, memoryview(memory)[2:6])
        assert memory == bytes([0, 0, 5, 6, 7, 8, 0, 0, 0, 0])
        with assert_raises(CheckpointError, problem="wrong size", expected="1 bytes from 100 on", got="its end"):
            folder.read_into("f", 97, memoryview(memory)[:4])


def test_a_file_is_never_overwritten_or_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with assert_raises(CheckpointError, problem="EEXIST"):
            write_file(tmp_path, name, [b"new"])
    assert (tmp_path / "there").read_bytes() == b"x"
    assert not (tmp_path / "elsewhere").exists()


def test_links_pipes_and_folders_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with open_directory(tmp_path) as folder:
        assert bytes(folder.read("real")) == b"x"
        for name, reason in {
            "link": "symbolic link",
            "folder": "Is a directory",
            "pipe": "not a regular file",
            "gone": "missing",
            "../real": "not a name",
        }.items():
            with assert_raises(CheckpointError, problem=reason):
                folder.read(name)
        with assert_raises(CheckpointError, expected="2 bytes", got="1 bytes"):
            folder.read("real", size=2)
        with assert_raises(CheckpointError, problem="too large"):
            folder.read("real", limit=0)


def test_an_open_folder_is_of_one_moment(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_bytes(b"old")
    with open_directory(tmp_path / "a") as folder:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "f").write_bytes(b"new")
        assert bytes(folder.read("f")) == b"old"


def test_disk_errors_carry_the_system_text_and_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with assert_raises(CheckpointError, problem=r"No space left on device \(ENOSPC\)", fix="Free space") as caught:
        write_file(tmp_path, "f", [b"x"])
    assert caught.value.where == str(tmp_path / "f")


def test_commit_moves_the_former_holder_aside_and_gives_its_name_back_on_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "step-1"
    first = make_stage(target)
    write_file(first, "f", [b"1"])
    assert commit(first, target) is None
    second = make_stage(target)
    write_file(second, "f", [b"2"])
    real = os.rename

    def fail(source: Path, to: Path) -> None:
        if source == second:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with assert_raises(CheckpointError, problem="EIO"):
            commit(second, target)
    assert (target / "f").read_bytes() == b"1"
    aside = commit(second, target)
    assert aside is not None
    assert (target / "f").read_bytes() == b"2"
    assert (aside / "f").read_bytes() == b"1"
    gone = set_aside(aside)
    assert [left.kind for left in leftovers(tmp_path)] == ["tmp"]
    assert leftovers(tmp_path)[0].target == "step-1"
    remove_flat(gone)
    assert os.listdir(tmp_path) == ["step-1"]


def test_leftovers_are_dead_only_if_their_writer_ran_here_and_is_gone(tmp_path: Path) -> None:
    script = (
        f"from accel.storage import make_stage; from pathlib import Path; make_stage(Path({str(tmp_path / 'x')!r}))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    mine = make_stage(tmp_path / "x")
    (tmp_path / "x.tmp-another_host-1-01234567").mkdir()
    (tmp_path / "x.tmp-notes").mkdir()
    dead = {left.path: left.dead for left in leftovers(tmp_path)}
    assert sorted(dead.values()) == [False, False, True]
    assert dead[mine] is False


def test_a_folder_with_a_folder_inside_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "stage" / "mine").mkdir(parents=True)
    (tmp_path / "stage" / "file").write_bytes(b"")
    with assert_raises(CheckpointError, got="mine"):
        remove_flat(tmp_path / "stage")
    assert (tmp_path / "stage" / "file").exists()


def test_folders_are_made_with_their_parents_and_not_over_files(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with assert_raises(CheckpointError, problem="there is a file instead"):
        make_folder(tmp_path / "file")
    with pytest.raises(CheckpointError):
        make_folder(tmp_path / "file" / "below")
