# SPDX-License-Identifier: Apache-2.0
"""Records to and from files: round trips, templates, and files that are wrong."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from configs import FIELDS, VALUES, configs
from hypothesis import given, strategies as st

from accel.config import LaunchConfig, decode, encode, read_config
from accel.errors import ConfigError


@given(configs(), st.sampled_from(["a.toml", "a.json"]))
def test_what_is_written_is_read_back(config: LaunchConfig, path: str) -> None:
    assert decode(encode(config, path), path) == config


@given(configs(), st.sets(st.sampled_from(sorted(VALUES))))
def test_a_template_sets_what_it_is_told_to_and_shows_the_rest(config: LaunchConfig, only: set[str]) -> None:
    text = encode(config, only=only)
    assert set(tomllib.loads(text)) == only | {"format"}
    assert decode(re.sub("^#(?! )", "", text, flags=re.M)) == config


def test_a_template_explains_every_field() -> None:
    words = " ".join(encode(LaunchConfig()).replace("#", " ").split())
    for field in FIELDS:
        assert field.doc in words
        assert all(f"{name}: {meaning}" in words for name, meaning in field.choices.items())


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", "device = \n", "malformed TOML: got invalid value - at a.toml, line 1, column 10"),
        ("a.toml", "quiet = true\nprefix = yes\n", 'at a.toml, line 2, column 10. Write texts in quotes: "yes".'),
        ("a.toml", "quiet = True\n", "at a.toml, line 1, column 9. Write true."),
        ("a.toml", "quiet = true\nquiet = true\n", "at a.toml, line 2, column"),
        ("a.toml", "\n\n[launch\n", "at a.toml, line 3, column 8"),
        ("a.toml", 'device = "cpu', "unterminated"),
        ("a.toml", '\nlog_dir = """a', "line 2, column"),
        ("a.toml", "[launch]\nquiet = true\n", "unknown key: got 'launch' - at a.toml. Move its keys to the top"),
        ("a.toml", "device = cpu\n", "line 1, column 10"),
        ("a.toml", "a = " + "[" * 9999, "nested too deeply"),
        ("a.toml", "nproc_per_node = " + "9" * 5000, "a number with too many digits"),
        ("a.toml", "nproc_per_node = 5000", "an integer from 1 to 4096 or auto, got 5000"),
        ("a.toml", "log_dir = 2026-11-21", "a text such as logs, got datetime.date"),
        ("a.json", '{"nproc_per_node": ' + "9" * 5000 + "}", "a number with too many digits"),
        ("a.json", '{"quiet": true,}', "malformed JSON: got "),
        ("a.json", '{\n "quiet" true}', "at a.json, line 2, column 10"),
        ("a.json", "", "at a.json, line 1, column 1"),
        ("a.json", "[true]", "the file does not hold a JSON object"),
        ("a.json", '{"quiet": true, "quiet": true}', "a key is repeated: got 'quiet' - at a.json"),
        ("a.json", '{"timeout_s": NaN}', "a number above 0"),
        ("a.json", '{"timeout_s": null}', "got None - at a.json, key timeout_s"),
        ("a.json", "[" * 99999, "nested too deeply"),
    ],
)
def test_a_malformed_text_is_told_with_its_place(name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(text, name)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accel.toml").write_bytes(b"quiet = true\n\xff")
    for path, told in {
        "accle.toml": "there is no such file: got 'accle.toml'. Did you mean `accel.toml`?",
        "nowhere/a.toml": "there is no such file",
        ".": "the file cannot be read",
        "accel.toml": "the file is not text: expected UTF-8, got byte 13 - at accel.toml",
        "a\0b": "the file cannot be read",
        "old.yaml": "accel config import old.yaml",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_config(path)
        assert told in str(caught.value), path


def test_an_empty_file_says_nothing() -> None:
    assert read_config("/dev/null").values == {}
