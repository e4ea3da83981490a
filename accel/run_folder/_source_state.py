# SPDX-License-Identifier: Apache-2.0
"""The code of a run: its git commit, whether the tree was clean, and versions of packages."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable

import msgspec

_PACKAGES = ("accel", "torch", "numpy", "safetensors", "transformers", "datasets", "torchao", "torchdata")
_PATIENCE_S = 5.0  # a status of a large tree on a slow disk
_GIT = ("git", "--no-optional-locks")


class SourceState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a git repository.

    Attributes:
        commit: full name of the commit that is checked out; empty before the first.
        branch: its branch; empty if none is checked out.
        changed: number of tracked files that differ from the commit.
        untracked: number of files and folders that git neither tracks nor ignores.
    """

    commit: str
    branch: str = ""
    changed: int = 0
    untracked: int = 0

    @property
    def clean(self) -> bool:
        """Whether all tracked files are those of the commit."""
        return self.changed == 0


def ask_git(folder: str) -> Callable[[], SourceState | None]:
    """Ask git for the state of the repository around a folder, and return at once.

    Returns:
        A function that waits for the answer, 5 seconds at most; None without git, without a repository or in time.
    """
    command = [*_GIT, "-C", folder or ".", "status", "--porcelain=v2", "--branch", "-z"]
    try:
        asked = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:
        return lambda: None

    def answer() -> SourceState | None:
        try:
            said, _ = asked.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            asked.kill()
            _ = asked.communicate()
            return None
        return parse_status(said.decode(errors="replace")) if asked.returncode == 0 else None

    return answer


def parse_status(text: str) -> SourceState:
    """Return the state that `git status --porcelain=v2 --branch -z` prints; see git-status(1)."""
    commit = branch = ""
    changed = untracked = 0
    entries = iter(text.split("\0"))
    for entry in entries:
        if entry.startswith("# branch.oid "):
            commit = entry.split(" ", 2)[2]
        elif entry.startswith("# branch.head "):
            branch = entry.split(" ", 2)[2]
        elif entry[:2] in ("1 ", "2 ", "u "):
            changed += 1
            if entry.startswith("2 "):
                _ = next(entries, "")  # the old name of a renamed file
        elif entry.startswith("? "):
            untracked += 1
    return SourceState(
        commit="" if commit == "(initial)" else commit,
        branch="" if branch == "(detached)" else branch,
        changed=changed,
        untracked=untracked,
    )


def installed_versions() -> dict[str, str]:
    """Return versions of Python and of the packages that decide what a run computes, without importing them."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms, which a launch spends in a thread

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
