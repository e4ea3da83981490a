# SPDX-License-Identifier: Apache-2.0
"""What holds the house up: direction of imports, sizes, no hidden state, one place that reads the environment."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from processes import patience
from sources import ACCEL, source_nodes, walked
from uncollected import no_collections

# A line may import only lines above it; neighbours on a line never import each other.
LAYERS = [
    {"terminal"},  # formats of numbers, which messages of all others use
    {"errors", "lazy", "opening", "system"},
    {"brought", "endpoints", "formats", "migrate", "run_folder", "topology", "xla"},
    {"alerts"},
    {"config"},
    {"env"},
    {"compiling", "devices"},
    {"fakes", "mixins", "tree", "random", "storage", "tensors"},
    {"comm"},
    {"context"},
    {"process", "collectives", "metrics", "memory", "loop_state", "preempt", "seeding"},
    {"data", "precision", "parallel", "optim", "checkpoint", "launching", "estimate", "report", "trackers"},
    {"items"},
    {"bigmodel"},
    {"training"},
    {"engines", "post_training", "schedules"},
    {"testing"},
    {"cli", "pytest_plugin"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# a process of its own, which runs torch's elastic agent; a table of a model that exists, so torch is loaded
WITH_TORCH = {
    "launching/hosts/_agent.py",
    "launching/hosts/_round.py",
    "estimate/_summary.py",
}
TORCH_FREE = {
    "alerts",
    "errors",
    "lazy",
    "opening",
    "system",
    "formats",
    "xla",
    "schedules",
    "config",
    "endpoints",
    "run_folder",
    "terminal",
    "topology",
    "env",
    "launching",
    "migrate",
    "estimate",
    "report",
    "bigmodel/plan",
    "cli",
    "pytest_plugin",
}
# each passes os.environ on as a mapping; env.py takes the mapping
ENVIRONMENT_READERS = {
    "context",
    "launching",
    "cli",
    "trackers/_mlflow.py",  # variables of MLflow's users, which its client does not read
}
FORBIDDEN = {"pickle", "eval", "exec"}
# a launch executes the script it was given; objects go between the ranks of a job, and a launch hands a function to its
# own ranks; torch hands a process's own flight record over as a pickle; nothing that others could have written is
# unpickled
EXCEPTIONS = {
    ("launching", "exec"),
    ("collectives/_objects.py", "pickle"),
    ("launching/local/_function_rank.py", "pickle"),
    ("launching/reports/_failure.py", "pickle"),
}
# torch's calls that order a device's work: the one door to them
DOOR = "comm/_streams.py"
BEHIND_THE_DOOR = {
    "Stream",
    "current_stream",
    "record_event",
    "record_stream",
    "set_stream",
    "wait_event",
    "wait_stream",
}
# a new subject may bring a file
MOST_FILES, MOST_LINES, MOST_FUNCTION_LINES = 480, 500, 60
MOST_PRIVATE_NAMES = 550  # imported by tests; 712 once
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CHANGING = {"append", "add", "update", "pop", "clear", "extend", "setdefault", "remove", "popitem", "insert", "discard"}
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "OrderedDict", "deque", "Counter", "bytearray", "count", "local"}


def complaints(path: Path, nodes: Sequence[Any], root: Path = ACCEL) -> Iterator[str]:
    """Everything that a source file does against the rules."""
    relative = path.relative_to(root)
    room = relative.parts[0].removesuffix(".py")
    text = path.read_text()
    if room != "__init__" and room not in LEVEL:
        yield f"{relative}: {room!r} has no layer"
        return
    if not text.startswith("# SPDX-License-Identifier: Apache-2.0\n"):
        yield f"{relative}: no SPDX line"
    if (lines := text.count("\n")) > MOST_LINES:
        yield f"{relative}: {lines} lines, the most is {MOST_LINES}"
    yield from _module_state(nodes, relative)
    top = set(nodes[0].body)
    for node in nodes:
        yield from _rules(node, relative, room, at_top=node in top)


def _rules(node: ast.AST, relative: Path, room: str, *, at_top: bool) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
        doc = ast.get_docstring(node, clean=False)
        length = node.end_lineno - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)
        if length > MOST_FUNCTION_LINES:
            yield f"{relative}:{node.lineno}: {node.name} has {length} lines, the most is {MOST_FUNCTION_LINES}"
    if relative.as_posix() != DOOR and _orders_streams(node):
        yield f"{relative}:{node.lineno}: streams without `ctx.streams`"  # type: ignore[attr-defined]
    if room != "terminal" and _formats_units(node):
        yield f"{relative}:{node.lineno}: formats seconds or bytes; `accel.terminal` does"  # type: ignore[attr-defined]
    if isinstance(node, ast.Global):
        yield f"{relative}:{node.lineno}: a global statement"
    if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
        if {room, relative.as_posix()}.isdisjoint(ENVIRONMENT_READERS):
            yield f"{relative}:{node.lineno}: touches the environment"
        if not isinstance(node.ctx, ast.Load):
            yield f"{relative}:{node.lineno}: replaces the environment"
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and "environ" in ast.dump(node.value):
        yield f"{relative}:{node.lineno}: writes the environment"
    if (
        isinstance(node, ast.Name)
        and node.id in FORBIDDEN
        and EXCEPTIONS.isdisjoint({(room, node.id), (relative.as_posix(), node.id)})
    ):
        yield f"{relative}:{node.lineno}: {node.id}"
    if isinstance(node, ast.Compare) and getattr(node.left, "attr", getattr(node.left, "id", "")) == "strategy":
        named = any(isinstance(each, ast.Constant) for side in node.comparators for each in ast.walk(side))
        yield from [f"{relative}:{node.lineno}: asks for a strategy's name; use `topology.data_dimension`"] * named
    for target in _imported(node, relative):
        if (
            target in ("torch", "safetensors")
            and at_top
            and {room, relative.parent.as_posix()} & TORCH_FREE
            and relative.as_posix() not in WITH_TORCH
        ):
            yield f"{relative}:{node.lineno}: {room} is torch-free"  # type: ignore[attr-defined]
        if target in LEVEL and room in LEVEL and target != room and LEVEL[target] >= LEVEL[room]:
            yield f"{relative}:{node.lineno}: {room} may not import {target}"  # type: ignore[attr-defined]


def _orders_streams(node: ast.AST) -> bool:
    """Whether a line takes torch's streams, or pins memory, on its own."""
    if isinstance(node, ast.Attribute):
        return node.attr in BEHIND_THE_DOOR or (node.attr == "Event" and ast.unparse(node.value).startswith("torch"))
    pins = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")
    return pins and any(each.arg == "pin_memory" for each in node.keywords)


