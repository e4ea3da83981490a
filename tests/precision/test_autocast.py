# SPDX-License-Identifier: Apache-2.0
"""Autocast follows the context's precision, and ends with its block."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import nn

import accel
from accel.errors import DeviceError
from accel.precision._amp import matmul_precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", DTYPES)
def test_matrix_products_run_in_the_precision_and_parameters_stay(precision):
    ctx, model = accel.single(precision=precision), nn.Linear(4, 4)
    with accel.autocast(ctx):
        assert model(torch.zeros(2, 4)).dtype == DTYPES[precision]
        assert torch.is_autocast_enabled("cpu") == (precision != "fp32")
    assert model(torch.zeros(2, 4)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert model.weight.dtype == torch.float32


def test_it_ends_with_a_block_that_fails():
    def fail():
        with accel.autocast(accel.single(precision="bf16")):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert not torch.is_autocast_enabled("cpu")


def test_fp32_within_a_users_own_autocast_changes_nothing():
    with torch.autocast("cpu", dtype=torch.bfloat16), accel.autocast(accel.single()):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == torch.bfloat16


def test_ranks_have_autocast_of_their_own(ranks):
    def rank(ctx):
        mine = accel.replace(ctx, precision=("fp32", "bf16", "fp16")[ctx.rank])
        with accel.autocast(mine):
            accel.wait_for_everyone(ctx)
            return nn.Linear(2, 2)(torch.zeros(1, 2)).dtype

    assert ranks.run(rank, 3) == list(DTYPES.values())


def test_blocks_nest_and_each_ends_where_it_began():
    ctx, model, inputs = accel.single(precision="bf16"), nn.Linear(2, 2), torch.zeros(1, 2)
    with accel.autocast(ctx):
        with accel.autocast(ctx, "fp32"):
            assert model(inputs).dtype == torch.float32
            with accel.autocast(ctx, "fp16"):
                assert model(inputs).dtype == torch.float16
            assert model(inputs).dtype == torch.float32
        assert model(inputs).dtype == torch.bfloat16
    assert model(inputs).dtype == torch.float32


def test_without_a_cache_a_changed_parameter_is_seen_within_the_block():
    ctx, model = accel.single(precision="bf16"), nn.Linear(1, 1, bias=False)
    for cache, seen in ((False, 2.0), (True, 1.0)):
        nn.init.ones_(model.weight)
        with accel.autocast(ctx, cache=cache):
            model(torch.ones(1, 1))
            with torch.no_grad():
                model.weight.fill_(2.0)
            assert model(torch.ones(1, 1)).item() == seen


OLD, NEW = (7, 0), (8, 0)


@pytest.mark.parametrize(
    ("precision", "capability", "alternatives"),
    [("bf16", OLD, "fp32 or fp16"), ("tf32", OLD, "fp32 or fp16"), ("fp16", OLD, None), ("tf32", NEW, None)],
)
def test_a_gpu_that_lacks_a_format_is_refused_with_those_it_has(monkeypatch, precision, capability, alternatives):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    ctx = dataclasses.replace(accel.single(precision=precision), device=torch.device("cuda", 0))
    if alternatives is None:
        assert accel.loss_scale(ctx).dynamic == (precision == "fp16")
        return
    fields = {"problem": f"{precision}$", "expected": alternatives, "got": r"capability 7\.0", "fix": "'fp16'"}
    for call in (accel.loss_scale, accel.autocast, lambda ctx: accel.precision.apply_precision(ctx, nn.Linear(2, 2))):
        with assert_raises(DeviceError, **fields):
            call(ctx)


def test_a_device_without_the_format_is_refused():
    with assert_raises(DeviceError, problem="tf32", expected="fp32 or bf16 or fp16", got="cpu has no tf32"):
        accel.autocast(accel.single(precision="tf32"))
    ctx = dataclasses.replace(accel.single(precision="bf16"), device=torch.device("meta"))
    with assert_raises(DeviceError, got="torch has no bf16 autocast for meta"):
        accel.autocast(ctx)


@pytest.fixture
def gpu(monkeypatch):
    """A context of a GPU that is not there: enough for what only sets flags."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: NEW)
    return dataclasses.replace(accel.single(precision="tf32"), device=torch.device("cuda", 0))


def _products() -> tuple[str, ...]:
    backends = torch.backends
    newer = [getattr(each, "fp32_precision", "none") for each in (backends.cuda.matmul, backends.mkldnn)]
    if hasattr(backends.cudnn, "conv"):
        newer += [each.fp32_precision for each in (backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)]
    return torch.get_float32_matmul_precision(), *newer


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_tf32_holds_in_its_block_and_leaves_no_flag_behind(gpu, before):
    fresh = _products()
    try:
        torch.set_float32_matmul_precision(before)
        outside = _products()
        with accel.autocast(gpu):
            assert torch.get_float32_matmul_precision() == "high"
            with accel.autocast(gpu, "fp32"):
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == "high"
        assert _products() == outside
        with pytest.raises(KeyError), matmul_precision(gpu):
            raise KeyError(torch.get_float32_matmul_precision())
        assert _products() == outside
        with matmul_precision(accel.single()):
            assert _products() == outside
    finally:
        torch.set_float32_matmul_precision("highest")
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            torch.backends.cuda.matmul.fp32_precision = fresh[1]


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_tf32_works_beside_torchs_newer_setting(gpu):
    settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        settings.fp32_precision = "tf32"
        with accel.autocast(gpu, "fp32"):
            assert settings.fp32_precision == "ieee"
            with accel.autocast(gpu):
                assert settings.fp32_precision == "tf32"
            assert settings.fp32_precision == "ieee"
        assert settings.fp32_precision == "tf32"
    finally:
        settings.fp32_precision = before


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("newer", [False, True])
def test_convolutions_round_and_are_exact_as_products_do(gpu, before, newer):
    if newer and not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("torch before 2.9")
    settings, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    fresh, fresh_products = cudnn.allow_tf32, _products()

    def conv() -> object:
        return cudnn.conv.fp32_precision if newer else cudnn.allow_tf32

    rounded, exact = ("tf32", "ieee") if newer else (True, False)
    try:
        if newer:
            settings.fp32_precision = "tf32"  # the older setting, "highest", cannot be read from here on
            cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32" if before else "ieee"
        else:
            cudnn.allow_tf32 = before
        outside = conv()
        with accel.autocast(gpu):
            assert conv() == rounded
            with accel.autocast(gpu, "fp32"):
                assert conv() == exact
            assert conv() == rounded
        assert conv() == outside
    finally:
        if newer:
            settings.fp32_precision = fresh_products[1]
        cudnn.allow_tf32 = fresh


def test_contexts_of_several_formats_nest(gpu):
    first, second, model = accel.single(precision="bf16"), accel.single(precision="fp16"), nn.Linear(2, 2)
    with accel.autocast(first):
        before = model(torch.zeros(1, 2))
        with accel.autocast(second):
            assert model(torch.zeros(1, 2)).dtype == torch.float16
        with accel.autocast(gpu):
            assert torch.equal(model(torch.zeros(1, 2)), before)
        assert torch.equal(model(torch.zeros(1, 2)), before)


def test_a_backward_runs_in_tf32_as_its_forward_did(gpu):
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.get_float32_matmul_precision())
            return grad

    seen, weight = [], torch.ones((), requires_grad=True)
    accel.backward(gpu, Seen.apply(weight), begin_batch(gpu))
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == "highest"
