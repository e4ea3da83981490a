# SPDX-License-Identifier: Apache-2.0
"""Random damage and hostile manifests: nothing is accepted wrong, the file is named, memory stays as it was."""

import hashlib
import io
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Run, equal, streams
from hypothesis import HealthCheck, given, settings, strategies as st
from profiles import share

from accel import latest_checkpoint, load_state, save_state
from accel.errors import CheckpointError
from accel.storage import LOCK

PAGE = 4096


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def zero_page(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    start = rng.randrange(0, len(data), PAGE)
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    file.write_bytes(data)


def extend(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 50)))


def remove(file: Path, _: random.Random) -> None:
    file.unlink()


def swap_in_stale(file: Path, _: random.Random) -> None:
    shutil.copy(file.parent.parent / "step-00000001" / file.name, file)


def swap_bytes(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    while True:
        one, other = rng.randrange(len(data)), rng.randrange(len(data))
        if data[one] != data[other]:
            break
    data[one], data[other] = data[other], data[one]
    file.write_bytes(data)


DAMAGES: list[Callable[[Path, random.Random], None]] = [flip, flip, truncate, zero_page, extend, remove, swap_bytes]
DAMAGES += [swap_in_stale]


@pytest.mark.parametrize("trials", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_no_damage_is_accepted_wrong_and_the_older_checkpoint_is_found(
    trials: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, rng = Run(), random.Random(5)
    run.step(1)
    older = save_state(CPU, tmp_path, run.items(), step=1)
    run.step(1)
    bad = save_state(CPU, tmp_path, run.items(), step=2)
    saved, good = run.state(), tmp_path / "good"
    shutil.copytree(bad, good)
    files = sorted(path.name for path in good.iterdir())
    run.step(1)
    live, drawn = run.state(), streams()
    for trial in range(trials):
        shutil.rmtree(bad)
        shutil.copytree(good, bad)
        name = files[trial % len(files)]
        damage = DAMAGES[trial // len(files) % len(DAMAGES)]
        damage(bad / name, rng)
        whole = damage is swap_in_stale and name == "manifest.json"  # a valid manifest, so its files get the blame
        with pytest.raises(CheckpointError) as caught:
            load_state(CPU, bad, run.items())
        expected = "safetensors" if whole else name
        assert expected in str(caught.value), (damage, str(caught.value))
        assert caught.value.where.startswith(str(bad))
        caplog.clear()
        assert latest_checkpoint(tmp_path, verify=True) == older
        assert [str(bad) in message and name in message for message in caplog.messages] == [True]
    assert equal((run.state(), streams()), (live, drawn))
    run.load(CPU, good)
    assert equal(run.state(), saved)


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a manifest as an attacker would: with a digest that fits."""
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    del manifest["digest"]
    change(manifest)
    body = msgspec.json.encode(manifest)[1:]
    digest = hashlib.sha256(body).hexdigest().encode()
    (folder / "manifest.json").write_bytes(b'{"digest":"' + digest + b'",' + body)


def rename_file(new: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        old, entry = manifest["files"].popitem()
        manifest["files"][new] = entry
        for tensor in manifest["tensors"].values():
            tensor["pieces"][0]["file"] = new
        assert old

    return change


def set_path(*steps: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for step in steps[:-1]:
            manifest = manifest[step]
        manifest[steps[-1]] = value

    return change


FILE = "tensors-00000-of-00001.safetensors"
HOSTILE = [
    *(rename_file(name) for name in ("../../secret", "/etc/passwd", ".hidden", "a/b", "", "a\0b", "manifest.json")),
    set_path("files", FILE, "size", value=10**18),
    set_path("files", FILE, "size", value=-1),
    set_path("files", FILE, "size", value=2**70),
    set_path("files", FILE, "sha256", value="0" * 64),
    set_path("files", FILE, "sha256", value="../../x"),
    set_path("files", FILE, "sha256", value=[]),
    set_path("files", FILE, "sha256", value=["0" * 64] * 2),
    set_path("files", FILE, "sha256", value=["0" * 64]),
    set_path("files", {}.__class__.__name__, value={"size": 1, "sha256": "0" * 64}),
    set_path("tensors", "model.0.weight", "shape", value=[10**9, 10**9]),
    set_path("tensors", "model.0.weight", "dtype", value="float64"),
    set_path("tensors", "model.0.weight", "dtype", value="object"),
    set_path("tensors", "model.0.weight", "pieces", value=[]),
    set_path("tensors", "model.0.weight", "pieces", 0, "file", value=""),
    set_path("tensors", "model.9.weight", value={"dtype": "float32", "shape": [], "pieces": []}),
    set_path("aliases", "model.0.weight", value="model.0.bias"),
    set_path("aliases", "model.extra", value="model.0.bias"),
    set_path("items", "cursor", "value", value={"epoch": "x", "consumed": 0, "best": None}),
    set_path("items", "cursor", "value", value={"epoch": 1}),
    set_path("items", "cursor", "value", value=[1]),
    set_path("items", "cursor", "value", value={"$tensor": "model.0.weight"}),
    set_path("items", "cursor", "type", value="os.system"),
    set_path("items", "optimizer", "value", value={}),
    set_path("items", "optimizer", "value", "state", "model.0.weight", value=[1]),
    set_path("items", "optimizer", "value", "state", "model.0.weight", "step", value={"$tensor": "gone"}),
    set_path("items", "optimizer", "value", "state", "nobody", value={}),
    set_path("items", "optimizer", "value", "groups", value=[]),
    set_path("items", "optimizer", "value", "rest", value=[]),
    set_path("items", "optimizer", "value", "rest", value={"x": {"$tuple": 1}}),
    set_path("items", "scheduler", "value", value=3),
    set_path("items", "scheduler", "value", "milestones", value={"$counter": 3}),
    set_path("items", "scheduler", "value", "milestones", value={"$pickle": "gASV"}),
    set_path("items", "extra", value={"kind": "value", "type": "int", "value": 1}),
    set_path("items", "model", "kind", value="code"),
    set_path("world_size", value=7),
    set_path("world_size", value=0),
    set_path("step", value=-3),
    set_path("format", value=99),
    set_path("format", value="1"),
    set_path("surprise", value=1),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_manifest_is_refused_and_changes_nothing(number: int, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 100)
    run = Run()
    run.step(1)
    path = save_state(CPU, tmp_path / "run", run.items(), step=0)
    reseal(path, HOSTILE[number])
    run.step(1)
    before, memory = (run.state(), streams()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        load_state(CPU, path, run.items())
    assert equal((run.state(), streams()), before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024


class Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("wrapped", [False, True])
def test_no_file_is_ever_unpickled(wrapped: bool, tmp_path: Path) -> None:
    data = pickle.dumps(Payload(f"touch {tmp_path / 'executed'}"))
    if wrapped:
        buffer = io.BytesIO()
        torch.save({"model": Payload(f"touch {tmp_path / 'executed'}")}, buffer)
        data = buffer.getvalue()
    out, run = tmp_path / "run", Run()
    for name in ("manifest.json", FILE):
        path = save_state(CPU, out, run.items(), step=0)
        (path / name).write_bytes(data)
        entry = {"size": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}
        if name == FILE:
            reseal(path, set_path("files", FILE, value=entry))
        with pytest.raises(CheckpointError):
            load_state(CPU, path, run.items())
        latest_checkpoint(out, verify=True)
        shutil.rmtree(path)
    (out / LOCK).write_bytes(data)
    save_state(CPU, out, run.items(), step=1)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("length", [0, 1, 7, 2**31, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    "header",
    [b"", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"\xff" * 64],
    ids=["none", "empty", "deep list", "deep object", "no text"],
)
def test_absurd_headers_are_refused_without_taking_memory(length: int, header: bytes, tmp_path: Path) -> None:
    path = save_state(CPU, tmp_path, {"x": torch.ones(2)}, step=0)
    data = length.to_bytes(8, "little") + header
    (path / FILE).write_bytes(data)
    reseal(path, set_path("files", FILE, value={"size": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        load_state(CPU, path, {"x": torch.ones(2)})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024


def test_files_are_never_read_through_links(tmp_path: Path) -> None:
    run = Run()
    path = save_state(CPU, tmp_path / "run", run.items(), step=0)
    for name in (FILE, "manifest.json"):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
        with assert_raises(CheckpointError, problem="symbolic link"):
            load_state(CPU, path, run.items())
        assert latest_checkpoint(tmp_path / "run") is None
        (path / name).unlink()
        (tmp_path / name).rename(path / name)
    load_state(CPU, path, run.items())


def mutate(value: Any, rng: random.Random) -> Any:
    """Change one place of a JSON value."""
    junk = [None, True, -1, 10**30, 1.5, "", "x", [], {}, "$tensor", [[]], {"$tuple": []}, {"$dict": [[[], 1]]}]
    if not value or not isinstance(value, dict | list) or rng.random() < 0.15:
        return rng.choice(junk)
    value = value.copy()
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.1:
        del value[key]
    else:
        value[key] = mutate(value[key], rng)
    return value


@pytest.mark.parametrize("trials", [150, pytest.param(300, marks=pytest.mark.slow)])
def test_mutated_manifests_with_valid_digests_raise_or_load_but_never_in_part(trials: int, tmp_path: Path) -> None:
    run, rng = Run(), random.Random(trials)
    run.step(1)
    path = save_state(CPU, tmp_path, run.items(), step=0)
    original, saved = msgspec.json.decode((path / "manifest.json").read_bytes()), run.state()
    run.step(1)
    refused, memory = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(trials):

        def change(manifest: dict[str, Any]) -> None:
            fresh = mutate({k: v for k, v in original.items() if k != "digest"}, rng)
            manifest.clear()
            manifest.update(fresh if isinstance(fresh, dict) and fresh else {"x": fresh})

        reseal_from(path, original, change)
        before = run.state(), streams()
        try:
            load_state(CPU, path, run.items())
        except CheckpointError:
            refused += 1
            assert equal((run.state(), streams()), before)
        else:  # a value was changed for another that fits, and vouched for by a digest
            assert equal(run.state()[0], saved[0])
            run = Run()
            run.step(1)
    assert refused > trials // 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024


KEYS = st.sampled_from(["$tensor", "$tuple", "$dict", "$counter", "$int", "$bytes", "file", "offset", "shape", "size"])
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(
        ["$tensor", "$dict", "model.0.weight", "../x", FILE, "manifest.json", "module", "uint8", "0" * 64]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | KEYS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[Any], Any]:
    """One to three changes, each at a place of its own: another value, none, one from elsewhere, or the same twice."""
    steps = draw(
        st.lists(st.tuples(st.lists(st.integers(0, 200), max_size=6), st.integers(0, 4), JUNK), min_size=1, max_size=3)
    )

    def change(manifest: Any) -> Any:
        for path, kind, junk in steps:
            manifest = change_at(manifest, path, kind, junk, manifest)
        return manifest

    return change


def change_at(value: Any, path: list[int], kind: int, junk: Any, root: Any) -> Any:
    """Return a value changed at the end of a path, of which each step counts the children."""
    if not path or not isinstance(value, dict | list) or not value:
        return {1: place(root, [kind, 1, 2]), 2: [value, value], 3: {"": value}}.get(kind, junk)
    value = value.copy()
    keys = sorted(value) if isinstance(value, dict) else range(len(value))
    key = keys[path[0] % len(keys)]
    if kind == 4 and len(path) == 1:
        del value[key]
    else:
        value[key] = change_at(value[key], path[1:], kind, junk, root)
    return value


def place(value: Any, path: list[int]) -> Any:
    for step in path:
        if isinstance(value, dict | list) and value:
            value = value[sorted(value)[step % len(value)]] if isinstance(value, dict) else value[step % len(value)]
    return value


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Any]:
    run = Run()
    run.step(1)
    path = save_state(CPU, tmp_path_factory.mktemp("sealed"), run.items(), step=0)
    return path, (path / "manifest.json").read_bytes(), run.state()[0]


def assert_mutation(sealed: tuple[Path, bytes, Any], change: Callable[[Any], Any]) -> None:
    """A typed error and nothing changed, or the module that was saved."""
    path, whole, saved = sealed
    manifest = msgspec.json.decode(whole)
    del manifest["digest"]
    body = msgspec.json.encode(change(manifest))[1:]
    (path / "manifest.json").write_bytes(b'{"digest":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body)
    run = Run(seed=4)
    before, memory = (run.state(), streams()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load_state(CPU, path, run.items())
    except CheckpointError:
        assert equal((run.state(), streams()), before)
    else:
        assert equal(run.state()[0], saved)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024


@settings(max_examples=share(1.6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(change=mutations())
def test_a_manifest_mutated_by_hypothesis_is_refused_with_a_typed_error_or_loads(
    sealed: tuple[Path, bytes, Any], change: Callable[[Any], Any]
) -> None:
    assert_mutation(sealed, change)


@pytest.mark.nightly
@settings(max_examples=share(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(change=mutations())
def test_many_mutated_manifests(sealed: tuple[Path, bytes, Any], change: Callable[[Any], Any]) -> None:
    assert_mutation(sealed, change)


def reseal_from(path: Path, original: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> None:
    try:
        (path / "manifest.json").write_bytes(msgspec.json.encode(original))
        reseal(path, change)
    except OverflowError:  # 10**30 is nothing that JSON encoders write; leave the damage as text
        (path / "manifest.json").write_bytes(b"{}")


def test_a_tensor_cannot_be_absurdly_large(tmp_path: Path) -> None:
    path = save_state(CPU, tmp_path, {"x": torch.ones(2)}, step=0)
    header = b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    data = len(header).to_bytes(8, "little") + header
    (path / FILE).write_bytes(data)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][FILE] = {"size": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}
        manifest["tensors"]["x"]["shape"] = manifest["tensors"]["x"]["pieces"][0]["shape"] = [10**12]

    reseal(path, change)
    with assert_raises(CheckpointError, problem="ends before its tensors do"):
        load_state(CPU, path, {"x": torch.ones(2)})


def test_names_from_a_file_are_escaped_in_errors(tmp_path: Path) -> None:
    stored = torch.nn.ParameterDict({"\x1b[2Jwiped\x07": torch.ones(1)})
    path = save_state(CPU, tmp_path, {"table": stored}, step=0)
    with assert_raises(CheckpointError, problem="table\\.\x1b\\[2Jwiped\x07") as caught:
        load_state(CPU, path, {"table": torch.nn.ParameterDict()})
    assert r"table.\x1b[2Jwiped\x07" in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()
    assert str(CheckpointError("of \x1b[31mred\n  next", where="/a\x07b")) == "of \\x1b[31mred\n  next - at /a\\x07b"
