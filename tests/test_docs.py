# SPDX-License-Identifier: Apache-2.0
"""Documentation runs: every python block of README.md and docs/, in order, and the README's script verbatim."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # where no pytest runs it

import pytest
import torch
from catching import assert_raises
from processes import patience, same_path
from tables import rows
from torch.utils.data import TensorDataset

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


@pytest.mark.kept("slow")
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


COUNTS = ROOT / "tests" / "docs_blocks.txt"


NAMED = re.compile(r"^```python \w+$", re.M)  # with tests of their own, such as tests/engines/test_inside_frameworks.py


def block_counts() -> dict[str, int]:
    """The number of executed blocks of each page, named ones included."""
    pages = [ROOT / "README.md", *PAGES]
    return {
        page.relative_to(ROOT).as_posix(): len(blocks(page)) + len(NAMED.findall(page.read_text())) for page in pages
    }


def test_no_executed_block_is_lost() -> None:
    """Blocks in HTML comments count. A fence that tests would not see, such as an indented one, is an error."""
    for page in [ROOT / "README.md", *PAGES]:
        fences = re.findall(r"^[ >]*(?:```|~~~) *python *$", page.read_text(), flags=re.M)
        assert len(fences) == len(blocks(page)), f"{page.name}: write ```python at the start of a line"
    recorded = dict(line.split() for line in COUNTS.read_text().splitlines())
    now = {page: str(count) for page, count in block_counts().items() if count}
    lost = {
        page: f"{count} before, {now.get(page, 0)} now" for page, count in recorded.items() if now.get(page) != count
    }
    assert not lost, f"{lost}: if it is meant, record them: python tests/test_docs.py"
    assert now == recorded, "record them: python tests/test_docs.py"


LOOP = (  # the pages that a reader of a first loop, launch or mesh needs
    "index", "tutorial", "train", "data", "step", "checkpoints", "launch", "clusters", "fsdp", "meshes", "comparison",
    "tensor-parallel", "pipelines", "data-parallel", "migrate", "from-accelerate", "concepts/context",
    "concepts/records", "concepts/cursor", "concepts/weights", "concepts/message",
)  # fmt: skip
MOST_WORDS = 28_500  # they had 37,137 before they were rewritten in plain English, and have three quarters of that


def words(page: Path) -> int:
    """What a reader of the site sees: words of text and code outside of comments; no marks, such as those of tables."""
    seen = re.sub(r"\A---\n.*?^---\n|<!--.*?-->", "", page.read_text(), flags=re.M | re.S)
    return sum(1 for word in seen.split() if re.search(r"\w", word))


def test_the_pages_of_the_loop_stay_short() -> None:
    counts = {page.name: words(page) for page in [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in LOOP)]}
    assert sum(counts.values()) <= MOST_WORDS, f"remove what another page says already: {counts}"


MOST_WORDS_BEFORE = 60  # of prose before the first block
NO_COMMAND = {
    "comparison.md": "readers choose a library before they install one",
    "design.md": "contributors read it before they change code",
    "modules.md": "a list of names, which readers search",
}


def opening(text: str) -> str | None:
    """The text above a page's first visible block; None if the block is below the first heading, or missing."""
    seen = re.sub(r"\A---\n.*?^---\n|<!--.*?-->|<p hidden.*?</p>", "", text, flags=re.M | re.S)
    above, fence, _ = seen.partition("\n```")
    return above if fence and "\n## " not in above else None


@rows("page", [ROOT / "README.md", *PAGES, *sorted((ROOT / "docs" / "recipes").glob("*.md"))])
def test_a_page_begins_with_the_script_or_the_command_that_its_readers_want(page: Path) -> None:
    above = opening(page.read_text())
    begins = above is not None and len(above.split()) <= MOST_WORDS_BEFORE
    assert begins == (page.name not in NO_COMMAND), "move the block up, or remove the page from NO_COMMAND"


@rows(
    "text, begins",
    [
        ("# A\n\nWords.\n\n```bash\nls\n```\n\n## B\n", True),
        ("---\ntitle: A\n---\n\n# A\n\n<!--\n```python\n1\n```\n-->\n```py\n2\n```\n", True),
        ("# A\n\n## B\n\n```bash\nls\n```\n", False),
        ("# A\n\n<!--\n```python\n1\n```\n-->\n\n## B\n\n```py\n2\n```\n", False),
        ("# A\n\n| a | b |\n|---|---|\n", False),
    ],
)
def test_a_block_in_a_comment_or_below_a_heading_begins_no_page(text: str, begins: bool) -> None:
    assert (opening(text) is not None) == begins


