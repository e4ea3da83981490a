# SPDX-License-Identifier: Apache-2.0
"""Public names: each has one place and stands on a page of docs/, and the verbs of the loop have examples that run.

`python tests/test_public_names.py` writes tests/public_names.txt anew, the names with their signatures, the tables of
docs/modules.md, and the pages of docs/api/.
"""

from __future__ import annotations

import ast
import difflib
import doctest
import importlib
import inspect
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # where no pytest runs it

import pytest
import torch
from tables import rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import lazy
from accel.config import _settings
from accel.post_training import _sample

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs"
SNAPSHOT = HERE / "public_names.txt"
MODULES_PAGE = PAGES / "modules.md"
MODULES = [f"accel.{name}" for name in accel._MODULES if name != "engines"]
MODULES += ["accel.post_training", "accel.training.parts"]
MODULES += [f"accel.engines.{name}" for name in accel.engines.__all__]
PACKAGES = ("accel", *MODULES)
MOST_AT_THE_TOP = 95
TWICE = {"AccelError"}  # the base of `accel.errors`
CORE = re.compile(r"^    (\w+) +(.+)$", flags=re.M)

VERBS = (
    "accumulate",
    "autocast",
    "backward",
    "batches",
    "estimate.summary",
    "gather_for_metrics",
    "latest_checkpoint",
    "log",
    "load_state",
    "loss_scale",
    "optimizer_step",
    "prepare",
    "prepare_loader",
    "resume",
    "save_state",
    "schedules.find_lr",
    "session",
    "total_steps",
    "tracking",
    "train_state",
    "train_step",
    "training.discard",
    "unwrap_model",
)


def mentioned() -> set[str]:
    """Names that stand in the pages' code: `name`, `name(...)`, accel.name, or imported from accel."""
    text = "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    imports = "\n".join(re.findall(r"^from accel(?:\.\w+)* import .*$", text, flags=re.M))
    return set(re.findall(r"(?:\baccel\.|`)(\w+)", text)) | set(re.findall(r"\w+", imports))


@rows("package", PACKAGES)
def test_each_public_name_stands_on_a_page(package: str) -> None:
    missing = sorted(set(public_names(package)) - mentioned())
    assert not missing, f"{', '.join(missing)}: on no page of docs/, neither as `name` nor as accel.name"


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_each_verb_runs(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function = attrgetter(verb)(accel)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(function) or "", around(), verb, None, None)
    assert 1 <= len(test.examples) <= 6, f"accel.{verb} has no example of about three lines (>>>) in its docstring"
    found = list[str]()
    doctest.DocTestRunner(verbose=False).run(test, out=found.append)
    assert not found, "".join(found)


def around() -> dict[str, Any]:
    """What an example finds beside `accel`: the objects of a small run on one rank, by their usual names."""
    torch.manual_seed(0)
    ctx = accel.single()
    dataset = TensorDataset(torch.randn(10, 4), torch.randn(10, 1))
    net = nn.Linear(4, 1)
    model, optimizer = accel.prepare(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=4, shuffle=True))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    inputs, targets = dataset.tensors
    state = accel.train_state(ctx, seed=0)
    return {
        "accel": accel,
        "Path": Path,
        "torch": torch,
        "nn": nn,
        "DataLoader": DataLoader,
        "ctx": ctx,
        "dataset": dataset,
        "net": net,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "state": state,
        "batch": next(accel.batches(ctx, loader, state)),
        "inputs": inputs,
        "targets": targets,
        "items": {"model": model, "optimizer": optimizer},
    }


def public_names(package: str) -> list[str]:
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None)
    return sorted(listed if listed is not None else _defined(module))


def _defined(module: Any) -> Iterator[str]:
    """Classes and functions of a module without a list, of which those that it imports for itself are none."""
    for name, each in vars(module).items():
        here = getattr(each, "__module__", "").startswith(module.__name__)
        if not name.startswith("_") and here and (inspect.isclass(each) or inspect.isfunction(each)):
            yield name


