# SPDX-License-Identifier: Apache-2.0
"""YAML: PyYAML reads all of it; without it the plain reader gives the same values or refuses by line."""

import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from accel.cli import main
from accel.config._accelerate import decode_yaml
from accel.config._yaml_plain import decode_plain
from accel.errors import ConfigError

Reader = Callable[[str, str], dict[str, Any]]
READERS = pytest.mark.parametrize("read", [decode_yaml, decode_plain], ids=["PyYAML", "plain"])

SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("ab '\"#:-{,", max_size=6)
KEYS = st.text("abc_", min_size=1)
NESTED = st.recursive(SCALARS, lambda deeper: st.dictionaries(KEYS, deeper) | st.lists(SCALARS), max_leaves=8)
PIECES = [  # beginnings of all that YAML 1.1 knows
    *["a", "b", "key", "yes", "tRUE", "null", "~", "é", "\n", "\n  ", "\n- ", "\r\n", "\r", " ", "\t", ": ", ":", "- "],
    *[" #", "'", '"', "''", "\\n", "\\x", "[", "]", "{", "}", ", ", "&", "*", "!!str", "|", ">", "%", "@", "`", "? "],
    *["0", "1", "010", "0x1F", "0b1", "1_0", "1:30", "1.5", "1e5", "1.5e+3", "-.5", ".inf", ".nan", "2020-01-01", "+"],
    *["10.0.0.1", "=", "<<", "\u2028", "\x85", "\xa0", "\ufeff", "\x00", "...", "---", "_", "08", "0x", "1.", "/"],
]
NASTY = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


def written(values: dict[str, Any], indent: str = "") -> str:
    """YAML of nested values, as its writers lay it out."""
    text = ""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            text += f"{indent}{key}:\n{written(value, indent + '  ')}"
        elif isinstance(value, list) and value:
            text += f"{indent}{key}:\n" + "".join(f"{indent}- {json.dumps(item)}  # said\n" for item in value)
        else:
            text += f"{indent}{key}: {json.dumps(value)}\n"
    return f"\n# noted\n{text}" if not indent else text


@given(st.dictionaries(KEYS, NESTED, max_size=5))
def test_nested_keys_lists_and_scalars_are_read(values: dict[str, Any]) -> None:
    assert decode_plain(written(values), "a.yaml") == values
    assert decode_yaml(written(values), "a.yaml") == values


@given(NASTY | NASTY.map("a: {}\nb: 1\n".format) | NASTY.map("a: [{}]\n".format) | NASTY.map("a:\n- {}\n- b\n".format))
def test_the_plain_reader_gives_what_pyyaml_gives_or_refuses(text: str) -> None:
    try:
        values = decode_plain(text, "a.yaml")
    except ConfigError:
        return
    assert repr(decode_yaml(text, "a.yaml")) == repr(values)


@READERS
@pytest.mark.parametrize(
    ("spelled", "value"),
    [
        ("no", False),
        ("'no'", "no"),
        ("Yes", True),
        ("tRUE", "tRUE"),
        ("y", "y"),
        ("~", None),
        ("# c", None),
        ("1.5", 1.5),
        ("1e3", "1e3"),
        ("1e3x", "1e3x"),
        ("-0", 0),
        ("'it''s'", "it's"),
        ('"a\\n\\"b\\\\"', 'a\n"b\\'),
        ("a b # c", "a b"),
        ("a#b", "a#b"),
        ("[0, 1]", [0, 1]),
        ("[a, 'b c', no]", ["a", "b c", False]),
        ("{}", {}),
        ("10.0.0.1", "10.0.0.1"),
        ("http://host:1", "http://host:1"),
        ("0,1", "0,1"),
        ("é", "é"),
    ],
)
def test_scalars_mean_what_yaml_says(spelled: str, value: object, read: Reader) -> None:
    found = read(f"---\nkey: {spelled}\n", "a.yaml")
    assert repr(found) == repr({"key": value})


