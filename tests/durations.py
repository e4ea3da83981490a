# SPDX-License-Identifier: Apache-2.0
"""Record how long tests take, and move the longest to later runs: `python tests/durations.py`.

Runs the default tests, on a quiet machine, and writes `tests/durations.txt`; see `tests/helpers/moved_tests.py`.

    --slow           run CI's slow tests instead, and move the longest to the nightly run
    --from FILE ...  take what earlier runs wrote with `pytest --record-durations FILE`
    -n N             workers of pytest
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "helpers"))

import moved_tests  # noqa: E402

SELECTED = {"default": "not slow and not gpu and not nightly", "slow": "slow and not gpu and not nightly"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--from", dest="files", nargs="+", type=Path, default=[])
    parser.add_argument("-n", type=int, default=2)
    args = parser.parse_args()
    run, status = "slow" if args.slow else "default", 0
    with tempfile.TemporaryDirectory() as folder:
        files: list[Path] = args.files
        if not files:
            words = ["-n", str(args.n), "--dist", "worksteal", "-m", SELECTED[run]]
            words += ["--hypothesis-profile", "ci"] if args.slow else []  # as in .ci/run
            command = [sys.executable, "-m", "pytest", *words, "--record-durations", f"{folder}/recorded"]
            status = subprocess.call(command, cwd=HERE.parent)
            files = sorted(Path(folder).iterdir())
        seconds = moved_tests.recorded(files)
    found = moved_tests.move(run, seconds)
    print(
        f"{len(seconds)} tests took {sum(seconds.values()):.0f} CPU seconds; {len(found)} of them moved:",
        *found,
        sep="\n",
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
