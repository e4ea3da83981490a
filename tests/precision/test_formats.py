# SPDX-License-Identifier: Apache-2.0
"""Precision is a record: names stand for records, and what has no effect is refused."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from tables import rows

import accel
from accel.errors import ConfigError
from accel.formats import Compute, PrecisionName, precision
from accel.precision import Fp8, Precision

records = st.builds(
    Precision,
    compute=st.just("bf16"),
    params=st.sampled_from([None, "fp32", "bf16"]),
    outputs=st.sampled_from([None, "fp32", "bf16", "fp16"]),
    fp32_modules=st.lists(st.text(), max_size=3).map(tuple),
    fp8=st.none() | st.builds(Fp8, scaling=st.sampled_from([None, "rowwise"]), skip=st.lists(st.text()).map(tuple)),
)


@settings(deadline=None, max_examples=share(1))
@given(record=records)
def test_a_record_is_itself_through_json_and_in_a_context(record):
    assert msgspec.json.decode(msgspec.json.encode(record), type=Precision) == record
    assert precision(record) is record
    ctx = accel.single(precision=record)
    assert ctx.precision == record
    assert hash(ctx.precision) == hash(record)


@pytest.mark.parametrize("name", get_args(PrecisionName))
def test_names_stand_for_records_and_back(name):
    assert precision(name).name == name
    assert accel.single(precision=name).precision == precision(name)
    assert accel.from_env({"ACCEL_PRECISION": name, "ACCEL_DEVICE": "cpu"}).precision == precision(name)


def test_a_record_without_a_name_says_so():
    assert Precision(compute="bf16", outputs="fp32").name == "custom"
    assert set(get_args(Compute)) < set(get_args(PrecisionName))


@rows(
    "make, fields",
    [
        (
            lambda: Precision(compute="fp61"),
            {"problem": "unknown format", "expected": "fp16", "where": "Precision.compute"},
        ),
        (
            lambda: Precision(params="fp16"),
            {"expected": "one of fp32, bf16", "got": "'fp16'", "where": "Precision.params"},
        ),
        (lambda: Precision(outputs="tf32"), {"where": "Precision.outputs"}),
        (lambda: Precision(compute="bf16", fp32_modules="head"), {"fix": r"Write \('head',\)"}),
        (
            lambda: Precision(compute="bf16", fp32_modules=["head"]),
            {"expected": "a tuple of patterns", "got": r"\['head'\]"},
        ),
        (
            lambda: Precision(compute="bf16", fp8="torchao"),
            {"expected": "an accel.precision.Fp8", "got": "'torchao'", "where": "Precision.fp8"},
        ),
        (lambda: Fp8(skip="head"), {"where": "Fp8.skip", "fix": r"Write \('head',\)"}),
        (lambda: Precision(fp32_modules=("head",)), {"problem": "no effect where all is computed in fp32"}),
        (
            lambda: Precision(compute="tf32", fp32_modules=("head",)),
            {"problem": "no effect where all is computed in tf32"},
        ),
        (lambda: Precision(compute="fp16", fp8=Fp8()), {"expected": "compute='bf16'"}),
        (lambda: Fp8(backend="msamp"), {"expected": "one of torchao, transformer_engine"}),
        (
            lambda: Fp8(scaling="delayed"),
            {"problem": "torchao does not have this scaling", "expected": "tensorwise, rowwise"},
        ),
        (lambda: Fp8(backend="transformer_engine", scaling="rowwise"), {"expected": "delayed, current, mxfp8"}),
        (lambda: Fp8(backend="transformer_engine", emulate=True), {"where": "Fp8.emulate"}),
        (
            lambda: Fp8(scaling="rowwise", fp8_all_gather=True),
            {"problem": "no effect with torchao and rowwise", "where": "fp8_all_gather"},
        ),
        (lambda: Fp8(margin=1), {"where": "Fp8.margin"}),
        (lambda: Fp8(backend="transformer_engine", scaling="current", amax_history=16), {"where": "Fp8.amax_history"}),
        (lambda: Fp8(backend="transformer_engine", amax_history=0), {"expected": "an integer from 1", "got": "^0$"}),
        (lambda: accel.single(precision="BF16"), {"fix": "Did you mean `bf16`"}),
        (
            lambda: accel.autocast(accel.single(), "half"),
            {"problem": "unknown precision", "where": r"autocast\(precision=\)"},
        ),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(make, fields):
    with assert_raises(ConfigError, **fields):
        make()


def test_fp16_on_a_cpu_is_fp16_and_not_fp32():
    """Accelerate reports fp16 there and computes in fp32."""
    with accel.autocast(accel.single(precision="fp16")):
        assert torch.mm(torch.ones(2, 2), torch.full((2, 2), 1 + 2**-12)).dtype == torch.float16
