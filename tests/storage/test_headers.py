# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files that would cost a reader time or memory are refused before they are computed with."""

import hashlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import Manifest, encode_manifest
from safetensors.torch import save

from accel import __version__, load_state, save_state
from accel.checkpoint._manifest import manifest_of
from accel.cli import main
from accel.context import single
from accel.errors import CheckpointError
from accel.storage import MOST_TENSORS, as_place, open_directory, plan_shards, read_header, read_reference, view_tensors

CPU = single()


def of(header: bytes, payload: bytes = b"") -> memoryview:
    return memoryview(bytearray(len(header).to_bytes(8, "little") + header + payload))


def entry(shape: str, end: int = 0) -> bytes:
    return b'{"dtype":"U8","shape":[%s],"data_offsets":[0,%d]}' % (shape.encode(), end)


def many(count: int) -> bytes:
    return b"{" + b",".join(b'"t%d":%s' % (at, entry("0")) for at in range(count)) + b"}"


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (lambda: b'{"x":' + entry(",".join(["9"] * 400_000)) + b"}", "more than 65 dimensions"),
        (lambda: b'{"x":' + entry(",".join(["9"] * 400_000 + ["0"])) + b"}", "more than 65 dimensions"),
        (lambda: b'{"x":' + entry(",".join(["1"] * 66), 1) + b"}", "length <= 65"),
        (lambda: b'{"x":' + entry(str(2**63)) + b"}", "cannot be read"),
        (lambda: b'{"x":' + entry("9" * 4000) + b"}", "cannot be read"),
        (lambda: many(MOST_TENSORS + 1), f"lists {MOST_TENSORS + 1} tensors"),
        (lambda: many(1_000_000), "more than 2097152 fields"),
        (lambda: b"{" + b",".join(b'"%d":1' % at for at in range(3_000_000)) + b"}", "more than 2097152 fields"),
    ],
    ids=["dims", "dims of nothing", "66", "one huge", "digits", "too many", "million", "fields"],
)
def test_a_header_of_too_many_numbers_is_refused(header: Callable[[], bytes], problem: str) -> None:
    with assert_raises(CheckpointError, problem=problem) as caught:
        read_header(of(header(), b"\0"), "a.safetensors")
    assert caught.value.where == "a.safetensors"


def test_what_the_reference_writes_is_read_with_long_texts_beside_the_tensors() -> None:
    texts = {"tags": '{"a": 1, "b": [{}]}' * 20_000}
    tensors = {"x" * 9000: torch.ones(2), "deep": torch.ones([1] * 64)}
    data = memoryview(bytearray(save(tensors, texts)))
    found = view_tensors(data, read_header(data, "a.safetensors"))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"x" * 9000: (2,), "deep": (1,) * 64}


def resealed(path: Path, header: bytes) -> None:
    """Put another header before the tensors of a checkpoint, with fitting digests."""
    file = next(path.glob("*.safetensors"))
    data = bytes(of(header, b"\0" * 8))
    file.write_bytes(data)
    manifest = manifest_of_any(path)
    entries = {file.name: {"size": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}}
    values = msgspec.to_builtins(manifest) | {"files": entries}
    (path / "manifest.json").write_bytes(encode_manifest(msgspec.convert(values, Manifest)))


def manifest_of_any(path: Path) -> Manifest:
    return msgspec.json.decode(b"{" + (path / "manifest.json").read_bytes()[77:], type=Manifest)


@pytest.mark.parametrize(
    "header",
    [b'{"x":' + entry(",".join(["9"] * 400_000)) + b"}", many(1000), b'{"x":' + entry("1", 1) + b"," + many(9)[1:]],
    ids=["dims", "many", "more than listed"],
)
def test_a_checkpoints_file_has_the_header_that_its_manifest_needs(header: bytes, tmp_path: Path) -> None:
    path = save_state(CPU, tmp_path, {"x": torch.ones(2)}, step=0)
    resealed(path, header)
    with assert_raises(CheckpointError, problem="header|dimensions"):
        load_state(CPU, path, {"x": torch.ones(2)})


