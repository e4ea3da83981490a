# SPDX-License-Identifier: Apache-2.0
"""Replicas stay replicas: what DDP would let drift apart is refused, and resume keeps every bit at any world size."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch
from catching import assert_raises
from processes import job, script_ranks
from safetensors.torch import load_file
from steps import ByState, begin_batch
from torch import nn
from torch.utils.data import DataLoader
from uncollected import no_collections

import accel
from accel.errors import PrepareError, StepError
from accel.testing import Simulator


class Branches(nn.Module):
    """Two layers, of which the second takes part only when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.second(hidden) if both else hidden


def test_parameters_without_a_part_in_the_loss_are_named_before_the_step(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = accel.prepare_model(ctx, Branches())
        run = ByState(ctx)
        run.begin()
        unused = r"no gradient for second\.weight, second\.bias"
        with assert_raises(StepError, got=unused, fix="find_unused_parameters"):  # noqa: SIM117
            with run.accumulate(model):
                run.backward(model(torch.ones(1, 2), both=False).sum())

    ranks.run(rank, 2)


def test_unused_parameters_that_were_announced_are_fine(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> torch.Tensor:
        torch.manual_seed(ctx.rank)
        model = accel.prepare_model(ctx, Branches(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = ByState(ctx)
        run.begin()
        with run.accumulate(model):
            run.backward(model(torch.ones(1, 2) * ctx.rank, both=False).sum())
        assert run.step(optimizer)
        return accel.unwrap_model(model).first.weight.detach()

    first, second = ranks.run(rank, 2)
    assert torch.equal(first, second)


def test_a_parameter_unfrozen_after_preparing_is_named(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        plain = Branches()
        plain.first.weight.requires_grad_(False)
        model = accel.prepare_model(ctx, plain)
        plain.first.weight.requires_grad_(True)
        with (
            assert_raises(PrepareError, got=r"first\.weight as well"),
            accel.accumulate(ctx, begin_batch(ctx), model),
        ):
            pass

    ranks.run(rank, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_within_the_block_of_its_window_is_that_behind_it(ranks: Simulator, world_size: int) -> None:
    def rank(ctx: accel.DistContext, *, within: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = accel.prepare_model(ctx, nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = accel.train_state(ctx, accumulation=2)
        loader = accel.prepare_loader(ctx, DataLoader(torch.eye(3).repeat(3, 1), batch_size=2), global_batch=2)
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                state = accel.backward(ctx, model(batch.data).square().mean(), state)
                if within and state.sync:
                    state = accel.optimizer_step(ctx, optimizer, state)
            if not within and state.sync:
                state = accel.optimizer_step(ctx, optimizer, state)
        assert state.updates == 3
        return accel.unwrap_model(model).weight.detach()

    behind = ranks.run(lambda ctx: rank(ctx, within=False), world_size, default_group=True)
    assert all(map(torch.equal, ranks.run(lambda ctx: rank(ctx, within=True), world_size, default_group=True), behind))


def test_a_frozen_model_is_rank_0s_on_every_rank_and_stays_unwrapped(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> dict[str, torch.Tensor]:
        torch.manual_seed(ctx.rank)
        plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        nn.init.normal_(plain[1].running_mean)
        assert accel.prepare_model(ctx, plain) is plain
        return {name: tensor.clone() for name, tensor in plain.state_dict().items()}

    states = ranks.run(rank, 3)
    torch.manual_seed(0)
    expected = nn.Linear(3, 3).weight
    assert torch.equal(states[0]["0.weight"], expected)
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in state)


def test_preparing_leaves_no_gradient_and_draws_nothing(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        stream = torch.get_rng_state()
        prepared = accel.prepare_model(ctx, model)
        assert torch.equal(torch.get_rng_state(), stream)
        assert all(parameter.grad is None for parameter in prepared.parameters())
        assert prepared.training
        assert accel.unwrap_model(prepared) is model
        if ctx.rank == 0:
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    ranks.run(rank, 2)


def test_a_checkpoint_of_replicas_that_drifted_is_rank_0s_and_says_so(
    ranks: Simulator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(ctx: accel.DistContext) -> tuple[torch.Tensor, torch.Tensor]:
        model = nn.Linear(4, 4)  # never prepared, so every rank has weights of its own
        with torch.no_grad():
            _ = model.weight.fill_(ctx.rank)
            _ = model.bias.fill_(ctx.rank)
        found = accel.save_state(ctx, tmp_path, {"model": model}, step=1)
        _ = accel.load_state(ctx, found, {"model": model})
        return model.weight.detach(), model.bias.detach()

    with caplog.at_level(logging.WARNING, "accel.checkpoint"):
        for weight, bias in ranks.run(rank, 3):
            assert not weight.any()
            assert not bias.any()
    assert "ranks hold different parameters" in caplog.text


RESUME = """
import os, sys
import torch, accel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out, stop = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
data = torch.randn(203, 16, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):  # layers registered in another order than they are used in
    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(67, 4), nn.Linear(129, 67), nn.Linear(16, 129)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.middle(torch.relu(self.first(x))))))


with accel.session(device="cpu") as ctx:
    torch.manual_seed(5)
    model = Model()
    torch.manual_seed(100 + ctx.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(data, data[:, :4]), batch_size=7, shuffle=True)
    model, optimizer, loader = accel.prepare(ctx, model, optimizer, loader)
    state = accel.train_state(ctx, seed=3, accumulation=2)
    items = lambda: dict(model=model, optimizer=optimizer, state=state)
    if found := accel.latest_checkpoint(out):
        state = accel.load_state(ctx, found, items())["state"]
    while state.epoch < 2:
        for batch in accel.batches(ctx, loader, state):
            inputs, targets = batch.data
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                state = accel.backward(ctx, loss, state)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
                if state.updates == stop:
                    accel.save_state(ctx, out, items(), step=stop)
                    os._exit(0)
    accel.save_state(ctx, out, items(), step=1000)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_resume_on_three_ranks_keeps_every_bit(tmp_path: Path) -> None:
    """With three summands their order matters, and DDP's layout of buckets decides it."""
    script = tmp_path / "resume.py"
    script.write_text(RESUME)

    def run(out: str, stop: int) -> None:
        with script_ranks(script, job(3), tmp_path / out, stop, folder=tmp_path) as ranks:
            assert not any(rank.wait(120) for rank in ranks), [rank.said() for rank in ranks]

    run("straight", 0)
    run("stopped", 3)
    run("stopped", 0)
    models = []
    for out in ("straight", "stopped"):
        found = accel.latest_checkpoint(tmp_path / out)
        assert found is not None
        tensors = {name: each for path in found.glob("*.safetensors") for name, each in load_file(path).items()}
        models.append({name: each for name, each in tensors.items() if not name.startswith("$")})
    assert models[0].keys() == models[1].keys()
    assert len(models[0]) == 6 * 4
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_prepared_model_that_has_not_stepped_is_freed_with_its_last_name(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> bool:
        model = accel.prepare_model(ctx, nn.Linear(2, 2))
        weight = weakref.ref(accel.unwrap_model(model).weight)
        accel.wait_for_everyone(ctx)  # others have copied its values
        _ = gc.collect()  # objects that preparing has left
        with no_collections():
            del model
            return weight() is None

    assert ranks.run(rank, 2) == [True, True]


class Task(nn.Module):
    """A head on an encoder that another task may have too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.encoder(inputs))).square().mean()


def _share_an_encoder(ctx: accel.DistContext, joint: bool, *views: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    encoder = nn.Linear(2, 2)
    plain = [Task(encoder), Task(encoder)]
    pairs = zip(plain, views, strict=True)
    tasks = [accel.prepare_model(ctx, each, gradient_as_bucket_view=view) for each, view in pairs]
    optimizer = torch.optim.SGD(dict.fromkeys(each for task in plain for each in task.parameters()), lr=0.1)
    inputs = torch.linspace(-1, 1, 8).view(4, 2)[ctx.rank :: ctx.world_size]
    run = ByState(ctx)
    for _ in range(2):
        run.begin()
        with run.accumulate(*tasks):
            if joint:
                run.backward(tasks[0](inputs) + tasks[1](inputs))
            else:
                run.backward(tasks[0](inputs))
                run.backward(tasks[1](inputs), same_units=True)
        assert run.step(optimizer)
    return [each.detach() for task in plain for each in task.parameters()]


@pytest.mark.parametrize(("joint", "views"), [(True, (False, False)), (False, (True, True)), (False, (True, False))])
def test_models_that_share_an_encoder_train_as_one_process(ranks: Simulator, joint: bool, views: tuple[bool, bool]):
    expected = ranks.run(lambda ctx: _share_an_encoder(ctx, True, *views), 1)[0]
    for found in ranks.run(lambda ctx: _share_an_encoder(ctx, joint, *views), 2):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("views", [(True, True), (True, False)])
def test_one_backward_through_two_replicas_of_an_encoder_is_refused(ranks: Simulator, views: tuple[bool, bool]):
    problem = "two prepared models share parameters"
    with assert_raises(PrepareError, problem=problem, got="encoder.weight, encoder.bias", fix="one module"):
        _ = ranks.run(lambda ctx: _share_an_encoder(ctx, True, *views), 2)
