# SPDX-License-Identifier: Apache-2.0
"""Several ranks: each writes its share, all return or raise the same, and any world size loads."""

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ckpt_helpers import CPU, Cursor, Run, equal, network
from hypothesis import given, settings, strategies as st
from processes import free_port, run_ranks
from profiles import share
from torch.nn.parallel import DistributedDataParallel

from accel import latest_checkpoint, load_state, save_state
from accel.context import DistContext, session
from accel.errors import AccelError, CheckpointError, CollectiveMismatch, ConfigError
from accel.storage import take_lock
from accel.testing import simulate


def outcome(call: Callable[[], object]) -> str:
    """What a call came to, as text that can be compared between ranks."""
    try:
        return f"returned {call()}"
    except AccelError as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=share(0.3), deadline=None)
@given(saved=st.integers(1, 5), loaded=st.integers(1, 5), steps=st.integers(0, 3))
def test_what_any_world_saved_any_world_loads(
    saved: int, loaded: int, steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("world")
    states = simulate(lambda ctx: train_and_save(ctx, out, steps), saved)
    path = latest_checkpoint(out)
    assert path is not None
    assert len(list(path.glob("*.safetensors"))) == saved
    found = simulate(lambda ctx: Run(seed=ctx.rank + 5).load(ctx, path).state(), loaded)
    assert all(equal(state, states[0]) for state in found)


def train_and_save(ctx: DistContext, out: Path, steps: int) -> Any:
    run = Run()
    torch.manual_seed(0)
    random.seed(0)
    run.step(steps)
    save_state(ctx, out, run.items(), step=steps)
    return run.state()


def test_random_streams_go_on_at_the_same_world_size_and_are_seeded_at_another(tmp_path: Path) -> None:
    def save(ctx: DistContext) -> tuple[float, float]:
        torch.manual_seed(ctx.rank)
        random.seed(ctx.rank)
        save_state(ctx, tmp_path, {"x": 1}, step=0)
        return random.random(), torch.rand(1).item()

    def load(ctx: DistContext) -> tuple[float, float]:
        load_state(ctx, tmp_path / "step-00000000", {"x": 1})
        return random.random(), torch.rand(1).item()

    expected = simulate(save, 3)
    assert len(set(expected)) == 3
    assert simulate(load, 3) == expected
    other = simulate(load, 2)
    assert len({*other, *expected}) == 5
    assert simulate(load, 2) == other


def test_ranks_write_about_equally_many_bytes(tmp_path: Path) -> None:
    def save(ctx: DistContext) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(6)])
        save_state(ctx, tmp_path, {"model": model}, step=0)

    simulate(save, 3)
    sizes = [file.stat().st_size for file in (tmp_path / "step-00000000").glob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 4 * min(sizes)  # rank 0 also writes all ranks' random streams


def test_the_buffers_and_values_of_rank_0_count(tmp_path: Path) -> None:
    def save(ctx: DistContext) -> None:
        model = network()
        model[1].running_mean.fill_(ctx.rank + 1.0)
        save_state(ctx, tmp_path, {"model": model, "cursor": Cursor(ctx.rank)}, step=0)

    simulate(save, 3)
    model = network(4)
    assert load_state(CPU, tmp_path / "step-00000000", {"model": model, "cursor": Cursor(9)})["cursor"] == Cursor(0)
    assert torch.equal(model[1].running_mean, torch.ones(6))


def test_ddp_leaves_no_trace(tmp_path: Path) -> None:
    def save(ctx: DistContext) -> None:
        model = DistributedDataParallel(network(), process_group=ctx.comm.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(8, 4) * ctx.rank).sum().backward()
        optimizer.step()
        save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=0)

    simulate(save, 2)
    text = (tmp_path / "step-00000000" / "manifest.json").read_text()
    assert "module." not in text
    assert '"model.0.weight"' in text
    model = network(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    load_state(CPU, tmp_path / "step-00000000", {"model": model, "optimizer": optimizer})


def test_a_second_writer_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    lock = take_lock(tmp_path)

    def body(ctx: DistContext) -> str:
        return outcome(lambda: save_state(ctx, tmp_path, {"x": 1}, step=0))

    results = simulate(body, 3)
    assert len(set(results)) == 1
    assert results[0].startswith("CheckpointError: rank 0: another writer is saving into this folder")
    assert f"got process {os.getpid()} on host" in results[0]
    lock.release()
    assert simulate(body, 3) == [f"returned {tmp_path / 'step-00000000'}"] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("name", ["write", "fsync", "rename"])
def test_a_disk_error_on_one_rank_is_the_same_error_on_every_rank(
    failing: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(CPU, tmp_path, {"model": network()}, step=0)
    real, broken = getattr(os, name), set[int]()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    def body(ctx: DistContext) -> str:
        if ctx.rank == failing:
            broken.add(threading.get_ident())
        return outcome(lambda: save_state(ctx, tmp_path, {"model": network()}, step=1, keep=1))

    monkeypatch.setattr(os, name, fail)
    results = simulate(body, 3)
    assert len(set(results)) == 1
    if name == "rename" and failing:
        assert results[0].startswith("returned")  # only rank 0 renames
        return
    assert "No space left on device (ENOSPC)" in results[0]
    assert str(tmp_path) in results[0]
    assert f"rank {failing}" in results[0]
    assert os.listdir(tmp_path) == ["step-00000000"]


def test_one_rank_with_the_wrong_model_leaves_all_ranks_untouched(tmp_path: Path) -> None:
    save_state(CPU, tmp_path, {"model": network(0, 400)}, step=0)

    def body(ctx: DistContext) -> tuple[str, bool]:
        model = network(5, 400 if ctx.rank != 1 else 401)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        result = outcome(lambda: load_state(ctx, tmp_path / "step-00000000", {"model": model}))
        return result, equal(dict(model.state_dict()), before)

    results = simulate(body, 3)
    assert len({text for text, _ in results}) == 1
    assert all(untouched for _, untouched in results)
    assert "rank 1" in results[0][0]
    assert "model.4.weight: expected [2, 401], got [2, 400]" in results[0][0]


def test_a_long_list_of_differences_reaches_every_rank_in_full(tmp_path: Path) -> None:
    save_state(CPU, tmp_path, {"model": torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(150))}, step=0)

    def body(ctx: DistContext) -> str:
        model = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(150))
        return outcome(lambda: load_state(ctx, tmp_path / "step-00000000", {"model": model}))

    results = simulate(body, 2)
    assert len(set(results)) == 1
    assert results[0].startswith("CheckpointError: the checkpoint")  # all ranks alike: none is blamed
    assert all(f"model.{i}.weight: expected [1, 2], got [1, 1]" in results[0] for i in range(150))


