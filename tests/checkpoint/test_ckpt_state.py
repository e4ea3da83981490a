# SPDX-License-Identifier: Apache-2.0
import errno
import gc
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU, Cursor, Run, Window, equal, network, streams
from torch import nn
from torch.optim import lr_scheduler as schedulers

import accel
from accel import DistContext, latest_checkpoint, load_state, save_state
from accel.errors import CheckpointError, ConfigError
from accel.storage import LOCK
from accel.testing import simulate

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}
SCHEDULERS = {
    "multistep": lambda o: schedulers.MultiStepLR(o, [2, 4, 4, 7]),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=9),
    "onecycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "chain": lambda o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], [3]),
}
CELLS = [
    (o, s) for o in OPTIMIZERS for s in SCHEDULERS if (o, s) not in {("sgd", "onecycle"), ("adafactor", "onecycle")}
]


@pytest.mark.parametrize(("optimizer", "scheduler"), CELLS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_resumed_run_is_the_same_bits_as_an_uninterrupted_one(optimizer: str, scheduler: str, tmp_path: Path) -> None:
    def start(seed: int) -> Run:
        return Run(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], seed=seed)

    run = start(0)
    run.step(5)
    path = save_state(CPU, tmp_path, run.items(), step=5)
    losses, expected, end = run.step(5), run.state(), streams()
    random.seed(1)
    torch.manual_seed(1)
    resumed = start(1)
    resumed.step(1)
    resumed.load(CPU, path)
    assert equal(resumed.step(5), losses)
    assert equal(resumed.state(), expected)
    assert streams() == end


def test_the_path_is_returned_and_found_and_repeated_saves_are_the_same_bytes(tmp_path: Path) -> None:
    run = Run()
    assert latest_checkpoint(tmp_path / "none") is None
    assert latest_checkpoint(tmp_path) is None
    path = save_state(CPU, tmp_path / "new" / "run", run.items(), step=3)
    assert path == tmp_path / "new" / "run" / "step-00000003"
    assert latest_checkpoint(path.parent) == path
    again = save_state(CPU, tmp_path / "other", run.items(), step=3)
    for name in os.listdir(path):
        assert (path / name).read_bytes() == (again / name).read_bytes()
    assert os.listdir(path.parent) == ["step-00000003"]


def test_steps_beyond_eight_digits_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (10**9, 99_999_999, 5):
        save_state(CPU, tmp_path, {"x": 1}, step=step)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000000"


def test_load_returns_live_objects_records_and_values(tmp_path: Path) -> None:
    run = Run()
    extra = {"losses": [1.0, float("nan")], "none": None, "table": torch.arange(3), "pair": (1, 2)}
    items = run.items() | {"extra": extra, "best": 0.5, "size": None}
    path = save_state(CPU, tmp_path, items | {"cursor": Cursor(2, 7, float("inf")), "size": 3}, step=0)
    loaded = load_state(CPU, path, items | {"extra": {}, "best": 0.0})
    assert list(loaded) == sorted(items)
    assert loaded["model"] is run.model
    assert loaded["optimizer"] is run.optimizer
    assert loaded["cursor"] == Cursor(2, 7, float("inf"))
    assert loaded["best"] == 0.5
    assert loaded["size"] == 3
    found: Any = loaded["extra"]
    assert repr(found["losses"]) == "[1.0, nan]"
    assert found["pair"] == (1, 2)
    assert torch.equal(found["table"], torch.arange(3))


def test_records_may_hold_tensors(tmp_path: Path) -> None:
    path = save_state(CPU, tmp_path, {"window": Window(0, torch.tensor(2.5, dtype=torch.float64))}, step=0)
    window: Any = load_state(CPU, path, {"window": Window()})["window"]
    assert torch.equal(window.weight, torch.tensor(2.5, dtype=torch.float64))


