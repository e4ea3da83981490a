# SPDX-License-Identifier: Apache-2.0
"""Step statistics: counts and rates over ranks, times that no checkpoint mixes, the rank that others wait for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.metrics._flops import peak_flops
from accel.metrics._steps import RankTimes, step_times


class SlowOn(TensorDataset):
    """A dataset that takes its time to read on one rank."""

    def __init__(self, rows: int, slow_s: float) -> None:
        super().__init__(torch.randn(rows, 4, generator=torch.Generator().manual_seed(0)))
        self.slow_s = slow_s

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        if self.slow_s:
            time.sleep(self.slow_s)
        return [self[index] for index in indices]


def _train(ctx, *, slow_s=0.0, accumulation=1, kinds=(("loss", "mean"),), out=None, stop=None, read_at=None) -> Any:
    """An epoch of 23 samples; the values read in the middle and at its end, by step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = accel.prepare_loader(ctx, DataLoader(SlowOn(23, slow_s), batch_size=4), global_batch=4)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    items = {"model": model, "optimizer": optimizer}
    start = {
        "state": accel.train_state(ctx, accumulation=accumulation),
        "statistics": accel.metrics.step_statistics(**dict(kinds)),
    }
    if out is not None and (found := accel.latest_checkpoint(out)):
        start = accel.load_state(ctx, found, items | start)
    state, statistics, read = start["state"], start["statistics"], []
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        with accel.accumulate(ctx, state, model):
            loss = model(batch.data[0]).square().mean()
            state = accel.backward(ctx, loss, state)
        if state.sync:
            state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
        statistics = statistics.add(batch, state, tokens=10 * batch.weight, loss=loss)
        if state.updates == stop:
            accel.save_state(ctx, out, items | {"state": state, "statistics": statistics}, step=stop)
            return read
        if state.updates == read_at or batch.is_last:
            values, statistics = statistics.read(ctx, flops_per_sample=1e3, peak=1e15)
            read.append(values)
    return read


def _without_time(read):
    return [{name: value for name, value in values.items() if name != "time"} for values in read]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (2, 2), (3, 1)])
def test_counts_norms_and_losses_are_those_of_one_process(ranks, world, accumulation):
    alone = ranks.run(lambda ctx: _train(ctx, accumulation=accumulation, read_at=2), 1, default_group=True)[0]
    for read in ranks.run(lambda ctx: _train(ctx, accumulation=accumulation, read_at=2), world, default_group=True):
        assert read[-1]["samples"] == 23
        assert read[-1]["tokens"] == 230
        assert read[-1]["skipped_steps"] == 0
        assert "loss_scale" not in read[-1]
        for values, expected in zip(_without_time(read), _without_time(alone), strict=True):
            assert values == pytest.approx(expected, rel=1e-5)
            assert list(values) == list(expected)
        times = read[-1]["time"]
        assert times["samples_per_s"] * 10 == pytest.approx(times["tokens_per_s"])
        assert times["flops_per_s"] == pytest.approx(1e3 * times["samples_per_s"])
        assert times["mfu"] == pytest.approx(times["flops_per_s"] / (1e15 * world))
        assert times["step_s"] <= times["step_s_max"]


def test_a_resumed_run_reads_the_same_bits_and_no_time_of_the_run_before(ranks, tmp_path):
    straight = ranks.run(lambda ctx: _train(ctx, read_at=100), 2, default_group=True)[0]
    assert ranks.run(lambda ctx: _train(ctx, slow_s=0.2, out=tmp_path, stop=3), 2, default_group=True) == [[], []]
    resumed = ranks.run(lambda ctx: _train(ctx, out=tmp_path, read_at=100), 2, default_group=True)[0]
    assert _without_time(resumed) == _without_time(straight)
    assert resumed[-1]["time"]["step_s"] < 0.1


def test_the_rank_that_waits_for_data_is_named_with_the_cause(ranks):
    def rank(ctx):
        return accel.metrics.straggler(_train(ctx, slow_s=0.05 * (ctx.rank == 1))[-1])

    for told in ranks.run(rank, 3, default_group=True):
        assert told is not None
        assert told.startswith("rank 1 takes ")
        assert "it waits for data" in told


def test_a_skipped_step_is_counted_and_its_norm_is_not(ranks):
    ctx, state = accel.single(), accel.train_state(accel.single())
    loader = accel.prepare_loader(ctx, DataLoader(SlowOn(8, 0.0), batch_size=4))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    statistics = accel.metrics.step_statistics()
    for i, batch in enumerate(accel.batches(ctx, loader, state)):
        state = state.next(batch)
        loss = model(batch.data[0]).square().mean() * (float("inf") if i else 1.0)
        state = accel.backward(ctx, loss, state)
        state = accel.optimizer_step(ctx, optimizer, state, nonfinite="skip", max_norm=1.0)
        statistics = statistics.add(batch, state)
    values, statistics = statistics.read(ctx)
    assert values["skipped_steps"] == 1
    assert values["grad_norm"] == values["grad_norm_max"] < 1e6
    assert statistics.read(ctx)[0] == {"samples": 8, "skipped_steps": 1}
    assert statistics.totals == {"samples": 8, "skipped_steps": 1}


