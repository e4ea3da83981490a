# SPDX-License-Identifier: Apache-2.0
"""Saving, loading and preparing a model whose weights are elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from catching import assert_raises
from safetensors.torch import load_file, save_file
from streamed import make_net, streamed_map, token_ids
from torch import nn

import accel
import accel.testing
from accel.bigmodel import Dispatched
from accel.bigmodel.run import dispatch_model


def dispatched(folder: Path, home: str, *, trainable: bool = False) -> Dispatched[nn.Module]:
    net = make_net().requires_grad_(trainable)
    save_file(net.state_dict(), folder / "weights.safetensors")
    return dispatch_model(
        net, streamed_map(net, home), source=None if home == "cpu" else folder / "weights.safetensors"
    )


@pytest.mark.parametrize("home", ["cpu", "mmap", "disk"])
def test_whole_and_as_a_checkpoint(tmp_path: Path, home: str) -> None:
    twin = make_net().state_dict()
    with accel.session() as ctx, dispatched(tmp_path, home) as run:
        accel.save_model(ctx, run.model, tmp_path / "model")
        saved = load_file(tmp_path / "model" / "model.safetensors")
        whole = accel.get_state_dict(ctx, run.model)
        assert whole is not None
        for name, tensor in twin.items():
            assert torch.equal(saved[name], tensor)
            assert torch.equal(whole[name], tensor)
        absent = {name: each for name, each in run.model.state_dict().items() if name.endswith("up.weight")}
        weight = run.model.blocks[0].up.weight
        for ask in (
            lambda: save_file(absent, tmp_path / "absent.safetensors"),  # what save_pretrained does
            weight.data_ptr,
            weight.untyped_storage,
            weight.detach().numpy,
            weight.tolist,
        ):
            with assert_raises(accel.errors.StreamError, problem="has no address") as caught:
                ask()
            assert "accel.save_model(ctx, model, folder)" in caught.value.fix
            assert caught.value.fix.startswith("weight.detach().clone() has memory")
        assert not (tmp_path / "absent.safetensors").exists()
        accel.save_state(ctx, tmp_path / "run", {"model": run.model}, step=1)
        fresh = make_net(1)
        accel.load_state(ctx, tmp_path / "run", {"model": fresh})
        assert all(torch.equal(tensor, twin[name]) for name, tensor in fresh.state_dict().items())
        with assert_raises(accel.errors.CheckpointError, problem="not in memory"):
            accel.load_state(ctx, tmp_path / "run", {"model": run.model})


def test_adapters_train_between_frozen_weights_and_resume(tmp_path: Path) -> None:
    def train(home: str | None, steps: int, out: Path) -> list[torch.Tensor]:
        with accel.session() as ctx:
            run = None if home is None else dispatched(tmp_path, home)
            net = make_net().requires_grad_(False) if run is None else run.model
            for block in net.blocks:
                block.extra = nn.Parameter(torch.zeros(16))
                block.register_forward_hook(lambda module, args, output: output + module.extra)
            model, optimizer = accel.prepare(ctx, net, torch.optim.SGD([b.extra for b in net.blocks], lr=0.1))
            items = {"model": accel.items.TrainableOnly(model), "optimizer": optimizer}
            if out.exists():
                accel.load_state(ctx, out, items)
            for _ in range(steps):
                model(token_ids()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            accel.save_state(ctx, out, items, step=steps)
            found = [block.extra.detach().clone() for block in net.blocks]
            if run is not None:
                run.close()
            return found

    expected = train(None, 3, tmp_path / "plain")
    train("disk", 1, tmp_path / "out")
    for mine, theirs in zip(train("disk", 2, tmp_path / "out"), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_cannot_train_is_refused(tmp_path: Path) -> None:
    fields = {"problem": "cannot be trained", "got": r"blocks\.0", "fix": r"requires_grad_\(False\)"}
    with (
        accel.session() as ctx,
        dispatched(tmp_path, "cpu", trainable=True) as run,
        assert_raises(accel.errors.PrepareError, **fields),
    ):
        accel.prepare(ctx, run.model)

    def rank(ctx: accel.DistContext) -> None:
        net = make_net().requires_grad_(False)
        with (
            dispatch_model(net, streamed_map(net, "cpu")) as run,
            assert_raises(accel.errors.PrepareError, problem="spread over ranks"),
        ):
            accel.prepare(ctx, run.model)

    accel.testing.simulate(rank, 2, default_group=True)
