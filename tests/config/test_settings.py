# SPDX-License-Identifier: Apache-2.0
"""A setting is declared in one file: all else that users see of it follows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from catching import assert_raises
from configs import SETTINGS
from processes import patience

import accel
from accel.config import ConfigFile, resolve
from accel.config._settings import GroupKeywords, SettingKeywords, Settings

KEYWORDS = "    timeout_s: float | None\n"
FIELD = """    label: Annotated[
        str, Meta(pattern="^[a-z]*$", examples=["night"], description="Label of the run; empty: none.")
    ] = ""


SETTINGS:"""
PROGRAM = """
import contextlib, io, sys
import accel
from accel.cli._launch import parser
from accel.cli._main import main
from accel.config import LaunchConfig, decode, encode, resolve
from accel.env import read_env
from test_config_page import with_table

def printed(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(list(words)) == 0
    return out.getvalue()

print(parser().format_help())
assert resolve({"label": "night"}, {}).config.label == "night"
assert resolve({}, {"ACCEL_LABEL": "night"}).config.label == "night"
assert decode('label = "night"').label == decode(encode(LaunchConfig(label="night"))).label == "night"
assert read_env({"ACCEL_LABEL": "night"}).label == "night"
assert "ACCEL_LABEL=night" in printed("launch", "--label", "night", "--dry-run", sys.argv[1])
assert "label " in printed("config", "show")
assert accel.single(label="night").settings.label == "night"
with accel.session({"ACCEL_LABEL": "night"}, device="cpu") as ctx:
    assert accel.replace(ctx).settings.label == "night"
    assert accel.replace(ctx, label="day").settings.label == "day"
print(with_table(open(sys.argv[2]).read()))
"""


def test_a_field_in_one_file_is_a_flag_a_variable_a_key_a_keyword_and_a_row(tmp_path: Path) -> None:
    package = tmp_path / "accel"
    shutil.copytree(accel.__path__[0], package, ignore=shutil.ignore_patterns("__pycache__"))
    source = package / "config" / "_settings.py"
    text = source.read_text()
    assert text.count(KEYWORDS) == text.count("\n\nSETTINGS:") == 1
    changed = text.replace(KEYWORDS, f"{KEYWORDS}    label: str | None\n").replace("\n\nSETTINGS:", FIELD)
    _ = source.write_text(changed)
    script = tmp_path / "train.py"
    script.touch()
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(script), str(page)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "  --label NAME" in done.stdout
    row = "| `label` | `--label` | `ACCEL_LABEL` | a text such as night | empty | Label of the run; empty: none. |"
    assert row in done.stdout.splitlines()


def test_keywords_and_fields_are_the_same_settings() -> None:
    names = {field.name for field in SETTINGS}
    assert names == set(Settings.__struct_fields__) == set(SettingKeywords.__annotations__)
    assert set(SettingKeywords.__annotations__) - set(GroupKeywords.__annotations__) == {"mesh", "backend"}


@pytest.mark.parametrize(
    ("flags", "environ", "file", "source"),
    [
        ({"accumulation": "4"}, {"ACCEL_ACCUMULATION": "8"}, {}, "--accumulation"),
        ({}, {}, {"accumulation": 4}, "accel.toml, key accumulation"),
        ({}, {"ACCEL_ACCUMULATION": "4"}, {"accumulation": 8}, "ACCEL_ACCUMULATION"),
    ],
)
def test_ranks_know_where_the_user_wrote_a_setting(
    flags: dict[str, str], environ: dict[str, str], file: dict[str, object], source: str
) -> None:
    resolved = resolve(flags, environ, ConfigFile(path="accel.toml", values=file))
    told = resolved.sources_variable()
    assert bool(told) == (not environ or bool(flags))
    rank = accel.read_env({"ACCEL_ACCUMULATION": "4", **told})
    assert dict(rank.sources) == {"accumulation": source}
    own = accel.read_env({**told, "ACCEL_ACCUMULATION": "2"})  # set again inside of the launch
    assert dict(own.sources) == {"accumulation": "ACCEL_ACCUMULATION"}


def test_sources_that_no_launcher_wrote_are_refused() -> None:
    with assert_raises(accel.errors.EnvError, where="ACCEL_SOURCES"):
        _ = accel.read_env({"ACCEL_SOURCES": "--accumulation"})
