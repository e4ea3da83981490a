# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import Item, Manifest, decode_manifest, encode_manifest
from hypothesis import given, strategies as st
from tables import rows

from accel.checkpoint._boxes import plan_checks, plan_writes
from accel.checkpoint._live_tensors import tied
from accel.checkpoint._manifest import StoredPiece, TensorEntry
from accel.errors import CheckpointError
from accel.storage import FileEntry


@given(data=st.data(), world=st.integers(1, 9))
def test_every_part_is_written_once_by_one_that_holds_it(data: st.DataObject, world: int) -> None:
    sizes = data.draw(st.dictionaries(st.text(max_size=4), st.integers(0, 10**12), max_size=30))
    some = st.lists(st.integers(0, world - 1), min_size=1, unique=True)
    holders = data.draw(st.dictionaries(st.sampled_from(sorted(sizes)), some) if sizes else st.just({}))
    plan = plan_writes(sizes, holders, world)
    assert len(plan) == world
    assert sorted(part for parts in plan for part in parts) == sorted(sizes)
    assert all(rank in holders.get(part, range(world)) for rank, parts in enumerate(plan) for part in parts)
    assert plan == plan_writes(dict(reversed(sizes.items())), holders, world)
    loads = [sum(sizes[part] for part in parts) for parts in plan]
    bound = sum(sizes[part] for part in holders) + max((sizes[p] for p in sizes if p not in holders), default=0)
    assert max(loads) - min(loads) <= bound


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=12), copies=st.integers(1, 3), shards=st.integers(1, 4)
)
def test_copies_of_a_shard_divide_its_writing(sizes: list[int], copies: int, shards: int) -> None:
    parts = {(name, shard): size for name, size in enumerate(sizes) for shard in range(shards)}
    holders = {part: [part[1] + copy * shards for copy in range(copies)] for part in parts}
    loads = [sum(parts[part] for part in written) for written in plan_writes(parts, holders, copies * shards)]
    for shard in range(shards):
        group = [loads[shard + copy * shards] for copy in range(copies)]
        assert max(group) - min(group) <= max(sizes)


@given(data=st.data(), world=st.integers(1, 9))
def test_every_part_of_a_file_is_checked_once_by_one_that_reads_it(data: st.DataObject, world: int) -> None:
    counts = data.draw(st.dictionaries(st.text(max_size=3), st.integers(0, 40), max_size=8))
    some = st.lists(st.integers(0, world - 1), min_size=1, unique=True)
    readers = {name: data.draw(some) for name in counts}
    plans = [plan_checks(counts, readers, rank) for rank in range(world)]
    for name, count in counts.items():
        shares = {rank: plan[name] for rank, plan in enumerate(plans) if name in plan}
        assert shares.keys() == set(readers[name])
        assert sorted(part for share in shares.values() for part in share) == list(range(count))
        assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1


def test_files_in_one_part_are_checked_by_different_ranks() -> None:
    files = [f"{at}" for at in range(4)]
    plans = [plan_checks(dict.fromkeys(files, 1), dict.fromkeys(files, range(4)), rank) for rank in range(4)]
    assert [sum(map(len, plan.values())) for plan in plans] == [1, 1, 1, 1]


def test_many_pieces_are_checked_in_little_time() -> None:
    pieces = tuple(piece((at,), (1,), f"f{at}") for at in range(100_000))
    files = {each.file: FileEntry(10, "0" * 64) for each in pieces}
    many = {"w": TensorEntry("float32", (100_000,), pieces)}
    changed = msgspec.structs.replace(manifest(), format=2, tensors=many, files=files, aliases={})
    assert decode_manifest(encode_manifest(changed), "here")[0] == changed


def test_tied_tensors_are_the_same_memory_with_the_same_view() -> None:
    base = torch.randn(4, 4)
    tensors = {"b": base, "a": base.view(4, 4), "t": base.t(), "row": base[0], "e": torch.empty(0), "f": torch.empty(0)}
    assert tied(tensors) == {"b": "a"}
    assert tied({"x": torch.ones(2), "y": torch.ones(2)}) == {}


def piece(offset: tuple[int, ...], shape: tuple[int, ...], file: str = "a.safetensors") -> StoredPiece:
    return StoredPiece(file, offset, shape)


OVERLAP = (piece((0,), (2,)), piece((1,), (2,), "b"))


def manifest() -> Manifest:
    return Manifest(
        format=1,
        accel="0",
        torch="2",
        step=3,
        world_size=2,
        files={name: FileEntry(10, "0" * 64) for name in ("a.safetensors", "b")},
        tensors={"m.w": TensorEntry("float32", (2, 3), (StoredPiece("a.safetensors", (0, 0), (2, 3)),))},
        aliases={"m.v": "m.w"},
        items={"m": Item("module", "Linear", {})},
    )


