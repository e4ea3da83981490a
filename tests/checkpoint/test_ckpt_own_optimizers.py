# SPDX-License-Identifier: Apache-2.0
"""Optimizers of users and other packages: whatever their state holds, a run that resumes equals one that went on."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import logging
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.optim import Optimizer

import accel
from accel.errors import CheckpointError
from accel.testing import simulate


class Rate(torch.optim.SGD):
    """Counts under a key that is no parameter, as MADGRAD's `state["k"]`."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", torch.tensor([0], dtype=torch.long)) + 1
        self.state[("note", 1)] = {"name": "rate", "seen": [int(self.state["k"])]}
        for group in self.param_groups:
            group["lr"] = 0.1 / int(self.state["k"])
        return super().step(closure)


class Basis:
    def __init__(self, rank: int) -> None:
        self.rank, self.matrix = rank, torch.linspace(0, 1, 3 * rank).view(3, rank)


class Projector:
    """As GaLore's: options, a tensor, and another object."""

    def __init__(self, rank: int) -> None:
        self.basis, self.calls, self.kind, self.history = Basis(rank), 0, "std", [Basis(1)]


@dataclasses.dataclass
class Window:
    sums: torch.Tensor
    size: int = 3


class Moments(NamedTuple):
    first: torch.Tensor
    name: str


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


class Projecting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            held = self.state[parameter].setdefault("projector", Projector(2))
            held.calls += 1
            held.basis.matrix = held.basis.matrix + 1
            self.param_groups[0]["lr"] = 0.01 * held.calls / float(held.basis.matrix.mean())
            self.state[parameter]["all"] = [{"one": Projector(1)}, (Projector(3),)]
        return super().step(closure)


class Recording(torch.optim.SGD):
    """Records, namedtuples and members of enums of its module."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            window = self.state[parameter].get("window", Window(torch.zeros(())))
            self.state[parameter]["window"] = Window(window.sums + 1, window.size)
            self.state[parameter]["moments"] = Moments(window.sums * 2, "m")
            self.state[parameter]["phase"] = Phase.COLD if window.sums else Phase.WARM
            self.param_groups[0]["lr"] = 0.1 / float(window.sums + 1)
        return super().step(closure)


class Values(torch.optim.SGD):
    """Plain values of every kind, which torch's own load would change or refuse."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", np.int64(0)) + np.int64(1)
            state["history"] = np.append(state.get("history", np.zeros(0)), float(state["count"]))
            state["text"] = f"step {state['count']}"
            state["texts"] = [state["text"], None, ("a", b"b", [1.5, {"deep": "c"}])]
            state["recent"] = collections.deque(state.get("recent", ()), maxlen=2)
            state["recent"].append(torch.ones(2) * int(state["count"]))
            state["sorted"] = collections.OrderedDict(b=1, a=torch.ones(1))
            state["kinds"] = (torch.bfloat16, torch.Size(parameter.shape), torch.device("cpu"))
            state["layout"] = [torch.strided, torch.channels_last, torch.Size([2, 3])]
            state["fine"] = [torch.full((2,), 1 / 3, dtype=torch.float64), {"x": torch.full((1,), 1 / 7).double()}]
            state["generator"] = torch.Generator().manual_seed(int(state["count"]))
            state["places"], state["range"] = {1, 2}, frozenset({"a"})
            self.param_groups[0]["lr"] = 0.1 / float(np.sum(state["history"])) / len(state["text"])
        self.param_groups[0].update(
            dtype=torch.bfloat16, shape=torch.Size([3]), names=["a", None], at=np.float32(1 / 3)
        )
        return super().step(closure)