def snapshot() -> str:
    """Every public name with its signature, one a line; of a class, its public methods and properties too."""
    lines = [line for package in PACKAGES for name in public_names(package) for line in described(package, name)]
    return "\n".join(lines) + "\n"


def described(package: str, name: str) -> Iterator[str]:
    found = getattr(importlib.import_module(package), name)
    if not inspect.isclass(found):
        yield f"{package}.{name}{signature(found)}"
        return
    bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
    yield f"class {package}.{name}({bases}){'' if issubclass(found, Exception) else signature(found)}"
    for attribute, each in sorted(vars(found).items()):
        inner = each.__func__ if isinstance(each, staticmethod | classmethod) else each
        if attribute.startswith("_"):
            continue
        if isinstance(inner, property):
            yield f"    {attribute}: {inspect.signature(inner.fget).return_annotation}"  # type: ignore[arg-type]
        elif inspect.isfunction(inner):
            yield f"    {attribute}{signature(inner)}"


def signature(found: Any) -> str:
    """Parameters, defaults and annotations as they stand in the source."""
    if not callable(found):
        return ""
    try:
        known = inspect.signature(found)
    except (TypeError, ValueError):  # of a class made in C
        return "(...)"
    written = annotations(found) if inspect.isclass(found) else {}
    parameters = [
        each.replace(annotation=written.get(each.name, each.annotation), default=shown(each.default))
        for each in known.parameters.values()
    ]
    text = str(known.replace(parameters=[each.replace(annotation=plain(each.annotation)) for each in parameters]))
    return re.sub(r"ForwardRef\(([^()]*)\)", r"\1", text.replace("'", ""))


def annotations(kind: type) -> dict[str, str]:
    """The annotations of a class and its bases, as texts."""
    found = dict[str, str]()
    for base in reversed(kind.__mro__):
        found |= vars(base).get("__annotations__", {})
    return found


def plain(annotation: Any) -> Any:
    """A type as it stands in the source, without what `Annotated` says of it; keywords that a dict lists, in full."""
    if not isinstance(annotation, str):
        return annotation
    tree = Unannotated().visit(ast.parse(annotation, mode="eval"))
    text = ast.unparse(tree)
    if found := re.fullmatch(r"Unpack\[(\w+)\]", text):
        listed = annotations(getattr(_settings, found[1], None) or getattr(_sample, found[1]))
        text = f"{{{', '.join(f'{name}: {kind.__forward_arg__}' for name, kind in listed.items())}}}"
    return text.replace("'", '"')


class Unannotated(ast.NodeTransformer):
    """`Annotated[kind, ...]` becomes `kind`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple):
            return self.visit(node.slice.elts[0])
        return self.generic_visit(node)


def shown(default: Any) -> Any:
    """A default that is written with double quotes, and without an address."""
    if default is inspect.Parameter.empty:
        return default
    text = re.sub(r"<(?:function |.*\.)?(<?\w+>?) at 0x\w+>", r"\1", repr(default))
    return type("Default", (), {"__repr__": lambda _: text.replace("'", '"')})()


def test_no_public_name_is_a_rooms() -> None:
    folder = Path(accel.__file__).parent
    rooms = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert not rooms & set(accel.__all__), "`import accel` binds a name to its room as soon as the room is imported"


def test_few_names_are_at_the_top_and_each_has_one_place() -> None:
    assert len(accel.__all__) <= MOST_AT_THE_TOP, "a name of one subject belongs to that subject's module"
    packages = [importlib.import_module(package) for package in PACKAGES]
    places = Counter((name, id(getattr(each, name))) for each in packages for name in each.__all__)
    assert {name for (name, _), count in places.items() if count > 1} == TWICE


@rows("package", MODULES)
def test_a_public_module_shows_its_names_and_no_others(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(name for name in dir(module) if not re.fullmatch(r"__\w+__", name)) == sorted(module.__all__)
    assert attrgetter(package.removeprefix("accel."))(accel) is module


ELSEWHERE = {
    name: f"{package.removeprefix('accel.')}.{name}"
    for package in (f"accel.{module}" for module in reversed(accel._PUBLIC))
    for name in importlib.import_module(package).__all__
    if name not in {*accel.__all__, *accel._OTHERS}
}


@rows("name", ELSEWHERE)
def test_a_name_of_a_module_is_answered_by_its_place(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Use accel\.{re.escape(ELSEWHERE[name])}\."):
        getattr(accel, name)
    with pytest.raises(ImportError, match=rf"name '{name}' from 'accel'\. Use accel\.{re.escape(ELSEWHERE[name])}\."):
        exec(f"from accel import {name}", {})


def test_a_missing_name_reads_no_source_until_its_text_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from accel import xla` asks for the name first, in every process."""
    read: list[str] = []
    monkeypatch.setattr("accel.lazy._place", lambda _package, name, _modules: read.append(name) or "")
    assert not hasattr(accel, "jsonl")
    assert read == []
    with pytest.raises(AttributeError) as caught:
        _ = accel.jsonl  # pyright: ignore[reportAttributeAccessIssue]
    assert "no attribute 'jsonl'" in str(caught.value)
    assert read == ["jsonl"]


