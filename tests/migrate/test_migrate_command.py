# SPDX-License-Identifier: Apache-2.0
"""`accel migrate` on files: what it prints and writes, what it refuses, its exit statuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.cli import main
from accel.migrate import migrate_bytes

SCRIPT = """from accelerate import Accelerator

accelerator = Accelerator()
accelerator.print("one")  # says it
"""
WRITTEN = """import accel

with accel.session() as ctx:
    accel.print(ctx, "one")  # says it
"""
UNKNOWN = "from accelerate import Accelerator\n\n\ndef f(accelerator):\n    accelerator.unheard_of()\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")
    _ = path.write_text(SCRIPT)
    return path


def test_a_diff_is_printed_and_nothing_is_written(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "--- a/train.py\n+++ b/train.py\n" in out
    assert '+    accel.print(ctx, "one")  # says it\n' in out
    assert "1 file read, 1 to rewrite, 0 notes." in out
    assert script.read_text() == SCRIPT
    assert not Path("train.py.orig").exists()


def test_write_keeps_the_original_and_its_mode(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.chmod(0o750)
    assert main(["migrate", "--write", "train.py"]) == 0
    assert script.read_text() == WRITTEN
    assert script.stat().st_mode & 0o777 == 0o750
    assert Path("train.py.orig").read_text() == SCRIPT
    out = capsys.readouterr().out
    assert "train.py: written; the original is" in out
    assert "1 file read, 1 rewritten, 0 notes." in out
    assert main(["migrate", "--write", "train.py"]) == 0  # nothing to do
    assert sorted(path.name for path in Path().iterdir()) == ["train.py", "train.py.orig"]


def test_an_original_is_not_replaced(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ = Path("train.py.orig").write_text("mine")
    assert main(["migrate", "--write", "train.py"]) == 2
    assert script.read_text() == SCRIPT
    assert Path("train.py.orig").read_text() == "mine"
    assert "there is an original already" in capsys.readouterr().err
    assert len(list(Path().iterdir())) == 2


def test_a_read_only_file_stays(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.chmod(0o444)
    assert main(["migrate", "--write", "train.py"]) == 2
    assert script.read_text() == SCRIPT
    assert "read-only" in capsys.readouterr().err


def test_check_tells_what_would_change(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--check", "train.py"]) == 1
    assert "train.py: would be rewritten" in capsys.readouterr().out
    _ = script.write_text(WRITTEN)
    assert main(["migrate", "--check", "train.py"]) == 0


def test_notes_are_status_1_and_stay_so(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ = script.write_text(UNKNOWN)
    assert main(["migrate", "--write", "train.py"]) == 1
    assert "train.py:5: decide what takes the place of accelerator.unheard_of" in capsys.readouterr().out
    assert main(["migrate", "--check", "train.py"]) == 1


def test_a_folder_goes_on_after_files_that_cannot_be_read(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, data in {"a.py": b"from accelerate import (\n", "b.py": b"\xff\xfe\x00", "c.ipynb": b"{}"}.items():
        _ = Path(name).write_bytes(data)
    Path("lib", ".venv").mkdir(parents=True)
    _ = Path("lib", ".venv", "x.py").write_text(SCRIPT)
    _ = Path("lib", "y.py").write_text(SCRIPT)
    _ = Path("launch.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n")
    assert main(["migrate", "."]) == 2
    out, err = capsys.readouterr()
    assert "the file is not valid Python" in err
    assert "a.py:" in err
    assert "the file is not text" in err
    assert "the file is not a notebook" in err
    assert "2 files read, 2 to rewrite" in out
    assert "accel config import launch.yaml" in out


@pytest.mark.parametrize("words", [["no.py"], ["--write", "--check", "train.py"], [], ["empty"]])
def test_words_that_mean_nothing(script: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["migrate", *words]) == 2
    assert "accel: error:" in capsys.readouterr().err


def test_a_missing_package_names_its_extra(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["migrate", "train.py"]) == 2
    assert "accel-torch[migrate]" in capsys.readouterr().err


def test_a_notebook_may_assign_magics_and_an_error_names_its_cell(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ["from accelerate import Accelerator\naccelerator = Accelerator()", "files = !ls\na, b = %sx ls\nmodel?"]
    path = Path("train.ipynb")

    def write(*more: str) -> None:
        none: dict[str, object] = {}
        cells = [{"cell_type": "code", "metadata": none, "source": source} for source in (*sources, *more)]
        _ = path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}))

    write()
    assert main(["migrate", "--write", "train.ipynb"]) == 0
    assert json.loads(path.read_text())["cells"][1]["source"] == sources[1]
    write("def f(:")
    _ = capsys.readouterr()
    assert main(["migrate", "train.ipynb"]) == 2
    assert "train.ipynb, cell 3" in capsys.readouterr().err


def test_a_meaning_that_changes_in_several_lines_is_told_once(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ = script.write_text(
        "from accelerate.utils import set_seed\n\n\ndef f(accelerator):\n    set_seed(1)\n    set_seed(2)\n"
    )
    assert main(["migrate", "train.py"]) == 0
    assert "train.py:5,6: set_seed" in capsys.readouterr().out


def test_a_notebook_keeps_ids_outputs_and_magics(script: Path) -> None:
    def cell(kind: str, source: str, **more: object) -> dict[str, object]:
        return {"cell_type": kind, "id": source[:3], "metadata": {}, "source": source.splitlines(keepends=True), **more}

    outputs = [{"output_type": "stream", "name": "stdout", "text": ["é\n"]}]
    book: dict[str, Any] = {
        "cells": [
            cell("markdown", "# accelerate"),
            cell("code", "%matplotlib inline\n!pip install accelerate\nfrom accelerate import notebook_launcher"),
            cell("code", "%%bash\naccelerate config"),
            cell(
                "code",
                "def train(epochs):\n    accelerator = Accelerator(mixed_precision='bf16')\n"
                "    accelerator.print(epochs)",
                outputs=outputs,
            ),
            cell("code", "from accelerate import Accelerator\nnotebook_launcher(train, (3,), num_processes=2)"),
        ],
        "metadata": {"kernelspec": {"name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = Path("train.ipynb")
    _ = path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")
    assert main(["migrate", "--write", "train.ipynb"]) == 0
    found = json.loads(path.read_text())
    sources = ["".join(each["source"]) for each in found["cells"]]
    assert sources[0] == "# accelerate"
    assert sources[1] == "%matplotlib inline\n!pip install accelerate\nimport accel"
    assert sources[2] == "%%bash\naccelerate config"
    assert sources[3] == "def train(ctx, epochs):\n    accel.print(ctx, epochs)"
    assert sources[4] == "accel.notebook_launcher(train, (3,), nproc=2, precision='bf16')"
    for old, new in zip(book["cells"], found["cells"], strict=True):
        assert {**old, "source": 0} == {**new, "source": 0}
    assert path.read_text().endswith("}\n")
    assert '"é\\n"' in path.read_text()


def test_a_file_that_breaks_the_rewriting_is_named_and_the_others_are_written(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel.migrate import _rewrite

    class Panic(BaseException):
        """As of a parser in Rust."""

    rewrite = _rewrite.rewrite
    for error in (RuntimeError("deep inside"), Panic("deep inside")):

        def broken(text: str, where: str, *, error: BaseException = error, **options: object) -> object:
            if where.endswith("bad.py"):
                raise error
            return rewrite(text, where, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(_rewrite, "rewrite", broken)
        (script.parent / "bad.py").write_text(script.read_text())
        assert main(["migrate", str(script.parent)]) == 2
        said = capsys.readouterr()
        assert (
            f"the file cannot be rewritten: got {type(error).__name__}: deep inside - at {script.parent / 'bad.py'}"
            in said.err
        )
        assert f"+++ b/{script}" in said.out


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("# é\nfrom accelerate import Accelerator\n".encode("latin-1"), "byte 0xe9 in line 1, which is not utf-8"),
        ("from accelerate import Accelerator\n".encode("utf-16"), "the file is not text"),
        (b"# coding: no-such\nfrom accelerate import Accelerator\n", "unknown encoding"),
        (b"\xef\xbb\xbf# coding: latin-1\nfrom accelerate import Accelerator\n", "the file is not text"),
    ],
)
def test_an_encoding_that_is_not_said_is_named(
    data: bytes, said: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ = Path("odd.py").write_bytes(data)
    assert main(["migrate", "odd.py", "train.py"]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert "+++ b/train.py" in told.out


def test_magics_of_several_lines_stay(script: Path) -> None:
    sources = [
        "!pip install \\\n    accelerate \\\n    torch\nfrom accelerate import Accelerator",
        'rest = (7\n % 4)\ntext = """\n!no magic\n"""\nfiles = !ls \\\n  -l',
        "accelerator = Accelerator()\naccelerator.print(rest)",
    ]
    none: dict[str, object] = {}
    cells = [{"cell_type": "code", "metadata": none, "source": source} for source in sources]
    path = Path("train.ipynb")
    _ = path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}))
    assert main(["migrate", "--write", "train.ipynb"]) == 0
    found = [cell["source"] for cell in json.loads(path.read_text())["cells"]]
    assert found[0] == sources[0].replace("from accelerate import Accelerator", "import accel")
    assert found[1] == sources[1]
    assert found[2] == "ctx = accel.from_env()\naccel.print(ctx, rest)"


def test_remarks_stand_next_to_the_script_and_are_told_again(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ = script.write_text(
        "from accelerate import Accelerator\n\n\ndef f(accelerator, model, opt, loader):\n"
        "    loader = accelerator.prepare(loader, device_placement=False)\n"
        "    accelerator.unheard_of()\n    for batch in loader:\n        accelerator.backward(model(batch))\n"
        "        opt.step()\n        opt.zero_grad()\n"
    )
    assert main(["migrate", "--write", "train.py"]) == 1
    first = capsys.readouterr().out.partition("Changed in meaning:")[2]
    assert "  train.py:" in first
    told = Path("train.py.remarks").read_text()
    assert told.startswith("Left to you:\n  ")
    assert told.index("a mean loss is weighed") < told.index("no seed is set")  # what changes numbers most is first
    assert main(["migrate", "train.py"]) == 1
    again = capsys.readouterr().out.partition("Changed in meaning:")[2]
    assert first.replace("1 rewritten", "0 to rewrite") == again


def test_a_folder_shows_how_far_it_is(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ = Path("other.py").write_text("x = 1\n")
    assert main(["migrate", "."]) == 0
    assert "[1/2] other.py\n[2/2] train.py\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "advises"),
    [
        ("make(optimizer, 100, args.total * accelerator.num_processes)", True),
        ("make(optimizer, num_warmup_steps=args.warmup)", True),
        ("make(optimizer, num_warmup_steps=args.warmup * accelerator.num_processes)", False),
        ("make(optimizer, T_max=len(loader) * args.epochs)", False),
        ("make(optimizer, gamma=0.5, last_lr=1000)", False),
    ],
)
def test_constants_are_to_be_divided_only_where_they_are(schedule: str, advises: bool, script: Path) -> None:
    text = (
        "from accelerate import Accelerator\n\n\ndef f(accelerator, args, optimizer, loader):\n"
        f"    scheduler = {schedule}\n    optimizer, scheduler, loader = "
        "accelerator.prepare(optimizer, scheduler, loader)\n"
    )
    result = migrate_bytes(text.encode(), Path("x.py"))
    assert any("divide constants" in change.text for change in result.changes) == advises


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import os\n\nimport torch\nfrom accelerate import Accelerator\nfrom x import y", "accel,torch,x"),
        ("import os\n\nimport numpy\nimport torch\nfrom accelerate import Accelerator", "accel,numpy,torch"),
        ("import os\n\nfrom accelerate import Accelerator\nfrom x import y", "accel,x"),
        ("import torch\nimport os\nfrom accelerate import Accelerator", "torch,os,accel"),  # in no order itself
    ],
)
def test_imports_that_were_sorted_stay_so(before: str, after: str, script: Path) -> None:
    text = migrate_bytes(f"{before}\n\nAccelerator().print(1)\n".encode(), Path("x.py")).new.decode()
    words = [line.split()[1] for line in text.splitlines() if line.startswith(("import", "from"))]
    assert ",".join(words).removeprefix("os,") == after
