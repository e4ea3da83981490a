"""Check types as users do: the code of README.md and docs/, and what the public functions return.

`python tests/typing/check.py` prints the errors and exits with 1 if there are any. A page becomes a module whose lines
are the page's. The README passes pyright in strict mode and `mypy --strict`, tests/typing/reveal_*.py pyright's strict
mode, and pages its standard mode.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
README = ROOT / "README.md"
# The README leaves it to the reader. Its body must return, for mypy.
YOURS = 'def load_dataset() -> "Dataset[tuple[Tensor, Tensor]]": raise NotImplementedError'
# torch declares less than it takes: a DataLoader reads lists, ranges and tensors too
TORCH_GAPS = re.compile(r'"(range|Tensor|list\[.*\])" is not assignable to "Dataset\[')


def page_lines(page: Path) -> list[str]:
    """A page's lines inside of python blocks; the others are empty."""
    lines, inside = list[str](), False
    for line in page.read_text().split("\n"):
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = (not inside and line == "```python") if fence else inside
    return lines


def readme() -> str:
    """The README's script as a module of its user, in strict mode."""
    lines = page_lines(README)
    lines[:2] = ["# pyright: strict", YOURS]
    return "\n".join(lines)


def modules() -> Iterator[tuple[str, Path, str]]:
    """What is checked: a module's name, the file that it is from, its text."""
    yield "README", README, readme()
    for page in sorted((ROOT / "docs").glob("*.md")):
        lines = page_lines(page)
        lines[0] = "# pyright: reportPossiblyUnboundVariable=false"  # a page's loop runs
        yield f"docs_{page.stem.replace('-', '_')}", page, "\n".join(lines)
    for case in sorted(HERE.glob("reveal_*.py")):
        yield case.stem, case, case.read_text()
    yield "orders", Path(__file__), orders()


def orders() -> str:
    """Calls of `prepare` in every order that it is typed for: models, then anything else, five objects at most."""
    kinds = {"net": "nn.Module", "adam": "AdamW", "data": "accel.Loader"}
    calls = [
        ["net"] * models + list(rest)
        for models in range(6)
        for others in range(6 - models)
        for rest in product(("adam", "data"), repeat=others)
        if models + others
    ]
    lines = ["import accel", "from torch import nn", "from torch.optim import AdamW", "from typing import assert_type"]
    lines += ["from torch.utils.data import DataLoader", "ctx, net = accel.single(), nn.Sequential(nn.Linear(2, 2))"]
    lines += ["adam: AdamW = AdamW(net.parameters())", "data: DataLoader[int] = DataLoader([1])  # type: ignore"]
    for call in calls:
        returned = [kinds[name] for name in call]
        expected = f"tuple[{', '.join(returned)}]" if len(call) > 1 else returned[0]
        lines.append(f"assert_type(accel.prepare(ctx, {', '.join(call)}), {expected})")
    return "\n".join(lines)


def complaints() -> list[str]:
    """The errors that pyright finds, each with its place in the source."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        sources = dict[str, Path]()
        for name, source, text in modules():
            path = folder / f"{name}.py"
            path.write_text(text)
            sources[str(path)] = source
        settings = {"typeCheckingMode": "standard", "pythonVersion": "3.11", "extraPaths": [str(ROOT)]}
        (folder / "pyrightconfig.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", temporary]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(sources), report["summary"]
    return [
        f"{sources[each['file']]}:{each['range']['start']['line'] + 1}: {each['message']} ({each.get('rule', '')})"
        for each in report["generalDiagnostics"]
        if each["severity"] == "error" and not TORCH_GAPS.search(each["message"])
    ]


def mypy_complaints() -> list[str]:
    """The errors that `mypy --strict` finds in the README's script, with accel as it is installed."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "readme.py").write_text(readme())
        command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", f"{temporary}/cache", "readme.py"]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False, timeout=600)
    return done.stdout.splitlines() if done.returncode else []


if __name__ == "__main__":
    found = complaints() + mypy_complaints()
    print("\n".join(found) or "README.md, docs/ and the public types check")
    sys.exit(bool(found))
