# SPDX-License-Identifier: Apache-2.0
"""The example of a model bigger than its limit, in a small size."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "big_model.py"


def test_a_model_generates_under_a_limit(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("big_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sizes = ["--hidden", "64", "--layers", "4", "--limit", "4.7MB", "--tokens", "3"]
    stats = example.main(["--folder", str(tmp_path / "llama"), *sizes])
    assert stats.moved_bytes > 0
    assert not stats.fetches