class Refusing:
    def __init__(self, refuses: bool) -> None:
        self.refuses, self.value = refuses, 5

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["value"] == 1:
            raise ValueError("no")
        self.value = state["value"]


def test_an_object_that_refuses_on_one_rank_is_undone_on_all(tmp_path: Path) -> None:
    first = Refusing(False)
    first.value = 1
    save_state(CPU, tmp_path, {"object": first, "model": network()}, step=0)

    def body(ctx: DistContext) -> tuple[str, int, bool]:
        thing, model = Refusing(ctx.rank == 2), network(1)
        before = model[0].weight.clone()
        items = {"object": thing, "model": model}
        result = outcome(lambda: load_state(ctx, tmp_path / "step-00000000", items))
        return result, thing.value, torch.equal(before, model[0].weight)

    results = simulate(body, 3)
    assert len({text for text, _, _ in results}) == 1
    assert "rank 2" in results[0][0]
    assert [(value, same) for _, value, same in results] == [(5, True)] * 3


@pytest.mark.parametrize(
    ("items", "step", "error"),
    [
        (lambda rank: {"model": network(0, 5 + rank)}, lambda rank: 0, CollectiveMismatch),
        (lambda rank: {"x": 1}, lambda rank: rank, CollectiveMismatch),
        (lambda rank: {"x": 1}, lambda rank: -rank, ConfigError),
        (lambda rank: {"x": object() if rank else 1}, lambda rank: 0, CheckpointError),
    ],
)
def test_ranks_that_disagree_all_raise_and_nothing_is_written(
    items: Any, step: Any, error: type[AccelError], tmp_path: Path
) -> None:
    def body(ctx: DistContext) -> str:
        return outcome(lambda: save_state(ctx, tmp_path / "run", items(ctx.rank), step=step(ctx.rank)))

    results = simulate(body, 2)
    assert len(set(results)) == 1
    if error is not ConfigError:  # another step is told before it is found to be out of range
        assert results[0].startswith(error.__name__)
    assert os.listdir(tmp_path) == []


def test_ranks_that_read_different_folders_are_told(tmp_path: Path) -> None:
    for rank in (0, 1):
        save_state(CPU, tmp_path / str(rank), {"x": rank}, step=0)

    def body(ctx: DistContext) -> str:
        return outcome(lambda: load_state(ctx, tmp_path / str(ctx.rank) / "step-00000000", {"x": 0}))

    results = simulate(body, 2)
    assert all("different checkpoints" in result for result in results)


def worker(rank: int, out: str, port: int) -> None:
    torch.set_num_threads(1)
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with session(environ, device="cpu", timeout_s=60) as ctx:
        torch.manual_seed(rank)
        run = Run()
        run.model = DistributedDataParallel(run.model, process_group=ctx.comm.group)  # type: ignore[assignment]
        run.step(3)
        path = save_state(ctx, out, run.items(), step=3, keep=1)
        losses, expected = run.step(3), run.state()
        other = Run(seed=7)
        other.model = DistributedDataParallel(other.model, process_group=ctx.comm.group)  # type: ignore[assignment]
        other.load(ctx, path)
        assert equal(other.step(3), losses)
        assert equal(other.state()[1:], expected[1:])
        bad = outcome(lambda: load_state(ctx, path, {"model": network(0, 9 + rank)}))
        assert bad.startswith("CheckpointError: rank 0: the checkpoint does not fit"), bad
        del run.model, other.model
    (Path(out) / f"done-{rank}").touch()


@pytest.mark.multiprocess
def test_two_real_processes_resume_the_same_bits_and_one_loads_what_they_saved(tmp_path: Path) -> None:
    run_ranks(worker, str(tmp_path), free_port())
    assert {"done-0", "done-1"} <= set(os.listdir(tmp_path))
    path = latest_checkpoint(tmp_path)
    assert path is not None
    assert msgspec.json.decode((path / "manifest.json").read_bytes())["world_size"] == 2
    Run(seed=2).load(CPU, path)
