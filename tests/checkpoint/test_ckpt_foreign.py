# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face Accelerate: taken over exactly, or refused by name, and never executed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Run, Wrapper, equal
from safetensors.torch import save_file

import accel
from accel import LossScale
from accel.cli import main
from accel.errors import CheckpointError, ConfigError
from accel.items.foreign import import_accelerate
from accel.testing import Simulator


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Payload:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


def accelerate_folder(folder: Path, run: Run, *counters: Counter) -> Path:
    """Write what Accelerate's save_state writes on one process."""
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in run.model.state_dict().items()}, folder / "model.safetensors"
    )
    torch.save(run.optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(run.scheduler.state_dict(), folder / "scheduler.bin")
    scaler = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}
    torch.save(scaler, folder / "scaler.pt")
    torch.save({"step": 3, "torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")
    for at, counter in enumerate(counters):
        torch.save(counter.state_dict(), folder / f"custom_checkpoint_{at}.pkl")
    return folder


def items(run: Run, **more: object) -> dict[str, object]:
    return {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler, **more}


def test_a_run_goes_on_where_accelerate_left_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, counters = Run(), [Counter(5), Counter(6)]
    run.step(3)
    folder = accelerate_folder(tmp_path / "old", run, *counters)
    resumed, others = Run(seed=1), [Counter(), Counter()]
    with caplog.at_level(logging.WARNING, logger="accel.checkpoint"):
        asked = items(resumed, a=others[0], scaler=LossScale(dynamic=True), b=others[1])
        loaded = accel.items.load_accelerate_state(CPU, folder, asked)
    assert [other.count for other in others] == [5, 6]
    assert loaded["scaler"] == LossScale(scale=1024.0, dynamic=True, growth_interval=7, good_steps=3)
    assert loaded["model"] is resumed.model
    assert "random_states_0.pkl (random streams" in caplog.text
    assert equal(resumed.state()[:4], run.state()[:4])
    torch.manual_seed(2)
    run.step(3)
    torch.manual_seed(2)
    resumed.step(3)
    assert equal(resumed.state()[:4], run.state()[:4])


def test_all_ranks_load_or_all_raise(tmp_path: Path, ranks: Simulator) -> None:
    run = Run()
    run.step(1)
    folder = accelerate_folder(tmp_path / "old", run)

    def rank(ctx: accel.DistContext) -> None:
        mine = Run(seed=1)
        before = mine.state()
        wrong: dict[str, object] = {"counter": Counter()} if ctx.rank == 1 else {}
        with assert_raises(CheckpointError, problem=r"custom_checkpoint_0\.pkl: missing"):
            accel.items.load_accelerate_state(ctx, folder, items(mine, **wrong))
        assert equal(mine.state(), before)
        accel.items.load_accelerate_state(ctx, folder, items(mine))
        assert equal(mine.state()[:4], run.state()[:4])

    ranks.run(rank, 2)


def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    run, wide = Run(), Run(width=7)
    run.step(1)
    folder = accelerate_folder(tmp_path / "old", run)
    before = wide.state()
    with assert_raises(
        CheckpointError, problem=r"(?s)model\.0\.weight: expected \[7, 4\], got \[6, 4\].*exp_avg of param"
    ):
        accel.items.load_accelerate_state(CPU, folder, items(wide))
    assert equal(wide.state(), before)


@pytest.mark.parametrize("damage", ["payload", "cut", "list"])
def test_pickles_with_code_and_damaged_ones_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    run = Run()
    folder = accelerate_folder(tmp_path / "old", run, Counter())
    path = folder / "custom_checkpoint_0.pkl"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        torch.save(Payload(tmp_path / "never") if damage == "payload" else [1], path)
    with assert_raises(CheckpointError, problem=r"custom_checkpoint_0\.pkl: "):
        accel.items.load_accelerate_state(CPU, folder, items(run, counter=Counter()))
    assert not (tmp_path / "never").exists()


def test_what_accelerate_does_not_save_is_refused(tmp_path: Path) -> None:
    folder = accelerate_folder(tmp_path / "old", Run())
    with assert_raises(ConfigError, problem="saves no such item", got="Cursor", where="load_accelerate_state, cursor"):
        accel.items.load_accelerate_state(CPU, folder, items(Run(), cursor=accel.Cursor(seed=0)))
    with assert_raises(CheckpointError, problem=r"model_1\.safetensors: missing", fix="as many items of a kind"):
        accel.items.load_accelerate_state(CPU, folder, {"model": Run().model, "other": Run().model})
    (tmp_path / "fsdp" / "pytorch_model_fsdp_0").mkdir(parents=True)
    with assert_raises(CheckpointError, fix="pytorch_model_fsdp_0 is of another format"):
        accel.items.load_accelerate_state(CPU, tmp_path / "fsdp", {"model": Run().model})


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_accelerate_itself_wrote(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    run, counter = Run(), Counter(9)
    theirs = accelerate.Accelerator(cpu=True)
    run.model, run.optimizer, run.scheduler = theirs.prepare(run.model, run.optimizer, run.scheduler)
    theirs.register_for_checkpointing(counter)
    run.step(3)
    theirs.save_state(str(tmp_path / "old"))
    mine, other = Run(seed=1), Counter()
    accel.items.load_accelerate_state(CPU, tmp_path / "old", items(mine, counter=other))
    assert other.count == 9
    for name, tensor in run.model.state_dict().items():
        assert mine.model.state_dict()[name].equal(tensor)
    assert mine.scheduler.last_epoch == 3
    assert mine.optimizer.state[mine.model[0].weight]["step"] == 3


def test_an_optimizer_in_another_librarys_wrapper_is_loaded_inside(tmp_path: Path) -> None:
    run, mine = Run(), Run(seed=1)
    run.step(3)
    wrapper = Wrapper(mine.optimizer)
    asked = {"model": mine.model, "optimizer": wrapper}
    assert (
        accel.items.load_accelerate_state(CPU, accelerate_folder(tmp_path / "old", run), asked)["optimizer"] is wrapper
    )
    assert equal(mine.optimizer.state_dict(), run.optimizer.state_dict())


def test_the_command_imports_all_but_optimizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    run.step(3)
    folder = accelerate_folder(tmp_path / "old", run, Counter(5))
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "run"), "--step", "3"]) == 0
    path = tmp_path / "run" / "step-00000003"
    assert capsys.readouterr().out == f"{folder} -> {path}\n"
    told = [message.rpartition(" ")[2] for message in caplog.messages]
    assert told == ["optimizer.bin", "random_states_0.pkl", "scaler.pt"]
    other, counter = Run(seed=5), Counter()
    accel.load_state(CPU, path, {"model": other.model, "scheduler": other.scheduler, "custom_checkpoint_0": counter})
    assert equal(dict(other.model.state_dict()), dict(run.model.state_dict()))
    assert equal(other.scheduler.state_dict(), run.scheduler.state_dict())
    assert counter.count == 5


def test_the_command_refuses_folders_of_neither_and_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with assert_raises(CheckpointError, problem=r"no model\.safetensors"):
        import_accelerate(tmp_path, tmp_path / "run", step=3)
    old = accelerate_folder(tmp_path / "old", Run())
    torch.save({"a": Payload(tmp_path / "never")}, old / "custom_checkpoint_0.pkl")
    assert main(["checkpoint", "import", str(old), str(tmp_path / "run"), "--step", "3"]) == 2
    assert "custom_checkpoint_0.pkl" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
    assert not (tmp_path / "run").exists()
