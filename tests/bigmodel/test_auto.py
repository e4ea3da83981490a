# SPDX-License-Identifier: Apache-2.0
"""Maps for "auto": from what is free now, printed, and obeyed by the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from streamed import make_net, token_ids

import accel
import accel.testing
from accel.bigmodel.run import _auto as auto


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return accel.save_model(accel.single("cpu"), make_net(), tmp_path)


def free(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Let devices have that many bytes free."""

    def of(device: str, *, reserve: int) -> int:
        return sizes[device.replace(":", "")] - reserve

    monkeypatch.setattr(auto, "available_memory", of)


def test_a_model_with_values_runs_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    net = make_net()
    with torch.no_grad(), accel.dispatch_model(net, "auto") as run:
        assert torch.equal(run.model(token_ids()), make_net()(token_ids()))
        assert set(run.device_map.home.values()) == {auto.HOST} or torch.accelerator.is_available()
    printed = capsys.readouterr().out
    assert "SEGMENTS" in printed
    assert "PLACE" in printed


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the host is a home there")
def test_what_the_host_has_not_free_stays_in_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, cpu=25_000)
    ctx = accel.single("cpu")
    net = accel.init_empty_weights(lambda: make_net())
    with torch.no_grad(), accel.load_checkpoint_and_dispatch(ctx, net, folder, "auto") as run:
        torch.testing.assert_close(run.model(token_ids()), make_net()(token_ids()))
        assert run.device_map.limits["cpu"] == 22_500
        assert "disk" in run.device_map.home.values()
        assert capsys.readouterr().out.strip() == accel.bigmodel.explain(run.device_map)
    free(monkeypatch, cpu=10)
    with assert_raises(accel.errors.PlacementError, problem="no room for the model in 'cpu'"):  # no files
        accel.dispatch_model(accel.init_empty_weights(lambda: make_net()), "auto")


def test_ranks_of_a_host_share_its_memory_and_print_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, cpu=40_000)

    def rank(ctx: accel.DistContext) -> int:
        net = accel.init_empty_weights(lambda: make_net())
        with torch.no_grad(), accel.load_checkpoint_and_dispatch(ctx, net, folder, "auto") as run:
            torch.testing.assert_close(run.model(token_ids()), make_net()(token_ids()))
            return run.device_map.limits["cpu"]

    assert accel.testing.simulate(rank, 2, default_group=True) == [18_000, 18_000]
    assert capsys.readouterr().out.count("SEGMENTS") == 1


def test_all_accelerators_of_the_machine_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, cuda0=20_000, cuda1=30_000, cpu=100_000)
    monkeypatch.setattr(auto, "find_accelerator", lambda: "cuda")
    monkeypatch.setattr(auto, "count_devices", lambda kind: 2)
    net = make_net()
    held = sum(each.nbytes for each in net.parameters())
    options: dict[str, Any] = {"has_files": False, "shows": False}
    found = auto.auto_map(net, **options)
    assert found.limits == {"cuda:0": 18_000, "cuda:1": 27_000, "cpu": 90_000 + held}
    one = auto.auto_map(net, device=torch.device("cuda:1"), ranks=2, **options)
    assert one.limits == {"cuda:1": 27_000, "cpu": 45_000 + held}


def test_other_words_are_refused(folder: Path) -> None:
    for wrong in ("balanced", None, {"": 0}):
        with assert_raises(accel.errors.ConfigError, problem="the device map is not valid"):
            accel.load_checkpoint_and_dispatch(accel.single("cpu"), make_net(), folder, wrong)  # type: ignore[arg-type]