def test_without_sources_a_missing_name_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, encoding: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    with pytest.raises(AttributeError, match=r"no attribute 'jsonl'$"):
        _ = accel.jsonl  # pyright: ignore[reportAttributeAccessIssue]


@rows("package", MODULES)
def test_a_place_is_given_for_public_names_alone(package: str) -> None:
    module = importlib.import_module(package)
    assert lazy._listed(Path(module.__file__ or "").read_text(encoding="utf-8")) <= {*module.__all__}


def test_the_core_is_the_same_table_on_the_page_and_in_help() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", MODULES_PAGE.read_text().partition("\n## ")[0], flags=re.M)
    assert rows == CORE.findall(accel.__doc__ or "")
    assert 20 <= len(rows) <= 24
    assert {name for name, _ in rows} <= {*accel.__all__}


def test_the_page_of_public_modules_lists_their_names() -> None:
    page = MODULES_PAGE.read_text()
    assert page == listed(page), f"record it: python {Path(__file__).relative_to(HERE.parent)}"


def listed(page: str) -> str:
    """The page of public modules with a table of names in each section, in place of the one that is there."""
    head, *sections = re.split(r"^## ", page, flags=re.M)
    assert sorted(section.partition("\n")[0] for section in sections) == sorted(f"`{name}`" for name in PACKAGES)
    return head + "".join(f"## {_with_table(section)}\n" for section in sections).rstrip("\n") + "\n"


def _with_table(section: str) -> str:
    package = section.partition("\n")[0].strip("`")
    text = section.partition("\n|")[0].rstrip()
    module = importlib.import_module(package)
    modules = {name.rpartition(".")[2] for name in PACKAGES} | {"engines"}
    names = sorted(name for name in module.__all__ if name not in modules and not name.startswith("__"))
    rows = [f"| `{name}` | {_first_line(getattr(module, name))} |" for name in names]
    return "\n".join([text, "", "| name | |", "|---|---|", *rows, ""])


def _first_line(found: Any) -> str:
    return (inspect.getdoc(found) or "").partition("\n")[0].rstrip(".:").replace("|", "\\|")


def test_the_public_names_and_signatures_are_those_on_record() -> None:
    recorded, now = SNAPSHOT.read_text().splitlines(), snapshot().splitlines()
    changes = list(difflib.unified_diff(recorded, now, "on record", "now", n=0, lineterm=""))
    hint = f"If the change is wanted, record it: python {Path(__file__).relative_to(HERE.parent)}"
    assert not changes, "\n".join([*changes, hint])


if __name__ == "__main__":
    _ = SNAPSHOT.write_text(snapshot())
    _ = MODULES_PAGE.write_text(listed(MODULES_PAGE.read_text()))
    runpy.run_path(str(PAGES / "build.py"))["record"]()
