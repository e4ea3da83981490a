# SPDX-License-Identifier: Apache-2.0
"""Modules that Python finds by other ways than folders of `sys.path`, such as those of editable installs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

import pytest
from catching import assert_raises
from launches import LaunchTarget

from accel.errors import LaunchError
from accel.launching._target import check_target


class Elsewhere:
    """Finds one module that lies in no folder."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "lies_elsewhere" else None


def test_every_finder_is_asked_for_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    with assert_raises(LaunchError, problem="no such module"):
        check_target(LaunchTarget(kind="module", name="lies_elsewhere"), {})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Elsewhere()])
    check_target(LaunchTarget(kind="module", name="lies_elsewhere"), {})
    with assert_raises(LaunchError, problem="no such module"):
        check_target(LaunchTarget(kind="module", name="lies_elsewhere.train"), {})