_UNIT = r" ?(?:[mun]?s|min|h|[kMGT]?i?B|[A-Za-z]+/s)\b"


def _formats_units(node: ast.AST) -> bool:
    """Whether a text rounds a number and puts a unit of time, size or speed behind it."""
    if isinstance(node, ast.JoinedStr):
        return any(
            isinstance(number, ast.FormattedValue)
            and number.format_spec is not None
            and isinstance(unit, ast.Constant)
            and re.match(_UNIT, str(unit.value)) is not None
            for number, unit in pairwise(node.values)
        )
    return isinstance(node, ast.Constant) and re.search(rf"%[.\d]*[dfg]{_UNIT}", str(node.value)) is not None


def _module_state(nodes: Sequence[Any], relative: Path) -> Iterator[str]:
    """Containers bound at module level must be constants: named in capitals and never changed by the module."""
    names: set[str] = set()
    for node in nodes[0].body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        called = value.func if isinstance(value, ast.Call) else None
        called_name = getattr(called, "id", getattr(called, "attr", ""))
        if isinstance(value, MUTABLE) or called_name in MUTABLE_CALLS:
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for name in sorted(names - {"__all__"}):
        if name.lstrip("_") != name.lstrip("_").upper():
            yield f"{relative}: module-level {name} is a mutable container and not a constant"
    for node in nodes:
        changed = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            changed = node.func.value
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        if isinstance(changed, ast.Name) and changed.id in names:
            yield f"{relative}:{node.lineno}: changes module-level {changed.id}"


def _imported(node: ast.AST, relative: Path) -> set[str]:
    if isinstance(node, ast.Import):
        parts = [alias.name.split(".") for alias in node.names]
        return {part[1] if part[0] == "accel" and len(part) > 1 else part[0] for part in parts}
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{relative}:{node.lineno}: relative imports hide their direction"
        part = (node.module or "").split(".")
        if part[0] != "accel":
            return {part[0]}
        return {part[1]} if len(part) > 1 else {alias.name for alias in node.names}
    return set()