MOST_COLUMNS = 121  # of code, at which nothing scrolls in a window of 1,400 pixels: see docs/stylesheets/extra.css


@rows("page", [*PAGES, *sorted((ROOT / "examples").glob("*.py"))])
def test_code_fits_the_width_of_a_page(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S)
    code = re.findall(r"^```(?:python|py|bash|diff|yaml|toml)\b.*?\n(.*?)^```", text, flags=re.M | re.S)
    lines = "".join(code if page.suffix == ".md" else [text]).splitlines()
    assert not [line for line in lines if len(line) > MOST_COLUMNS]


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


@rows("page", [ROOT / "README.md", *PAGES, *sorted((ROOT / "examples").glob("*.py"))])
def test_loops_carry_the_state_save_on_the_page_of_its_parts(page: Path) -> None:
    found = [match.group() for each in code(page) for match in _PARTS.finditer(each)]
    assert bool(found) == (page.name in ("step-parts.md", "upgrading.md", "modules.md")), found


def readme() -> str:
    """The README's python blocks as one module, the hidden one that makes a model and an optimizer first."""
    return "\n".join(blocks(ROOT / "README.md"))


def loop_namespace() -> dict[str, Any]:
    """The names of the complete script with which docs/train.md begins."""
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(compile("\n".join(blocks(ROOT / "docs" / "train.md")[:2]), "train.md", "exec"), namespace)
    return namespace


def test_the_loop_of_the_readme_saves_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme", "load_dataset": load_dataset}
    exec(compile(readme().replace("state.epoch < 3", "state.epoch < 1"), "README.md", "exec"), dict(namespace))
    exec(compile(readme(), "README.md", "exec"), dict(namespace))
    lines = re.findall(r"^epoch (\d)  loss \d\.\d{3}$", capsys.readouterr().out, flags=re.M)
    assert lines == ["1", "2", "3"]  # the second run trained epochs 2 and 3 only


def test_the_readme_fits_on_a_screen_and_shows_its_loop() -> None:
    text = re.sub(r"<!--.*?-->\n", "", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(text.splitlines()) <= 60
    assert text.count("](docs/") <= 12  # the site has the navigation


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


def train_loop(out: Path, world_size: int, *, dies_in_epoch: int | None = None) -> torch.Tensor:
    """The loop of docs/train.md for three epochs in float64; its last parameters, the same on every rank."""
    train = loop_namespace()["main"]

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


def test_the_loop_gives_the_same_parameters_on_any_number_of_ranks(tmp_path: Path) -> None:
    one, *others = [train_loop(tmp_path / str(size), size) for size in (1, 2, 4)]
    for other in others:
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


def test_the_loop_resumes_after_a_crash_with_the_same_bits(tmp_path: Path) -> None:
    straight = train_loop(tmp_path / "straight", 2)
    with assert_raises(accel.AccelError, got="the run ends here"):
        train_loop(tmp_path / "stopped", 2, dies_in_epoch=1)
    assert accel.latest_checkpoint(tmp_path / "stopped") is not None
    assert torch.equal(train_loop(tmp_path / "stopped", 2), straight)


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
    script.write_text(preamble.replace("TESTS", repr(str(ROOT / "tests"))) + readme())
    program, *options = command.split()
    modules = {"python": [], "accel": ["-m", "accel.cli"], "torchrun": ["-m", "torch.distributed.run"]}
    command_line = [sys.executable, *modules[program], *options, str(script)]
    subprocess.run(command_line, cwd=tmp_path, env=same_path(), check=True, timeout=patience(120))
    found = accel.latest_checkpoint(tmp_path / "runs" / "demo")
    assert found is not None
    assert found.name == "step-00000015"  # 301 samples in batches of 64 over all ranks, three times


def test_quickstart_holds_two_commands_of_one_line() -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Quickstart") :]
    commands = re.findall(r"^```bash\n(.*?)^```", section, flags=re.M | re.S)[:2]
    assert [command.count("\n") for command in commands] == [1, 1]
    assert "accel launch --nproc-per-node 2 examples/digits.py" in commands[0]
    assert "pytest" in commands[1]


if __name__ == "__main__":
    _ = COUNTS.write_text("".join(f"{page} {count}\n" for page, count in block_counts().items() if count))
