# SPDX-License-Identifier: Apache-2.0
"""Training in few bits on a CPU: fp8 near bf16, quantization-aware layers, 8-bit optimizers that resume exactly."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from catching import assert_raises
from processes import job, run_ranks
from steps import begin_batch
from torch import nn

import accel
from accel.items._packed_state import put_together
from accel.precision import Fp8, Precision, Qat
from accel.testing import simulate

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS = 200
DISTANCE = 0.05  # of the loss in fp8 from that in bf16, by the first loss


@pytest.fixture(autouse=True)
def torchao() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it speaks of kernels that it could not load
        return pytest.importorskip("torchao.float8")


@pytest.fixture(autouse=True)
def _eager() -> Any:
    """Optimizers of torchao compile their step, which takes seconds and changes no promise."""
    with torch.compiler.set_stance("force_eager"):
        yield


def stack(sizes: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def train(
    ctx: accel.DistContext,
    steps: int,
    *,
    make: Callable[..., Any] = torch.optim.AdamW,
    out: Path | None = None,
    resume: bool = False,
    sizes: tuple[int, ...] = (16, 32, 32, 16),
) -> tuple[list[float], nn.Module]:
    """Train to reverse the features of 64 rows, of which each rank has its share; save before the last five steps."""
    with accel.seeding.seeded(ctx, 0):
        model = stack(sizes)
    model = accel.prepare(ctx, model)
    optimizer = accel.prepare(ctx, make(model.parameters(), lr=1e-2))
    items: dict[str, Any] = {"model": model, "optimizer": optimizer}
    taken = 0
    if resume:
        assert out is not None
        accel.load_state(ctx, accel.latest_checkpoint(out), items)
        taken = steps - 5
    share, shares = ctx.data_parallel
    inputs = torch.randn(64, sizes[0], generator=torch.Generator().manual_seed(1))[share::shares]
    losses: list[float] = []
    state = accel.train_state(ctx)
    for step in range(taken, steps):
        with accel.autocast(ctx):
            loss = (model(inputs).float() - inputs.flip(1)).square().mean()
        state = accel.backward(ctx, loss, begin_batch(ctx, state))
        state = accel.optimizer_step(ctx, optimizer, state)
        losses.append(accel.reduce(ctx, loss.detach(), "mean").item())
        if out is not None and step == steps - 6:
            accel.save_state(ctx, out, items, step=step)
    return losses, model


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_losses_in_fp8_stay_near_those_in_bf16_and_resume_exactly(tmp_path: Path, scaling: Any) -> None:
    exact, _ = train(accel.single(precision="bf16"), STEPS)
    fp8 = accel.single(precision=Precision(compute="bf16", fp8=Fp8(scaling=scaling, emulate=True)))
    rounded, model = train(fp8, STEPS, out=tmp_path)
    assert type(model[1]).__name__ == "Float8Linear"
    assert rounded != exact
    assert max(abs(one - other) for one, other in zip(rounded, exact, strict=True)) < DISTANCE * exact[0]
    assert rounded[-1] < 0.1 * rounded[0]
    assert train(fp8, STEPS, out=tmp_path, resume=True)[0] == rounded[-5:]


def assert_near_bf16(rank: int, environs: list[dict[str, str]]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = STEPS // 2
    exact, _ = train(accel.single(precision="bf16"), steps)
    for gathered in (False, True):
        precision = Precision(compute="bf16", fp8=Fp8(emulate=True, fp8_all_gather=gathered))
        with accel.session(environs[rank], device="cpu", precision=precision, strategy="fsdp") as ctx:
            rounded, _ = train(ctx, steps)
        assert max(abs(one - other) for one, other in zip(rounded, exact, strict=True)) < DISTANCE * exact[0]


@pytest.mark.multiprocess
def test_sharded_weights_are_gathered_in_fp8() -> None:
    """By processes: torchao's gathers of fp8 end simulated ranks with a segmentation fault."""
    run_ranks(assert_near_bf16, job(2))


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("group_size", [16, None])
def test_a_quantized_model_computes_what_its_training_did(
    tmp_path: Path, weights: Any, activations: Any, group_size: int | None
) -> None:
    recipe = Qat(weights=weights, activations=activations, group_size=group_size, skip=("0",))
    ctx = accel.single(precision=Precision(qat=recipe))
    losses, model = train(ctx, 60, out=tmp_path)
    assert train(ctx, 60, out=tmp_path, resume=True)[0] == losses[-5:]
    assert losses[-1] < 0.3 * losses[0]
    inputs = torch.randn(8, 16)
    trained = model(inputs)
    quantized = accel.precision.convert_qat(ctx, model)
    assert [type(layer.weight).__name__ for layer in quantized] == ["Parameter", *2 * ["IntxUnpackedToInt8Tensor"]]
    torch.testing.assert_close(quantized(inputs), trained, rtol=1e-5, atol=1e-6)


