# SPDX-License-Identifier: Apache-2.0
"""Tables of speeds by shape: between the measured ones, in files that may be anything, and measured on this device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from catching import assert_raises
from estimates import H100, MessageSpeed
from hypothesis import given, strategies as st

import accel
from accel.cli._plan import link_speeds
from accel.errors import ConfigError
from accel.estimate import Efficiencies, Hosts, measure_efficiencies, read_efficiencies
from accel.estimate._efficiencies import ProductSpeed, attention_flops, product_flops
from accel.testing import simulate

sizes = st.integers(1, 1 << 17)
formats = st.sampled_from(H100.dtypes)


def test_a_measured_shape_has_its_own_speed() -> None:
    for each in H100.products:
        assert product_flops(H100, each.dtype, each.m, each.n, each.k) == each.flops
    for row in H100.attention:
        assert attention_flops(H100, row.dtype, row.tokens, row.head_width) == (row.forward, row.backward)


@given(formats, sizes, sizes, sizes)
def test_others_lie_between_the_slowest_and_the_fastest(dtype: str, m: int, n: int, k: int) -> None:
    known = [each.flops for each in H100.products if each.dtype == dtype]
    assert min(known) * (1 - 1e-9) <= product_flops(H100, dtype, m, n, k) <= max(known) * (1 + 1e-9)


@given(st.sampled_from([(256, 256, 256), (4096, 4096, 4096), (16384, 28672, 8192)]))
def test_fp8_is_faster_than_bf16_and_slower_than_twice_its_peak(shape: tuple[int, int, int]) -> None:
    assert product_flops(H100, "bf16", *shape) <= 989e12
    assert product_flops(H100, "fp8", *shape) <= 1979e12
    assert product_flops(H100, "fp8", *shape) > product_flops(H100, "bf16", *shape)


def test_a_power_limit_needs_a_table_with_its_own() -> None:
    assert Hosts(power_w=700).clock == Hosts().clock == 1
    assert Hosts(power_w=400).clock == pytest.approx(835 / 989, rel=0.02)  # of H100 NVL beside SXM, as specified
    table = msgspec.structs.replace(H100, power_w=0)
    with assert_raises(ConfigError, got="a table without `power_w`"):
        _ = Hosts(efficiencies=table, power_w=500)
    with assert_raises(ConfigError, expected="a number above 0", got="-1"):
        _ = msgspec.structs.replace(H100, power_w=-1)


def test_links_may_be_infinitely_fast_but_have_a_speed() -> None:
    assert Hosts(inside=math.inf, between=math.inf).between == math.inf
    for speed in (0, math.nan):
        with assert_raises(ConfigError, got=str(speed), where="Hosts.between"):
            _ = Hosts(between=speed)


def test_a_format_without_products_is_refused() -> None:
    table = msgspec.structs.replace(H100, products=H100.products[:3])
    with assert_raises(ConfigError, expected="bf16", got="fp8"):
        _ = product_flops(table, "fp8", 512, 512, 512)


def test_attention_in_a_format_without_any_is_a_product() -> None:
    speed = product_flops(H100, "tf32", 1024, 1024, 64)
    assert attention_flops(H100, "tf32", 1024, 64) == (speed, speed)


def test_links_have_the_speed_of_the_longest_message() -> None:
    def row(hosts: int, size: int, seconds: float) -> MessageSpeed:
        return MessageSpeed(operation="all-reduce", ranks=16, hosts=hosts, bytes=size, seconds=seconds)

    assert link_speeds(H100) == {}
    inside = msgspec.structs.replace(H100, messages=(row(1, 10, 1.0), row(1, 1600, 3.0)))
    assert link_speeds(inside) == {"inside": pytest.approx(1000)}
    between = msgspec.structs.replace(H100, messages=(row(2, 1600, 3.0),))
    assert link_speeds(between) == {"between": pytest.approx(125)}  # each of eight ranks has a link


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    _ = file.write_bytes(msgspec.json.encode(H100))
    assert read_efficiencies(file) == H100


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"version": 2}, {"problem": "another version", "expected": "1", "got": "^2$"}),
        ({"version": "one"}, {"problem": "the file is not a table of speeds"}),
        ({"products": []}, {"got": "without products"}),
        ({"bandwidth": -1}, {"got": "Efficiencies.bandwidth"}),
        ({"products": [{"dtype": "bf16", "m": 0, "n": 1, "k": 1, "flops": 1}]}, {"got": r"products\[0\].m"}),
        ({"products": [{"dtype": "bf16", "m": 1, "n": 1, "k": 1}]}, {"got": "missing required field"}),
        ({"attention": 3}, {"problem": "the file is not a table of speeds"}),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, change: dict[str, Any], fields: dict[str, str]) -> None:
    file = tmp_path / "table.json"
    _ = file.write_bytes(msgspec.json.encode(msgspec.to_builtins(H100) | change))
    with assert_raises(ConfigError, **fields):
        _ = read_efficiencies(file)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"version": 1e400}', b"0" * (1 << 25)])
def test_any_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "table.json"
    _ = file.write_bytes(data)
    with assert_raises(ConfigError, problem="table of speeds"):
        _ = read_efficiencies(file)
    with assert_raises(ConfigError, problem="table of speeds"):
        _ = read_efficiencies(tmp_path)


def test_each_rank_measures_and_the_collectives_count() -> None:
    def measure(ctx: accel.DistContext) -> Efficiencies:
        return measure_efficiencies(ctx, sizes=(8, 16), least_s=1e-4, date="today")

    one = measure(accel.single())
    assert one.kind == "cpu"
    assert one.messages == ()
    assert {(each.m, each.n, each.k) for each in one.products if each.dtype == "fp32"} >= {(8, 8, 8), (8, 16, 8)}
    found = simulate(measure, world_size=2)
    assert {each.operation for each in found[0].messages} == {"all-reduce", "all-gather"}
    assert "inside" in link_speeds(found[0])
    assert isinstance(one.products[0], ProductSpeed)
