# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device, spread along any axis of a mesh before they have values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from language_models import forward_backward, make_objects, plan_of, rows
from steps import begin_batch
from torch import nn

import accel
from accel.parallel import Axes
from accel.tensors import full_tensor, is_dtensor, local_part
from accel.testing import Simulator

EXPERTS = 4
LAYOUTS = [
    (Axes(pp=2), "ddp"),
    (Axes(dp=2, tp=2, ep=4), "fsdp"),
    (Axes(dp=2), "ddp"),
    (Axes(), "ddp"),
    pytest.param(Axes(tp=2), "ddp", marks=pytest.mark.slow),
    pytest.param(Axes(dp=2, ep=2), "ddp", marks=pytest.mark.slow),
    pytest.param(Axes(cp=2), "fsdp", marks=pytest.mark.slow),
    pytest.param(Axes(pp=2, dp=2, tp=2, ep=2), "fsdp", marks=pytest.mark.slow),
]
ON_EACH = pytest.mark.parametrize(("axes", "strategy"), LAYOUTS, ids=str)


def _prepared(ctx: accel.DistContext, *, empty: bool, tied: bool = True) -> tuple[Any, Any]:
    with torch.device("meta" if empty else "cpu"):
        model, optimizer = make_objects(ctx, tied=tied, experts=EXPERTS, optimizer=torch.optim.AdamW)
    return accel.prepare(ctx, model, optimizer, plan=plan_of(EXPERTS))


def _on(ctx: accel.DistContext, axes: Axes, strategy: Any) -> accel.DistContext:
    return accel.replace(ctx, mesh=str(axes) or "dp=1", strategy=strategy)


def _step(ctx: accel.DistContext, model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Take one step on four sequences; return the parameters that this rank has a part of, whole."""
    share, shares = ctx.data_parallel
    batch = rows(4)[share::shares]
    state = begin_batch(ctx)
    _, state = forward_backward(ctx, model, state, ids=batch, labels=batch)
    _ = accel.optimizer_step(ctx, optimizer, state)
    return _whole(model)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    held = accel.unwrap_model(model).named_parameters(remove_duplicate=False)
    return {name: full_tensor(each).clone() for name, each in held}


def assert_law(found: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    assert {name for each in found for name in each} == expected.keys()
    for each in found:
        for name, value in each.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10, msg=name)


@ON_EACH
def test_ranks_without_values_get_those_of_rank_0(ranks: Simulator, axes: Axes, strategy: Any) -> None:
    def rank(ctx: accel.DistContext, *, alone: bool) -> dict[str, torch.Tensor]:
        ctx = _on(ctx, Axes() if alone else axes, strategy)
        return _step(ctx, *_prepared(ctx, empty=ctx.rank > 0))

    expected = ranks.run(lambda ctx: rank(ctx, alone=True), 1, default_group=True)[0]
    assert_law(ranks.run(lambda ctx: rank(ctx, alone=False), axes.world_size, default_group=True), expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of one process, and its parameters after the next step."""
    path = tmp_path_factory.mktemp("saved")

    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        ctx = _on(ctx, Axes(), "ddp")
        model, optimizer = _prepared(ctx, empty=False)
        _step(ctx, model, optimizer)
        accel.save_state(ctx, path, {"model": model, "optimizer": optimizer}, step=1)
        return _step(ctx, model, optimizer)

    with Simulator() as simulator:
        return path / "step-00000001", simulator.run(rank, 1, default_group=True)[0]


@ON_EACH
def test_a_load_fills_what_each_rank_has(ranks: Simulator, saved: Any, axes: Axes, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        ctx = _on(ctx, axes, strategy)
        model, optimizer = _prepared(ctx, empty=True)
        held = list(accel.unwrap_model(model).parameters())
        assert all(local_part(each).isnan().all() for each in held)
        assert {id(each) for each in optimizer.param_groups[0]["params"]} == {id(each) for each in held}
        accel.load_state(ctx, saved[0], {"model": model, "optimizer": optimizer})
        return _step(ctx, model, optimizer)

    assert_law(ranks.run(rank, axes.world_size, default_group=True), saved[1])


@pytest.mark.parametrize(("axes", "strategy"), [(Axes(), "ddp"), (Axes(dp=2), "ddp"), (Axes(pp=2, tp=2), "fsdp")])
def test_a_forward_before_the_values_came_is_refused(ranks: Simulator, axes: Axes, strategy: Any) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = _on(ctx, axes, strategy)
        model, optimizer = _prepared(ctx, empty=True)
        with pytest.raises(accel.AccelError) as caught:
            _step(ctx, model, optimizer)
        return str(caught.value)

    said = ranks.run(rank, axes.world_size, default_group=True)
    assert all("the model has no values yet" in each for each in said)


def test_no_rank_holds_more_than_its_part(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> tuple[int, int]:
        ctx = _on(ctx, Axes(dp=2, tp=2), "fsdp")
        model, _ = _prepared(ctx, empty=True)
        parameters = list(model.parameters())
        assert all(map(is_dtensor, parameters))
        storages = {each.data_ptr(): each for each in (local_part(each).untyped_storage() for each in parameters)}
        held = sum(each.nbytes() for each in storages.values())
        return held, sum(each.numel() * each.element_size() for each in parameters)

    for held, whole in ranks.run(rank, 4, default_group=True):
        assert held < whole / 2  # norms and the mixture's router and experts are not divided along tp


@pytest.mark.parametrize(
    ("axes", "strategy"), [(Axes(), "ddp"), (Axes(dp=2), "ddp"), (Axes(dp=2), "fsdp"), (Axes(pp=2), "ddp")], ids=str
)
def test_weights_for_others_are_not_written_before_the_values_came(
    ranks: Simulator, tmp_path: Path, axes: Axes, strategy: Any
) -> None:
    folder = tmp_path / "good"

    def rank(ctx: accel.DistContext) -> list[str]:
        ctx = _on(ctx, axes, strategy)
        empty, _ = _prepared(ctx, empty=True)
        full, _ = _prepared(ctx, empty=False)
        accel.save_model(ctx, full, folder)
        said: list[str] = []
        for write in (lambda: accel.save_model(ctx, empty, folder), lambda: accel.get_state_dict(ctx, empty)):
            with assert_raises(
                accel.AccelError, problem="no values yet", where="(save_model|get_state_dict)", fix="Load them"
            ) as caught:
                write()
            said.append(type(caught.value).__name__)
        accel.bigmodel.load_checkpoint_in_model(ctx, empty, folder)  # filled, with no forward yet
        weights = accel.get_state_dict(ctx, empty, dst=None)
        assert all(torch.equal(each, weights[name]) for name, each in accel.get_state_dict(ctx, full, dst=None).items())
        accel.save_model(ctx, empty, folder)
        return said

    for said in ranks.run(rank, axes.world_size, default_group=True):
        assert said == ["PrepareError"] * 2


def test_a_model_that_has_diverged_is_written(tmp_path: Path) -> None:
    ctx = accel.single("cpu")
    net = accel.prepare_model(ctx, accel.init_empty_weights(lambda: nn.Linear(2, 2)))
    net = accel.bigmodel.initialize_weights(ctx, net, accel.seeding.Key(0))
    net(torch.ones(1, 2))
    with torch.no_grad():
        net.weight.fill_(float("nan"))
    accel.save_model(ctx, net, tmp_path)
    state = accel.get_state_dict(ctx, net, dst=None)
    assert state["weight"].isnan().all()
