# SPDX-License-Identifier: Apache-2.0
"""Metrics over batches are those over the dataset, whatever stood in for what, on any number of ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from tables import rows
from torch.utils.data import DataLoader

import accel
from accel import Cursor
from accel.errors import CollectiveMismatch, ConfigError, DataError, TreeError
from accel.metrics._adding import add_on_device, fetched

few = settings(max_examples=share(0.4))
N = 37
generator = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 9, (N,), generator=generator)
LOSSES = torch.rand(N, generator=generator, dtype=torch.float64)
KINDS = {"loss": "mean", "tokens": "count", "low": "min", "high": "max", "total": "sum", "lr": "last"}


class Scores(NamedTuple):
    square: torch.Tensor
    per_class: list[torch.Tensor]


def _loader(ctx, n, size, tail="ragged", shuffle=False) -> accel.Loader:
    return accel.prepare_loader(ctx, DataLoader(range(n), batch_size=size, shuffle=shuffle), tail=tail)


def _of_tokens(metrics, batch):
    """A step's values as a training loop has them: a mean over tokens, which is nan where there are none."""
    ids = batch.data[: batch.weight]
    weight = TOKENS[ids].sum()
    metrics = metrics.add(weight, loss=(LOSSES[ids] * TOKENS[ids]).sum() / weight, tokens=int(weight))
    low, high = (LOSSES[ids].min(), LOSSES[ids].max()) if len(ids) else (math.nan, math.nan)
    return metrics.add(batch.weight, low=low, high=high, total=LOSSES[ids].sum(), lr=0.1)


@few
@given(
    world=st.integers(1, 4),
    n=st.integers(1, N),
    size=st.integers(1, 7),
    tail=st.sampled_from(["ragged", "pad"]),
    shuffle=st.booleans(),
)
def test_any_split_into_ranks_and_batches_gives_the_numbers_of_one_process(ranks, world, n, size, tail, shuffle):
    def rank(ctx):
        steps, samples = (
            accel.metrics.running_metrics(**KINDS),
            accel.metrics.running_metrics(scores="mean", seen="sum", odd="count"),
        )
        for batch in accel.batches(ctx, _loader(ctx, n, size, tail, shuffle), Cursor()):
            ids = batch.data
            steps = _of_tokens(steps, batch)
            scores = Scores(ids.double() ** 2, [torch.nn.functional.one_hot(ids % 3, 3)])
            samples = samples.add(batch.weights, scores=scores, seen=ids, odd=ids % 2 == 1)
        return steps.read(ctx)[0], samples.read(ctx)[0]

    ids = torch.arange(n)
    for found, samples in ranks.run(rank, world):
        assert samples["seen"] == ids.sum()
        assert samples["odd"] == n // 2
        assert type(samples["odd"]) is int
        assert float(samples["scores"].square) == pytest.approx(float((ids**2).double().mean()), rel=1e-12)
        assert samples["scores"].per_class[0].tolist() == pytest.approx([len(range(at, n, 3)) / n for at in range(3)])
        assert found["low"] == LOSSES[:n].min()
        assert found["high"] == LOSSES[:n].max()
        assert found["total"] == pytest.approx(float(LOSSES[:n].sum()), rel=1e-12)
        assert found["lr"] == 0.1
        weights = TOKENS[:n].double()
        if weights.any():
            assert found["loss"] == pytest.approx(float((LOSSES[:n] * weights).sum() / weights.sum()), rel=1e-12)
            assert found["tokens"] == int(weights.sum())
        else:
            assert {"loss", "tokens"}.isdisjoint(found)


