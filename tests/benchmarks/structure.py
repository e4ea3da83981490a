# SPDX-License-Identifier: Apache-2.0
"""How much a reader of `accel` has to open: files and functions that each verb enters, places that inspect a model,
and statements of each room.

    python tests/benchmarks/structure.py [--files]

A verb runs on two simulated ranks; rank 0's thread is counted. A launch starts two processes; their parent is counted.
Files of `comm`, `errors`, `context`, `lazy` and `testing` are left out: a reader knows them from the first verb on.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.bigmodel import DeviceMap, describe
from accel.comm import start
from accel.formats import StrategyName
from accel.parallel._spread import ModelView
from accel.testing import simulate

ROOT = Path(accel.__file__).parent
KNOWN = ("comm", "errors", "context", "lazy", "testing")


class Seen:
    """Code objects that were entered, checked messages, and changes of file from one call to the next.

    Calls by `testing` are left out: where one simulated rank hands over to another is no work of a verb.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.collectives = 0
        self.changes = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/") or code.co_name == "<module>":
            return
        if caller is not None and caller.f_code.co_filename.startswith(f"{ROOT}/testing/"):
            return
        self.codes.add(code)
        self.collectives += code is start.__code__  # each begins with one checked message
        self.changes += code.co_filename != self._last
        self._last = code.co_filename

    def files(self) -> list[str]:
        """Files by their path inside of `accel`, without the rooms that every reader knows."""
        paths = {Path(code.co_filename).relative_to(ROOT) for code in self.codes}
        return sorted(path.as_posix() for path in paths if path.parts[0].removesuffix(".py") not in KNOWN)


def traced(run: Callable[[], object]) -> Seen:
    """Run a function with all calls of this thread noted."""
    seen = Seen()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


class Visits:
    """Functions that walk over a model's modules or tensors, and the rooms that a model enters.

    A room is entered by the first call of each function that gets a module, a tensor or a view of a model. Another one
    in between makes it a return.
    """

    def __init__(self) -> None:
        self.walks: set[str] = set()
        self.rooms: list[str] = []
        self._seen: set[CodeType] = set()

    @property
    def returns(self) -> int:
        """The number of entries into rooms that were entered before."""
        return len(self.rooms) - len(set(self.rooms))

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call":
            return
        if code.co_name in _WALKS and code.co_filename == nn.modules.module.__file__:
            if caller is not None and caller.f_code.co_filename.startswith(f"{ROOT}/"):
                where, name = Path(caller.f_code.co_filename), caller.f_code.co_qualname
                self.walks.add(f"{where.relative_to(ROOT)}: {name.partition('.<locals>.<')[0]}")
        elif code.co_filename.startswith(f"{ROOT}/") and code not in self._seen and not code.co_name.startswith("<"):
            room = Path(code.co_filename).relative_to(ROOT).parts[0]
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if room != "testing" and any(isinstance(frame.f_locals.get(name), _MODELS) for name in names):
                self._seen.add(code)
                self.rooms += [room] if self.rooms[-1:] != [room] else []


_NAMES = ("modules", "children", "parameters", "buffers")
_WALKS = (*_NAMES, *(f"named_{each}" for each in _NAMES))
_MODELS = (nn.Module, torch.Tensor, ModelView)


