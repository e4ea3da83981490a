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
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.testing import simulate

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "concepts").glob("*.md")])


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


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.name in ("notebooks.md", "tutorial.md")), id=page.name)
        for page in PAGES
    ],
)
def test_docs_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


_PARTS = re.compile(  # a record made, or a name under which loops carry one; not `state.cursor`, `scaler=`, `scaler.pt`
    r"\b(?:Accumulation|Cursor|LossScale)\(|(?<![.\w])(?:accum|cursor|scaler)\b(?!=|\.pt)|\bstep\.(?:accum|scaler)\b"
)


def code(page: Path) -> list[str]:
    """A page's code: its fenced blocks, of any language, and what stands in backquotes; all of a script."""
    text = page.read_text()
    if page.suffix == ".py":
        return [text]
    fenced = re.compile(r"^```.*?\n(.*?)^```", flags=re.M | re.S)
    return fenced.findall(text) + re.findall(r"`([^`\n]+)`", fenced.sub("", text))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES, *sorted((ROOT / "examples").glob("*.py"))], ids=lambda page: page.name
)
def test_loops_carry_the_state_save_on_the_page_of_its_parts(page: Path) -> None:
    found = [match.group() for each in code(page) for match in _PARTS.finditer(each)]
    assert bool(found) == (page.name in ("step-parts.md", "upgrading.md", "modules.md")), found


def readme_namespace() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "readme", "load_dataset": load_dataset}
    exec(compile(blocks(ROOT / "README.md")[0], "README.md", "exec"), namespace)
    return namespace


def test_readme_test_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = readme_namespace()
    exec(compile(blocks(ROOT / "README.md")[1], "README.md", "exec"), namespace)
    assert accel.latest_checkpoint("runs/test") is not None


def test_the_readme_shows_the_loop_beside_that_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, ours = blocks(ROOT / "README.md", "py")
    assert "accelerator.backward(loss)" in theirs
    net = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = DataLoader(load_dataset(), batch_size=64)
    namespace = {"accel": accel, "cross_entropy": nn.functional.cross_entropy, "model": net, "optimizer": optimizer}
    exec(compile(ours, "README.md", "exec"), namespace | {"loader": loader, "scheduler": scheduler})
    assert accel.latest_checkpoint("out") is not None


class Interrupted(TensorDataset):
    """A dataset whose reading fails after so many samples, as a crash would end the run."""

    def __init__(self, whole: TensorDataset, samples: int) -> None:
        super().__init__(*whole.tensors)
        self.left = samples

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        self.left -= len(indices)
        if self.left < 0:
            raise OSError("the run ends here")
        return [self[index] for index in indices]


def train_readme(out: Path, world_size: int, *, dies_in_epoch: int | None = None) -> torch.Tensor:
    """README's loop for three epochs in float64; the parameters at its end, the same on every rank."""
    train = readme_namespace()["train"]

    def rank(ctx: accel.DistContext) -> torch.Tensor:
        torch.manual_seed(0)
        dataset = TensorDataset(load_dataset().tensors[0].double(), load_dataset().tensors[1])
        if dies_in_epoch is not None:
            dataset = Interrupted(dataset, round((dies_in_epoch + 0.5) * len(dataset)) // ctx.world_size)
        model = train(ctx, dataset, epochs=3, out=str(out))
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        first, *others = simulate(rank, world_size)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(first, other) for other in others)
    return first


def test_readme_loop_gives_the_same_parameters_on_any_number_of_ranks(tmp_path: Path) -> None:
    one, *others = [train_readme(tmp_path / str(size), size) for size in (1, 2, 4)]
    for other in others:
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


def test_readme_loop_goes_on_after_a_crash_as_if_there_had_been_none(tmp_path: Path) -> None:
    straight = train_readme(tmp_path / "straight", 2)
    with pytest.raises(accel.AccelError, match="the run ends here"):
        train_readme(tmp_path / "stopped", 2, dies_in_epoch=1)
    assert accel.latest_checkpoint(tmp_path / "stopped") is not None
    assert torch.equal(train_readme(tmp_path / "stopped", 2), straight)


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