def _run_imports(body: list[ast.stmt], modules: Collection[str]) -> Iterator[str]:
    """The modules that a module imports while it is imported itself, and whatever else it imports."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (path if path in modules else node.module or "" for path in paths)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _run_imports(node.orelse, modules)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _run_imports([*node.body, *getattr(node, "orelse", [])], modules)


def circle(modules: dict[str, ast.Module]) -> list[str]:
    """Modules that import each other, in order; none if there is no circle."""
    graph = {name: set(_run_imports(tree.body, modules)) & modules.keys() - {name} for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    names = {path: ".".join(path.relative_to(ACCEL.parent).with_suffix("").parts) for path in source_nodes()}
    assert circle({name.removesuffix(".__init__"): source_nodes()[path][0] for path, name in names.items()}) == []
    sources = {"a": "import b", "b": "try:\n    from a import c\nexcept ImportError: pass", "c": "from a import b"}
    assert set(circle({name: ast.parse(source) for name, source in sources.items()})) == {"a", "b"}


@pytest.mark.kept("default")
def test_sources_keep_the_rules() -> None:
    found = [complaint for path, its in source_nodes().items() for complaint in complaints(path, its)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("data", "from accel.precision import autocast\n", "data may not import precision"),
        ("errors", "import torch\n", "torch-free"),
        ("comm", "import accel.context\n", "comm may not import context"),
        ("data", "import os\nx = os.environ['A']\n", "touches the environment"),
        ("launching", "import os\nos.environ['A'] = '1'\n", "writes the environment"),
        ("data", "cache = {}\n", "mutable container"),
        ("data", "import torch\nx.record_stream(torch.cuda.current_stream())\n", "streams without"),
        ("data", "import torch\ndone = torch.cuda.Event()\n", "streams without"),
        ("data", "import torch\nx = torch.empty(3, pin_memory=True)\n", "streams without"),
        ("data", "CACHE = {}\ndef f(): CACHE['a'] = 1\n", "changes module-level"),
        ("data", "SEEN = list()\ndef f(): SEEN.append(1)\n", "changes module-level"),
        ("data", "def f():\n    global x\n", "global"),
        ("data", "x = 1\n" * 501, "lines, the most is 500"),
        ("data", "def f():\n" + "    x = 1\n" * 61, "f has 62 lines"),
        ("data", "import pickle\npickle.loads(b'')\n", "pickle"),
        ("data", "x = f'after {seconds:g} s'\n", "formats seconds"),
        ("data", "x = f'{count / 1e6:.1f} MB of {total}'\n", "formats seconds"),
        ("data", "x = f'{speed:.3g} steps/s'\n", "formats seconds"),
        ("data", "log.info('after %g s, %s', seconds, name)\n", "formats seconds"),
        ("surprise", "x = 1\n", "has no layer"),
        ("metrics", "def f(ctx): return ctx.strategy == 'ddp'\n", "asks for a strategy's name"),
        ("parallel", "def f(strategy): return strategy in ('ddp', 'fsdp')\n", "asks for a strategy's name"),
    ],
)
def test_the_rules_catch_what_breaks_them(tmp_path: Path, room: str, source: str, expected: str) -> None:
    (tmp_path / room).mkdir()
    path = tmp_path / room / "_module.py"
    path.write_text("# SPDX-License-Identifier: Apache-2.0\n" + source)
    assert any(expected in complaint for complaint in complaints(path, walked(path.read_text()), tmp_path))


@pytest.mark.kept("default")
def test_importing_is_silent_free_of_torch_and_then_of_dtensors() -> None:
    code = (
        "import os, sys, signal, threading, logging\n"
        "def world():\n"
        "    return dict(os.environ), signal.getsignal(15), threading.active_count(), logging.root.handlers[:]\n"
        "before = world()\n"
        "import accel, accel.env, accel.errors, accel.cli, accel.launching\n"
        "import accel.checkpoint, accel.storage, accel.bigmodel.plan\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "import torch, accel.training\n"
        "from accel.tensors import full_tensor, is_dtensor, is_partial, local_part, local_parts, mesh_of\n"
        "tensor = torch.nn.Parameter(torch.ones(2))\n"
        "assert not is_dtensor(tensor) and not is_partial(tensor) and mesh_of(tensor) is None\n"
        "assert local_parts([tensor])[0] is tensor and torch.equal(local_part(tensor), full_tensor(tensor))\n"
        "assert 'torch.distributed.tensor' not in sys.modules, 'before there is one'\n"
        "import accel.testing\n"
        "assert world() == before, (world(), before)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience(120))


def test_every_public_name_resolves_and_is_documented() -> None:
    import accel

    for name in accel.__all__:
        assert getattr(accel, name).__doc__, name
    assert len(set(accel.__all__)) == len(accel.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = accel.no_such_name  # type: ignore[attr-defined]


def test_a_class_name_has_one_meaning_and_files_are_few() -> None:
    """A reader who looks for a class finds one; and opens no more files than there are subjects."""
    places: dict[str, list[str]] = {}
    for path, its in source_nodes().items():
        for node in its:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.relative_to(ACCEL).as_posix())
    homonyms = {name: found for name, found in places.items() if len(found) > 1}
    assert not homonyms, homonyms
    assert len(source_nodes()) <= MOST_FILES, f"{len(source_nodes())} files: merge one with the file of its subject"


def private_names(tree: ast.Module) -> Iterator[str]:
    """Names that a test imports from private modules of the package, or that are private themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accel":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.startswith("accel.")]
        else:
            continue
        yield from (path for path in paths if re.search(r"\._(?!_)", path))


# in one line, or a line of an import in parentheses
MAY_IMPORT_PRIVATE = re.compile(r"(from|import) accel\b.*\b_[a-z]|^ +_[a-z]\w*( as \w+)?,?$", re.MULTILINE)


def test_tests_import_few_private_names() -> None:
    source = "import accel._a\nfrom accel import _b, __version__\nfrom accel.comm._d import E, F\nfrom accel.e import g"
    assert list(private_names(ast.parse(source))) == ["accel._a", "accel._b", "accel.comm._d.E", "accel.comm._d.F"]
    texts = [path.read_text() for path in Path(__file__).parent.rglob("*.py")]
    with no_collections():
        trees = [ast.parse(text) for text in texts if MAY_IMPORT_PRIVATE.search(text)]
    count = sum(1 for tree in trees for _ in private_names(tree))
    wish = "test through a public name; what several files need is imported once, by a helper of their folder"
    assert count <= MOST_PRIVATE_NAMES, f"{count} private names, the most is {MOST_PRIVATE_NAMES}: {wish}"
