"""Check types as users do: the code of README.md and docs/, and what the public functions return.

`python tests/typing/check.py` prints the errors and exits with 1 if there are any. A page becomes a module whose lines
are the page's. All pages pass pyright in strict mode and `mypy --strict`, with `accel` as it is installed for mypy;
tests/typing/reveal_*.py pyright's strict mode.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
# The README leaves it to the reader. Its body must return, for mypy.
YOURS = 'def load_dataset() -> "Dataset[tuple[Tensor, Tensor]]": raise NotImplementedError'
# A loop on a page runs at least once, and a block imports again what one above it imported.
PAGE = "# pyright: strict, reportPossiblyUnboundVariable=false, reportDuplicateImport=false"

_NAME = str.maketrans("/-.", "___")  # of a page's path, for its module

# Functions that torch declares in part only: right code that calls them is reported all the same.
_TORCH = "all_reduce|atleast_1d|backward|manual_seed|norm|register_hook|schedule|step|table|tolist"
GAPS = {
    "*": rf'^Type of "({_TORCH})" is partially unknown|^Call to untyped function "({_TORCH})"',
    "docs/fsdp.md": '^Type of "(name|module)" is partially unknown',  # of `named_modules`, narrowed by isinstance
    "docs/profile.md": '"(plan|schedule|values)"',  # torch.profiler
    # Libraries without types, or with types in part.
    "docs/tutorial.md": 'sklearn|load_digits|^Type of "(images|labels)" is partially unknown',
    "docs/trackers.md": 'tensorboard|^Type of "(event|step|value|Scalars)" is',
    "docs/models.md": '^Type of "(load_file|save_file)" is partially unknown',
    "docs/checkpoint-format.md": '^Type of "(file|get_tensor)" is unknown',
    # Slips that a page shows: a type checker finds them too.
    "docs/concepts/records.md": "epoch",
    "docs/upgrading.md": "stage_plan",
}


def page_lines(page: Path) -> list[str]:
    """A page's lines inside of python blocks; the others are empty."""
    lines, inside = list[str](), False
    for line in page.read_text().split("\n"):
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = (not inside and line == "```python") if fence else inside
    return lines


def pages() -> Iterator[tuple[str, Path, str]]:
    """Pages as modules of their user: a module's name, its page, its text."""
    for page in [README, *sorted(DOCS.rglob("*.md"))]:
        lines = page_lines(page)
        lines[0] = PAGE
        if page == README:
            lines[1] = YOURS
        yield f"page_{page.relative_to(ROOT).with_suffix('').as_posix()}".translate(_NAME), page, "\n".join(lines)


def cases() -> Iterator[tuple[str, Path, str]]:
    """Further modules, for pyright alone."""
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


def put(modules: Iterator[tuple[str, Path, str]], folder: Path) -> dict[str, Path]:
    """Write modules into a folder; return the source of each by its file's name."""
    sources = dict[str, Path]()
    for name, source, text in modules:
        (folder / f"{name}.py").write_text(text)
        sources[f"{name}.py"] = source
    return sources


def by_pyright() -> list[str]:
    """The errors that pyright finds, each with its place in the source."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        sources = put(pages(), folder) | put(cases(), folder)
        settings = {"typeCheckingMode": "standard", "pythonVersion": "3.11", "extraPaths": [str(ROOT)]}
        (folder / "pyrightconfig.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", temporary]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(sources), report["summary"]
    found = [
        (
            sources[Path(each["file"]).name],
            each["range"]["start"]["line"] + 1,
            f"{each['message']} ({each.get('rule', '')})",
        )
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    return told(found)


def by_mypy() -> list[str]:
    """The errors that `mypy --strict` finds in the pages."""
    with tempfile.TemporaryDirectory() as temporary:
        sources = put(pages(), Path(temporary))
        command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", f"{temporary}/cache", *sources]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode < 2, done.stdout + done.stderr
    found = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", done.stdout, flags=re.M)
    return told([(sources[name], int(line), message) for name, line, message in found])


def told(found: list[tuple[Path, int, str]]) -> list[str]:
    """Errors as lines, without those of `GAPS`."""
    lines = list[str]()
    for source, line, message in found:
        name = source.relative_to(ROOT).as_posix()
        if not re.search(GAPS["*"], message) and not re.search(GAPS.get(name, "(?!)"), message):
            lines.append(f"{name}:{line}: {message}")
    return lines


if __name__ == "__main__":
    with ThreadPoolExecutor() as both:
        runs = [both.submit(check) for check in (by_pyright, by_mypy)]
    found = [line for run in runs for line in run.result()]
    print("\n".join(found) or "README.md, docs/ and the public types check")
    sys.exit(bool(found))
