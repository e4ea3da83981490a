# SPDX-License-Identifier: Apache-2.0
"""`accel migrate` on scripts in the manner of strangers: exit status 0 means that the written script holds together."""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import re
import subprocess
import symtable
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from processes import patience
from tables import rows

import accel
from accel.migrate import FileResult, find_scripts, migrate_bytes, migrate_file, read_shared
from accel.migrate._layout import width_of
from accel.migrate._shared import shared_in

TEXTS = sorted(Path(__file__).parent.glob("strangers_*.txt"))
SCRIPTS = {
    name.strip(): body
    for path in TEXTS
    for name, body in re.findall(r"^#### (.*)\n((?:(?!####).*\n)*)", path.read_text(), flags=re.MULTILINE)
}


class Written(Mapping[str, FileResult]):
    """What is written for each script, once somebody asks for it."""

    def __init__(self, root: Path) -> None:
        self._root, self._shared = root, read_shared(list(find_scripts([str(root)])))
        self._found: dict[str, FileResult] = {}

    def __getitem__(self, name: str) -> FileResult:
        if name not in self._found:
            self._found[name] = migrate_file(self._root / name, self._shared)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(SCRIPTS)

    def __len__(self) -> int:
        return len(SCRIPTS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("strangers")
    for name, body in SCRIPTS.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        _ = path.write_text(body)
    return Written(root)


def undefined(text: str) -> set[str]:
    """The names that a script reads, and that no scope around them binds."""
    found: set[str] = set()
    tables = [symtable.symtable(text, "script.py", "exec")]
    module = {each.get_name() for each in tables[0].get_symbols() if each.is_local()}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {each.get_name() for each in table.get_symbols() if each.is_referenced() and not each.is_local()}
        found -= {each.get_name() for each in table.get_symbols() if each.is_free()}
    return found - module - set(dir(builtins))


def test_the_checks_of_these_tests_find_what_they_look_for() -> None:
    assert undefined("def f(a):\n    return a + b + len(c)\n\n\nc = 1\n") == {"b"}
    assert undefined("def f(a):\n    def g():\n        return a\n    return g\n") == set()
    assert len(list(misfits("accel.prepare(ctx, a, device_placement=[True])\naccel.gather(ctx, x)\n"))) == 1
    assert left("from accelerate import Accelerator\nself.accelerator.print(1)\n# accelerate\n") == [1, 1, 2]


def left(text: str) -> list[int]:
    """The lines that name Accelerate outside of comments and strings, but for functions of the script."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    own = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    names = [each for each in tokens if each.type == tokenize.NAME and each.string not in own]
    return [each.start[0] for each in names if "accelerat" in each.string.lower()]


def misfits(text: str) -> Iterator[str]:
    """The calls of accel's functions that do not bind to a signature."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not re.fullmatch(r"accel(\.\w+)+", ast.unparse(node.func)):
            continue
        found: object = accel
        for part in ast.unparse(node.func).split(".")[1:]:
            found = getattr(found, part)
        starred = any(isinstance(each, ast.Starred) for each in node.args) or any(
            each.arg is None for each in node.keywords
        )
        bind = inspect.signature(found).bind_partial if starred else inspect.signature(found).bind  # type: ignore[arg-type]
        try:
            plain = [each for each in node.args if not isinstance(each, ast.Starred)]
            _ = bind(*plain, **{each.arg: 0 for each in node.keywords if each.arg})
        except TypeError as error:
            yield f"{ast.unparse(node)}: {error}"


@pytest.mark.slow
def test_scripts_without_notes_hold_together(written: Written) -> None:
    """Nothing of Accelerate is left, no name is undefined that was not, and each call fits; or a note says where."""
    wrong: dict[str, list[str]] = {}
    for name, result in written.items():
        text = result.new.decode()
        _ = compile(text, name, "exec")
        if not result.notes:
            wrong[name] = [*(undefined(text) - undefined(SCRIPTS[name])), *misfits(text), *map(str, left(text))]
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.slow
def test_most_scripts_need_at_most_two_decisions(written: Written) -> None:
    few = [name for name, result in written.items() if len(result.notes) <= 2]
    assert len(few) >= 18, sorted(set(SCRIPTS) - set(few))


@pytest.mark.parametrize("name", ["made/by_function.py", "made/by_method.py", "split/base_trainer.py"])
def test_a_class_keeps_what_a_function_or_a_method_makes(name: str, written: Written) -> None:
    """Only who closes the context is left to decide; models of a list are accumulated one by one."""
    (note,) = written[name].notes
    assert note.text.startswith("decide who closes this context: accel.close(self.ctx), or the accel.session")
    assert "[self." not in written[name].new.decode()
    assert "return accel.from_env(" in written["made/build.py"].new.decode()


def test_loggers_without_a_rank_get_no_arguments_of_ranks(written: Written) -> None:
    text = written["split/base_trainer.py"].new.decode()
    assert "main_process_only" in SCRIPTS["split/base_trainer.py"]
    assert 'logger.info(f"eval loss {mean.item():.4f}")' in text


@pytest.mark.slow
def test_a_trainer_over_two_files_trains(written: Written, tmp_path: Path) -> None:
    for name in ("split/base_trainer.py", "split/regression.py"):
        text = written[name].new.decode().replace("# accel: decide", "# once: ")
        (tmp_path / Path(name).name).write_text(text)
    done = subprocess.run(
        [sys.executable, "regression.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("eval")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) >= 2


def test_a_list_of_optimizers_is_no_loader(written: Written) -> None:
    assert "accel.batches(" not in written["kinds/optimizers.py"].new.decode()


@pytest.mark.slow
@rows("name", SCRIPTS)
def test_new_lines_keep_the_width_and_no_comment_to_a_linter_stands_alone(name: str, written: Written) -> None:
    old = SCRIPTS[name]
    kept = {line.strip() for line in old.splitlines()}
    new = [line for line in written[name].new.decode().splitlines() if line.strip() not in kept]
    code = [line for line in new if not line.strip().startswith(("#", '"', "'", "f'", 'f"'))]
    assert [line for line in code if len(line) > width_of(old) and "# accel: " not in line] == []
    assert [line for line in new if re.match(r"\s*#\s*(noqa|type: ignore)", line)] == []


def test_options_of_trackers_that_settings_name_are_kept(written: Written) -> None:
    text = " ".join(written["kinds/hydra.py"].new.decode().split())
    assert 'accel.trackers.by_name( cfg.logging.report_to if cfg.logging.enabled else None, {"wandb":' in text


def test_statements_on_one_line_are_read_as_lines(written: Written) -> None:
    text = written["kinds/semicolons.py"].new.decode()
    assert not written["kinds/semicolons.py"].notes
    assert "\tstate = accel.backward(ctx, loss, state)  # both\n" in text
    assert "# one object\nwith accel.session() as ctx:" in text


def test_a_note_on_big_models_names_the_function(written: Written) -> None:
    notes = [note.text for note in written["kinds/bigmodel.py"].notes]
    assert any(
        "accelerate's init_empty_weights, accel.init_empty_weights (docs/big-models.md)" in each for each in notes
    )


def test_a_file_without_accelerate_gets_no_import() -> None:
    made = "class Trainer:\n    def __init__(self):\n        self.accelerator = Accelerator()\n"
    base = f"from accelerate import Accelerator\n\n\n{made}"
    imports = "from torch.utils.data import random_split\n\nfrom pytorch_accelerated import Trainer\n"
    text = f"{imports}\n\nclass Own(Trainer):\n    pass\n"
    result = migrate_bytes(text.encode(), Path("own.py"), shared_in([base]))
    assert result.new.decode() == text


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("import torch\nfrom accelerate import Accelerator, Missing\n", ["import accel", "import torch"]),
        ("import os\nimport torch\n# data\nfrom accelerate import Accelerator\n", ["import accel", "import os"]),
        ("# license\nimport torch\nfrom accelerate import Accelerator\n", ["# license", "import accel"]),
    ],
)
def test_the_import_stands_in_its_place_beside_comments(imports: str, expected: list[str]) -> None:
    text = f"{imports}\nwith_model = Missing\naccelerator = Accelerator()\naccelerator.print(torch.ones(1))\n"
    lines = migrate_bytes(text.encode(), Path("own.py")).new.decode().splitlines()
    assert lines[:2] == expected