def test_own_names_are_refused():
    with assert_raises(accel.errors.ConfigError, problem="step statistics have themselves", got="'samples'"):
        accel.metrics.step_statistics(samples="sum")
    batch = next(accel.batches(accel.single(), accel.prepare_loader(accel.single(), DataLoader(range(4)))))
    with assert_raises(accel.errors.ConfigError, problem="themselves", got="'grad_norm'", where=r"statistics\.add"):
        accel.metrics.step_statistics(loss="mean").add(batch, loss=1.0, grad_norm=1.0)


def test_batches_made_by_hand_have_no_times():
    batch = next(accel.batches(accel.single(), accel.prepare_loader(accel.single(), DataLoader(range(4)))))
    assert batch.asked_at is not None
    assert 0 <= batch.wait_s <= time.perf_counter() - batch.asked_at
    bare = accel.Batch(batch.data, batch.valid, batch.rows, batch.is_last, batch.next, batch.start)
    values, _ = accel.metrics.step_statistics(loss="mean").add(bare, loss=1.0).read(accel.single())
    assert values == {"loss": 1.0, "samples": 1}


seconds = st.floats(1e-4, 10.0)
rank_times = st.builds(
    lambda steps, own, wait, rest: RankTimes(
        steps=steps, samples=3 * steps, seconds=steps * (own + wait + rest), wait=steps * wait, own=steps * (own + wait)
    ),
    st.integers(1, 9),
    seconds,
    seconds,
    seconds,
)


@given(ranks=st.lists(rank_times, min_size=1, max_size=5))
def test_readings_are_within_those_of_the_ranks(ranks):
    found = step_times(ranks)
    steps = [each.seconds / each.steps for each in ranks]
    assert min(steps) <= found["step_s_median"] <= max(steps) == found["step_s_max"]
    assert 0 < found["data_wait"] < 1
    worst = ranks[int(found["slowest_rank"])]
    assert worst.own / worst.steps == found["slowest_own_s"] == max(each.own / each.steps for each in ranks)
    told = accel.metrics.straggler({"time": found})
    assert (told is None) or told.startswith(f"rank {found['slowest_rank']} takes ")
    assert step_times([]) == step_times([RankTimes()]) == {}
    assert accel.metrics.straggler({}) is None


def test_a_rank_that_computes_longer_and_even_ranks():
    even = [RankTimes(steps=2, samples=8, seconds=0.2, wait=0.02, own=0.05)] * 3
    assert accel.metrics.straggler({"time": step_times(even)}) is None
    slow = RankTimes(steps=2, samples=8, seconds=0.2, wait=0.02, own=0.19)
    assert accel.metrics.straggler({"time": step_times([*even, slow])}) == (
        "rank 3 takes 95 ms a step of its own, the median is 25 ms; it takes longer before the backward"
    )


@pytest.mark.parametrize("slow", [0, 1])
def test_of_two_ranks_the_other_is_named_and_no_median(slow):
    times = [RankTimes(steps=2, samples=8, seconds=0.2, wait=0.02, own=0.05)] * 2
    assert accel.metrics.straggler({"time": step_times(times)}) is None
    times[slow] = RankTimes(steps=2, samples=8, seconds=0.2, wait=0.15, own=0.19)
    for untimed in ([], [RankTimes()]):
        assert accel.metrics.straggler({"time": step_times([*times, *untimed])}) == (
            f"rank {slow} takes 95 ms a step of its own, rank {1 - slow} takes 25 ms; it waits for data, 75 ms a step"
        )


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA L40", 181e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12), ("Tesla T4", 65e12),
        ("AMD Instinct MI300X", 1307.4e12), ("NVIDIA RTX A4000", None), ("NVIDIA T400", None),
    ],
)  # fmt: skip
def test_the_name_of_another_device_gives_no_peak(device, expected):
    assert peak_flops(device, accel.precision.Precision(compute="bf16")) == expected


def test_peaks_of_devices():
    assert peak_flops("NVIDIA H200", accel.precision.Precision(compute="bf16")) == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", accel.precision.Precision(compute="fp32")) == 19.5e12
    assert (
        peak_flops(
            "NVIDIA A100-SXM4-80GB",
            accel.precision.Precision(compute="bf16", fp8=accel.precision.Fp8(backend="torchao")),
        )
        is None
    )
    assert peak_flops("Tesla V100", accel.precision.Precision(compute="tf32")) is None
    assert peak_flops("a card", accel.precision.Precision()) is None


def test_an_mfu_above_1_is_not_told(ranks):
    def rank(ctx):
        batch = next(accel.batches(ctx, accel.prepare_loader(ctx, DataLoader(range(4)))))
        return accel.metrics.step_statistics().add(batch).read(ctx, flops_per_sample=1e9, peak=1.0)[0]["time"]

    (times,) = ranks.run(rank, 1)
    assert "mfu" not in times
    assert times["flops_per_s"] > 1.0