def test_ranks_train_quantization_aware_layers_as_one_does() -> None:
    one = train(accel.single(precision=Precision(qat=Qat(group_size=16))), 20)[0]
    for strategy in ("ddp", "fsdp"):

        def losses(ctx: accel.DistContext, strategy: Any = strategy) -> list[float]:
            return train(accel.replace(ctx, precision=Precision(qat=Qat(group_size=16)), strategy=strategy), 20)[0]

        for each in simulate(losses, 2, default_group=True):
            assert each[:2] == pytest.approx(one[:2], rel=1e-5)  # later a weight may round the other way
            assert max(abs(a - b) for a, b in zip(each, one, strict=True)) < DISTANCE * one[0]


def test_what_cannot_be_quantized_is_refused() -> None:
    ctx = accel.single(precision=Precision(qat=Qat(group_size=32)))
    with assert_raises(accel.errors.ConfigError, expected="multiples of 32"):
        accel.prepare(ctx, stack((16, 16, 16)))
    with assert_raises(accel.errors.PrepareError, got="without prepared layers"):
        accel.precision.convert_qat(ctx, stack((32, 32)))
    with assert_raises(accel.errors.ConfigError, problem="no recipe to quantize by"):
        accel.precision.convert_qat(accel.single(), stack((32, 32)))


def test_weights_gathered_in_fp8_are_other_parameters_and_prepare_says_so() -> None:
    ctx = accel.single(precision=Precision(compute="bf16", fp8=Fp8(emulate=True, fp8_all_gather=True)))
    model = stack((16, 16, 16, 16))
    with assert_raises(accel.errors.PrepareError, problem="other parameters than the model's"):
        accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))


BIG = (64, 256, 64)  # weights of enough elements to be held in blocks


def optimizer_of(package: str, name: str) -> Callable[..., Any]:
    return getattr(pytest.importorskip(package), name)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("bitsandbytes.optim", "AdamW8bit"),
        ("bitsandbytes.optim", "Lion8bit"),
        ("torchao.optim", "AdamW8bit"),
        ("torchao.optim", "AdamW4bit"),
        ("torchao.optim", "AdamWFp8"),
    ],
)
def test_low_bit_optimizers_resume_exactly(tmp_path: Path, package: str, name: str) -> None:
    make = optimizer_of(package, name)
    ctx = accel.single()
    straight, model = train(ctx, 12, make=make, out=tmp_path, sizes=BIG)
    resumed, other = train(ctx, 12, make=make, out=tmp_path, resume=True, sizes=BIG)
    assert resumed == straight[-5:]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_sharded_low_bit_optimizers_resume_on_other_numbers_of_ranks(tmp_path: Path, name: str) -> None:
    make = optimizer_of("torchao.optim", name)

    def run(ctx: accel.DistContext, resume: bool = False) -> list[float]:
        return train(accel.replace(ctx, strategy="fsdp"), 12, make=make, out=tmp_path, resume=resume, sizes=BIG)[0]

    straight = simulate(run, 2, default_group=True)[0]
    assert simulate(lambda ctx: run(ctx, resume=True), 2, default_group=True)[0] == straight[-5:]
    for ranks in (1, 4):
        assert simulate(lambda ctx: run(ctx, resume=True), ranks, default_group=True)[0] == pytest.approx(
            straight[-5:], rel=1e-3
        )


def test_parts_that_make_no_state_are_refused() -> None:
    parameter = torch.zeros(64, 64)
    whole = {"torchao": "OptimState8bit", "dtype": "float32", "signed": True, "qmap": torch.zeros(256)}
    whole |= {"codes": torch.zeros(64, 64, dtype=torch.uint8), "scale": torch.ones(16)}
    made = put_together({"exp_avg": whole}, parameter, "optimizer.state.weight")["exp_avg"]
    assert type(made).__name__ == "OptimState8bit"
    for change in (
        {"dtype": "load"},
        {"codes": torch.zeros(64, 64)},
        {"scale": torch.ones(0)},
        {"signed": None, "qmap": 3},
    ):
        with assert_raises(accel.errors.CheckpointError, problem="the parts of OptimState8bit are not valid"):
            put_together({"exp_avg": whole | change}, parameter, "optimizer.state.weight")
