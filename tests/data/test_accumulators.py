# SPDX-License-Identifier: Apache-2.0
"""Sums and means over batches are those over the dataset, whatever stood in for what, on any number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

import accel
from accel import CollectiveMismatch, ConfigError, Cursor, DataError, Mean, Sum, TreeError

relaxed = settings(deadline=None, max_examples=40)
splits = {
    "n": st.integers(1, 40),
    "size": st.integers(1, 9),
    "tail": st.sampled_from(["ragged", "pad"]),
    "shuffle": st.booleans(),
}


class Scores(NamedTuple):
    square: torch.Tensor
    per_class: list[torch.Tensor]


def _loader(ctx, n, size, tail, shuffle) -> accel.Loader:
    return accel.prepare_loader(ctx, DataLoader(range(n), batch_size=size, shuffle=shuffle), tail=tail)


def _values(batch) -> dict[str, object]:
    ids = batch.data
    return {"id": ids, "scores": Scores(ids**2, [torch.nn.functional.one_hot(ids % 3, 3)]), "odd": ids % 2 == 1}


@relaxed
@given(world=st.integers(1, 5), **splits)
def test_sums_and_means_are_those_of_the_dataset(ranks, world, **split):
    def rank(ctx):
        total, mean = Sum(), Mean()
        for batch in accel.batches(ctx, _loader(ctx, **split), Cursor()):
            total = total.add(_values(batch), batch)
            mean = mean.add(_values(batch) | {"of batch": batch.data[: max(batch.valid, 1)].double().mean()}, batch)
        return total.value(ctx), mean.value(ctx)

    n, ids = split["n"], torch.arange(split["n"])
    for total, mean in ranks.run(rank, world):
        assert total["id"] == ids.sum()
        assert total["scores"].square == (ids**2).sum()
        assert total["scores"].per_class[0].tolist() == [len(range(at, n, 3)) for at in range(3)]
        assert float(mean["odd"]) == pytest.approx(float((ids % 2).sum()) / n)
        assert float(mean["scores"].square) == pytest.approx(float((ids**2).sum()) / n)
        assert float(mean["of batch"]) == pytest.approx(float(ids.sum()) / n)
        assert total["id"].dtype == mean["id"].dtype == torch.float64


@relaxed
@given(first=st.integers(1, 4), second=st.integers(1, 4), k=st.integers(0, 20), **splits)
def test_what_is_common_goes_on_with_any_number_of_ranks(ranks, first, second, k, **split):
    """Half an epoch on some ranks, a checkpoint, the rest on others."""

    def part(ctx, cursor, total, mean, stop):
        loader = accel.prepare_loader(ctx, DataLoader(range(split["n"]), shuffle=True), global_batch=split["size"])
        for step, batch in enumerate(accel.batches(ctx, loader, cursor)):
            if step == stop:
                break
            total, mean = total.add(batch.data, batch), mean.add({"square": batch.data**2}, batch)
            cursor = batch.next
        return cursor, total.sync(ctx), mean.sync(ctx)

    cursor, total, mean = ranks.run(lambda ctx: part(ctx, Cursor(), Sum(), Mean(), k), first)[0]
    total.check_saveable()
    mean.check_saveable()
    if cursor.epoch == 0:
        cursor, total, mean = ranks.run(lambda ctx: part(ctx, cursor, total, mean, -1), second)[-1]
    alone, ids = accel.single(), torch.arange(split["n"])
    assert total.value(alone) == ids.sum()
    assert float(mean.value(alone)["square"]) == pytest.approx(float((ids**2).sum()) / split["n"])


def test_weights_are_tokens_and_no_tokens_weigh_nothing(ranks):
    losses, tokens = torch.tensor([2.0, float("nan"), 5.0]), torch.tensor([3, 0, 1])

    def rank(ctx):
        by_batch, by_row = Mean(), Mean()
        for batch in accel.batches(ctx, _loader(ctx, 3, 1, "ragged", False), Cursor()):
            (at,) = batch.data.tolist()
            by_batch = by_batch.add(losses[at], batch, weight=tokens[at])
            by_row = by_row.add({"loss": losses[at : at + 1]}, batch, weight=tokens[at : at + 1])
        numbers = Mean().add([1.0, 2], weight=3).add([5.0, 2], weight=1)
        return float(by_batch.value(ctx)), float(by_row.value(ctx)["loss"]), [float(v) for v in numbers.value(ctx)]

    assert ranks.run(rank, 2) == [(11 / 4, 11 / 4, [2.0, 2.0])] * 2


def test_ranks_with_the_same_data_count_it_once(ranks):
    def rank(ctx):
        raw = DataLoader(range(11), batch_size=2)
        loader = accel.prepare_loader(ctx, raw, data_parallel=(ctx.rank // 2, 2))
        total, ids = Sum(), []
        for batch in accel.batches(ctx, loader, Cursor()):
            total = total.add({"id": batch.data, "batches": 1}, batch)
            ids += accel.gather_for_metrics(ctx, batch.data, batch).tolist()
        return {key: float(value) for key, value in total.value(ctx).items()}, ids

    assert ranks.run(rank, 4) == [({"id": 55.0, "batches": 6.0}, list(range(11)))] * 4


def test_sums_are_added_in_float64():
    ctx = accel.single()
    total = Sum()
    for value in (torch.tensor(2.0**24), torch.tensor(1.0), torch.tensor(True), 1):
        total = total.add(value)
    assert float(total.value(ctx)) == 2.0**24 + 3


def test_a_record_is_as_it_was_after_adding():
    before = Sum().add(1)
    _ = before.add(5)
    assert float(before.value(accel.single())) == 1


def _batch(ctx) -> accel.Batch:
    return next(accel.batches(ctx, _loader(ctx, 8, 2, "ragged", False), Cursor()))


@pytest.mark.parametrize(
    ("add", "error", "said"),
    [
        (
            lambda b: Sum().add({"x": [torch.zeros(3)]}, b),
            DataError,
            r"expected 2 rows, got shape \[3\] - at \$\.x\[0\]",
        ),
        (lambda b: Sum().add({"x": "text"}, b), TreeError, r"got str - at \$\.x"),
        (lambda b: Sum().add({"x": {1}}, b), TreeError, r"\$\.x"),
        (lambda b: Sum().add({"x": torch.tensor(1j)}), TreeError, r"only real numbers.*complex64 - at \$\.x"),
        (lambda b: Sum().add({"x": 1}).add({"y": 1}), DataError, r"another form.*\$\.x \[\].*\$\.y \[\]"),
        (lambda b: Sum().add(torch.zeros(2)).add(torch.zeros(3)), DataError, r"\[2\].*\[3\]"),
        (lambda b: Mean().add(1.0), ConfigError, "batch or weight="),
        (lambda b: Mean().add(torch.zeros(2), b, weight=3), DataError, "a weight for each row"),
        (
            lambda b: Mean().add(torch.zeros(()), b, weight=torch.ones(2)),
            DataError,
            r"each of the weights, shape \[2\]",
        ),
        (lambda b: Mean().add(torch.zeros(2), weight=torch.ones(2)), DataError, "each of the weights"),
        (lambda b: Mean().add(1.0, b).check_saveable(), ConfigError, r"metric.sync\(ctx\) before save_state"),
    ],
)
def test_what_cannot_be_added_is_refused(add, error, said):
    ctx = accel.single()
    with pytest.raises(error, match=said):
        add(_batch(ctx))


@pytest.mark.parametrize("metric", [Sum(), Mean(), Mean().add(1.0, weight=0)], ids=["sum", "mean", "no weight"])
def test_nothing_has_no_value_on_any_rank(ranks, metric):
    def rank(ctx):
        with pytest.raises(DataError, match="nothing was added"):
            metric.value(ctx)
        accel.wait_for_everyone(ctx)
        return True

    assert ranks.run(rank, 2) == [True, True]


def test_ranks_that_added_different_things_are_told(ranks):
    def rank(ctx):
        with pytest.raises(CollectiveMismatch, match=r"reduce"):
            Sum().add({"x": 1} if ctx.rank else {"y": 1}).value(ctx)
        return True

    assert ranks.run(rank, 2) == [True, True]


def test_a_checkpoint_holds_them(tmp_path):
    ctx = accel.single()
    items = {"seen": Sum().add({"a": torch.ones(2)}).sync(ctx), "loss": Mean().add([2.0], weight=4).sync(ctx)}
    accel.save_state(ctx, tmp_path, items, step=1)
    fresh = {"seen": Sum(), "loss": Mean()}
    loaded = accel.load_state(ctx, accel.latest_checkpoint(tmp_path), fresh)
    assert loaded["seen"].add({"a": torch.ones(2)}).value(ctx)["a"].tolist() == [2.0, 2.0]
    assert float(loaded["loss"].add([5.0], weight=2).value(ctx)[0]) == 3.0
