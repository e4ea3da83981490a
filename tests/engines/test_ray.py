# SPDX-License-Identifier: Apache-2.0
"""Ranks on a Ray cluster: values, output, errors, lost actors, stop requests, and too few resources."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest
from catching import assert_raises
from services import tried_again

import accel
from accel.config import LaunchConfig
from accel.engines import ray as on_ray

pytestmark = [pytest.mark.engine, pytest.mark.slow]

sys.path.insert(0, str(Path(__file__).parent))
import ray_functions  # noqa: E402 - beside this file

CONFIG = LaunchConfig(device="cpu", threads_per_process=1, stop_grace_s=20.0)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> None:
    pytest.importorskip("ray")  # here, so that the default run, which has no test of this file, does not import it


@pytest.fixture(scope="module")
def cluster() -> Generator[Any]:
    """A cluster that leaves `print` as it is: torch.compile gives another reason for a call of Ray's function."""
    import ray

    # the address of the socket must be short, and everything is this test's own
    ray.init(
        num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=100 * 2**20
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_TQDM_PATCH_PRINT", "0")
        yield ray
    ray.shutdown()
    assert isinstance(print, BuiltinFunctionType)


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.filterwarnings("default")
@tried_again
def test_ranks_on_a_cluster(cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained = on_ray.launch(ray_functions.train, (8,), nproc=2, config=CONFIG)
    assert [rank for rank, _, _ in trained] == [0, 1]
    assert len({actor for _, actor, _ in trained}) == 2
    assert trained[0][2] == trained[1][2]
    assert "[rank 0] trained 12 steps" in capfd.readouterr().out

    with pytest.raises(ValueError, match="no such value") as raised:
        on_ray.launch(ray_functions.fail_on_one, nproc=2, config=CONFIG)
    note = "\n".join(raised.value.__notes__)
    assert "rank 1 of 2 raised this" in note
    assert 'in fail_on_one\n    raise ValueError("no such value")' in note

    began = time.monotonic()
    with assert_raises(
        accel.errors.LaunchError, problem=r"rank 1 failed: ray\.exceptions\..*the actor of rank 1 on .* is gone"
    ):
        on_ray.launch(ray_functions.lose_actor, (str(tmp_path),), nproc=2, config=CONFIG)
    print(f"a killed actor ended both ranks within {time.monotonic() - began:.1f} s of the launch")
    assert all(gone(int((tmp_path / f"pid-{rank}").read_text())) for rank in range(2))


@pytest.mark.filterwarnings("default")
@tried_again
def test_a_stop_request_reaches_all_ranks_at_one_step(cluster: Any, tmp_path: Path) -> None:
    def ask() -> None:
        while len(list(tmp_path.glob("begun-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        with assert_raises(accel.errors.LaunchError, problem="stopped by SIGTERM"):
            on_ray.launch(ray_functions.stop_when_asked, (str(tmp_path),), nproc=2, config=CONFIG)
    finally:
        signal.signal(signal.SIGTERM, before)
    steps = {(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)}
    assert len(steps) == 1
    assert heard == [signal.SIGTERM]


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
@tried_again
def test_the_example_trains_and_tries_again(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import digits_on_ray
    from digits import Settings

    lost = [accel.errors.LaunchError("rank 1 failed", fix="")]  # by the first attempt, as if its actor had been killed
    launch = on_ray.launch

    def attempt(*args: Any, **options: Any) -> list[Any]:
        if lost:
            raise lost.pop()
        return launch(*args, **options, config=CONFIG)

    monkeypatch.setattr(on_ray, "launch", attempt)
    digits_on_ray.launch(Settings(epochs=1, out=str(tmp_path)), nproc=2, attempts=2)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["right"] > 0.7 * row["tested"] > 0


@pytest.mark.filterwarnings("default")
@tried_again
def test_no_files_of_a_rank_are_left(cluster: Any) -> None:
    (folder,) = on_ray.launch(ray_functions.own_folder, nproc=1, config=CONFIG)
    assert "accel-rank-" in folder
    assert not Path(folder).exists()


@pytest.mark.filterwarnings("default")
def test_too_few_resources_are_an_error(cluster: Any) -> None:
    with assert_raises(
        accel.errors.LaunchError,
        problem="no room for 3 ranks within 1 s",
        expected="3 times 1 CPU",
        got="of 2 CPU free",
    ):
        on_ray.launch(ray_functions.train, (1,), nproc=3, timeout_s=1.0, config=CONFIG)


def test_arguments_outside_their_range_are_one_error() -> None:
    with assert_raises(accel.errors.ConfigError, got="nproc=0.*gpus=2.*timeout_s=0"):
        on_ray.launch(ray_functions.train, (1,), nproc=0, gpus=2, timeout_s=0)
    with assert_raises(accel.errors.ConfigError, got=r"timeout_s=nan.*CPU in resources, expected cpus=.*\{'x': -1\}"):
        on_ray.launch(ray_functions.train, nproc=1, timeout_s=float("nan"), resources={"CPU": 1, "x": -1})