def test_saving_inside_a_window_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with assert_raises(ConfigError, fix="Save after optimizer_step"):
        save_state(CPU, tmp_path / "run", {"window": Window(micro=1)}, step=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("items", "options", "fields"),
    [
        ({}, {"step": 1}, {"expected": "at least one item"}),
        ({"a b": 1}, {"step": 1}, {"problem": "the name of an item is not valid"}),
        ({"../x": 1}, {"step": 1}, {"problem": "the name of an item is not valid"}),
        ({3: 1}, {"step": 1}, {"problem": "the name of an item is not valid"}),
        (nn.Linear(1, 1), {"step": 1}, {"problem": "items have no names", "got": "Linear"}),
        ({"x": 1}, {"step": -1}, {"problem": "the step is not valid"}),
        ({"x": 1}, {"step": True}, {"problem": "the step is not valid"}),
        ({"x": 1}, {"step": 1.0}, {"problem": "the step is not valid"}),
        ({"x": 1}, {"step": 1, "keep": 0}, {"expected": "keep of 1 or above"}),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    items: Any, options: Any, fields: dict[str, str], tmp_path: Path
) -> None:
    with assert_raises(ConfigError, **fields):
        save_state(CPU, tmp_path / "run", items, **options)
    assert os.listdir(tmp_path) == []


def test_a_path_that_no_file_system_takes_is_refused_on_every_rank(tmp_path: Path) -> None:
    def rank(ctx: DistContext) -> bool:
        out = f"{tmp_path}/run\0" if ctx.rank == 0 else tmp_path / "run"
        with assert_raises(ConfigError, problem="rank 0: a path with a zero byte"):
            save_state(ctx, out, {"x": 1}, step=0)
        return True

    assert simulate(rank, 2) == [True] * 2
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_is_named_by_its_path(tmp_path: Path) -> None:
    with assert_raises(CheckpointError, problem="^an object cannot be stored"):
        save_state(accel.single(), tmp_path, {"x": object()}, step=0)
    run = Run()
    run.optimizer.param_groups[0]["decay"] = lambda step: step
    with assert_raises(
        CheckpointError, problem="a function cannot be stored", where=r"optimizer\.param_groups\[0\]\.decay"
    ):
        save_state(CPU, tmp_path / "run", run.items(), step=0)
    loop: list[Any] = []
    loop.append(loop)
    with assert_raises(CheckpointError, problem="contains itself"):
        save_state(CPU, tmp_path / "run", {"loop": loop}, step=0)
    assert os.listdir(tmp_path) == []


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    plain = network(0)
    compiled = torch.compile(network(1), backend="eager")
    inner = network(2)
    inner[0] = torch.compile(inner[0], backend="eager")
    path = save_state(CPU, tmp_path, {"model": plain}, step=0)
    for other in (compiled, inner):
        load_state(CPU, path, {"model": other})
        assert equal([p.detach() for p in other.parameters()], [p.detach() for p in plain.parameters()])
        again = save_state(CPU, tmp_path / "again", {"model": other}, step=0)
        assert b"_orig_mod" not in (again / "manifest.json").read_bytes()
        load_state(CPU, again, {"model": network(3)})


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if tie:
            self.b.weight = self.a.weight


def test_tied_tensors_are_written_once_and_cannot_be_torn_apart_in_silence(tmp_path: Path) -> None:
    model = Tied(tie=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.b(model.a(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    path = save_state(CPU, tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    assert b'"aliases":{"model.b.weight":"model.a.weight"}' in (path / "manifest.json").read_bytes()
    other = Tied(tie=True)
    load_state(CPU, path, {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)})
    assert torch.equal(other.b.weight, model.a.weight)
    torn = save_state(CPU, tmp_path, {"model": Tied(tie=False)}, step=1)
    with assert_raises(CheckpointError, problem=r"model\.b\.weight: expected the same tensor as model\.a\.weight"):
        load_state(CPU, torn, {"model": other})


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count: Any = (0,)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_extra_state_of_modules_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1), Counting())
    model[1].count = (7, torch.ones(2))
    path = save_state(CPU, tmp_path, {"model": model}, step=0)
    other = nn.Sequential(nn.Linear(1, 1), Counting())
    load_state(CPU, path, {"model": other})
    assert equal(other[1].count, (7, torch.ones(2)))


def test_optimizer_state_keeps_its_dtype_where_torch_would_cast_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
    path = save_state(CPU, tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    load_state(CPU, path, {"model": model, "optimizer": other})
    for parameter in model.parameters():
        assert equal(other.state[parameter], optimizer.state[parameter])


def test_optimizer_state_follows_names_not_positions(tmp_path: Path) -> None:
    model = network()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=0.1)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    path = save_state(CPU, tmp_path, {"model": model, "optimizer": optimizer}, step=0)
    backwards = torch.optim.AdamW(list(named.values())[::-1], lr=0.5)
    load_state(CPU, path, {"model": model, "optimizer": backwards})
    assert all(equal(backwards.state[p], optimizer.state[p]) for p in named.values())
    assert backwards.param_groups[0]["lr"] == 0.1


def test_an_optimizer_of_parameters_outside_the_items_is_kept_by_position(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    path = save_state(CPU, tmp_path, {"optimizer": optimizer}, step=0)
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.3, momentum=0.9)
    load_state(CPU, path, {"optimizer": other})
    assert equal(list(other.state.values()), list(optimizer.state.values()))
    wrong = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.3, momentum=0.9)
    with assert_raises(CheckpointError, problem=r"parameter 0: expected \[4\], got \[3\]"):
        load_state(CPU, path, {"optimizer": wrong})


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)


