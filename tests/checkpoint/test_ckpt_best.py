# SPDX-License-Identifier: Apache-2.0
"""The best checkpoint is the one that `Keep(best=1)` keeps; `only=` loads a part and leaves all else alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Run, equal, plan_keep, streams
from hypothesis import HealthCheck, given, settings, strategies as st
from profiles import share
from torch import nn

import accel
from accel.checkpoint import Keep, best_checkpoint
from accel.errors import CheckpointError, ConfigError
from accel.testing import simulate

VALUES = st.dictionaries(st.integers(0, 9), st.none() | st.sampled_from([0.0, 0.5, -2.0]), max_size=4)


def save(out: Any, values: dict[int, float | None]) -> dict[int, Any]:
    """Save a small checkpoint for each step, with its loss if it has one."""
    return {
        step: accel.save_state(CPU, out, {"a": step}, step=step, metrics=None if value is None else {"loss": value})
        for step, value in values.items()
    }


@pytest.mark.parametrize("where", ["files", "store"])
@settings(deadline=None, max_examples=share(0.1), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=VALUES, mode=st.sampled_from(["min", "max"]))
def test_it_is_the_one_that_the_rule_keeps(where, values, mode, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("best")
    out = folder if where == "files" else f"memory://best/{folder.name}"
    paths = save(out, values)
    rated = {step: {} if value is None else {"loss": value} for step, value in values.items()}
    found = best_checkpoint(out, by="loss", mode=mode)
    if not any(rated.values()):
        assert found is None
        return
    [kept] = plan_keep(rated, 99, Keep(best=1, by="loss", mode=mode)) - {99}
    assert found == paths[kept]
    assert best_checkpoint(out, by="accuracy") is None


@pytest.mark.parametrize("where", ["files", "store"])
def test_a_damaged_one_is_skipped_with_a_warning(where: str, tmp_path: Path, caplog: Any) -> None:
    paths = save(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3})
    (paths[1] / "manifest.json").write_text("{}")
    assert best_checkpoint(str(tmp_path) if where == "files" else f"file://{tmp_path}", by="loss") == paths[2]
    assert "step-00000001" in caplog.text
    assert best_checkpoint(tmp_path / "none", by="loss") is None


def test_with_verify_one_with_changed_bytes_is_skipped(tmp_path: Path) -> None:
    run = Run()
    paths = [
        accel.save_state(CPU, tmp_path, {"model": run.model}, step=at, metrics={"loss": float(at)}) for at in range(2)
    ]
    [file] = paths[0].glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert best_checkpoint(tmp_path, by="loss") == paths[0]
    assert best_checkpoint(tmp_path, by="loss", verify=True) == paths[1]


@pytest.mark.parametrize("wrong", [{"by": ""}, {"by": None}, {"by": "loss", "mode": "least"}])
def test_a_wrong_word_is_refused(wrong: Any, tmp_path: Path) -> None:
    with assert_raises(ConfigError, where="best_checkpoint"):
        best_checkpoint(tmp_path, **wrong)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_is_loaded_and_all_else_stays(ranks: int, tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> None:
        run = Run()
        run.step(2)
        path = accel.save_state(ctx, tmp_path, run.items() | {"best": 0.5}, step=1)
        other = Run(seed=4)
        other.step(1)
        items = other.items() | {"best": 0.25, "new": 7}
        before = [streams(), other.optimizer.state_dict()]
        loaded = accel.load_state(ctx, path, items, only=("model",))
        assert equal(dict(other.model.state_dict()), dict(run.model.state_dict()))
        assert equal([streams(), other.optimizer.state_dict()], before)
        assert loaded == items
        assert loaded.skipped == ()
        assert accel.load_state(ctx, path, {"best": 0.0}, only=["best"])["best"] == 0.5
        for only, fix in ((("modle",), "`model`"), ("model", ""), ((), "")):
            with assert_raises(ConfigError, where="load_state, only=", fix=fix):
                accel.load_state(ctx, path, items, only=only)
        with assert_raises(CheckpointError, problem="missing in the checkpoint:\n    item new"):
            accel.load_state(ctx, path, items, only=("new",))
        assert accel.load_state(ctx, path, items, only=("new", "best"), strict=False)["best"] == 0.5
        weights = {name: each.clone() for name, each in other.model.state_dict().items()}
        _ = accel.load_state(ctx, path, items, only=("optimizer",))  # by the names that the model gives
        assert equal(other.optimizer.state_dict(), run.optimizer.state_dict())
        assert equal(dict(other.model.state_dict()), weights)

    simulate(body, ranks)


def test_a_part_is_verified_as_a_whole_load_is(tmp_path: Path) -> None:
    model, table = nn.Linear(2, 2), torch.ones(9)
    path = accel.save_state(CPU, tmp_path, {"model": model, "table": table}, step=1)
    [file] = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[data.index(model.weight.detach().numpy().tobytes())] ^= 1
    file.write_bytes(data)
    own = model.weight.detach().clone()
    with assert_raises(CheckpointError, problem="digest"):
        accel.load_state(CPU, path, {"model": model, "table": table}, only=("model",))
    assert torch.equal(model.weight, own)


def test_ranks_that_name_other_parts_are_told(tmp_path: Path) -> None:
    def body(ctx: accel.DistContext) -> None:
        items = {"model": nn.Linear(2, 2), "more": 3}
        path = accel.save_state(ctx, tmp_path, items, step=1)
        with pytest.raises(accel.errors.CollectiveMismatch):
            accel.load_state(ctx, path, items, only=("model", "more")[ctx.rank : ctx.rank + 1])

    simulate(body, 2)
