# SPDX-License-Identifier: Apache-2.0
"""The recipes of `examples/`: each runs small on two processes, dies once, and ends as a run that never died.

A recipe is a script of at most 150 lines with a row in `RECIPES` of `examples/gallery.py`. Its contract:

- `main(ctx, *, steps, size, out)`, and the flags `--steps` (optimizer steps of the whole run), `--size` (what it costs:
  the width of the model, or the number of samples) and `--out`. Their defaults are the full run, two minutes at most.
- Each row of `metrics.jsonl` under `--out` has the loss of all processes, or what the gallery's row names in `falls`.
- `save_state(ctx, out, ..., step=state.updates, keep=2)`, four times a run or more, and at its end. `trackers` is an
  item.
- The same command goes on. A run whose rank 0 is killed as the first checkpoint of its second half commits, and that is
  started again, leaves the metrics of one that was never killed, and the same tensors in its last checkpoint.
- Images to show are saved by `accel.save(ctx, {"pictures": images}, f"{out}/pictures.safetensors")`.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from catching import assert_raises
from processes import free_port, job, patience, script_ranks, wait_for
from safetensors.torch import load_file, save_file

import accel
from accel import post_training
from accel.testing import simulate

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where msgspec looks up the types of fields
    spec.loader.exec_module(module)
    return module


GALLERY = load("gallery")
RECIPES = {recipe.name: recipe for recipe in GALLERY.RECIPES}
KILLED = {
    **RECIPES,
    "sft --lora": msgspec.structs.replace(
        RECIPES["sft"], small=f"{RECIPES['sft'].small} --lora", needs=(*RECIPES["sft"].needs, "peft")
    ),
}

KILLER = """
import os, re, runpy, signal, sys

def die(event, values):
    found = re.fullmatch(r"(.*)/step-(\\d{8})", str(values[1])) if event == "os.rename" else None
    if found and found[1] == folder and 2 * int(found[2]) > last:
        os.kill(os.getpid(), signal.SIGKILL)

folder, script, *_ = sys.argv = sys.argv[1:]
last = int(sys.argv[sys.argv.index("--steps") + 1])
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
sys.addaudithook(die)
runpy.run_path(script, run_name="__main__")
"""


def run(recipe: Any, out: Path, folder: Path) -> str:
    """Run a recipe small on two processes to its end; return what rank 0 printed."""
    folder.mkdir()
    with script_ranks(EXAMPLES / f"{recipe.name}.py", job(2), *words(recipe, out), folder=folder) as ranks:
        assert not any(rank.wait(60) for rank in ranks), [rank.said() for rank in ranks]
        return ranks[0].said()


def kill_in_the_second_half(recipe: Any, out: Path, folder: Path) -> None:
    """Run a recipe whose rank 0 dies by SIGKILL as a checkpoint of the second half commits."""
    folder.mkdir()
    killer = folder / "killer.py"
    killer.write_text(KILLER)
    arguments = (checkpoints(recipe, out), EXAMPLES / f"{recipe.name}.py", *words(recipe, out))
    with script_ranks(killer, job(2), *arguments, folder=folder) as ranks:
        assert ranks[0].wait(60) == -signal.SIGKILL, ranks[0].said()


def words(recipe: Any, out: Path) -> list[str]:
    return [*recipe.small.split(), "--out", str(out)]


def checkpoints(recipe: Any, out: Path) -> Path:
    """Return the folder of the checkpoints beside the metrics; a run may have other parts in other folders."""
    return (out / recipe.metrics).parent


def saved(recipe: Any, out: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of the last checkpoint but the random streams, which may begin anywhere."""
    tensors: dict[str, torch.Tensor] = {}
    for path in max(checkpoints(recipe, out).glob("step-" + "[0-9]" * 8)).rglob("*.safetensors"):
        tensors |= load_file(path)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items() if name != "$rng"}


