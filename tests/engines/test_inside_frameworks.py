# SPDX-License-Identifier: Apache-2.0
"""The scripts of docs/inside-frameworks.md on two processes that another framework, or torchrun, has started."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import job, patience, same_path, script_ranks

PAGE = Path(__file__).parents[2] / "docs" / "inside-frameworks.md"
SCRIPTS: dict[str, str] = dict(re.findall(r"^```python (\w+)\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S))
NEEDS = {"fabric": "lightning_fabric", "trainer": "transformers", "raytrain": "ray.train"}
PRINTED = {
    "ddp": r"^5 steps$",
    "fsdp2": r"^5 steps$",
    "fabric": r"(?s)^5 steps$.*Lightning Fabric has prepared the model",
    "trainer": r"(?s)37 samples, error .*37 samples, error ",
    "raytrain": r"mean rank 0\.5$",
}

pytestmark = [pytest.mark.engine, pytest.mark.multiprocess, pytest.mark.slow]


def test_every_script_of_the_page_is_tried() -> None:
    assert SCRIPTS.keys() == PRINTED.keys()


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fabric", "trainer"])
def test_a_script_runs_on_two_processes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{name}.py"
    script.write_text(SCRIPTS[name])
    with script_ranks(script, job(2), folder=tmp_path) as ranks:
        ends = [rank.wait(120) for rank in ranks]
        said = [rank.said() for rank in ranks]
    assert ends == [0, 0], said
    assert re.search(PRINTED[name], said[0], flags=re.M), said[0]
    assert not re.search(PRINTED[name], said[1], flags=re.M), said[1]


@pytest.mark.nightly
def test_ray_train_opens_the_group(tmp_path: Path) -> None:
    pytest.importorskip(NEEDS["raytrain"])
    script = tmp_path / "raytrain.py"
    script.write_text(SCRIPTS["raytrain"])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=same_path(),
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(PRINTED["raytrain"], done.stdout + done.stderr, flags=re.M), done.stdout + done.stderr
