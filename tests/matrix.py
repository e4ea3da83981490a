# SPDX-License-Identifier: Apache-2.0
"""Try another version of torch: `python tests/matrix.py 2.12.1`.

Makes a virtual environment with that torch and the other requirements of the tests, at the versions of constraints.txt.
Imports accel, runs the README's main job, then the default tests folder by folder, unedited, and prints a verdict.
torch for CUDA runs on CPUs, takes about 7 GB, and is removed at the end.

    --keep FOLDER    make the environment there, or use the one there, and leave it, with the output of the tests
    --only WORD ...  run the folders of tests whose name begins so; "files" are those beside the folders
    --names          install torch and what accel itself needs, and look for the private names that accel uses; no tests
    -n N             workers of pytest
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
JOB = ("-m", "accel.cli", "launch", "--nproc-per-node", "2", "examples/digits.py")
CRASHES = re.compile(r"node down|worker '\w+' crashed|Fatal Python error|Segmentation fault|INTERNAL ASSERT FAILED")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def requirements(*extras: str) -> list[str]:
    """Return what the project and some of its extras need, extras of its own resolved, torch left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    left = [line for name in extras for line in project["optional-dependencies"][name]]
    while left:
        each = left.pop()
        own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", each)
        if own:
            left += [line for name in own[1].split(",") for line in project["optional-dependencies"][name]]
        else:
            found.append(each)
    return sorted({each for each in found if not re.match(r"torch\b", each)})


def install(folder: Path, version: str, *extras: str) -> Path:
    """Make the environment where there is none, and return its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "\n".join([each for each in lines if not each.startswith("torch==")] + [f"torch=={version}"])
    )
    pip = (python, "-m", "pip", "install", "-q")
    subprocess.run([*pip, "-c", constraints, f"torch=={version}", *requirements(*extras)], check=True)
    subprocess.run([*pip, "--no-deps", "-e", ROOT], check=True)
    return python


def folders() -> list[str]:
    """The folders that hold tests, and the files beside them as one."""
    tests = ROOT / "tests"
    found = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py") if path.parent != tests}
    return [*sorted(found), ""]


def attempt(python: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run([python, *words], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def try_tests(python: Path, folder: str, workers: int) -> tuple[list[str], str]:
    """Run a folder's default tests, and keep their output; return the failures, and the line of counts."""
    found = [f"tests/{folder}"] if folder else [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py")]
    status, text = attempt(
        python, "-m", "pytest", "-n", str(workers), "--dist", "worksteal", "-p", "no:cacheprovider", *found
    )
    (python.parent.parent / f"tests-{folder or 'files'}.log").write_text(text)
    failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    failed += [line for line in text.splitlines() if CRASHES.search(line)]
    if status not in (0, 5) and not failed:  # 5: it has no default tests
        failed = [f"pytest ended with {status}: {text[-2000:]}"]
    return failed, next((line for line in reversed(text.splitlines()) if COUNTS.search(line)), "")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("version")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--names", action="store_true")
    parser.add_argument("-n", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="accel-matrix-") as temporary:
        extras = () if args.names else ("tests",)
        python = install((args.keep or Path(temporary)).absolute(), args.version, *extras)
        if args.names:
            status, text = attempt(python, "tests/helpers/private_names.py")
            print(text.strip())
            return status
        for words in (
            ("-c", "import accel, accel.testing, torch; accel.session, accel.save_state; print(torch.__version__)"),
            JOB,
        ):
            status, text = attempt(python, *words)
            print(text.strip().splitlines()[-1:], flush=True)
            if status:
                print(f"{text}\ntorch {args.version}: {' '.join(words)} fails")
                return 1
        broken, total = list[str](), Counter[str]()
        for folder in folders():
            if not (folder or "files").startswith(tuple(args.only)):
                continue
            began = time.monotonic()
            failed, last = try_tests(python, folder, args.n)
            broken += failed
            total.update({word: int(count) for count, word in COUNTS.findall(last)})
            print(
                f"{folder or 'tests/*.py':16} {time.monotonic() - began:6.0f} s  {last}",
                *failed,
                sep="\n  ",
                flush=True,
            )
    counts = ", ".join(f"{count} {word}" for word, count in total.items())
    print(f"torch {args.version}: {counts}; {f'{len(broken)} lines of failures' if broken else 'no failure'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