def assert_falls(rows: list[dict[str, Any]], column: str) -> None:
    """The mean of a run's last quarter is below that of its first; above it if a minus stands before the column."""
    values = [row[column.lstrip("-")] * (-1 if column.startswith("-") else 1) for row in rows]
    assert len(values) >= 4
    quarter = len(values) // 4
    assert sum(values[-quarter:]) < sum(values[:quarter]), values


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("recipe", KILLED.values(), ids=KILLED.keys())
def test_a_recipe_killed_once_ends_as_one_that_was_not(recipe: Any, tmp_path: Path) -> None:
    if recipe.missing:
        pytest.skip(f"needs {', '.join(recipe.missing)}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(recipe, whole, tmp_path / "first")
    rows = GALLERY.read_metrics(whole / recipe.metrics)
    assert_falls(rows, recipe.falls)

    kill_in_the_second_half(recipe, killed, tmp_path / "second")
    run(recipe, killed, tmp_path / "third")
    assert GALLERY.read_metrics(killed / recipe.metrics) == rows
    ends, expected = saved(recipe, killed), saved(recipe, whole)
    assert [name for name in expected if ends.pop(name, None) != expected[name]] == []
    assert not ends


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # as peft reads it
@pytest.mark.parametrize("name", ["sft", "sft --lora", "dpo", "reward_model", "grpo"])
def test_recipes_of_post_training_have_the_same_curves_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    name, _, lora = name.partition(" --")
    recipe = RECIPES[name]
    if recipe.missing:
        pytest.skip(f"needs {', '.join(recipe.missing)}")
    _, steps, _, size = recipe.small.split()[:4]
    options: dict[str, Any] = {"steps": int(steps), "size": int(size)} | ({"lora": bool(lora)} if name == "sft" else {})
    script, curves = load(name), list[Any]()
    for world in (1, 2, 3) if name == "grpo" else (1, 2):
        out = str(tmp_path / str(world))
        simulate(functools.partial(script.main, out=out, **options), world_size=world)
        curves.append(GALLERY.read_metrics(Path(out) / recipe.metrics))
    close = {"rel": 1e-7, "abs": 1e-10} if name == "grpo" else {"rel": 1e-3, "abs": 1e-4}
    alone, *others = curves
    for shared in others:
        assert len(alone) == len(shared) >= 4
        for mine, theirs in zip(alone, shared, strict=True):
            assert mine == pytest.approx(theirs, **close)
    assert any("/" in column for column in alone[-1])  # a group of the report


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_recipe_runs_by_its_own_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", "2", "--cpu"]
    script = EXAMPLES / "text_classification.py"
    done = subprocess.run(
        [*command, script, *words(RECIPES["text_classification"], tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 0] step    12  loss " in done.stdout


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_a_recipe_reads_like_a_page(recipe: Any) -> None:
    text = (EXAMPLES / f"{recipe.name}.py").read_text()
    assert len(text.splitlines()) <= 150
    tree = ast.parse(text)
    assert f"accel launch --nproc-per-node 2 examples/{recipe.name}.py" in (ast.get_docstring(tree) or "")
    [main] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert [each.arg for each in (*main.args.args, *main.args.kwonlyargs)][:4] == ["ctx", "steps", "size", "out"]
    assert recipe.small.split()[::2][:2] == ["--steps", "--size"]


def test_the_gallery_lists_recipes_by_name() -> None:
    assert list(RECIPES) == sorted(RECIPES)
    assert len(RECIPES) == len(GALLERY.RECIPES)


def test_the_pages_of_recipes_are_what_the_script_writes() -> None:
    pages = {path: (ROOT / "docs" / path).read_text() for path in GALLERY.pages()}
    assert pages == GALLERY.pages(), "write them: python examples/gallery.py --pages"
    assert {path.stem for path in (ROOT / "docs" / "recipes").iterdir()} == {*RECIPES}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_what_to_change_names_code_of_the_script(recipe: Any) -> None:
    _, changes = GALLERY.CHANGES[recipe.name]
    begun = [found[1] for each in changes if (found := re.match(r"`([^`]+)`.*", each))]
    named = [re.split(r"[( ]", each)[0].rpartition(".")[2].lstrip("-") for each in begun]
    assert named
    assert [each for each in named if each not in recipe.text] == []


def test_the_gallery_draws_a_run_and_sees_whether_it_learned(tmp_path: Path) -> None:
    recipe = GALLERY.Recipe("digits", "accuracy >= 0.9", small="--steps 2 --size 1")
    rows = [{"step": 1, "loss": 2.0, "accuracy": 0.5}, {"step": 2, "loss": 1.0, "accuracy": 0.8}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_file({"pictures": torch.rand(9, 8, 8)}, tmp_path / "pictures.safetensors")
    assert GALLERY.check(recipe, tmp_path, tmp_path) == ("accuracy 0.8, expected >= 0.9", False)
    svg = ElementTree.parse(tmp_path / "digits.svg").getroot()
    names = [each.tag.rpartition("}")[2] for each in svg]
    assert names == ["style", "path", "text", "text", "path", "text", "text", "image"]
    image = base64.b64decode(svg[-1].attrib["href"].partition(",")[2])
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert image[16:24] == bytes([0, 0, 0, 24, 0, 0, 0, 24])  # three images a side

    easier = msgspec.structs.replace(recipe, learned="loss <= 1")
    assert GALLERY.check(easier, tmp_path, tmp_path) == ("loss 1, expected <= 1", True)


@contextlib.contextmanager
def sample_server(port: int, folder: Path) -> Generator[None]:
    """Run the server of samples of `grpo.py` in a second process; it ends by SIGKILL."""
    folder.mkdir()
    arguments = ("--serve", port, "--size", 16)
    with script_ranks(EXAMPLES / "grpo.py", [{"OMP_NUM_THREADS": "1"}], *arguments, folder=folder) as [server]:
        wait_for(lambda: "http://" in server.said(), 60)
        yield


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("count", [1, 2])
def test_grpo_resumes_behind_the_death_of_a_server_in_a_second_process(count: int, tmp_path: Path) -> None:
    """One of `count` servers dies; a run that is started again with a new one ends as one without servers."""
    recipe = RECIPES["grpo"]
    if recipe.missing:
        pytest.skip(f"needs {', '.join(recipe.missing)}")
    ports, script, ctx = [free_port() for _ in range(count)], load("grpo"), accel.single()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    main = functools.partial(script.main, ctx, size=16, out=str(tmp_path / "server"), server=urls)
    with contextlib.ExitStack() as others:
        for port in ports[1:]:
            others.enter_context(sample_server(port, tmp_path / f"{port}"))
        with sample_server(ports[0], tmp_path / "first"):
            main(steps=4)
        with assert_raises(accel.errors.ServerError, problem="does not answer") as caught:
            main(steps=8)
        assert caught.value.where.startswith(urls[0])
        with sample_server(ports[0], tmp_path / "again"):
            main(steps=8)
    script.main(ctx, steps=8, size=16, out=str(tmp_path / "alone"))
    rows = [GALLERY.read_metrics(tmp_path / each / recipe.metrics) for each in ("server", "alone")]
    assert [len(each) for each in rows] == [8, 8]
    for mine, theirs in zip(*rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_rewards_that_fail_hang_or_crash_count_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    script = load("grpo")

    def reward(prompt: list[int], answer: list[int]) -> float:
        match prompt[0]:
            case 1:
                raise ValueError("no number")
            case 2:
                time.sleep(600)
            case 3:
                os._exit(1)
            case _:
                return 0.5
        return 1.0

    rows = [post_training.SampleRow([at, 10, 4], 2, prompt=at) for at in (0, 1, 2, 3, 4)]
    reward.__module__, reward.__qualname__ = script.__name__, "reward"  # helpers find it by its name
    monkeypatch.setattr(script, "reward", reward)
    monkeypatch.setattr(script, "LIMIT_S", patience(0.5))
    began = time.monotonic()
    assert script.score(post_training.Samples.of(rows)).tolist() == [0.5, 0.0, 0.0, 0.0, 0.5]
    assert time.monotonic() - began < patience(10)
