# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft on quantized models: they train, resume exactly, and are saved; and the page's blocks run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from quantized_nets import Net, make_net, token_ids
from safetensors.torch import load_file
from torch import nn

import accel
from accel.testing import simulate

PAGE = Path(__file__).parents[2] / "docs" / "quantized.md"
CONFIGS = [
    accel.engines.quantized.Bitsandbytes(double=True, skip="head"),
    accel.engines.quantized.Bitsandbytes(bits=8, skip="head"),
    accel.engines.quantized.Torchao(skip="head"),
]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def peft() -> Any:
    """The package; skip where one is not installed."""
    for name in ("bitsandbytes", "torchao"):
        _ = pytest.importorskip(name)
    return pytest.importorskip("peft")


def adapted(peft: Any, ctx: accel.DistContext, folder: Path, config: Any, **options: Any) -> nn.Module:
    """A quantized net with adapters, of which those alone train."""
    model = accel.engines.quantized.load_quantized(ctx, accel.init_empty_weights(Net), folder, config=config, **options)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up", "down"]))


def train(model: nn.Module, ctx: accel.DistContext, out: Path, steps: int, *, resumes: bool = False) -> list[float]:
    """Train adapters for some steps; return the losses."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    items = {"model": accel.items.TrainableOnly(model), "optimizer": optimizer}
    if resumes:
        accel.load_state(ctx, out, items)
    losses: list[float] = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(token_ids()).flatten(0, 1), token_ids().flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accel.save_state(ctx, out, items, step=steps)
    return losses


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: repr(config)[:24])
def test_adapters_train_resume_and_are_saved(tmp_path: Path, peft: Any, config: Any) -> None:
    ctx = accel.single("cpu")
    accel.save_model(ctx, make_net(), tmp_path / "full")
    model = adapted(peft, ctx, tmp_path / "full", config)
    kinds = {type(module).__module__ for module in model.modules() if hasattr(module, "lora_A")}
    assert kinds == {
        "peft.tuners.lora." + ("bnb" if isinstance(config, accel.engines.quantized.Bitsandbytes) else "torchao")
    }
    before = {name: each.clone() for name, each in accel.get_state_dict(ctx, model, dst=None).items()}
    losses = train(model, ctx, tmp_path / "whole", 4)
    assert losses[-1] < 0.9 * losses[0]
    after = accel.get_state_dict(ctx, model, dst=None)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if "lora_" in name
    }

    first = train(adapted(peft, ctx, tmp_path / "full", config), ctx, tmp_path / "cut", 2)
    resumed = adapted(peft, ctx, tmp_path / "full", config)
    assert first + train(resumed, ctx, tmp_path / "cut", 2, resumes=True) == losses
    size = sum(path.stat().st_size for path in (tmp_path / "cut").rglob("*.safetensors"))
    assert size < 150_000  # adapters and their moments for two checkpoints, no base

    other = adapted(peft, ctx, accel.save_model(ctx, make_net(1), tmp_path / "other"), config)
    with assert_raises(accel.errors.CheckpointError, problem="the base that the checkpoint was trained on"):
        train(other, ctx, tmp_path / "cut", 1, resumes=True)

    path = accel.save(ctx, peft.get_peft_model_state_dict(model), tmp_path / "adapter_model.safetensors")
    fresh = adapted(peft, ctx, tmp_path / "full", config)
    peft.set_peft_model_state_dict(fresh, load_file(path))
    with torch.no_grad():
        expected = model(token_ids())
        assert torch.equal(fresh(token_ids()), expected)
    accel.save_model(ctx, model, tmp_path / "both")
    stored = load_file(tmp_path / "both" / "model.safetensors")
    assert stored.keys() == after.keys()
    accel.save_state(ctx, tmp_path / "state", {"model": model}, step=1)
    restored = adapted(peft, ctx, tmp_path / "other", config)  # another base, overwritten in place
    accel.load_state(ctx, tmp_path / "state", {"model": restored})
    with torch.no_grad():
        assert torch.equal(restored(token_ids()), expected)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: repr(config)[:24])
def test_an_average_of_adapters_leaves_the_base_out(tmp_path: Path, peft: Any, config: Any) -> None:
    ctx = accel.single("cpu")
    accel.save_model(ctx, make_net(), tmp_path / "full")
    model = adapted(peft, ctx, tmp_path / "full", config)
    ema = accel.training.Ema(model, decay=0.5, warmup=False)
    names = {name for name, each in model.named_parameters() if type(each) is nn.Parameter}
    assert {name.removeprefix("weights.") for name, _ in ema.named_parameters()} == names
    _ = train(model, ctx, tmp_path / "out", 2)
    ema.update_(model)
    accel.save_state(ctx, tmp_path / "state", {"ema": ema}, step=1)
    other = adapted(peft, ctx, tmp_path / "full", config)
    loaded = accel.training.Ema(other, decay=0.5, warmup=False)
    accel.load_state(ctx, tmp_path / "state", {"ema": loaded})
    with torch.no_grad():
        own = model(token_ids())
        with ema.applied_to(model), loaded.applied_to(other):
            average = model(token_ids())
            assert torch.equal(other(token_ids()), average)
        assert not torch.equal(average, own)
        assert torch.equal(model(token_ids()), own)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: repr(config)[:24])
def test_adapters_train_while_the_base_streams(tmp_path: Path, peft: Any, config: Any) -> None:
    ctx = accel.single("cpu")
    accel.save_model(ctx, make_net(), tmp_path / "full")
    expected = train(adapted(peft, ctx, tmp_path / "full", config), ctx, tmp_path / "here", 3)
    base = accel.engines.quantized.load_quantized(ctx, accel.init_empty_weights(Net), tmp_path / "full", config=config)
    for each in base.parameters():
        each.requires_grad_(False)
    skeleton = accel.bigmodel.describe(base)
    homes = {segment.name: "cpu" if segment.movable else "cpu:0" for segment in skeleton.segments}
    device_map = accel.bigmodel.DeviceMap(skeleton=skeleton, home=homes, runs=dict.fromkeys(homes, "cpu:0"))
    with accel.dispatch_model(base, device_map) as run:
        torch.manual_seed(1)
        model = peft.get_peft_model(run.model, peft.LoraConfig(r=4, target_modules=["up", "down"]))
        losses = train(model, ctx, tmp_path / "away", 3)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "config", [*CONFIGS, accel.engines.quantized.Torchao(kind="float8")], ids=lambda config: repr(config)[:24]
)
def test_two_ranks_train_the_adapters_of_one(tmp_path: Path, peft: Any, config: Any) -> None:
    ctx = accel.single("cpu")
    folders = [accel.save_model(ctx, make_net(seed), tmp_path / f"full{seed}") for seed in range(2)]

    def run(ctx: accel.DistContext) -> list[float]:
        model = adapted(peft, accel.single("cpu"), folders[ctx.rank], config)  # replicas begin with rank 0's
        return train(model, ctx, tmp_path / f"out{ctx.world_size}", 3)

    alone = simulate(run, 1, default_group=True)[0]
    for losses in simulate(run, 2, default_group=True):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: repr(config)[:24])
def test_local_steps_on_a_quantized_base_end_alike(tmp_path: Path, peft: Any, config: Any) -> None:
    ctx = accel.single("cpu")
    folders = [accel.save_model(ctx, make_net(seed), tmp_path / f"full{seed}") for seed in range(2)]

    def run(ctx: accel.DistContext) -> torch.Tensor:
        model = adapted(peft, accel.single("cpu"), folders[ctx.rank], config)
        model = accel.parallel.prepare_local_model(ctx, model)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        model(token_ids() + ctx.rank).square().mean().backward()
        optimizer.step()
        _ = accel.parallel.local_sgd_step(ctx, model, accel.parallel.LocalSgd(every=1))
        with torch.no_grad():
            return model(token_ids())

    first, second = simulate(run, 2, default_group=True)
    assert torch.equal(first, second)


def test_quantized_weights_that_ask_for_gradients_are_refused(tmp_path: Path, peft: Any) -> None:
    accel.save_model(accel.single("cpu"), make_net(), tmp_path)
    ctx = accel.single("cpu")
    model = accel.engines.quantized.load_quantized(
        ctx, accel.init_empty_weights(Net), tmp_path, config=accel.engines.quantized.Torchao()
    )
    model.requires_grad_(True)
    with assert_raises(
        accel.errors.PrepareError,
        problem="quantized weights cannot be trained",
        got="with requires_grad:",
        fix="Freeze",
    ):
        accel.prepare_model(ctx, model)


def test_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peft: Any) -> None:
    del peft
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "docs"}
    # the first block is the page's summary, of calls alone
    _, *blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
