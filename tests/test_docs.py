# SPDX-License-Identifier: Apache-2.0
"""Documentation runs: every python block of README.md and docs/, in order, and the README's script verbatim."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import patience, same_path
from torch.utils.data import TensorDataset

import accel
from accel.testing import simulate

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path, language: str = "python") -> list[str]:
    """The fenced blocks of a language, padded so that line numbers in tracebacks are the page's."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)
    return ["\n" * text[: match.start(1)].count("\n") + match.group(1) for match in found]


def load_dataset() -> TensorDataset:
    """A dataset whose classes can be learnt, of a length that divides by nothing."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(301, 64, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


def readme_namespace() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "readme", "load_dataset": load_dataset}
    exec(compile(blocks(ROOT / "README.md")[0], "README.md", "exec"), namespace)
    return namespace


def test_readme_test_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = readme_namespace()
    exec(compile(blocks(ROOT / "README.md")[1], "README.md", "exec"), namespace)
    assert accel.latest_checkpoint("runs/test") is not None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_readme_loop_trains_and_resumes(tmp_path: Path, world_size: int) -> None:
    train = readme_namespace()["train"]

    def run(out: str, epochs: int) -> list[torch.Tensor]:
        def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
            torch.manual_seed(0)
            return [
                parameter.detach().clone()
                for parameter in train(ctx, load_dataset(), epochs=epochs, out=out).parameters()
            ]

        everyone = simulate(rank, world_size)
        for other in everyone[1:]:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(everyone[0], other, strict=True))
        return everyone[0]

    straight = run(str(tmp_path / "straight"), 3)
    run(str(tmp_path / "stopped"), 1)
    resumed = run(str(tmp_path / "stopped"), 3)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "command",
    [
        "accel launch --nproc-per-node 2",
        *(pytest.param(command, marks=pytest.mark.slow) for command in ("python", "torchrun --nproc-per-node 2")),
    ],
)
def test_readme_script_runs_verbatim(tmp_path: Path, command: str) -> None:
    preamble = "import sys; sys.path.insert(0, TESTS); from test_docs import load_dataset\n"
    script = tmp_path / "train.py"
    script.write_text(preamble.replace("TESTS", repr(str(ROOT / "tests"))) + blocks(ROOT / "README.md")[0].lstrip("\n"))
    program, *options = command.split()
    modules = {"python": [], "accel": ["-m", "accel.cli"], "torchrun": ["-m", "torch.distributed.run"]}
    command_line = [sys.executable, *modules[program], *options, str(script)]
    subprocess.run(command_line, cwd=tmp_path, env=same_path(), check=True, timeout=patience(120))
    found = accel.latest_checkpoint(tmp_path / "runs" / "demo")
    assert found is not None
    assert found.name == "step-00000003"


def test_quickstart_holds_two_commands_of_one_line() -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Quickstart") :]
    commands = re.findall(r"^```bash\n(.*?)^```", section, flags=re.M | re.S)[:2]
    assert [command.count("\n") for command in commands] == [1, 1]
    assert "accel launch --nproc-per-node 2 examples/digits.py" in commands[0]
    assert "pytest" in commands[1]