def visited(ctx: accel.DistContext, strategy: StrategyName) -> Visits:
    """Return what inspects a model of two blocks in `prepare_model`, on this rank."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    visits = Visits()
    sys.setprofile(visits)
    try:
        accel.prepare_model(accel.replace(ctx, strategy=strategy), net)
    finally:
        sys.setprofile(None)
    return visits


def verbs(ctx: accel.DistContext, folder: str) -> dict[str, Seen]:
    """Return what each verb of a small run enters on this rank."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    net = nn.Linear(4, 1)
    model, optimizer = net, torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    found: dict[str, Seen] = {}

    def prepare() -> None:
        nonlocal model, optimizer, scheduler
        model, optimizer, scheduler = accel.prepare(ctx, net, optimizer, scheduler)

    def train() -> None:
        nonlocal state
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                with accel.autocast(ctx):
                    loss = nn.functional.mse_loss(model(batch.data[0]), batch.data[1])
                state = accel.backward(ctx, loss, state)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler, max_norm=1.0)

    loader = accel.prepare_loader(ctx, DataLoader(data, batch_size=4, shuffle=True))
    state = accel.train_state(ctx, seed=0)
    found["prepare"] = traced(prepare)
    found["batches"] = traced(lambda: list(accel.batches(ctx, loader)))
    found["a loop's pass"] = traced(train)
    save = accel.save_state  # found before it is traced: a name is looked up in `lazy`
    load = accel.load_state
    layer = {"model": nn.Linear(4, 1)}
    run = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "state": state}
    found["save a layer"] = traced(lambda: save(ctx, f"{folder}/layer", layer, step=1))
    found["load a layer"] = traced(lambda: load(ctx, f"{folder}/layer", layer))
    found["save a run"] = traced(lambda: save(ctx, f"{folder}/run", run, step=1))
    found["load a run"] = traced(lambda: load(ctx, f"{folder}/run", run))
    return found


def dispatched(ctx: accel.DistContext, folder: str) -> Seen:
    """Return what a load of blocks that stream from the host and from files enters on this rank, with a forward."""

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))

    def load_and_run() -> None:
        with load(ctx, model, folder, device_map):
            model(torch.ones(2, 4))

    save_file(make().state_dict(), f"{folder}/model.safetensors")
    model = accel.init_empty_weights(make)
    segments = describe(model).segments
    homes = {each.name: ("cpu", "disk")[at % 2] for at, each in enumerate(segments)}
    device_map = DeviceMap(skeleton=describe(model), home=homes, runs=dict.fromkeys(homes, "cpu:0"), slots=2)
    load = accel.load_checkpoint_and_dispatch
    return traced(load_and_run)


def launched() -> Seen:
    """Return what the launch of a function on two ranks enters in the process that calls it."""
    launch = partial(accel.launch, attrgetter("rank"), nproc=2, environ=os.environ | {"ACCEL_DEVICE": "cpu"})
    assert launch() == [0, 1]  # looks names up
    return traced(launch)


def statements(path: Path) -> int:
    """Count a file's statements, an assignment of several values as one each; docstrings are none."""
    count = 0
    for node in ast.walk(ast.parse(path.read_text())):
        documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        count += isinstance(node, ast.stmt) and not documents
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Tuple)
        ):
            count += len(node.value.elts) - 1
    return count


def main() -> None:
    """Print a line for each verb and each room."""
    parser = argparse.ArgumentParser(description="Files that each verb enters, and statements of each room.")
    parser.add_argument("--files", action="store_true", help="list the files of each verb")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(lambda ctx: verbs(ctx, folder), 2)[0]
        found["dispatch"] = simulate(lambda ctx: dispatched(ctx, folder), 1)[0]
    found["launch"] = launched()
    strategies: tuple[StrategyName, ...] = ("ddp", "fsdp")
    for strategy in strategies:
        visits = simulate(partial(visited, strategy=strategy), 2, default_group=True)[0]
        print(f"prepare_model, {strategy}: {len(visits.walks)} functions walk over the model, {visits.returns} returns")
    print(f"{'verb':<16}{'files':>8}{'functions':>11}{'changes':>9}{'collectives':>13}")
    for verb, seen in found.items():
        print(f"{verb:<16}{len(seen.files()):>8}{len(seen.codes):>11}{seen.changes:>9}{seen.collectives:>13}")
        if flags.files:
            print(*(f"    {name}" for name in seen.files()), sep="\n")
    print(f"\n{'room':<16}{'files':>8}{'lines':>8}{'statements':>12}")
    rooms: dict[str, list[Path]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        rooms.setdefault(path.relative_to(ROOT).parts[0], []).append(path)
    rooms["all"] = sorted(ROOT.rglob("*.py"))
    for room, paths in rooms.items():
        lines = sum(path.read_text().count("\n") for path in paths)
        print(f"{room:<16}{len(paths):>8}{lines:>8}{sum(map(statements, paths)):>12}")


if __name__ == "__main__":
    main()
