# SPDX-License-Identifier: Apache-2.0
"""fp8 layers: which ones, by which package, and why not."""

from __future__ import annotations

import contextlib
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import nn

import accel
from accel.errors import ConfigError, DeviceError, MissingExtraError
from accel.precision import Fp8, Precision
from accel.precision._fp8 import check_fp8, fp8_layers

CUDA = torch.device("cuda", 0)


def _stack(sizes: list[int]) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


@settings(deadline=None, max_examples=share(1))
@given(
    sizes=st.lists(st.sampled_from([8, 16, 24, 32]), min_size=2, max_size=8),
    ends=st.booleans(),
    skipped=st.integers(0, 7),
)
def test_the_layers_are_those_inside_that_divide_and_are_not_left_out(sizes, ends, skipped):
    model, count = _stack(sizes), len(sizes) - 1
    skip = (str(skipped),) if skipped < count else ()
    expected = [
        str(i)
        for i in range(count)
        if sizes[i] % 16 == sizes[i + 1] % 16 == 0 and (ends or 0 < i < count - 1) and str(i) not in skip
    ]
    recipe = Fp8(first_and_last=ends, skip=skip)
    if expected:
        assert fp8_layers(model, recipe, set()) == expected
        assert fp8_layers(model, recipe, {"0"}) if expected != ["0"] else True
    else:
        with assert_raises(ConfigError, problem="no layer of the model would compute in fp8"):
            fp8_layers(model, recipe, set())


def test_a_layer_that_is_to_be_left_out_must_exist():
    with assert_raises(ConfigError, problem="no submodule", got="'7'", where="Fp8.skip"):
        fp8_layers(_stack([16] * 4), Fp8(skip=("7",)), set())


@pytest.mark.parametrize(("backend", "extra"), [("torchao", "torchao"), ("transformer_engine", "te")])
def test_a_missing_package_is_refused_with_the_line_that_installs_it(monkeypatch, backend, extra):
    monkeypatch.setitem(sys.modules, backend, None)
    for name in [name for name in sys.modules if name.startswith(f"{backend}.")]:
        monkeypatch.delitem(sys.modules, name)
    ctx = accel.single(precision=Precision(compute="bf16", fp8=Fp8(backend=backend)))
    with assert_raises(MissingExtraError, fix=rf"pip install 'accel-torch\[{extra}\]'"):
        accel.precision.apply_precision(ctx, _stack([16] * 4))
    with pytest.raises(MissingExtraError), accel.autocast(ctx):
        pass


class _EngineLinear(nn.Linear):
    def __init__(self, in_features, out_features, *, bias, params_dtype, device):
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)


@pytest.fixture
def engine(monkeypatch):
    """Transformer Engine's names, and what it was called with."""
    entered = []

    @contextlib.contextmanager
    def autocast(**options):
        entered.append(options)
        yield

    def recipe(name):
        return lambda **options: SimpleNamespace(name=name, **options)

    root, common, pytorch, recipes = (
        ModuleType(f"transformer_engine{rest}") for rest in ("", ".common", ".pytorch", ".common.recipe")
    )
    pytorch.autocast, pytorch.Linear = autocast, _EngineLinear
    for name in ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"):
        setattr(recipes, name, recipe(name))
    for module in (root, common, pytorch, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("accel.precision._fp8.check_fp8", lambda device, recipe: None)
    monkeypatch.setattr("accel.precision._model.check_fp8", lambda device, recipe: None)
    return entered


@pytest.mark.parametrize(
    ("recipe", "made"),
    [
        ({"margin": 1, "amax_history": 16}, {"name": "DelayedScaling", "margin": 1, "amax_history_len": 16}),
        ({"scaling": "current"}, {"name": "Float8CurrentScaling"}),
        ({"scaling": "mxfp8"}, {"name": "MXFP8BlockScaling"}),
    ],
)
def test_transformer_engine_gets_the_recipe_and_the_very_parameters(engine, recipe, made):
    record = Precision(compute="bf16", fp8=Fp8(backend="transformer_engine", **recipe), fp32_modules=("2",))
    ctx, model = accel.single(precision=record), _stack([16] * 6)
    before = list(model.parameters())
    model = accel.prepare(ctx, model)
    assert [type(layer) is _EngineLinear for layer in model] == [False, True, False, True, False]
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    with accel.autocast(ctx):
        assert model(torch.ones(2, 16)).dtype == torch.bfloat16
    assert vars(engine[0]["recipe"]) == made
    assert engine[0]["enabled"]
    assert engine[0]["amax_reduction_group"] is None
    with accel.autocast(ctx, "bf16"):
        model(torch.ones(2, 16))
    assert len(engine) == 1


def test_delayed_scales_are_shared_by_all_ranks(engine, ranks):
    def rank(ctx, scaling):
        record = Precision(compute="bf16", fp8=Fp8(backend="transformer_engine", scaling=scaling))
        with accel.autocast(accel.replace(ctx, precision=record)):
            return engine[-1]["amax_reduction_group"] is ctx.comm.group

    assert ranks.run(lambda ctx: rank(ctx, "delayed"), 2) == [True, True]
    assert ranks.run(lambda ctx: rank(ctx, "current"), 2) == [False, False]


@pytest.mark.parametrize(
    ("scaling", "capability", "works"),
    [
        ("tensorwise", (8, 9), True),
        ("tensorwise", (8, 0), False),
        ("rowwise", (8, 9), False),
        ("rowwise", (9, 0), True),
    ],
)
def test_hardware_that_cannot_is_refused_with_what_it_takes(monkeypatch, scaling, capability, works):
    monkeypatch.setattr("accel.precision._fp8._package", lambda recipe: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    recipe = Fp8(scaling=scaling)
    if works:
        check_fp8(CUDA, recipe)
        return
    got = rf"^compute capability 8\.{capability[1]}"
    with assert_raises(DeviceError, expected=r"compute capability (8\.9|9\.0)", got=got):
        check_fp8(CUDA, recipe)


def test_a_cpu_is_refused_and_told_of_emulation(monkeypatch):
    monkeypatch.setattr("accel.precision._fp8._package", lambda recipe: None)
    with assert_raises(DeviceError, got="a cpu device", fix=r"precision='bf16', or Fp8\(emulate=True\)"):
        check_fp8(torch.device("cpu"), Fp8())
    check_fp8(torch.device("cpu"), Fp8(emulate=True))
