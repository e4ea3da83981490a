# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel.checkpoint import Item, Manifest, Piece, TensorEntry, decode_manifest, encode_manifest, plan_writes, tied
from accel.errors import CheckpointError
from accel.storage import FileEntry

SIZES = st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 10**12), max_size=30)


@given(shared=SIZES, main=SIZES, world=st.integers(1, 9))
def test_every_tensor_is_written_once_and_ranks_write_about_equally_much(
    shared: dict[str, int], main: dict[str, int], world: int
) -> None:
    main = {f"main.{name}": size for name, size in main.items()}
    plan = plan_writes(shared, main, world)
    assert len(plan.ranks) == world
    assert sorted(name for part in plan.ranks for name in part) == sorted([*shared, *main])
    assert set(main) <= set(plan.ranks[0])
    loads = [sum((shared | main)[name] for name in part) for part in plan.ranks]
    largest = max(shared.values(), default=0)
    assert max(loads) - min(loads[1:] or loads) <= max(largest, sum(main.values()))
    assert plan == plan_writes(dict(reversed(shared.items())), main, world)


def test_tied_tensors_are_the_same_memory_with_the_same_view() -> None:
    base = torch.randn(4, 4)
    tensors = {"b": base, "a": base.view(4, 4), "t": base.t(), "row": base[0], "e": torch.empty(0), "f": torch.empty(0)}
    assert tied(tensors) == {"b": "a"}
    assert tied({"x": torch.ones(2), "y": torch.ones(2)}) == {}


def manifest() -> Manifest:
    return Manifest(
        format=1,
        accel="0",
        torch="2",
        step=3,
        world_size=2,
        files={"a.safetensors": FileEntry(10, "0" * 64)},
        tensors={"m.w": TensorEntry("float32", (2, 3), (Piece("a.safetensors", (0, 0), (2, 3)),))},
        aliases={"m.v": "m.w"},
        items={"m": Item("module", "Linear", {})},
    )


def test_a_manifest_comes_back_and_its_digest_is_of_all_that_follows_it() -> None:
    found, digest = decode_manifest(encode_manifest(manifest()), "here")
    assert found == manifest()
    assert encode_manifest(manifest()).startswith(b'{"digest":"' + digest.encode() + b'","format":1,')


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_blamed_on_it(position: int, bit: int) -> None:
    data = bytearray(encode_manifest(manifest()))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        decode_manifest(bytes(data), "here")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"files": {"../a": FileEntry(1, "0" * 64)}}, "not a name of a file"),
        ({"files": {"manifest.json": FileEntry(1, "0" * 64)}}, "not a name of a file"),
        ({"files": {}}, "not listed"),
        ({"aliases": {"x": "gone"}}, "leads nowhere"),
        ({"aliases": {"m.w": "m.w"}}, "leads nowhere"),
        ({"items": {"a/b": Item("value", "int", 1)}}, "not an item's name"),
        ({"format": 2}, "newer format.*expected format 1 or older, got format 2, written by accel 0"),
        ({"format": 0}, "never was"),
        ({"tensors": {"w": TensorEntry("float32", (2,), ())}}, "one piece"),
        ({"tensors": {"w": TensorEntry("float32", (2,), (Piece("a.safetensors", (1,), (1,)),))}}, "one piece"),
        ({"tensors": {"w": TensorEntry("float32", (2,), (Piece("a.safetensors", (), (2,)),))}}, "dimensions"),
        ({"step": -1}, "cannot be read"),
        ({"world_size": 0}, "cannot be read"),
        ({"tensors": {"w": TensorEntry("float32", (-2,), (Piece("a.safetensors", (0,), (-2,)),))}}, "cannot be read"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest(), **change)), "here")