def test_a_manifest_comes_back_and_its_digest_is_of_all_that_follows_it() -> None:
    found, digest = decode_manifest(encode_manifest(manifest()), "here")
    assert found == manifest()
    assert encode_manifest(manifest()).startswith(b'{"digest":"' + digest.encode() + b'","format":1,')


def test_a_manifest_that_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(encode_manifest(manifest()))
    monkeypatch.setattr("accel.checkpoint._manifest.LARGEST_MANIFEST", size)
    assert len(encode_manifest(manifest())) == size
    monkeypatch.setattr("accel.checkpoint._manifest.LARGEST_MANIFEST", size - 1)
    with assert_raises(CheckpointError, problem="too large to be read", got="for 1 tensors"):
        encode_manifest(manifest())


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_blamed_on_it(position: int, bit: int) -> None:
    data = bytearray(encode_manifest(manifest()))
    data[position % len(data)] ^= 1 << bit
    with assert_raises(CheckpointError, problem=r"manifest\.json: damaged"):
        decode_manifest(bytes(data), "here")


@rows(
    "change, fields",
    [
        ({"files": {"../a": FileEntry(1, "0" * 64)}}, {"problem": "not a name of a file"}),
        ({"files": {"manifest.json": FileEntry(1, "0" * 64)}}, {"problem": "not a name of a file"}),
        ({"files": {}}, {"problem": "not listed"}),
        ({"aliases": {"x": "gone"}}, {"problem": "leads nowhere"}),
        ({"aliases": {"m.w": "m.w"}}, {"problem": "leads nowhere"}),
        ({"items": {"a/b": Item("value", "int", 1)}}, {"problem": "not an item's name"}),
        (
            {"format": 6},
            {"problem": "newer format", "expected": "format 5 or older", "got": "format 6, written by accel 0"},
        ),
        ({"format": 5}, {"problem": "format 5 and a part of a host do not go together"}),
        ({"format": 3}, {"problem": "'a.safetensors' has not the digests that format 3 asks for"}),
        ({"files": {"b": FileEntry(1, ("0" * 64,))}}, {"problem": "'b' has not the digests that format 1 asks for"}),
        (
            {"format": 3, "files": {"b": FileEntry(2**24 + 1, ("0" * 64,))}},
            {"problem": "'b' has not the digests that format 3"},
        ),
        ({"format": 0}, {"problem": "never was"}),
        ({"tensors": {"w": TensorEntry("float32", (2,), ())}}, {"problem": "one piece"}),
        (
            {"format": 2, "tensors": {"w": TensorEntry("float32", (2,), ())}},
            {"problem": "0 elements that do not cover its 2"},
        ),
        (
            {"tensors": {"w": TensorEntry("float32", (2,), (piece((1,), (1,)),))}},
            {"problem": "1 elements that do not cover its 2"},
        ),
        ({"tensors": {"w": TensorEntry("float32", (2,), (piece((), (2,)),))}}, {"problem": "dimensions"}),
        (
            {"tensors": {"w": TensorEntry("float32", (2,), (piece((0,), (1,)), piece((1,), (1,))))}},
            {"problem": "two pieces in one"},
        ),
        (
            {"tensors": {"w": TensorEntry("float32", (2,), (piece((0,), (1,)), piece((1,), (1,), "b")))}},
            {"problem": "one piece"},
        ),
        (
            {"format": 2, "tensors": {"w": TensorEntry("float32", (3,), OVERLAP)}},
            {"problem": "4 elements that do not cover its 3"},
        ),
        (
            {"format": 2, "tensors": {"w": TensorEntry("float32", (5,), OVERLAP)}},
            {"problem": "4 elements that do not cover its 5"},
        ),
        (
            {"format": 2, "tensors": {"w": TensorEntry("float32", (2**63, 2**63), OVERLAP)}},
            {"problem": "more elements than any"},
        ),
        (
            {"format": 2, "tensors": {"w": TensorEntry("float32", (1,) * 10**5, OVERLAP)}},
            {"problem": "100000 dimensions"},
        ),
        ({"step": -1}, {"problem": "cannot be read"}),
        ({"world_size": 0}, {"problem": "cannot be read"}),
        (
            {"tensors": {"w": TensorEntry("float32", (-2,), (StoredPiece("a.safetensors", (0,), (-2,)),))}},
            {"problem": "cannot be read"},
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, object], fields: dict[str, str]) -> None:
    with assert_raises(CheckpointError, **fields):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest(), **change)), "here")
