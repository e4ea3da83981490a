# SPDX-License-Identifier: Apache-2.0
"""A `loss_fn` that returns a mean is refused once, and every sum is let through, with nothing changed."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from catching import assert_raises, caught
from steps import begin_batch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, one_hot
from torch.utils.data import DataLoader

import accel
from accel.testing import Simulator
from accel.tree import Container

ROWS, MICRO = 12, 4


def _model(**plan: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return accel.prepare_model(accel.single(), model, plan=accel.parallel.Plan(**{"micro_batches": MICRO} | plan))


def _batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator), torch.arange(rows) % 3


def _run(
    loss_fn: Callable[..., Tensor],
    *,
    targets: Any = None,
    rows: int = ROWS,
    weight: float | None = None,
    seed: int = 0,
    **plan: Any,
) -> Tensor:
    ctx, count = accel.single(), rows if weight is None else weight
    inputs, _ = _batch(rows)
    with accel.seeding.seeded(ctx, seed):
        loss, _ = accel.forward_backward(
            ctx, _model(**plan), begin_batch(ctx), inputs, targets=targets, loss_fn=loss_fn, weight=count
        )
    return loss


def _normalized(output: Tensor) -> Tensor:
    return output.div_(2).square().mean()  # in place: what the halves are given is a copy


MEANS = {
    "cross entropy": lambda output, targets: cross_entropy(output, targets),
    "module": nn.CrossEntropyLoss(),
    "partial": functools.partial(cross_entropy, label_smoothing=0.1),
    "one row aside": lambda output, _: output.square().mean(),
    "of means of rows": lambda output, _: output.square().sum(1).mean(),
    "by hand": lambda output, targets: (output - one_hot(targets, 3)).square().sum() / len(output),
    "negative": lambda output, targets: -cross_entropy(output, targets),
    "in place": lambda output, _: _normalized(output.clone()),
    "with dropout": lambda output, targets: cross_entropy(dropout(output, 0.05), targets),
}


@pytest.mark.parametrize("rows", [8, 11, 12, 16])
@pytest.mark.parametrize("loss", MEANS.values(), ids=list(MEANS))
def test_a_mean_is_refused_with_the_line_to_write(loss: Any, rows: int) -> None:
    error = caught(lambda: _run(loss, targets=_batch(rows)[1], rows=rows))
    assert isinstance(error, accel.errors.StepError)
    assert "loss_fn returns a mean" in str(error)
    assert 'reduction="sum"' in str(error)


def _cancelling(output: Tensor) -> Tensor:
    sign = torch.where(torch.arange(len(output)) % 2 == 0, 1.0, -1.0)
    return (output.detach() * 0 + sign[:, None] * 1e6).sum() + output.sum() * 1e-6


def _beside(output: Tensor, advantages: Tensor) -> Tensor:
    return advantages.sum() + 0.01 + output.sum() * 0


def _noisy(output: Tensor) -> Tensor:
    return (output + torch.randn_like(output)).square().sum()


def _drawn(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(dropout(output, 0.5), targets, reduction="sum")


def _checked(output: Tensor) -> Tensor:
    assert len(output) == ROWS // MICRO, "a fixed size"
    return output.square().mean() * len(output)


FIXED = torch.zeros(2, 3, dtype=torch.float64)
SUMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cross entropy": (lambda output, targets: cross_entropy(output, targets, reduction="sum"), {}),
    "module": (nn.CrossEntropyLoss(reduction="sum"), {}),
    "torch.sum": (torch.sum, {}),
    "no token counts": (lambda output, targets: cross_entropy(output, targets * 0 - 100, reduction="sum"), {}),
    "terms that cancel": (_cancelling, {}),
    "a constant beside terms that cancel": (_beside, {"targets": torch.tensor([2.0, -1.0, -1.0] * 4)}),
    "noise": (_noisy, {}),
    "dropout": (_drawn, {}),
    "pairs": (lambda output: (output @ output.T).square().sum(), {}),
    "contrast": (lambda output: -(output @ output.T).log_softmax(1).diagonal().sum(), {}),
    "refuses other sizes": (_checked, {}),
    "nothing": (lambda output: output.sum() * 0, {}),
    "targets of its own": (lambda output: (output - FIXED).square().sum(), {"micro_batches": 1, "rows": 2}),
    "a mean over micro-batches": (lambda output: output.square().mean(), {"weight": MICRO}),
    "a mean over the batch": (lambda output: output.square().mean() / MICRO, {"weight": 1}),
    "one row each": (lambda output: output.square().mean(), {"rows": MICRO}),
}


@pytest.mark.parametrize(("loss", "options"), SUMS.values(), ids=list(SUMS))
def test_every_other_loss_is_let_through(loss: Any, options: dict[str, Any]) -> None:
    takes = getattr(getattr(loss, "__code__", None), "co_argcount", 1)
    if takes == 2 or isinstance(loss, nn.Module):
        options = {"targets": _batch()[1]} | options
    for seed in range(8):
        assert torch.isfinite(_run(loss, seed=seed, **options))


def test_looking_changes_no_number_and_no_random_stream() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return (dropout(output.mul_(1.5), 0.3) - targets.div_(2.0)[:, None]).square().sum()

    def run(model: nn.Module) -> tuple[Tensor, list[Tensor], Tensor]:
        inputs, targets = _batch()
        with accel.seeding.seeded(accel.single(), 3):
            found, _ = accel.forward_backward(
                accel.single(),
                model,
                begin_batch(accel.single()),
                inputs,
                targets=targets.double(),
                loss_fn=loss,
                weight=12,
            )
            gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
            model.zero_grad()
            return found, gradients, torch.rand(4)

    model = _model()
    torch.testing.assert_close(run(model), run(model), rtol=0, atol=0)  # it looks the first time alone


@pytest.mark.parametrize("fresh", [False, True])
def test_a_function_is_looked_at_once_though_a_loop_makes_it_anew(fresh: bool) -> None:
    calls: list[bool] = []

    def make(reduction: str) -> Callable[[Tensor], Tensor]:
        def loss(output: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return getattr(output.square(), reduction)()

        return loss

    def step(model: nn.Module, loss_fn: Any) -> None:
        accel.forward_backward(
            accel.single(), model, begin_batch(accel.single()), _batch()[0], loss_fn=loss_fn, weight=12
        )

    model, kept = _model(), make("sum")
    for _ in range(3):
        step(model, make("sum") if fresh else kept)
    assert calls == [False] * 2 + [True] * 12
    for _ in range(2):
        with assert_raises(accel.errors.StepError, problem="mean"):  # the same code, by another reduction
            step(model, make("mean"))
    step(pickle.loads(pickle.dumps(copy.deepcopy(model))), kept)


def test_the_last_stage_of_a_pipeline_looks_too(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext, reduction: str) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        ctx = accel.replace(ctx, mesh="pp=2", timeout_s=5)
        model = accel.prepare_model(ctx, model, plan=accel.parallel.Plan(micro_batches=2))
        inputs, targets = _batch()
        loss_fn = functools.partial(cross_entropy, reduction=reduction)
        return accel.forward_backward(
            ctx, model, begin_batch(ctx), inputs.float(), targets=targets, loss_fn=loss_fn, weight=12
        )[0].item()

    first, second = ranks.run(lambda ctx: rank(ctx, "sum"), 2, default_group=True)
    assert first == second
    error = caught(lambda: ranks.run(lambda ctx: rank(ctx, "mean"), 2, default_group=True))
    assert "loss_fn returns a mean" in str(error)


class OwnLoss(nn.Module):
    """Returns its loss alone, or beside logits."""

    def __init__(self, reduction: str, *, wraps: bool) -> None:
        super().__init__()
        self.reduction, self.wraps = reduction, wraps
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.two(torch.tanh(self.one(inputs)))
        loss = cross_entropy(logits, labels, reduction=self.reduction)
        return SimpleNamespace(loss=loss, logits=logits) if self.wraps else loss


NAMESPACE = Container(SimpleNamespace, vars, lambda _, parts: SimpleNamespace(**parts))


def _own(ctx: accel.DistContext, mesh: str, reduction: str, wraps: bool, line: str, rows: int) -> list[float]:
    """The loss and squares of the gradients of a batch, by a `loss_fn` as it is written in a line."""
    ctx = accel.replace(ctx, mesh=mesh, containers=[NAMESPACE])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = OwnLoss(reduction, wraps=wraps).double()
    given = dict(zip(("inputs", "labels"), _batch(rows), strict=True))
    plan = accel.parallel.Plan(micro_batches=MICRO)
    model = accel.prepare_model(ctx, model, plan=plan, example=given)
    scope: dict[str, Any] = {"labels": given["labels"]}
    exec(f"options = dict({line})", scope)
    loss, _ = accel.forward_backward(ctx, model, begin_batch(ctx), given, weight=rows, **scope["options"])
    named = model.named_parameters()
    return [float(loss), *(float(each.grad.square().sum()) for _, each in named if each.grad is not None)]


@pytest.mark.parametrize(
    ("mesh", "wraps"), [("", False), *(pytest.param("pp=2", each, marks=pytest.mark.slow) for each in (True, False))]
)
def test_a_loss_of_the_models_own_takes_the_line_to_write(ranks: Simulator, mesh: str, wraps: bool) -> None:
    """The value of a model says nothing of rows, so its sum and its mean are told apart by the line."""

    def run(reduction: str, line: str, rows: int = ROWS) -> list[float]:
        found = ranks.run(
            lambda ctx: _own(ctx, mesh, reduction, wraps, line, rows), 2 if mesh else 1, default_group=True
        )
        assert len({each[0] for each in found}) == 1
        return [found[0][0], *(value for each in found for value in each[1:])]

    inputs, labels = _batch()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = OwnLoss("sum", wraps=False).double()
    total_loss = plain(inputs, labels)
    total_loss.backward()  # a step divides by the weight
    expected = [total_loss.item() / ROWS]
    expected += [float(each.grad.square().sum()) for each in plain.parameters() if each.grad is not None]
    value = "output.loss" if wraps else "output"
    for reduction in ("sum", "mean"):
        with assert_raises(accel.errors.StepError, problem="a value that the model has computed") as caught:
            run(reduction, f"loss_fn=lambda output: {value}")
        mean, total = re.split(r"For a mean over its units pass |; for a sum ", caught.value.fix.rstrip("."))[1:]
        line = mean.replace(" and loss_fn", ", loss_fn") if reduction == "mean" else total
        assert run(reduction, line) == pytest.approx(expected, rel=1e-12)
        if mesh:  # micro-batches of one size
            with assert_raises(accel.errors.StepError, problem="with rows that fill up a micro-batch") as caught:
                run(reduction, line, ROWS - 1)
            made = re.findall(r"DataLoader\(.*?\)", caught.value.fix)[0]
            loader = functools.partial(DataLoader, range(2 * ROWS - 1), batch_size=ROWS)
            scope: dict[str, Any] = {"DataLoader": loader}
            exec(f"sizes = [len(batch) for batch in {made}]", scope)
            assert scope["sizes"] == [ROWS]


def _stages(ctx: accel.DistContext) -> nn.Sequential:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    accel.prepare_model(accel.replace(ctx, mesh="pp=2"), net)
    return net


def _sums_of_stages(ctx: accel.DistContext, penalty: Callable[[nn.Sequential], Tensor], rows: int = 8) -> None:
    net = _stages(ctx)
    inputs = torch.linspace(-1, 1, 4 * rows).view(rows, 4)

    def loss_fn(output: Tensor) -> Tensor:
        return output.square().sum() + len(output) * penalty(net)

    ctx = accel.replace(ctx, mesh="pp=2")
    _ = accel.forward_backward(ctx, net, begin_batch(ctx, accel.train_state(ctx)), inputs, loss_fn=loss_fn, weight=rows)


@pytest.mark.parametrize("rows", [8, 2])  # micro-batches of four rows, and of one
def test_a_penalty_of_one_layer_of_another_stage_is_refused(ranks: Simulator, rows: int):
    def penalty(net: nn.Sequential) -> Tensor:
        return net[0].get_parameter("0.weight").square().sum()

    with assert_raises(accel.errors.StepError, problem="a module in another stage", got="[4, 4]", fix="weight decay"):
        ranks.run(lambda ctx: _sums_of_stages(ctx, penalty, rows), 2, default_group=True)


@pytest.mark.parametrize("rows", [8, 2])
def test_a_penalty_of_all_parameters_is_refused_on_the_last_stage(ranks: Simulator, rows: int):
    def penalty(net: nn.Sequential) -> Tensor:
        return torch.stack([each.square().sum() for each in net.parameters()]).sum()

    with assert_raises(accel.errors.StepError, problem="parameters of all modules", got="2.0, 3.0", fix="weight decay"):
        ranks.run(lambda ctx: _sums_of_stages(ctx, penalty, rows), 2, default_group=True)


def test_a_loss_may_read_the_parameters_of_a_head(ranks: Simulator):
    def penalty(net: nn.Sequential) -> Tensor:
        *_, weight, _ = net.parameters()
        return weight.square().sum()

    ranks.run(lambda ctx: _sums_of_stages(ctx, penalty), 2, default_group=True)


def test_a_loss_may_make_tensors_of_the_dtype_of_a_parameter(ranks: Simulator):
    def penalty(net: nn.Sequential) -> Tensor:
        weight = net[0].get_parameter("0.weight")
        made = (
            torch.ones_like(weight),
            weight.new_ones(4, 4),
            torch.ones(4, 4).to(weight),
            torch.ones(16).view_as(weight),
        )
        return torch.stack(made).sum()

    ranks.run(lambda ctx: _sums_of_stages(ctx, penalty), 2, default_group=True)


def test_a_loss_may_count_the_elements_of_all_parameters(ranks: Simulator):
    def penalty(net: nn.Sequential) -> Tensor:
        elements = sum(each.numel() for each in net.parameters() if each.device.type == "cpu" and each.requires_grad)
        elements += net[0].get_parameter("0.weight").numel()
        return torch.tensor(0.1 * elements)

    ranks.run(lambda ctx: _sums_of_stages(ctx, penalty), 2, default_group=True)
