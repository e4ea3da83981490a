# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint: taken over and given back exactly; its pickles are read as data and never run."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from catching import assert_raises
from ckpt_helpers import CPU, Run, equal
from hypothesis import HealthCheck, given, settings, strategies as st
from profiles import share
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel import latest_checkpoint, load_state, save_state
from accel.cli import main
from accel.context import DistContext
from accel.errors import CheckpointError
from accel.items import export_dcp, import_dcp
from accel.items.foreign import Described, describe_pickle
from accel.testing import simulate

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def untrained(seed: int) -> Run:
    """A run whose scheduler's state torch keeps: of a Counter, as MultiStepLR has, it makes a dict of texts."""
    return Run(scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=9), seed=seed)


def trained() -> Run:
    run = untrained(0)
    run.step(3)
    return run


def items(run: Run) -> dict[str, object]:
    return {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}


def folder_of(run: Run, folder: Path) -> Path:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": run.scheduler.state_dict(), "best": 0.5}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_what_torch_saved_loads_and_goes_on_the_same(tmp_path: Path) -> None:
    run = trained()
    path = import_dcp(folder_of(run, tmp_path / "dcp"), tmp_path / "run", step=3)
    assert path == latest_checkpoint(tmp_path / "run")
    resumed = untrained(1)
    loaded = load_state(CPU, path, items(resumed) | {"best": 0.0})
    assert loaded["best"] == 0.5
    assert equal(resumed.state()[:4], run.state()[:4])


def test_pieces_of_several_ranks_become_whole_and_a_single_state_dict_is_the_model(tmp_path: Path) -> None:
    expected = Run().model.state_dict()

    def rank(ctx: DistContext) -> None:
        model = Run().model
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")

    simulate(rank, 3, default_group=True)
    path = import_dcp(tmp_path / "dcp", tmp_path / "run", step=0)
    model = Run(seed=1).model
    load_state(CPU, path, {"model": model})
    assert equal(dict(model.state_dict()), dict(expected))


def test_what_is_exported_loads_in_torch(tmp_path: Path) -> None:
    run = trained()
    path = save_state(CPU, tmp_path / "run", items(run), step=3)
    read = list[int]()
    assert export_dcp(path, tmp_path / "dcp", advance=read.append) == tmp_path / "dcp"
    assert sum(read) == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    mine = untrained(1)
    mine.step(1)
    model, optimizer = get_state_dict(mine.model, mine.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(mine.model, mine.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert equal(dict(mine.model.state_dict()), dict(run.model.state_dict()))
    assert equal(mine.optimizer.state_dict()["state"], run.optimizer.state_dict()["state"])
    again = import_dcp(tmp_path / "dcp", tmp_path / "again", step=3)
    resumed = untrained(1)
    load_state(CPU, again, items(resumed))
    assert equal(resumed.state()[:4], run.state()[:4])
    with assert_raises(CheckpointError, problem="exists already"):
        export_dcp(path, tmp_path / "dcp")


@pytest.mark.parametrize("damage", ["metadata", "value", "cut", "missing", "elsewhere", "huge", "no folder"])
def test_hostile_and_damaged_folders_are_refused_and_nothing_runs(tmp_path: Path, damage: str) -> None:
    folder, never = folder_of(trained(), tmp_path / "dcp"), tmp_path / "never"
    metadata, data = folder / ".metadata", next(folder.glob("*.distcp"))
    described = pickle.loads(metadata.read_bytes())
    if damage == "metadata":
        metadata.write_bytes(pickle.dumps(Payload(never)))
    elif damage == "value":
        shutil.rmtree(folder)
        dcp.save({"value": Payload(never)}, checkpoint_id=folder, no_dist=True)
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:-100])
    elif damage == "missing":
        data.unlink()
    elif damage == "no folder":
        folder = tmp_path / "other"
    else:
        if damage == "elsewhere":
            for info in described.storage_data.values():
                info.relative_path = "../secret"
        else:
            described.state_dict_metadata["model.0.weight"].size = torch.Size([2**40, 2**20])
        metadata.write_bytes(pickle.dumps(described))
    with assert_raises(CheckpointError, where="dcp|other|secret|the name is not valid"):
        import_dcp(folder, tmp_path / "run", step=1)
    assert not never.exists()
    assert latest_checkpoint(tmp_path / "run") is None


@settings(max_examples=share(0.8), suppress_health_check=[HealthCheck.too_slow])
@given(value=PLAIN, protocol=st.integers(3, 5))
def test_plain_values_are_described_as_they_are(value: object, protocol: int) -> None:
    assert describe_pickle(pickle.dumps(value, protocol), "here") == value


@given(data=st.binary(max_size=60))
def test_any_bytes_are_described_or_refused(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        describe_pickle(data, "here")


def test_objects_are_named_and_not_made(tmp_path: Path) -> None:
    found = describe_pickle(pickle.dumps([Payload(tmp_path / "never"), torch.Size]), "here")
    assert isinstance(found[0], Described)
    assert found[0].name.endswith(".mkdir")
    assert found[0].args == (str(tmp_path / "never"),)
    assert (found[1].name, found[1].args) == ("torch.Size", None)
    assert not (tmp_path / "never").exists()


def test_the_commands_say_what_they_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(trained(), tmp_path / "dcp")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["checkpoint", "import", str(folder), run, "--step", "7"]) == 0
    assert capsys.readouterr().out == f"{folder} -> {run}/step-00000007\n"
    assert main(["checkpoint", "export", run, out]) == 0
    assert capsys.readouterr().out == f"{run}/step-00000007 -> {out}\n"
    for words, told in (
        (["import", run, out, "--step", "1"], "no folder of torch.distributed.checkpoint"),
        (["import", str(folder), run, "--step", "-1"], "the step is not valid: expected an integer from 0, got -1"),
        (["export", run, out], "exists already"),
    ):
        assert main(["checkpoint", *words]) == 2
        assert told in capsys.readouterr().err
