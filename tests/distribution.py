# SPDX-License-Identifier: Apache-2.0
"""Build the sdist and the wheel, and try both as their users meet them: `python tests/distribution.py [--each|--all]`.

1. The sdist holds the tracked files less `.ci`, and builds the wheel that the tree builds, with the pages of docs/.
2. The wheel runs the loop of docs/train.md in an environment with the four dependencies of the core alone.
3. From the unpacked sdist pytest collects the tests of the tree. With `--each` ten of each folder pass, with `--all`
   the default tests.

The packages `build` and `setuptools` must be installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ("torch", "safetensors", "msgspec", "typing_extensions")
EACH = 10
BUILT = re.compile(r"PKG-INFO|setup\.cfg|accel_torch\.egg-info/.*")
LOOP = """
import torch
from torch.utils.data import TensorDataset

{loop}

def load_dataset():
    return TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))

with accel.session() as ctx:
    main(ctx, load_dataset(), epochs=1, out="run")
print("the loop of docs/train.md trained from the wheel, in an environment of four dependencies")
"""


def run(*words: str | Path, where: Path) -> str:
    done = subprocess.run([str(word) for word in words], cwd=where, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def build(source: Path, kind: str, folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", folder, source, where=folder)
    [built] = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist() if not name.endswith("/RECORD")}


def check_metadata(wheel: dict[str, bytes]) -> None:
    [text] = [value.decode() for name, value in wheel.items() if name.endswith("/METADATA")]
    assert "# accel\n" in text, "the wheel lacks the README"
    assert "](docs/" not in text, "links to files of the repository lead nowhere on a package index"


def check_files(names: set[str]) -> None:
    tracked = run("git", "ls-files", where=ROOT).splitlines()
    expected = {name for name in tracked if not name.startswith(".ci/")}
    assert names == expected, f"missing: {sorted(expected - names)}; more: {sorted(names - expected)}"


def collected(where: Path) -> list[str]:
    text = run(sys.executable, "-m", "pytest", "-n", "0", "--collect-only", where=where)
    found = [line for line in text.splitlines() if "::" in line]  # one a line, by the -q of pyproject.toml
    assert found, f"pytest lists no tests:\n{text[-2000:]}"
    return found


def spread(tests: list[str]) -> list[str]:
    """Return ten tests of each folder, evenly spaced, none twice."""
    folders: dict[str, list[str]] = {}
    for test in tests:
        folders.setdefault(test.partition("::")[0].rpartition("/")[0], []).append(test)
    return [each for found in folders.values() for each in found[:: max(1, len(found) // EACH)][:EACH]]


def closure(names: tuple[str, ...]) -> dict[str, Path]:
    """Return the top-level files and folders of distributions and of what they require, by name."""
    found = dict[str, Path]()
    seen, left = set[str](), list(names)
    while left:
        name = left.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # required on other systems
            continue
        if package.name in seen:
            continue
        seen.add(package.name)
        left += [re.split(r"[^\w.-]", text)[0] for text in package.requires or () if "extra ==" not in text]
        for file in package.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__"):
                found[top] = Path(str(package.locate_file(top)))
    return found


def try_wheel(wheel: Path, folder: Path) -> str:
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", where=folder)
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    for top, path in closure(CORE).items():
        (site / top).symlink_to(path)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    [loop, *_] = re.findall(
        r"```python\n(import accel\n.*?)\n\nif __name__", (ROOT / "docs/train.md").read_text(), re.S
    )
    (folder / "train.py").write_text(LOOP.format(loop=loop))
    return run(folder / "venv" / "bin" / "python", "-I", folder / "train.py", where=folder)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="accel-dist-") as temporary:
        folder = Path(temporary)
        for part in ("sdist", "tree", "again", "wheel"):
            (folder / part).mkdir()
        sdist = build(ROOT, "sdist", folder / "sdist")
        with tarfile.open(sdist) as files:
            files.extractall(folder / "sdist", filter="data")
        [unpacked] = [path for path in (folder / "sdist").iterdir() if path.is_dir()]
        names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
        check_files({name for name in names if not BUILT.fullmatch(name)})
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # files of an earlier build would go into the wheel
        wheel = build(ROOT, "wheel", folder / "tree")
        assert contents(build(unpacked, "wheel", folder / "again")) == contents(wheel)
        check_metadata(contents(wheel))
        pages = {f"accel/pages/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")}
        assert pages == {name for name in contents(wheel) if name.startswith("accel/pages/")}
        scripts = {f"accel/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
        assert scripts == {name for name in contents(wheel) if name.startswith("accel/examples/")}
        print(f"{sdist.name}: {len(names)} files, and the same wheel as the tree's")
        print(try_wheel(wheel, folder / "wheel").strip())
        tests = collected(unpacked)
        assert tests == collected(ROOT), "the sdist collects other tests than the tree"
        print(f"the sdist collects the {len(tests)} tests of the tree")
        if "--each" in sys.argv or "--all" in sys.argv:
            chosen = [] if "--all" in sys.argv else spread(tests)
            words = ("-n", "2", "--dist", "worksteal", *chosen)
            print(run(sys.executable, "-m", "pytest", *words, where=unpacked).splitlines()[-1])


if __name__ == "__main__":
    main()