@pytest.mark.parametrize(
    ("text", "values", "line"),
    [
        ("a: 010\n", {"a": 8}, 1),
        ("a: 0x1F\n", {"a": 31}, 1),
        ("a: 0b11\n", {"a": 3}, 1),
        ("a: 1_000\n", {"a": 1000}, 1),
        ("a: 1:30\n", {"a": 90}, 1),
        ("a: .5\n", {"a": 0.5}, 1),
        ("a: -.inf\n", {"a": float("-inf")}, 1),
        ("a: 1\nb: 2020-01-01\n", {"a": 1, "b": datetime.date(2020, 1, 1)}, 2),
        ("a: [b, ]\n", {"a": ["b"]}, 1),
        ("a: [ ]\n", {"a": []}, 1),
        ("a: [1,\n  2]\n", {"a": [1, 2]}, 1),
        ("a: ['b, c']\n", {"a": ["b, c"]}, 1),
        ("a: {b: 1}\n", {"a": {"b": 1}}, 1),
        ("a: &x 1\nb: *x\n", {"a": 1, "b": 1}, 1),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", {"a": {"b": 1}, "c": {"b": 1}}, 1),
        ("a: |\n  text\n", {"a": "text\n"}, 1),
        ("a: >\n  b\n  c\n", {"a": "b c\n"}, 1),
        ("a: b\n  c\n", {"a": "b c"}, 2),
        ("a:\n  b\n", {"a": "b"}, 2),
        ('a: "b\n  c"\n', {"a": "b c"}, 1),
        ('a: "\\x41"\n', {"a": "A"}, 1),
        ("a:\n- b: 1\n", {"a": [{"b": 1}]}, 2),
        ("a:\n- - b\n", {"a": [["b"]]}, 2),
        ("a:\n-\n- b\n", {"a": [None, "b"]}, 2),
        ("? a\n: b\n", {"a": "b"}, 1),
        ("%YAML 1.1\n---\na: 1\n", {"a": 1}, 1),
        ("# c\n---\na: 1\n", {"a": 1}, 2),
        ("a: 1\n...\n", {"a": 1}, 2),
        ("  a: 1\n", {"a": 1}, 1),
        ("a: !!str 1\n", {"a": "1"}, 1),
        ("é: 1\n", {"é": 1}, 1),
        ("a: 'b\tc'\n", {"a": "b\tc"}, 1),
    ],
)
def test_what_only_pyyaml_reads_is_refused_by_line_without_it(text: str, values: dict[str, Any], line: int) -> None:
    assert decode_yaml(text, "a.yaml") == values
    with pytest.raises(ConfigError, match=f"line {line}, column") as caught:
        decode_plain(text, "a.yaml")
    assert "accel[yaml]" in caught.value.fix


@READERS
@pytest.mark.parametrize(
    "text",
    [
        "a: 'b' c\n",
        "a: b: c\n",
        "a: - b\n",
        'a: "b\n',
        "a: @b\n",
        "a: %b\n",
        "a: =\n",
        "a: [b\n",
        "a: 1\n   b: 2\n",
        "a:\n  b: 1\n c: 2\n",
        "a:\n\tb: 1\n",
        "a: 1\na: 2\n",
        "a: 1\n---\na: 2\n",
        "a: !!python/object:os.system 1\n",
        "a: 2020-13-45\n",
        "a: *x\n",
        "a: \x07\n",
        "yes: 1\n",
        "1: 2\n",
        "- a\n",
        "text\n",
    ],
)
def test_what_is_no_mapping_of_names_is_refused(text: str, read: Reader) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, "a.yaml")
    assert caught.value.where.startswith("a.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb 2\n", "expected `key: value` - at a.yaml, line 2, column 1"),
        ("a: 1\n   b: 2\n", "fits no line above - at a.yaml, line 2, column 4"),
        ("a:\n  b: 1\n c: 2\n", "fits no line above - at a.yaml, line 3, column 2"),
        ("a:\n\tb: 1\n", "a tab in the indentation - at a.yaml, line 2"),
        ("a: &x 1\n", "more than a plain value - at a.yaml, line 1, column 4"),
        ('a: "b\n', "a string that does not end, or has escapes - at a.yaml, line 1, column 4"),
        ("a: b: 1\n", "more than a plain value"),
        ("- a\n- b\n", "fits no line above - at a.yaml, line 1"),
    ],
)
def test_the_plain_reader_names_the_place(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_plain(text, "a.yaml")
    assert told in str(caught.value)


@READERS
def test_values_nested_too_deeply_are_a_typed_error(read: Reader) -> None:
    block = "".join(f"{' ' * depth}a:\n" for depth in range(3000))
    for text in (block, "a: " + "[" * 3000 + "]" * 3000, "a: " + "{b: " * 3000 + "}" * 3000, "a: " + "[" * 10**5):
        with pytest.raises(ConfigError, match="line"):
            read(text, "a.yaml")
    assert read("".join(f"{' ' * depth}a:\n" for depth in range(60)), "a.yaml")


def test_aliases_that_stand_for_more_than_a_file_holds_are_refused() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]\n" for at in range(1, 40))
    with pytest.raises(ConfigError, match=r"values - at a\.yaml, line"):
        decode_yaml(bomb, "a.yaml")
    with pytest.raises(ConfigError, match="contains itself"):
        decode_yaml("a: &x {b: *x}\n", "a.yaml")


@pytest.mark.parametrize("installed", [True, False])
def test_the_command_ends_with_the_error(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "deep.yaml"
    path.write_text("".join(f"{' ' * depth}a:\n" for depth in range(3000)))
    assert main(["config", "import", str(path)]) == 2
    assert "nested" in capsys.readouterr().err
