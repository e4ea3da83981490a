# SPDX-License-Identifier: Apache-2.0
"""Older files in the present format: renamed and removed keys, what cannot be mapped, and the file on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from catching import assert_raises
from configs import configs
from hypothesis import given, strategies as st

from accel.cli import main
from accel.config import LaunchConfig, _resolve, decode, encode, read_config
from accel.config._files import decode_values
from accel.config._resolve import CHANGES, FormatChange, is_old, take_format, update_values
from accel.errors import ConfigError

LATER = (
    *CHANGES,
    FormatChange(renamed=(("ranks", "nproc"), ("mute", "quiet")), removed=(("color", "lines have none"),)),
    FormatChange(renamed=(("nproc", "nproc_per_node"),)),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@given(configs(), st.sampled_from(["a.toml", "a.json"]))
def test_what_is_written_now_needs_no_update(config: LaunchConfig, path: str) -> None:
    values = decode_values(encode(config, path), path)
    assert update_values(values, path) == (take_format(values, path)[1], ())


@given(st.integers(1, 9), st.booleans(), st.integers(0, len(LATER)))
def test_keys_follow_every_format_between_a_files_and_the_present_one(ranks: int, quiet: bool, given: int) -> None:
    count = "nproc_per_node" if given == 3 else "nproc" if given == 2 else "ranks"
    old = {count: ranks, "quiet" if given > 1 else "mute": quiet, "prefix": False} | ({} if given > 1 else {"color": 1})
    values, changes = update_values(old | {"format": given}, "a.toml", LATER)
    assert values == {"nproc_per_node": ranks, "quiet": quiet, "prefix": False}
    assert list(values)[:2] == ["nproc_per_node", "quiet"], "keys keep their order"
    assert ("color = 1 is gone: lines have none" in changes) == (given < 2)
    assert ("nproc is now nproc_per_node" in changes) == (given < 3)
    assert update_values(values | {"format": len(LATER)}, "a.toml", LATER).changes == ()


def test_all_that_cannot_be_mapped_is_told_at_once() -> None:
    values: dict[str, Any] = {"format": 1, "ranks": 2, "nproc": 3, "precison": "bf16", "timeout_s": -1, "quiet": True}
    with pytest.raises(ConfigError) as caught:
        update_values(values, "a.toml", LATER)
    told = str(caught.value)
    assert "'ranks' and its new name 'nproc' are both set" in told
    assert "'precison' is no key: Did you mean `precision`?" in told
    assert "invalid timeout_s: expected a number above 0" in told
    with assert_raises(ConfigError, fix=r"accel config import a\.json"):
        update_values({"mixed_precision": "no", "num_processes": 2}, "a.json")


@pytest.mark.parametrize("given", [len(CHANGES) + 1, -1, "1", True, None])
def test_formats_that_do_not_exist_are_refused(given: object) -> None:
    Path("a.json").write_text(json.dumps({"format": given, "quiet": True}))
    with assert_raises(ConfigError, problem="newer release|format of the file is not known"):
        read_config("a.json")
    with assert_raises(ConfigError, problem="newer release|format of the file is not known"):
        decode(Path("a.json").read_text(), "a.json")


def test_an_old_key_is_refused_with_the_command_that_updates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_resolve, "CHANGES", LATER)
    assert [is_old(key) for key in ("ranks", "color", "nproc_per_node")] == [True, True, False]
    with assert_raises(ConfigError, fix=r"Run `accel config update a\.toml`"):
        decode("ranks = 2\n", "a.toml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("accel.toml", 'nproc-per-node = 2\nquiet = true\n\n[plan]\nunits = ["Block"]\n'),
        ("old.json", '{"nproc-per-node": 2, "quiet": true, "plan": {"units": ["Block"]}}'),
    ],
)
def test_a_file_is_replaced_and_the_old_one_kept(
    name: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text(text)
    Path(name).chmod(0o640)
    Path(f"{name}.old").write_text("older still")
    assert main(["config", "update", *([] if name == "accel.toml" else [name])]) == 0
    assert capsys.readouterr().out == (
        f"  nproc-per-node is now nproc_per_node\n  format = 1, from none\nWrote {name}; the old file is {name}.old1.\n"
    )
    assert Path(f"{name}.old1").read_text() == text
    assert Path(f"{name}.old").read_text() == "older still"
    assert Path(name).stat().st_mode & 0o777 == 0o640
    config = decode(Path(name).read_text(), name)
    assert (config.nproc_per_node, config.quiet, config.plan.units) == (2, True, ("Block",))
    assert set(read_config(name).values) == {"nproc_per_node", "quiet", "plan"}
    assert main(["config", "update", name]) == 0
    assert capsys.readouterr().out == f"{name} is up to date.\n"
    assert sorted(path.name for path in folder.iterdir()) == sorted([name, f"{name}.old", f"{name}.old1"])


def test_a_file_that_cannot_be_mapped_stays_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "quiet = true\nunknown = 1\nother = 2\n"
    Path("accel.toml").write_text(text)
    assert main(["config", "update"]) == 2
    told = capsys.readouterr().err
    assert "'unknown' is no key" in told
    assert "'other' is no key" in told
    assert Path("accel.toml").read_text() == text
    assert [path.name for path in folder.iterdir()] == ["accel.toml"]
    assert main(["config", "update", "a.yaml"]) == 2
    assert "accel config import a.yaml" in capsys.readouterr().err