@few
@given(first=st.integers(1, 4), second=st.integers(1, 4), k=st.integers(0, 5), extra=st.booleans())
def test_a_checkpoint_goes_on_with_the_same_bits(ranks, tmp_path_factory, first, second, k, extra):
    """Some steps on some ranks, a checkpoint, the rest on as many or on others; `extra` saves where none is loaded."""
    out = tmp_path_factory.mktemp("run")

    def steps(ctx, metrics, numbers):
        for step in numbers:
            value = LOSSES[(7 * step + 3 * ctx.rank) % N]
            metrics = metrics.add(1.0 / (2 + step), loss=value, tokens=step, low=value, high=value, total=value)
            metrics = metrics.add(3, matrix={"a": torch.stack([value, -value])}, lr=float(step + ctx.rank))
        return metrics

    def whole(ctx):
        metrics = steps(ctx, accel.metrics.running_metrics(**KINDS, matrix="mean"), range(k))
        accel.save_state(ctx, out, {"metrics": metrics, "list": [metrics]}, step=1)
        return steps(ctx, metrics, range(k, 8 if extra else k)).read(ctx)[0]

    def rest(ctx):
        fresh = accel.metrics.running_metrics(**KINDS, matrix="mean")
        loaded = accel.load_state(ctx, accel.latest_checkpoint(out), {"metrics": fresh, "list": [fresh]})
        last = 8 if extra and first == second else k
        again = steps(ctx, loaded["list"][0], range(k, last)).read(ctx)[0]
        return steps(ctx, loaded["metrics"], range(k, last)).read(ctx)[0], again

    straight = ranks.run(whole, first)[0]
    if extra and first != second:
        return
    for resumed, again in ranks.run(rest, second):
        for name in straight | resumed | again:
            one, two, three = (torch.as_tensor(_plain(each[name])) for each in (straight, resumed, again))
            if first == second:
                assert torch.equal(one, two)
                assert torch.equal(one, three)
            else:
                assert torch.allclose(one.double(), two.double(), rtol=1e-12, atol=0)


def _plain(value):
    return value["a"] if isinstance(value, dict) else value


def test_numbers_of_rank_0_are_never_those_of_all(ranks, tmp_path):
    def save(ctx):
        metrics = accel.metrics.running_metrics(loss="mean").add(1 + ctx.rank, loss=float(ctx.rank))
        return accel.save_state(ctx, tmp_path, {"metrics": metrics}, step=1)

    path = ranks.run(save, 3)[0]
    assert msgspec.json.decode((path / "manifest.json").read_bytes())["items"]["metrics"]["value"]["numbers"] == {}
    fresh = accel.metrics.running_metrics(loss="mean")

    def read(ctx):
        return accel.load_state(ctx, path, {"metrics": fresh})["metrics"].read(ctx)[0]

    for world in (1, 2, 3, 4):
        assert ranks.run(read, world) == [{"loss": (2 * 1.0 + 3 * 2.0) / 6}] * world


def test_a_script_may_declare_more_metrics_than_were_saved(tmp_path):
    ctx, path = accel.single(), tmp_path / "run"
    accel.save_state(ctx, path, {"metrics": accel.metrics.running_metrics(a="mean", b="sum").add(2, a=3.0)}, step=1)

    def loaded(**kinds):
        items = {"metrics": accel.metrics.running_metrics(**kinds)}
        return accel.load_state(ctx, accel.latest_checkpoint(path), items)["metrics"]

    assert loaded(c="last", a="mean").add(2, a=4.0, c=1).read(ctx)[0] == {"c": 1.0, "a": 3.5}
    with assert_raises(accel.errors.CheckpointError, problem="a was a 'mean', and is a 'max'"):
        loaded(a="max")
    with assert_raises(accel.errors.CheckpointError, problem="numbers of a, which are not declared"):
        loaded(b="sum")


values = st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf])
steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60) | st.floats(0, 3), values, values), max_size=12)


@settings(max_examples=share(1.2))
@given(steps=steps, kind=st.sampled_from(["mean", "sum", "min", "max", "last"]), wide=st.booleans(), far=st.booleans())
def test_the_path_for_accelerators_gives_the_bits_of_the_host(steps, kind, wide, far):
    """Scalars in changing company, weights as numbers and as tensors; run on tensors of the CPU."""
    names = [("a", "b"), ("a",), ("b", "a")]
    kinds = {"a": kind, "b": kind}
    host = device = accel.metrics.running_metrics(**kinds)
    for company, weight, one, two in steps:
        dtype = torch.float64 if wide else torch.float32
        added = {name: torch.tensor({"a": one, "b": two}[name], dtype=dtype) for name in names[company]}
        host = host.add(weight, **added)
        if far or weight:
            given_weight = torch.tensor(weight, dtype=torch.float64) if far else weight
            device = add_on_device(device, given_weight, added)
    found = fetched(device)
    expected = (host.rank_part() or {"numbers": {}})["numbers"]
    for name in found:
        state, weight = expected.get(name, (None, 0.0))
        assert found[name][1] == weight
        if weight:
            assert found[name][0] == state or (math.isnan(found[name][0]) and math.isnan(state))