def test_no_file_of_ours_has_more_tensors_than_a_reader_takes() -> None:
    shards = plan_shards({str(at): 0 for at in range(MOST_TENSORS + 1)}, 10)
    assert [len(names) for names in shards] == [MOST_TENSORS, 1]


def test_show_and_diff_escape_what_terminals_act_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[31m\x9b2J\u202e\r\n\x07"
    paths = [tmp_path / "step-00000001", tmp_path / "step-00000002"]
    for step, path in enumerate(paths, 1):
        save_state(CPU, tmp_path, {"x": {evil + str(step): torch.ones(2)}}, step=step, metrics={"loss": 1.0})
        text = msgspec.to_builtins(manifest_of(as_place(path)))
        text |= {"accel": evil, "torch": evil + str(step), "metrics": {evil: 1.0}}
        text["items"]["x"]["type"] = evil * step
        (path / "manifest.json").write_bytes(encode_manifest(msgspec.convert(text, Manifest)))
    assert main(["checkpoint", "show", str(paths[0]), "--tensors"]) == 0
    assert main(["checkpoint", "diff", *map(str, paths)]) == 1
    assert main(["checkpoint", "diff", "--values", *map(str, paths)]) == 1
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    (paths[1] / "manifest.json").write_bytes((paths[0] / "manifest.json").read_bytes())
    assert main(["checkpoint", "verify", str(tmp_path)]) in (0, 1)
    assert main(["checkpoint", "merge", str(paths[0]), str(tmp_path / "merged"), "--item", "x"]) == 2
    out, err = capsys.readouterr()
    assert "\\x1b[31m" in out
    assert all(char.isprintable() or char == "\n" for char in out + err)


def test_the_packages_version_is_a_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(name: str) -> str:
        raise AssertionError(name)

    monkeypatch.setattr(metadata, "version", searched)
    assert manifest_of(as_place(save_state(CPU, tmp_path, {"x": 1}, step=0))).accel == __version__


@pytest.mark.parametrize(
    ("dtype", "count", "size"),
    [("F8_E8M0", 2, 2), ("F8_E4M3FNUZ", 2, 2), ("F8_E5M2FNUZ", 2, 2), ("F4", 4, 2), ("BOOL", 2, 2), ("C64", 2, 16)],
)
def test_files_of_other_writers_hold_any_dtype_of_the_format(dtype: str, count: int, size: int, tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"%s","shape":[%d],"data_offsets":[0,%d]}}' % (dtype.encode(), count, size)
    (tmp_path / "a.safetensors").write_bytes(of(header, b"\5" * size))
    with open_directory(tmp_path) as folder:
        found = read_reference(folder, "a.safetensors")["x"]
    assert found.nbytes == size
    assert dtype != "BOOL" or found.view(torch.uint8).tolist() == [1, 1]


@pytest.mark.parametrize(
    "header",
    [
        b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}',
        b'{"x":{"dtype":"F99","shape":[3],"data_offsets":[0,3]}}',
        b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,3]}}',
        b'{"x":' + entry(",".join(["1"] * 66), 1) + b"}",
        b"{",
    ],
)
def test_files_of_other_writers_that_are_damaged_are_a_typed_error(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(of(header, b"\0" * 3))
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    with open_directory(tmp_path) as folder:
        for name in ("a.safetensors", "b.safetensors", "c.safetensors"):
            with pytest.raises(CheckpointError) as caught:
                read_reference(folder, name)
            assert caught.value.where == str(tmp_path / name)


def test_a_dtype_that_is_never_saved_is_a_typed_error_in_a_checkpoint(tmp_path: Path) -> None:
    path = save_state(CPU, tmp_path, {"x": torch.ones(2)}, step=0)
    header = b'{"$rng":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"x":'
    header += b'{"dtype":"F8_E8M0","shape":[4],"data_offsets":[4,8]}}'
    resealed(path, header)
    with assert_raises(CheckpointError, problem="dtype"):
        load_state(CPU, path, {"x": torch.ones(2)})
