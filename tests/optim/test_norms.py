# SPDX-License-Identifier: Apache-2.0
"""Norms, multiples and cuts of lists of gradients against plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from profiles import share
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.optim import clamp_, first_nonfinite, gradients, norms, scale_, total_norm

relaxed = settings(deadline=None, max_examples=share(1.6))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = st.lists(st.sampled_from([(), (1,), (3, 4), (0,), (2, 1, 5)]), min_size=1, max_size=5)


def _tensors(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kinds = [dtypes[at % len(dtypes)] for at in range(len(shapes))]
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, kinds, strict=True)]


def _values(tensors: list[torch.Tensor]) -> list[float]:
    return [abs(value) for tensor in tensors for value in tensor.double().flatten().tolist()]


@relaxed
@given(
    shapes=SHAPES,
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    norm_type=st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf]),
    seed=st.integers(0, 99),
)
def test_the_norm_is_that_of_all_elements(shapes, dtypes, norm_type, seed):
    tensors = _tensors(shapes, dtypes, seed)
    values = _values(tensors)
    expected = max(values, default=0.0)
    if norm_type != math.inf:
        expected = math.fsum(value**norm_type for value in values) ** (1 / norm_type)
    exact = 1e-12 if set(dtypes) == {torch.float64} else 1e-5
    assert total_norm(tensors, norm_type) == pytest.approx(expected, rel=exact, abs=1e-12)


@relaxed
@given(
    shapes=SHAPES,
    dtype=st.sampled_from(DTYPES),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    value=st.sampled_from([math.inf, -math.inf, math.nan]),
    seed=st.integers(0, 99),
)
def test_one_element_that_is_not_finite_makes_the_norm_so(shapes, dtype, norm_type, value, seed):
    tensors = _tensors([*shapes, (7,)], [dtype], seed)
    tensors[-1][seed % 7] = value
    assert not math.isfinite(total_norm(tensors, norm_type))


def test_a_norm_that_16_bits_cannot_hold():
    tensors = [torch.full((1000,), 6e4, dtype=torch.float16)] * 2
    assert total_norm(tensors) == pytest.approx(6e4 * math.sqrt(2000), rel=1e-3)
    assert [norm.dtype for norm in norms(tensors)] == [torch.float32] * 2
    assert norms([*tensors, torch.ones(1, dtype=torch.float64)])[0].dtype == torch.float64


def test_nothing_has_no_length():
    assert total_norm([]) == 0.0
    assert total_norm([torch.zeros(0)], math.inf) == 0.0


@relaxed
@given(shapes=SHAPES, dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2), as_tensor=st.booleans())
def test_multiples_and_cuts_are_those_of_each_element(shapes, dtypes, as_tensor):
    tensors = _tensors(shapes, dtypes, 1)
    expected = [(each * 0.5).clamp(-0.3, 0.3) for each in tensors]
    scale_(tensors, torch.tensor(0.5, dtype=torch.float64) if as_tensor else 0.5)
    clamp_(tensors, torch.tensor(0.3, dtype=torch.float64) if as_tensor else 0.3)
    for got, want in zip(tensors, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0 if got.dtype == torch.float64 else 1e-3)


def test_gradients_come_in_order_and_each_once():
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    first.grad, third.grad = torch.full((2,), 1.0), torch.full((2,), 3.0)
    listed = gradients(iter([third, first, second, third]))
    assert [each.data_ptr() for each in listed] == [third.grad.data_ptr(), first.grad.data_ptr()]
    assert first_nonfinite([second, first, third]) == 3
    third.grad[1] = -math.inf
    assert first_nonfinite([second, first, third]) == 2


def test_a_factor_and_a_limit_on_a_device_reach_gradients_on_the_host() -> None:
    """The gradients of an offloaded model; the weight of its window is summed on the device."""
    with FakeTensorMode():
        number = torch.tensor(0.5, dtype=torch.float64, device="cuda")
        plain = [torch.ones(3), torch.ones(2)]
        mixed = [torch.ones(3, dtype=torch.bfloat16), torch.ones(2, device="cuda")]
        for grads in (plain, mixed):
            scale_(grads, number)
            clamp_(grads, number)
