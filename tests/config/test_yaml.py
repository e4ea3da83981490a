# SPDX-License-Identifier: Apache-2.0
"""YAML: the values of PyYAML, or an error with the place; without PyYAML, an error that names the extra."""

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from catching import assert_raises
from hypothesis import given, strategies as st
from tables import rows

from accel.cli import main
from accel.config._accelerate import decode_yaml, import_accelerate
from accel.errors import ConfigError, MissingExtraError

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
    assert decode_yaml(written(values), "a.yaml") == values


@given(NASTY | NASTY.map("a: {}\nb: 1\n".format) | NASTY.map("a: [{}]\n".format) | NASTY.map("a:\n- {}\n- b\n".format))
def test_any_text_has_the_values_of_pyyaml_or_is_refused_with_its_place(text: str) -> None:
    try:
        found, expected = repr(decode_yaml(text, "a.yaml")), repr(yaml.safe_load(text) or {})
    except ConfigError as error:
        found, expected = error.where[:6], "a.yaml"
    assert found == expected


@rows(
    "spelled, value",
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
def test_scalars_mean_what_yaml_says(spelled: str, value: object) -> None:
    found = decode_yaml(f"---\nkey: {spelled}\n", "a.yaml")
    assert repr(found) == repr({"key": value})


@rows(
    "text, values",
    [
        ("a: 010\n", {"a": 8}),
        ("a: 0x1F\n", {"a": 31}),
        ("a: 0b11\n", {"a": 3}),
        ("a: 1_000\n", {"a": 1000}),
        ("a: 1:30\n", {"a": 90}),
        ("a: .5\n", {"a": 0.5}),
        ("a: -.inf\n", {"a": float("-inf")}),
        ("a: 1\nb: 2020-01-01\n", {"a": 1, "b": datetime.date(2020, 1, 1)}),
        ("a: [b, ]\n", {"a": ["b"]}),
        ("a: [ ]\n", {"a": []}),
        ("a: [1,\n  2]\n", {"a": [1, 2]}),
        ("a: ['b, c']\n", {"a": ["b, c"]}),
        ("a: {b: 1}\n", {"a": {"b": 1}}),
        ("a: &x 1\nb: *x\n", {"a": 1, "b": 1}),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: |\n  text\n", {"a": "text\n"}),
        ("a: >\n  b\n  c\n", {"a": "b c\n"}),
        ("a: b\n  c\n", {"a": "b c"}),
        ("a:\n  b\n", {"a": "b"}),
        ('a: "b\n  c"\n', {"a": "b c"}),
        ('a: "\\x41"\n', {"a": "A"}),
        ("a:\n- b: 1\n", {"a": [{"b": 1}]}),
        ("a:\n- - b\n", {"a": [["b"]]}),
        ("a:\n-\n- b\n", {"a": [None, "b"]}),
        ("? a\n: b\n", {"a": "b"}),
        ("%YAML 1.1\n---\na: 1\n", {"a": 1}),
        ("# c\n---\na: 1\n", {"a": 1}),
        ("a: 1\n...\n", {"a": 1}),
        ("  a: 1\n", {"a": 1}),
        ("a: !!str 1\n", {"a": "1"}),
        ("é: 1\n", {"é": 1}),
        ("a: 'b\tc'\n", {"a": "b\tc"}),
    ],
)
def test_values_of_every_kind_are_read(text: str, values: dict[str, Any]) -> None:
    assert decode_yaml(text, "a.yaml") == values


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
def test_what_is_no_mapping_of_names_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_yaml(text, "a.yaml")
    assert caught.value.where.startswith("a.yaml")


def test_values_nested_too_deeply_are_a_typed_error() -> None:
    block = "".join(f"{' ' * depth}a:\n" for depth in range(3000))
    for text in (block, "a: " + "[" * 3000 + "]" * 3000, "a: " + "{b: " * 3000 + "}" * 3000, "a: " + "[" * 10**5):
        with assert_raises(ConfigError, got="line"):
            decode_yaml(text, "a.yaml")
    assert decode_yaml("".join(f"{' ' * depth}a:\n" for depth in range(60)), "a.yaml")


def test_aliases_that_stand_for_more_than_a_file_holds_are_refused() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]\n" for at in range(1, 40))
    with assert_raises(ConfigError, got=r"values - at a\.yaml, line"):
        decode_yaml(bomb, "a.yaml")
    with assert_raises(ConfigError, got="contains itself"):
        decode_yaml("a: &x {b: *x}\n", "a.yaml")


def test_the_command_ends_with_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("".join(f"{' ' * depth}a:\n" for depth in range(3000)))
    assert main(["config", "import", str(path)]) == 2
    assert "nested" in capsys.readouterr().err


def test_without_pyyaml_the_error_names_the_extra_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    Path("old.yaml").write_text("num_processes: 2\n")
    Path("old.json").write_text('{"num_processes": 2}')
    with assert_raises(MissingExtraError, where=r"old\.yaml", fix=r"accel-torch\[yaml\]"):
        import_accelerate("old.yaml")
    assert main(["config", "import", "old.yaml"]) == 2
    assert "pip install 'accel-torch[yaml]'" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"old.yaml", "old.json"}
    assert main(["config", "import", "old.json"]) == 0