def refusals(run: Run) -> dict[str, tuple[dict[str, object], list[str]]]:
    """Items that do not fit the run's checkpoint, and what the error must say."""
    narrow = Run(width=5)
    half = network().half()
    sgd = torch.optim.SGD(run.model.parameters(), lr=0.1)
    split = torch.optim.AdamW([{"params": p} for p in run.model.parameters()])
    items = run.items()
    return {
        "shape": (items | {"model": narrow.model}, ["model.0.weight: expected [5, 4], got [6, 4]"]),
        "names": (items | {"model": Other()}, ["missing in the checkpoint", "model.first.weight", "model.0.weight"]),
        "dtype": (items | {"model": half}, ["model.0.bias: expected float16, got float32"]),
        "class": (items | {"optimizer": sgd}, ["item optimizer: expected optimizer SGD, got optimizer AdamW"]),
        "groups": (items | {"optimizer": split}, ["groups of parameters"]),
        "kind": (items | {"cursor": 3}, ["item cursor: expected value int, got record Cursor"]),
        "record": (items | {"cursor": Window()}, ["expected record Window, got record Cursor"]),
        "unasked": ({"model": run.model}, ["cursor", "optimizer", "scheduler=None"]),
        "absent": (items | {"scaler": Cursor()}, ["item scaler"]),
    }


@pytest.mark.parametrize("case", ["shape", "names", "dtype", "class", "groups", "kind", "record", "unasked", "absent"])
def test_what_does_not_fit_is_listed_and_nothing_changes(case: str, tmp_path: Path) -> None:
    run = Run()
    run.step(2)
    path = save_state(CPU, tmp_path, run.items(), step=0)
    run.step(2)
    items, words = refusals(run)[case]
    modules = [item for item in items.values() if isinstance(item, nn.Module)]
    before = run.state(), streams(), [equal_copy(m) for m in modules]
    with pytest.raises(CheckpointError) as caught:
        load_state(CPU, path, items)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert str(path) in text
    assert equal((run.state(), streams(), [equal_copy(m) for m in modules]), before)


def equal_copy(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def test_none_leaves_an_item_in_the_file(tmp_path: Path) -> None:
    run = Run()
    path = save_state(CPU, tmp_path, run.items(), step=0)
    model = network(9)
    left = dict.fromkeys(run.items(), None)
    assert load_state(CPU, path, left | {"model": model})["optimizer"] is None
    assert equal(equal_copy(model), equal_copy(run.model))


class Stubborn:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.value == 1:
            raise KeyError("no")


def test_an_object_that_refuses_its_state_undoes_all_others(tmp_path: Path) -> None:
    run, stubborn = Run(), Stubborn()
    run.step(1)
    stubborn.value = 1
    path = save_state(CPU, tmp_path, run.items() | {"zz": stubborn}, step=0)
    run.step(1)
    stubborn.value = 2
    before = run.state(), streams()
    with assert_raises(CheckpointError, problem="refused its state: KeyError"):
        load_state(CPU, path, run.items() | {"zz": stubborn})
    assert equal((run.state(), streams()), before)
    assert stubborn.value == 2
    run.step(1)  # the optimizer still works


def test_training_can_go_on_after_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with assert_raises(CheckpointError, problem="ENOSPC"):
            save_state(CPU, tmp_path, run.items(), step=0)
    run.step(1)
    run.load(CPU, save_state(CPU, tmp_path, run.items(), step=1))
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_every_file_and_two_folders_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(os.readlink(f"/proc/self/fd/{file}")) or real(file))
    path = save_state(CPU, tmp_path, {"x": torch.ones(2)}, step=0)
    assert Path(calls.pop(0)).name == LOCK
    assert [Path(call).suffix for call in calls[:2]] == [".safetensors", ".json"]
    assert ".tmp-" in calls[2]
    assert calls[3] == str(tmp_path)
    assert len(calls) == len(os.listdir(path)) + 2


def test_loaded_tensors_do_not_hold_the_files(tmp_path: Path) -> None:
    run = Run()
    run.step(1)
    items = run.items() | {"value": {"t": torch.ones(5)}}
    path = save_state(CPU, tmp_path, items, step=0)
    loaded = load_state(CPU, path, items)
    gc.collect()
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(path) not in maps.read_text()
    assert loaded["value"]


def test_no_pickle_anywhere() -> None:
    import accel.checkpoint
    import accel.items
    import accel.storage

    folders = [Path(str(m.__file__)).parent for m in (accel.checkpoint, accel.storage, accel.items)]
    told = re.compile(r"pickle|torch\.load|torch\.save|yaml|(?<![.\w])(?<!def )(eval|exec)\(")
    for file in (file for folder in folders for file in folder.glob("*.py")):
        assert not told.search(file.read_text()), file


def test_a_number_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    found = save_state(CPU, tmp_path, {"best": 0.5, "count": 3}, step=0)
    loaded = load_state(CPU, found, {"best": 0, "count": 0.0})
    assert (loaded["best"], loaded["count"]) == (0.5, 3)
    with assert_raises(CheckpointError, problem="best"):
        load_state(CPU, found, {"best": "none", "count": 0})
