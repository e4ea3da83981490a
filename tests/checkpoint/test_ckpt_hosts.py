# SPDX-License-Identifier: Apache-2.0
"""A folder for each host, on simulated ranks of two hosts, each with a directory of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Box, equal
from ckpt_meshes import Layout, build, state, step
from hypothesis import given, strategies as st

import accel
from accel.checkpoint._hosts import places_seen_from, plan_host_writes
from accel.errors import CheckpointError, CollectiveMismatch, ConfigError
from accel.testing import WriteFault

FSDP: Layout = ("fsdp", (4,))
HSDP: Layout = ("hsdp", (2, 2))  # each host holds a whole copy
PLAIN: Layout = ("plain", (1,))


def on_host(ctx: accel.DistContext, hosts: Sequence[int] = (0, 0, 1, 1)) -> accel.DistContext:
    """The context of a rank on one of the hosts."""
    node = hosts[ctx.rank]
    beside = [rank for rank, its_node in enumerate(hosts) if its_node == node]
    return dataclasses.replace(
        ctx,
        node_rank=node,
        num_nodes=len({*hosts}),
        local_rank=beside.index(ctx.rank),
        local_world_size=len(beside),
    )


def folder(root: Path, ctx: accel.DistContext) -> accel.checkpoint.HostFolder:
    return accel.checkpoint.HostFolder(root / f"host-{ctx.node_rank}/run")


class Trainer:
    """A small run on simulated ranks of two hosts."""

    def __init__(self, ranks: Any, root: Path, layout: Layout) -> None:
        self.ranks, self.root, self.layout = ranks, root, layout

    def save(self, steps: Sequence[int], *, seed: int = 1, faults: Sequence[Any] = (), **options: Any) -> list[Any]:
        """Train, save after each of some steps, and return the last state of each rank."""

        def body(bare: accel.DistContext) -> Any:
            ctx = on_host(bare)
            model, optimizer = build(self.layout, seed)
            for number in range(max(steps) + 1):
                step(self.layout, ctx.rank if self.layout != PLAIN else 0, model, optimizer, number)
                if number in steps:
                    items = self._items(ctx, model, optimizer, number)
                    _ = accel.save_state(ctx, folder(self.root, ctx), items, step=number, **options)
            return state(model, optimizer)

        return self.ranks.run(body, 4, default_group=True, faults=faults)

    def load(self, *, at: str = "", hosts: Sequence[int] = (0, 0, 1, 1)) -> list[Any]:
        """Load into a new model; return state, step and value of each rank."""

        def body(bare: accel.DistContext) -> Any:
            ctx = on_host(bare, hosts)
            model, optimizer = build(self.layout, seed=7)
            place = folder(self.root, ctx)
            loaded = accel.load_state(
                ctx, accel.checkpoint.HostFolder(Path(place) / at), self._items(ctx, model, optimizer, 0)
            )
            assert loaded["of_rank"]["rank"] == 0
            return state(model, optimizer), loaded["number"], loaded.path.name

        return self.ranks.run(body, 4, default_group=True)

    def _items(self, ctx: accel.DistContext, model: Any, optimizer: Any, number: int) -> dict[str, Any]:
        own = {"rank": ctx.rank, "tensor": torch.full((3,), float(ctx.rank))}
        return {"model": model, "optimizer": optimizer, "number": number, "of_rank": own}


def pieces(root: Path) -> dict[int, dict[str, bytes]]:
    """The files of each host, by path from its folder."""
    found = {host: root / f"host-{host}" for host in (0, 1)}
    return {
        host: {str(path.relative_to(at)): path.read_bytes() for path in at.rglob("*") if path.is_file()}
        for host, at in found.items()
    }


@pytest.mark.parametrize("layout", [FSDP, HSDP])
def test_each_host_loads_from_its_own_folder(ranks: Any, tmp_path: Path, layout: Layout) -> None:
    trainer = Trainer(ranks, tmp_path, layout)
    saved = trainer.save([0, 1])
    for loaded, number, name in trainer.load():
        assert (number, name) == (1, "step-00000001")
        assert equal(loaded, saved[0])
    whole = layout != FSDP
    for host in (0, 1):
        shown = json.loads((tmp_path / f"host-{host}/run/step-00000001/manifest.json").read_text())
        assert (not shown.get("host", {}).get("elsewhere")) == whole, "a host holds what its ranks hold, and no more"
    if whole:  # then any number of ranks loads it
        model, optimizer = build(PLAIN, seed=7)
        for host in (0, 1):
            out = tmp_path / f"host-{host}/run"
            _ = accel.load_state(CPU, out, {"model": model, "optimizer": optimizer, "number": 0, "of_rank": None})
            assert equal(state(model, optimizer), saved[0])


def test_the_folders_of_all_hosts_copied_together_are_a_whole_checkpoint(ranks: Any, tmp_path: Path) -> None:
    trainer = Trainer(ranks, tmp_path, FSDP)
    saved = trainer.save([0])[0]
    model, optimizer = build(PLAIN, seed=7)
    items = {"model": model, "optimizer": optimizer, "number": 0, "of_rank": None}
    first, second = (tmp_path / f"host-{host}/run/step-00000000" for host in (0, 1))
    with assert_raises(
        CheckpointError, problem=r"tensors-0000[23]-of-00004.safetensors: in the folder of node 1 \(.+\)"
    ):
        _ = accel.load_state(CPU, first, items)
    for file in second.glob("*.safetensors"):
        shutil.copy(file, first)
    _ = accel.load_state(CPU, first, items)
    assert equal(state(model, optimizer), saved)


def test_ranks_on_other_hosts_than_those_that_saved_are_told_whose_part_is_missing(ranks: Any, tmp_path: Path) -> None:
    trainer = Trainer(ranks, tmp_path, FSDP)
    _ = trainer.save([0])
    with assert_raises(CheckpointError, got=r"in the folder of node [01] \(.+\), not in this host's"):
        _ = trainer.load(hosts=(1, 1, 0, 0))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1)])
def test_the_plain_path_of_a_hosts_checkpoint_loads_its_part(
    ranks: Any, tmp_path: Path, hosts: tuple[int, ...], verify: bool
) -> None:
    """Whose manifests list other numbers of files."""

    def body(bare: accel.DistContext) -> Any:
        ctx = on_host(bare, hosts)
        _ = accel.save_state(ctx, folder(tmp_path, ctx), {"a": torch.arange(3.0)}, step=1)
        newest = accel.latest_checkpoint(folder(tmp_path, ctx))
        assert newest is not None
        return accel.load_state(ctx, newest, {"a": torch.zeros(3)}, verify=verify)["a"].tolist()

    assert ranks.run(body, 4) == [[0.0, 1.0, 2.0]] * 4


# the same step is replaced, or another follows
@pytest.mark.parametrize(("committed", "newer"), [((0,), 0), ((1,), 0), ((1,), 1), ((0, 1), 0)])
def test_a_kill_between_the_commits_leaves_the_newest_that_all_hosts_have(
    ranks: Any, tmp_path: Path, committed: tuple[int, ...], newer: int
) -> None:
    root = tmp_path / "run"
    trainer = Trainer(ranks, root, PLAIN)
    former = trainer.save([0])[0]
    shutil.copytree(root, tmp_path / "former")
    new = trainer.save([newer], seed=5, keep=1)[0]
    for host in (0, 1):  # nothing of the former goes before all hosts have committed
        at, was = (top / f"host-{host}/run" for top in (root, tmp_path / "former"))
        if host not in committed:
            shutil.rmtree(at)
            shutil.copytree(was, at)
            shutil.copytree(was / "step-00000000", at / f"step-0000000{newer}.tmp-elsewhere-99999999-0123abcd")
        else:
            aside = "" if newer else ".old-elsewhere-99999999-0123abcd"
            shutil.copytree(was / "step-00000000", at / f"step-00000000{aside}")
    expected = new if committed == (0, 1) else former
    assert equal(trainer.load()[3][0], expected)
    with assert_raises(CheckpointError, problem="No space left"):  # the next save clears up, and takes nothing from it
        _ = trainer.save([2], keep=1, faults=[WriteFault(rank=2, write=1, action="full")])
    assert equal(trainer.load()[3][0], expected)
    last = trainer.save([2], keep=1)[0]
    assert equal(trainer.load()[3][0], last)
    for host in (0, 1):
        assert [each.name for each in (root / f"host-{host}/run").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(("rank", "write"), [(0, 1), (2, 1), (3, 0)])
def test_a_full_disk_on_one_host_changes_nothing_on_any(ranks: Any, tmp_path: Path, rank: int, write: int) -> None:
    trainer = Trainer(ranks, tmp_path, PLAIN)
    saved = trainer.save([0])[0]
    before = pieces(tmp_path)
    with assert_raises(CheckpointError, problem="No space left"):
        _ = trainer.save([1], faults=[WriteFault(rank=rank, write=write, action="full")])
    assert pieces(tmp_path) == before
    assert equal(trainer.load()[0][0], saved)


def test_a_host_that_lacks_its_part_is_named(ranks: Any, tmp_path: Path) -> None:
    trainer = Trainer(ranks, tmp_path, PLAIN)
    _ = trainer.save([0, 1])
    tensors = next((tmp_path / "host-1/run/step-00000001").glob("tensors-*"))
    tensors.write_bytes(tensors.read_bytes()[:-1] + bytes([tensors.read_bytes()[-1] ^ 1]))
    assert {name for _, _, name in trainer.load()} == {"step-00000000"}, "damage on one host takes the checkpoint out"
    shutil.rmtree(tmp_path / "host-1/run/step-00000000")
    with assert_raises(CheckpointError, problem="no checkpoint of this run can be loaded", got="damaged"):
        _ = trainer.load()
    shutil.rmtree(tmp_path / "host-1")
    for at in ("", "step-00000001"):
        with assert_raises(CheckpointError, got=r"node 0 \(.+\): step-00000001.*; node 1 \(.+\): none"):
            _ = trainer.load(at=at)


def test_what_hosts_cannot_do_is_refused(tmp_path: Path) -> None:
    place = accel.checkpoint.HostFolder(tmp_path)
    with assert_raises(ConfigError, problem="a folder on each host takes no asynchronous save"):
        _ = accel.save_state(CPU, place, {"a": 1}, step=0, mode="async")
    with assert_raises(ConfigError, problem="a URL as a folder of each host"):
        _ = accel.save_state(CPU, accel.checkpoint.HostFolder("memory://bucket/run"), {"a": 1}, step=0)
    path = accel.save_state(CPU, place, {"a": 1}, step=0)
    assert accel.load_state(CPU, place, {"a": 0})["a"] == 1
    assert accel.latest_checkpoint(place) == path


@pytest.mark.parametrize("path", [3, None, b"run", ""])
def test_a_host_folder_needs_a_path(path: Any) -> None:
    with assert_raises(ConfigError, expected="the path of a folder", where="HostFolder"):
        accel.checkpoint.HostFolder(path)


def test_ranks_that_mean_other_kinds_of_folders_are_told(ranks: Any, tmp_path: Path) -> None:
    def body(bare: accel.DistContext) -> None:
        ctx = on_host(bare, (0, 1))
        place = tmp_path if ctx.rank else accel.checkpoint.HostFolder(tmp_path)
        with assert_raises(CollectiveMismatch, expected="save_state at .*step 1 in a folder '.+' of each host"):
            accel.save_state(ctx, place, {"a": 1}, step=1)
        with assert_raises(CollectiveMismatch, expected="load_state at .* per host"):
            accel.load_state(ctx, place, {"a": 1})

    ranks.run(body, 2)


def test_ranks_that_name_other_folders_are_told_before_anything_is_written(ranks: Any, tmp_path: Path) -> None:
    def body(bare: accel.DistContext) -> None:
        ctx = on_host(bare, (0, 0))
        with assert_raises(
            CollectiveMismatch, expected="(?s)in a folder 'run-0' of each host", got="'run-1' of each host"
        ):
            accel.save_state(ctx, accel.checkpoint.HostFolder(tmp_path / f"run-{ctx.rank}"), {"a": 1}, step=1)

    ranks.run(body, 2)
    assert not list(tmp_path.iterdir())


def boxes(count: int) -> list[tuple[str, Box]]:
    return [(f"t{at}", Box((0,), (at + 1,))) for at in range(count)]


@given(st.data())
def test_each_host_writes_once_what_its_ranks_read(data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    every = list(range(len(nodes)))
    some = st.lists(st.sampled_from(every), min_size=1, unique=True)
    sizes = {box: box[1].size for box in boxes(data.draw(st.integers(0, 6)))}
    holders = {box: data.draw(some) for box in sizes if data.draw(st.booleans())}
    readers = {box: data.draw(some) for box in sizes if data.draw(st.booleans())}
    writes = plan_host_writes(sizes, holders, readers, nodes)
    for node in set(nodes):
        local = [rank for rank in every if nodes[rank] == node]
        written = [box for rank in local for box in writes.ranks[rank]]
        needed = [box for box in sizes if {*readers.get(box, every)} & {*local}]
        assert sorted(written) == sorted(needed)
        for rank in local:
            for box in writes.ranks[rank]:
                assert rank in holders.get(box, every) or not {*holders[box]} & {*local}
                assert rank in holders.get(box, every) or writes.sent[box] == min(holders[box])
        places = places_seen_from(node, writes, nodes)
        assert all(nodes[places[box]] == node for box in needed)
        assert places.keys() == sizes.keys()