def test_ranks_with_the_same_data_count_it_once(ranks):
    def rank(ctx):
        raw = DataLoader(range(11), batch_size=2)
        loader = accel.prepare_loader(ctx, raw, data_parallel=(ctx.rank // 2, 2))
        metrics, ids = accel.metrics.running_metrics(id="sum", batches="count"), []
        for batch in accel.batches(ctx, loader, Cursor()):
            metrics = metrics.add(batch.weights, id=batch.data).add(batch.weight, batches=1)
            ids += accel.gather_for_metrics(ctx, batch.data, batch).tolist()
        return metrics.read(ctx)[0], ids

    assert ranks.run(rank, 4) == [({"id": 55.0, "batches": 6}, list(range(11)))] * 4


def test_median_largest_and_rank_of_what_is_declared_so(ranks):
    def rank(ctx):
        metrics = accel.metrics.running_metrics(by_rank=("wait",), wait="mean", loss="mean")
        if ctx.rank != 2:
            metrics = metrics.add(2, wait=[5.0, 1.0, 0.0, 2.0][ctx.rank], loss=1.0)
        return metrics.read(ctx)[0]

    expected = {"wait": 8 / 3, "loss": 1.0, "wait_median": 2.0, "wait_max": 5.0, "wait_max_rank": 0}
    assert ranks.run(rank, 4) == [expected] * 4


def test_a_value_that_no_rank_has_is_not_there(ranks):
    def rank(ctx):
        metrics = accel.metrics.running_metrics(loss="mean", grad_norm="max", scores="sum")
        metrics = metrics.add(0, loss=math.nan, grad_norm=torch.tensor(math.nan), scores=torch.full((2,), math.nan))
        return metrics.read(ctx)[0]

    assert ranks.run(rank, 2) == [{}, {}]


def test_a_rank_that_added_nothing_reads_plain_containers(ranks):
    def rank(ctx):
        metrics = accel.metrics.running_metrics(x="sum")
        if ctx.rank == 1:
            metrics = metrics.add(1, x={"a": Scores(torch.ones(2, 1), [torch.tensor(3.0)]), 2: (4,)})
        return metrics.read(ctx)[0]["x"]

    without, added = ranks.run(rank, 2)
    assert isinstance(added["a"], Scores)
    assert without["a"][0].tolist() == added["a"].square.tolist() == [[1.0], [1.0]]
    assert [float(each) for each in (*without["a"][1], *without[2])] == [3.0, 4.0]


def test_last_is_of_the_lowest_rank_that_has_one(ranks):
    def rank(ctx):
        metrics = accel.metrics.running_metrics(lr="last")
        return metrics.add(ctx.rank, lr=0.1 * ctx.rank).add(ctx.rank, lr=float(ctx.rank)).read(ctx)[0]

    assert ranks.run(rank, 3) == [{"lr": 1.0}] * 3


def test_reading_is_one_collective_and_gives_an_empty_record(ranks):
    def rank(ctx):
        before = accel.metrics.running_metrics(loss="mean", scores="sum")
        after = before.add(1, loss=2.0, scores=torch.ones(1000))
        assert before.read(ctx)[0] == {}
        found, fresh = after.read(ctx)
        assert fresh.read(ctx)[0] == {}
        assert after.read(ctx)[0]["loss"] == found["loss"] == 2.0
        return found["scores"].tolist()

    assert ranks.run(rank, 2) == [[2.0] * 1000] * 2


def test_sums_are_float64_and_keep_no_graph():
    ctx, metrics = accel.single(), accel.metrics.running_metrics(x="sum", y="mean", n="count")
    for value in (torch.tensor(2.0**24), torch.tensor(1.0, requires_grad=True), torch.tensor(True), 1, True):
        metrics = metrics.add(1, x=value, n=bool(value))
    weights = torch.tensor([1.0, 0.0], requires_grad=True)
    metrics = metrics.add(weights, y=torch.tensor([[3.0, 1.0], [math.nan, 1.0]], requires_grad=True))
    found = metrics.read(ctx)[0]
    assert found["x"] == 2.0**24 + 4
    assert found["n"] == 5
    assert found["y"].tolist() == [3.0, 1.0]
    assert not metrics.nested["y"].values.requires_grad


@rows(
    "add, error, fields",
    [
        (
            lambda m, w: m.add(1, los=1.0),
            ConfigError,
            {"problem": "not declared", "got": "'los'", "fix": "Did you mean `loss`"},
        ),
        (
            lambda m, w: m.add(w, accuracy=torch.ones(2)),
            ConfigError,
            {"problem": "not declared", "fix": 'Declare it.*accuracy="mean"'},
        ),
        (lambda m, w: m.add(-1, loss=1.0), ConfigError, {"expected": "a number from 0", "got": "-1"}),
        (lambda m, w: m.add(math.nan, loss=1.0), ConfigError, {"expected": "a number from 0", "got": "nan"}),
        (lambda m, w: m.add("2", loss=1.0), ConfigError, {"expected": "a number from 0", "got": "'2'"}),
        (
            lambda m, w: m.add(w, loss=torch.zeros(3)),
            DataError,
            {"expected": "2 rows", "got": r"\[3\]", "where": "loss"},
        ),
        (
            lambda m, w: m.add(w, x={"a": [torch.zeros(3)]}),
            DataError,
            {"expected": "2 rows", "got": r"\[3\]", "where": r"x\.a\[0\]"},
        ),
        (lambda m, w: m.add(1, x={"a": "text"}), TreeError, {"got": "str", "where": r"x\.a"}),
        (lambda m, w: m.add(1, x={1}), TreeError, {"got": "set", "where": "x"}),
        (
            lambda m, w: m.add(1, x=torch.tensor(1j)),
            TreeError,
            {"problem": "only real numbers", "got": "complex64", "where": "x"},
        ),
        (
            lambda m, w: m.add(1, x={"a": 1}).add(1, x={"b": 1}),
            DataError,
            {"problem": "another form", "expected": r"\$\.a \[\]", "got": r"\$\.b \[\]"},
        ),
        (
            lambda m, w: m.add(0, x=torch.zeros(2)).add(1, x=torch.zeros(3)),
            DataError,
            {"expected": r"\[2\]", "got": r"\[3\]"},
        ),
        (lambda m, w: m.add(1, x=1.0).add(1, x=torch.zeros(3)), DataError, {"expected": "a number, as before"}),
        (lambda m, w: m.add(1, x=torch.zeros(3)).add(1, x=1.0), DataError, {"problem": "another form"}),
        (lambda m, w: m.add(1, n=0.5).read(accel.single()), DataError, {"problem": "not an integer", "where": "n"}),
        (lambda m, w: m.read(m), ConfigError, {"expected": r"metrics\.read\(ctx\)"}),
        (lambda m, w: accel.metrics.running_metrics(), ConfigError, {"expected": 'loss="mean"'}),
        (
            lambda m, w: accel.metrics.running_metrics(loss="avg"),
            ConfigError,
            {"problem": "'loss'", "expected": "mean, sum, count"},
        ),
        (
            lambda m, w: accel.metrics.running_metrics(step="last"),
            ConfigError,
            {"problem": "reserved", "got": "'step'"},
        ),
        (
            lambda m, w: accel.metrics.running_metrics(by_rank=("b",), a="sum"),
            ConfigError,
            {"problem": "no such metric"},
        ),
    ],
)
def test_what_cannot_be_added_is_refused(add, error, fields):
    with assert_raises(error, **fields):
        add(accel.metrics.running_metrics(loss="mean", x="sum", n="count"), torch.ones(2))


@pytest.mark.parametrize(
    ("make", "error", "fields"),
    [
        (lambda r: accel.metrics.running_metrics(**{"xy"[r]: "sum"}), CollectiveMismatch, {"expected": "metrics.read"}),
        (
            lambda r: accel.metrics.running_metrics(x="sum").add(1, x=torch.zeros(2 + r)),
            DataError,
            {"expected": r"\[2\]", "got": r"\[3\].*rank 1"},
        ),
        (
            lambda r: accel.metrics.running_metrics(x="sum").add(1, x=1.0 if r else torch.zeros(2)),
            DataError,
            {"got": "a number on rank"},
        ),
    ],
)
def test_ranks_that_differ_are_told_on_every_rank(ranks, make, error, fields):
    def rank(ctx):
        with assert_raises(error, **fields):
            make(ctx.rank).read(ctx)
        accel.wait_for_everyone(ctx)
        return True

    assert ranks.run(rank, 2) == [True, True]
