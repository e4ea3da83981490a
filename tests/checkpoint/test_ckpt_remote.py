# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a store: whatever operation fails, the former or the new one loads; what is not ours stays."""

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Cursor, Run, equal
from ckpt_store import Breaking, Crash, Store, register
from hypothesis import given, settings, strategies as st
from processes import patience
from profiles import share

import accel
from accel.cli import main
from accel.errors import CheckpointError, ConfigError, MissingExtraError
from accel.storage import LOCK, RemotePath
from accel.storage._lock import take_remote_lock
from accel.testing import simulate

URL = "objects://runs/demo"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    monkeypatch.setattr("accel.storage._store.RemotePlace.pause_s", 0.01)
    register()
    yield
    register()


@pytest.fixture
def orphaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every holder of a lock has ended."""
    monkeypatch.setattr("accel.storage._lock.is_gone", lambda holder: True)


def names() -> list[str]:
    return sorted(name.removeprefix("runs/demo/") for name in Store.objects)


def steps() -> set[str]:
    return {name.partition("/")[0] for name in names()}


@settings(max_examples=share(0.08), deadline=None)
@given(saved=st.integers(1, 4), loaded=st.integers(1, 4), mode=st.sampled_from(["sync", "async"]))
def test_what_any_world_saved_any_world_loads(saved: int, loaded: int, mode: Any) -> None:
    register()

    def save(ctx: accel.DistContext) -> Any:
        run = Run()
        torch.manual_seed(0)
        run.step(2)
        path = accel.save_state(ctx, URL, run.items(), step=2, mode=mode)
        assert (path.result() if mode == "async" else path) == RemotePath(f"{URL}/step-00000002")
        return run.state()[:1] + run.state()[3:]

    states = simulate(save, saved)
    found = accel.latest_checkpoint(URL, verify=True)
    assert len(names()) == saved + 1  # nothing but the manifest and a file of each rank
    loads = simulate(lambda ctx: Run(seed=ctx.rank + 5).load(ctx, found).state(), loaded)
    assert all(equal(state[:1] + state[3:], states[0]) for state in loads)


def held(value: int) -> dict[str, Any]:
    return {"x": torch.full((3,), float(value)), "number": value}


def load(path: Any) -> int:
    """The number of a checkpoint, of which all parts must be of one save."""
    loaded: Any = accel.load_state(CPU, path, held(-1))
    assert torch.equal(loaded["x"], torch.full((3,), float(loaded["number"])))
    return int(loaded["number"])


@pytest.mark.parametrize("layout", ["fresh", pytest.param("keep_1", marks=pytest.mark.slow), "same_step"])
def test_a_crash_at_any_operation_loses_nothing(layout: str, orphaned: None) -> None:
    keep = None if layout == "same_step" else 1
    step = 1 if layout == "same_step" else 2
    points = 0
    for after in (False, True):
        for moment in range(1000):
            register()
            if layout != "fresh":
                accel.save_state(CPU, URL, held(1), step=1)
            fault = Store.fault = Breaking(moment, Crash, after=after)
            with contextlib.suppress(Crash):
                accel.save_state(CPU, URL, held(2), step=step, keep=keep)
            Store.fault = None
            found = accel.latest_checkpoint(URL, verify=True)
            if found is not None:
                assert load(found) == 2 or (fault.reached and load(found) == 1)
            else:
                assert layout == "fresh"
                assert fault.reached
            path = accel.save_state(CPU, URL, held(3), step=step + 1, keep=1)
            assert steps() == {path.name}  # whatever the crash left is gone
            assert len(names()) == 2
            if not fault.reached:
                break
            points += 1
    assert points > 20


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_failing_store_is_the_same_error_on_all_ranks(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.storage._lock.FRESH_S", -1.0)  # the lock's object may not have been removed
    refused = 0
    for moment in range(1000):
        register()
        accel.save_state(CPU, URL, held(1), step=1)

        def body(ctx: accel.DistContext) -> str:
            try:
                saved = accel.save_state(ctx, URL, held(2), step=2, mode=mode)
                return f"saved {saved.result() if mode == 'async' else saved}"
            except CheckpointError as error:
                return str(error)

        fault = Breaking(moment, lambda: ConnectionError("unplugged"), after=False, for_ever=moment % 2 == 0)
        Store.fault = fault
        results = simulate(body, 2)
        Store.fault = None
        assert len(set(results)) == 1
        saved = results[0].startswith("saved")
        if not saved:
            refused += 1
            assert "ConnectionError: unplugged" in results[0]
            assert URL in results[0]
        assert load(accel.latest_checkpoint(URL, verify=True)) == (2 if saved else 1)
        accel.save_state(CPU, URL, held(3), step=3, keep=1)
        assert steps() == {"step-00000003"}
        if not fault.reached:
            break
    assert refused > 3


def test_retention_deletes_the_manifest_first_and_what_is_not_ours_never() -> None:
    run, order = Run(), list[str]()
    for step in range(3):
        accel.save_state(CPU, URL, run.items(), step=step)
    Store.objects["runs/demo/step-00000001/notes.txt"] = b"mine", 0.0
    Store.objects["runs/demo/step-00000001/tensors-00000-of-00001.safetensors"] = b"mine", 0.0
    Store.objects["runs/demo/step-00000007/tensors-00000-of-00001.safetensors"] = b"being copied here", 0.0
    Store.objects["runs/demo/step-00000008/tensors-00000-of-00001-0123456789abcdef.safetensors"] = b"left", 0.0
    Store.objects["runs/other"] = b"mine", 0.0
    before = dict(Store.objects)

    def watch(kind: str, work: Any) -> Any:
        left = set(Store.objects)
        result = work()
        order.extend(sorted(left - set(Store.objects)))
        return result

    Store.fault = watch
    accel.save_state(CPU, URL, run.items(), step=3, keep=1)
    Store.fault = None
    gone = [name.removeprefix("runs/demo/") for name in order if "step-00000000" in name]
    assert len(gone) == 2
    assert gone[0] == "step-00000000/manifest.json"
    kept = {"runs/other", *(name for name in before if "step-00000001" in name or "step-00000007" in name)}
    assert kept <= set(Store.objects)
    assert steps() - {"runs"} >= {"step-00000001", "step-00000003", "step-00000007"}
    assert not steps() & {"step-00000000", "step-00000002", "step-00000008"}


def requests(work: Any) -> int:
    """Count the requests of some work as S3 counts them: a small upload is one."""
    kinds = list[str]()

    def watch(kind: str, do: Any) -> Any:
        kinds.append(kind)
        return do()

    Store.fault = watch
    work()
    Store.fault = None
    return sum(kind != "part" for kind in kinds)


def test_a_save_and_a_load_take_few_requests_however_many_checkpoints_there_are() -> None:
    counts = dict[str, int]()

    def save(name: str, step: int, **options: Any) -> None:
        def work() -> None:
            saved = accel.save_state(CPU, URL, held(step), step=step, **options)
            assert not isinstance(saved, accel.checkpoint.Saving) or saved.result()

        counts[name] = requests(work)

    save("first", 0)
    for step in range(1, 12):
        save("more", step)
    save("kept", 12, keep=20)
    before = counts["more"]
    assert counts["first"] == before <= 10
    assert counts["kept"] <= before + 1
    save("at once", 13, keep=2)  # 12 go, each by its manifest and two deletions
    assert counts["at once"] <= before + 2 + 3 * 12
    for step in range(14, 17):
        save("steady", step, keep=2)
        assert counts["steady"] <= 15  # and on S3 one that lists unfinished uploads
    save("async", 17, keep=2, mode="async")
    save("same", 17, keep=2)
    assert counts["async"] <= 15
    assert counts["same"] <= 16
    assert requests(lambda: load(URL)) == 4
    assert requests(lambda: accel.latest_checkpoint(URL)) == 3


@settings(max_examples=share(0.3), deadline=None)
@given(
    order=st.lists(st.integers(0, 9), min_size=2, max_size=6),
    bad=st.sets(st.integers(0, 9), max_size=2),
    keep=st.builds(accel.checkpoint.Keep, newest=st.integers(1, 4), every=st.none() | st.integers(1, 4))
    | st.builds(accel.checkpoint.Keep, newest=st.integers(1, 3), best=st.integers(1, 2), by=st.just("loss")),
)
def test_retention_in_a_store_keeps_what_it_keeps_in_a_folder(order: Any, bad: Any, keep: Any) -> None:
    register()
    with tempfile.TemporaryDirectory() as folder:
        for at, step in enumerate(order):
            last = at == len(order) - 1
            if last:
                for name in [name for name in Store.objects if step_number(name) in bad - {step}]:
                    if name.endswith("manifest.json"):
                        Store.objects[name] = Store.objects[name][0][:-9] + b"torn here", 0.0
                for path in Path(folder).glob("*/manifest.json"):
                    if step_number(str(path)) in bad - {step}:
                        path.write_bytes(path.read_bytes()[:-9] + b"torn here")
            for out in (URL, folder):
                rule = keep if last else None
                accel.save_state(CPU, out, held(step), step=step, keep=rule, metrics={"loss": float(step % 3)})
        assert steps() == {path.name for path in Path(folder).iterdir()}


def step_number(path: str) -> int:
    return int(path.rpartition("step-")[2].partition("/")[0])


def test_a_second_writer_is_refused_and_named_while_the_first_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    items, refused = {"x": torch.ones(3)}, list[str]()

    def second(kind: str, work: Any) -> Any:
        if kind == "complete" and not refused:
            refused.append("")
            Store.fault, mine = None, Store.fault
            start = time.monotonic()
            with pytest.raises(CheckpointError) as caught:
                accel.save_state(CPU, URL, items, step=9)
            assert time.monotonic() - start < patience(10)
            refused[0], Store.fault = str(caught.value), mine
        return work()

    Store.fault = second
    accel.save_state(CPU, URL, items, step=1)
    assert "another writer is saving into this folder" in refused[0]
    assert f"process {os.getpid()} on host" in refused[0]
    assert steps() == {"step-00000001"}


def test_a_lock_that_is_released_is_held_until_its_object_is_gone() -> None:
    lock, refused = take_remote_lock(RemotePath(URL)), list[str]()

    def second(kind: str, work: Any) -> Any:
        if kind == "delete":
            Store.fault = None
            with pytest.raises(CheckpointError) as caught:
                take_remote_lock(RemotePath(URL))
            refused.append(str(caught.value))
        return work()

    Store.fault = second
    lock.release()
    assert "another writer is saving into this folder" in refused[0]
    take_remote_lock(RemotePath(URL)).release()
    assert names() == []


@pytest.mark.parametrize("age", [10.0, 100.0])
def test_a_lock_of_another_host_holds_for_a_minute(age: float) -> None:
    holder = {"host": "elsewhere", "pid": 7, "started": "", "since": "then"}
    lease = {"holder": holder, "token": "x", "renewed": time.time() - age}
    Store.objects[f"runs/demo/{LOCK}"] = msgspec.json.encode(lease), 0.0
    if age < 60:
        with assert_raises(CheckpointError, got="process 7 on host elsewhere"):
            accel.save_state(CPU, URL, {"x": 1}, step=1)
        assert LOCK in names()
    else:
        accel.save_state(CPU, URL, {"x": 1}, step=1)
        assert LOCK not in names()


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
@pytest.mark.parametrize("age", [10.0, 100.0])
def test_the_store_s_clock_decides_where_those_of_two_hosts_are_apart(age: float, ahead: float) -> None:
    holder = {"host": "elsewhere", "pid": 7, "started": "", "since": "then"}
    lease = {"holder": holder, "token": "x", "renewed": time.time() - age + ahead}
    Store.objects[f"runs/demo/{LOCK}"] = msgspec.json.encode(lease), time.time() - age
    if age < 60:
        with assert_raises(CheckpointError, got="process 7 on host elsewhere"):
            accel.save_state(CPU, URL, {"x": 1}, step=1)
        assert names() == [LOCK]
    else:
        accel.save_state(CPU, URL, {"x": 1}, step=1)
        assert steps() == {"step-00000001"}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_process_takes_a_lock_back_that_it_failed_to_release(mode: Any) -> None:
    def stuck(kind: str, work: Any) -> Any:
        if kind == "delete":
            raise ConnectionError("unplugged")
        return work()

    Store.fault = stuck
    saved = accel.save_state(CPU, URL, held(1), step=1, mode=mode)
    assert mode == "sync" or saved.result()
    Store.fault = None
    assert LOCK in names()
    accel.save_state(CPU, URL, held(2), step=2)
    assert LOCK not in names()
    assert load(URL) == 2


@pytest.mark.parametrize("kind", ["list", "part", "put"])
def test_a_store_that_does_not_answer_is_told(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if "has not answered" in each.getMessage()]

    accel.save_state(CPU, URL, held(0), step=0)
    assert told() == []
    monkeypatch.setattr("accel.storage._objects._SILENT_S", 0.1)
    until = time.monotonic() + patience(10)

    def slow(found: str, work: Any) -> Any:
        while found == kind and not told() and time.monotonic() < until:
            time.sleep(0.01)
        return work()

    Store.fault = slow
    accel.save_state(CPU, URL, held(1), step=1)
    assert URL in told()[0]


def test_a_save_under_way_is_no_damaged_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    accel.save_state(CPU, URL, held(1), step=1)
    found: list[Any] = []

    def look(kind: str, work: Any) -> Any:
        if kind == "put" and any("step-00000002" in name for name in names()) and not found:
            found.append("")
            found[0] = accel.latest_checkpoint(URL), load(URL)
        return work()

    Store.fault = look
    accel.save_state(CPU, URL, held(2), step=2)
    Store.fault = None
    assert found == [(RemotePath(f"{URL}/step-00000001"), 1)]
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    with assert_raises(CheckpointError, fix="objects only some time after"):
        accel.load_state(CPU, f"{URL}/step-00000009", held(0))
    with assert_raises(CheckpointError, fix="objects only some time after"):
        accel.load_state(CPU, f"{URL}-other", held(0))


def test_a_writer_that_lost_its_lock_does_not_commit_nor_delete_what_the_other_wrote() -> None:
    run = Run()
    accel.save_state(CPU, URL, run.items(), step=1)
    their_lock = msgspec.json.encode(
        {"holder": {"host": "b", "pid": 1, "started": "", "since": ""}, "token": "y", "renewed": 9e9}
    )
    theirs = f"runs/demo/step-00000002/tensors-00000-of-00001-{'a' * 16}.safetensors"

    def steal(kind: str, work: Any) -> Any:
        if kind == "complete":
            Store.objects[f"runs/demo/{LOCK}"] = their_lock, 0.0
            Store.objects[theirs] = b"theirs", 0.0
        return work()

    Store.fault = steal
    with assert_raises(CheckpointError, problem="another writer has taken the lock"):
        accel.save_state(CPU, URL, run.items(), step=2)
    Store.fault = None
    assert [name for name in names() if "step-00000002" in name] == [theirs.removeprefix("runs/demo/")]
    assert Store.objects[f"runs/demo/{LOCK}"][0] == their_lock
    assert accel.latest_checkpoint(URL) == RemotePath(f"{URL}/step-00000001")


def test_a_long_save_renews_its_lock_and_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.storage._lock._BEAT_S", 0.01)
    renewed, lives, waited = set[float](), set[str](), list[bool]()

    def slow(kind: str, work: Any) -> Any:
        if kind == "complete":  # rank 0's first: rank 1 goes on when rank 0 has written
            waited.append(len(waited) == 0)
        deadline = time.monotonic() + patience(10)
        while kind == "complete" and (len(renewed) < 3 if waited[-1] else not lives) and time.monotonic() < deadline:
            lock = Store.objects.get(f"runs/demo/{LOCK}")
            renewed.update([msgspec.json.decode(lock[0])["renewed"]] if lock is not None else [])
            lives.update(name for name in list(Store.objects) if name.endswith(".beat"))
            time.sleep(0.005)
        return work()

    def body(ctx: accel.DistContext) -> None:
        items = {"model": torch.nn.Linear(4, 4)}  # which both ranks write parts of
        accel.save_state(ctx, URL, items, step=1, mode="async").result()

    Store.fault = slow
    simulate(body, 2)
    Store.fault = None
    assert len(renewed) >= 3
    assert any("share-00001" in name for name in lives)
    assert len(names()) == 3  # neither lock nor note is left


def damage(name: str, data: bytes | None) -> None:
    key = next(key for key in Store.objects if key.startswith("runs/demo/step-00000002") and name in key)
    if data is None:
        del Store.objects[key]
    else:
        Store.objects[key] = data, 0.0


@pytest.mark.parametrize("name", ["manifest", "tensors"])
@pytest.mark.parametrize("kind", ["missing", "cut", "flipped", "longer"])
def test_damage_is_found_named_and_skipped(name: str, kind: str) -> None:
    run = Run()
    for step in (1, 2):
        accel.save_state(CPU, URL, run.items(), step=step)
    whole = next(data for key, (data, _) in Store.objects.items() if "step-00000002" in key and name in key)
    middle = len(whole) - 9
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    damage(name, {"missing": None, "cut": whole[:-1], "flipped": flipped, "longer": whole + b"x"}[kind])
    before = run.state()
    with pytest.raises(CheckpointError) as caught:
        run.load(CPU, f"{URL}/step-00000002")
    assert caught.value.where.startswith(f"{URL}/step-00000002")
    assert equal(run.state(), before)
    assert accel.latest_checkpoint(URL, verify=True) == RemotePath(f"{URL}/step-00000001")


def test_large_objects_go_and_come_in_parts() -> None:
    sizes: list[int] = []

    def measure(kind: str, work: Any) -> Any:
        result = work()
        sizes.append(len(result) if kind == "get" else result if kind == "part" else 0)
        return result

    value = torch.arange(3_000_000, dtype=torch.float64) + 0.5  # 24 MB
    Store.fault = measure
    path = accel.save_state(CPU, URL, {"x": value}, step=0)
    loaded = accel.load_state(CPU, path, {"x": torch.zeros(3)})
    assert torch.equal(loaded["x"], value)  # type: ignore[arg-type]
    assert max(sizes) == 16 << 20
    assert accel.latest_checkpoint(URL, verify=True) == path


def test_the_commands_take_urls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = Run()
    for step in (1, 2):
        accel.save_state(CPU, URL, run.items(), step=step)
    assert main(["checkpoint", "ls", URL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "step-00000001", "step-00000002"]
    assert "kB" in lines[1]
    assert re.search(r" \d+ s ", lines[1])
    assert main(["checkpoint", "show", URL]) == 0
    assert capsys.readouterr().out.startswith(f"{URL}/step-00000002\nstep 2")
    assert main(["checkpoint", "verify", URL]) == 0
    assert main(["checkpoint", "diff", f"{URL}/step-00000001", f"{URL}/step-00000002", "--values"]) == 1
    assert main(["checkpoint", "merge", URL, str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    damage("tensors", b"?")
    assert main(["checkpoint", "verify", URL]) == 1
    assert main(["checkpoint", "prune", URL, "--keep", "1"]) == 0
    assert "step-00000001" in steps()  # the newest that is whole


def test_options_go_with_the_place_and_are_never_shown() -> None:
    place = RemotePath("memory://runs/options/", {"skip_instance_cache": True, "secret": "hidden"})
    path = accel.save_state(CPU, place, {"x": 1}, step=0)
    assert path == RemotePath("memory://runs/options/step-00000000", place.options)
    assert accel.load_state(CPU, path, {"x": 0}) == {"x": 1}
    assert "hidden" not in f"{path!r} {path}"
    assert accel.latest_checkpoint(place) == path
    assert accel.latest_checkpoint("memory://runs/nothing") is None


def test_urls_of_files_are_paths(tmp_path: Path) -> None:
    path = accel.save_state(CPU, f"file://{tmp_path}/run", {"cursor": Cursor(3)}, step=0)
    assert path == tmp_path / "run" / "step-00000000"


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("nonsense://bucket/run", CheckpointError, "Protocol not known: nonsense"),
        ("objects://runs/none/step-00000001", CheckpointError, "has been deleted, or never was"),
        ("objects://", ConfigError, "the URL does not name a place in a store"),
    ],
)
def test_what_cannot_be_reached_is_told(url: str, error: type[Exception], words: str) -> None:
    with assert_raises(error, problem=words):
        accel.load_state(CPU, url, {"x": 0})


@pytest.mark.parametrize(("url", "extra"), [("memory://x/y", "remote"), ("s3://x/y", "s3")])
def test_a_missing_package_is_told_with_its_extra(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    threads = set(threading.enumerate())
    with assert_raises(MissingExtraError, fix=rf"pip install 'accel-torch\[{extra}\]'"):
        accel.save_state(CPU, url, {"x": 0}, step=0)
    assert set(threading.enumerate()) <= threads  # such as the one that renews a lock