class Bare(torch.optim.Optimizer):
    """Keeps a tensor or a list in place of a parameter's dict."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for at, parameter in enumerate(self.param_groups[0]["params"]):
            sums = self.state[parameter] or [torch.zeros_like(parameter), "sums"]
            self.state[parameter] = [sums[0] + parameter.grad, f"sums of {at}"]
            parameter -= self.param_groups[0]["lr"] * self.state[parameter][0]


class Lookahead(Optimizer):
    """A state dict of its own form, as torch_optimizer's."""

    def __init__(self, params: Any, lr: float) -> None:
        self.fast = torch.optim.SGD(params, lr=lr, momentum=0.9)
        super().__init__(self.fast.param_groups[0]["params"], {"lr": lr})
        self.param_groups = self.fast.param_groups
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.fast.step()
        self.steps += 1
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            if self.steps % 2 == 0:
                parameter.copy_(slow.add_(parameter - slow, alpha=0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.fast.state_dict(), "slow": self.slow, "steps": self.steps, "dtype": self.slow[0].dtype}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fast.load_state_dict(state_dict["fast"])
        self.slow, self.steps = [each.clone() for each in state_dict["slow"]], state_dict["steps"]
        self.param_groups = self.fast.param_groups


KINDS: tuple[type[Optimizer], ...] = (Rate, Projecting, Recording, Values, Bare, Lookahead)


def _made(ctx: accel.DistContext, kind: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    options = {"momentum": 0.9} if isinstance(kind, type) and issubclass(kind, torch.optim.SGD) else {}
    model, optimizer = accel.prepare(ctx, net, kind(net.parameters(), lr=0.05, **options))
    return model, optimizer


def _step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    dtype = next(model.parameters()).dtype
    rows = torch.linspace(-1, 1, 16, dtype=dtype).view(4, 4) * (step + 1)  # of all ranks: one process is the reference
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _train(ctx: accel.DistContext, model: nn.Module, optimizer: Optimizer) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    loader = accel.prepare_loader(ctx, torch.utils.data.DataLoader(data, batch_size=2))
    state = accel.train_state(ctx, seed=0)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        state = accel.backward(ctx, model(batch.data[0]).square().mean(), state)
        state = accel.optimizer_step(ctx, optimizer, state)


def _weights(ctx: accel.DistContext, model: nn.Module) -> list[torch.Tensor]:
    whole = accel.get_state_dict(ctx, model, dst=None)
    assert whole is not None
    return list(whole.values())


def _plain(value: Any) -> Any:
    """A state by values that `==` compares."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.flatten().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return "numpy", str(value.dtype), value.tolist()
    if isinstance(value, torch.Generator):
        return "generator", value.get_state().tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(repr(key), _plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        extra = value.maxlen if isinstance(value, collections.deque) else None
        return type(value).__name__, extra, [_plain(each) for each in value]
    if type(value).__module__ == __name__ and not isinstance(value, enum.Enum):
        return type(value).__name__, _plain(vars(value))
    return type(value).__name__, value


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 3), (2, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_one_that_went_on(tmp_path: Path, kind: type[Optimizer], ranks: tuple[int, int]) -> None:
    def begin(ctx: accel.DistContext) -> list[torch.Tensor]:
        model, optimizer = _made(ctx, kind)
        for step in range(5):
            if step == 3:
                accel.save_state(ctx, tmp_path / "run", {"model": model, "optimizer": optimizer}, step=3)
            _step(model, optimizer, step)
        return _weights(ctx, model)

    def resume(ctx: accel.DistContext) -> list[torch.Tensor]:
        model, optimizer = _made(ctx, kind)
        accel.load_state(ctx, tmp_path / "run", {"model": model, "optimizer": optimizer})
        for step in (3, 4):
            _step(model, optimizer, step)
        return _weights(ctx, model)

    whole = simulate(begin, ranks[0])[0]
    for found in simulate(resume, ranks[1]):
        torch.testing.assert_close(found, whole, rtol=0, atol=0 if ranks[0] == ranks[1] else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_comes_back_as_it_was(tmp_path: Path, kind: type[Optimizer]) -> None:
    ctx = accel.single()
    model, optimizer = _made(ctx, kind)
    model = model.to(torch.bfloat16)  # torch casts loaded state to it
    for step in range(2):
        _step(model, optimizer, step)
    saved = _plain(copy.deepcopy(optimizer.state_dict()))
    path = accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    other, fresh = _made(ctx, kind)
    accel.load_state(ctx, path, {"model": other.to(torch.bfloat16), "optimizer": fresh})
    if kind is not Lookahead:  # whose own load casts
        assert _plain(fresh.state_dict()) == saved


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", [Rate, Projecting, Recording, Values])
def test_sharded_parameters_and_other_state_resume_on_any_ranks(
    tmp_path: Path, kind: type[Optimizer], ranks: tuple[int, int]
) -> None:
    def run(ctx: accel.DistContext, first: int, last: int) -> list[torch.Tensor]:
        ctx = accel.replace(ctx, strategy="fsdp")
        model, optimizer = _made(ctx, kind)
        if first:
            accel.load_state(ctx, tmp_path / "run", {"model": model, "optimizer": optimizer})
        for step in range(first, last):
            if step == 3 and not first:
                accel.save_state(ctx, tmp_path / "run", {"model": model, "optimizer": optimizer}, step=3)
            _step(model, optimizer, step)
        return _weights(ctx, model)

    whole = simulate(lambda ctx: run(ctx, 0, 5), ranks[0], default_group=True)[0]
    for found in simulate(lambda ctx: run(ctx, 3, 5), ranks[1], default_group=True):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)


def test_a_form_of_its_own_is_refused_for_sharded_parameters(tmp_path: Path) -> None:
    def run(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, strategy="fsdp")
        model = accel.prepare(ctx, nn.Linear(4, 2))
        with assert_raises(
            CheckpointError, problem="not in torch's form", got="sharded parameters", fix=r"strategy=\"ddp\""
        ) as caught:
            accel.save_state(
                ctx, tmp_path / "run", {"model": model, "o": Lookahead(model.parameters(), lr=0.1)}, step=1
            )
        return str(caught.value)

    assert len(set(simulate(run, 2, default_group=True))) == 1


class Function(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["rule"] = lambda: 0
        return super().step(closure)


def _with_a_function(params: Any, **options: Any) -> Optimizer:
    return torch.optim.SGD([{"params": list(params), "rule": lambda: 0}], **options)


class Slotted:
    __slots__ = ("value",)


class Opaque(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["held"] = [Slotted()]
        return super().step(closure)


class Failing(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("nothing")


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        (Function, "Function", {"problem": "a function cannot be stored", "where": "state.*rule"}),
        (Opaque, "Opaque", {"problem": "a Slotted cannot be stored", "where": r"held\[0\]"}),
        (_with_a_function, "SGD", {"problem": "a function cannot be stored", "where": r"param_groups\[0\]\.rule"}),
        (Failing, "Failing", {"problem": "does not give its state: KeyError"}),
        *((kind, "", None) for kind in KINDS),
    ],
)
def test_what_a_save_would_refuse_is_logged_after_the_first_step_alone(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, kind: type[Optimizer], name: str, fields: dict[str, str] | None
) -> None:
    def run(ctx: accel.DistContext) -> None:
        model, optimizer = _made(ctx, kind)
        _train(ctx, model, optimizer)
        items = {"model": model, "optimizer": optimizer}
        if fields is None:
            accel.save_state(ctx, tmp_path / "run", items, step=1)
            return
        with assert_raises(CheckpointError, **fields):
            accel.save_state(ctx, tmp_path / "run", items, step=1)

    with caplog.at_level(logging.WARNING, logger="accel.training"):
        simulate(run, 2)
    texts = [record.getMessage() for record in caplog.records if "save_state will refuse" in record.getMessage()]
    assert len(texts) == (fields is not None)
    for pattern in (fields or {}).values():
        assert re.search(f"{name} .*{pattern}", texts[0])


def test_an_object_of_an_unknown_class_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = accel.single()
    model, optimizer = _made(ctx, Projecting)
    _step(model, optimizer, 0)
    path = accel.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    before = copy.deepcopy(optimizer.state_dict())
    for broken in (None, Slotted, type("Closing", (), {"__del__": lambda _: None})):
        monkeypatch.setattr(sys.modules[__name__], "Basis", broken)
        with assert_raises(
            CheckpointError, problem="a class that is not known", expected="a class Basis in the module"
        ):
            accel.load_state(ctx, path, {"model": model, "optimizer": optimizer})
    assert _plain(optimizer.state_dict()) == _plain(before)


class Sharpness(Optimizer):
    """As SAM: an optimizer inside, whose state its state dict leaves out."""

    def __init__(self, params: Any, *, shares: bool = False, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        if shares:
            self.state = self.base_optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step()


class Giving(Sharpness):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"base": self.base_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base_optimizer.load_state_dict(state_dict["base"])


@pytest.mark.parametrize(
    ("make", "warns"),
    [
        (lambda params: Sharpness(params, lr=0.1, momentum=0.9), True),
        (lambda params: Sharpness(params, lr=0.1), False),  # nothing to lose
        (lambda params: Sharpness(params, lr=0.1, momentum=0.9, shares=True), False),
        (lambda params: Giving(params, lr=0.1, momentum=0.9), False),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), False),
    ],
)
def test_state_of_an_optimizer_inside_another_is_not_lost_in_silence(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, make: Any, warns: bool
) -> None:
    ctx = accel.single()

    def made() -> tuple[nn.Module, Any]:
        net = nn.Linear(4, 2)
        return net, make(net.parameters())

    net, optimizer = made()
    _train(ctx, net, optimizer)
    texts = [record.getMessage() for record in caplog.records if "leaves out the state" in record.getMessage()]
    assert len(texts) == warns
    if warns:  # the line of the warning
        assert '{"optimizer": optimizer, "inner": optimizer.base_optimizer}' in texts[0]
        items = {"model": net, "optimizer": optimizer, "inner": optimizer.base_optimizer}
        path = accel.save_state(ctx, tmp_path, items, step=1)
        other, fresh = made()
        accel.load_state(ctx, path, {"model": other, "optimizer": fresh, "inner": fresh.base_optimizer})
        momenta = [each.base_optimizer.state_dict()["state"] for each in (optimizer, fresh)]
        assert _plain(momenta[0]) == _plain(momenta[1])
