# SPDX-License-Identifier: Apache-2.0
"""`accel examples`: lists every script, copies one with the scripts that it imports, and overwrites nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accel.cli import main

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_it_lists_each_script_with_its_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    listed = dict(re.findall(r"^(\w+) +(\S.*)$", capsys.readouterr().out, flags=re.M))
    assert {*listed} == {path.stem for path in EXAMPLES.glob("*.py")} - {"gallery"}
    assert all(text.endswith(".") for text in listed.values())


@pytest.mark.parametrize("name", ["lora", "lora.py", "early-stopping"])
def test_it_copies_a_script(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", name, "--to", str(tmp_path / "new")]) == 0
    [copied] = (tmp_path / "new").iterdir()
    assert copied.read_bytes() == (EXAMPLES / copied.name).read_bytes()
    assert f"accel launch --nproc-per-node 2 {copied}" in capsys.readouterr().out


def test_it_copies_what_a_script_imports_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["examples", "digits_on_ray", "--to", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"digits_on_ray.py", "digits.py"}
    (tmp_path / "digits_on_ray.py").unlink()
    (tmp_path / "digits.py").write_text("mine")
    assert main(["examples", "digits_on_ray", "--to", str(tmp_path)]) == 2
    assert "a file of this name exists" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lorra", "--to", "."], "Did you mean `lora`?"),
        (["gallery", "--to", "."], "`accel examples` lists them."),
        (["lora"], "`accel examples lora --to .` copies it to this folder."),
    ],
)
def test_a_slip_names_the_line_to_type(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", *words]) == 2
    assert told in capsys.readouterr().err
