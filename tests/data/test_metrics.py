# SPDX-License-Identifier: Apache-2.0
"""What is gathered for metrics is the dataset, each sample once, whatever stood in for what."""

from __future__ import annotations

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch.utils.data import DataLoader

import accel
from accel import Cursor
from accel.errors import CollectiveMismatch, DataError, TreeError


@settings(deadline=None, max_examples=share(1.2))
@given(
    n=st.integers(1, 50),
    world=st.integers(1, 6),
    size=st.integers(1, 12),
    tail=st.sampled_from(["ragged", "pad"]),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_gathered_ids_are_the_datasets(ranks, n, world, size, tail, epoch, shuffle):
    def rank(ctx):
        raw = DataLoader(range(n), batch_size=size, shuffle=shuffle)
        loader = accel.prepare_loader(ctx, raw, tail=tail)
        ids, squares, means = [], [], 0
        for batch in accel.batches(ctx, loader, Cursor(seed=1, epoch=epoch)):
            values = {"id": batch.data, "rows": (batch.data[:, None] ** 2, [batch.data.double().mean()])}
            got = accel.gather_for_metrics(ctx, values, batch)
            assert len(got["id"]) == batch.valid.world
            ids += got["id"].tolist()
            squares += got["rows"][0].flatten().tolist()
            means += len(got["rows"][1][0])
            assert len(got["rows"][1][0]) == min(world, batch.valid.world)  # ranks that hold a real sample
        return ids, squares, means

    results = ranks.run(rank, world)
    assert all(result == results[0] for result in results)
    ids, squares, _ = results[0]
    assert sorted(ids) == list(range(n))
    assert squares == [each**2 for each in ids]


@settings(deadline=None, max_examples=share(0.6))
@given(n=st.integers(1, 40), world=st.integers(1, 4), size=st.integers(1, 6), inner=st.integers(1, 10))
def test_an_evaluation_within_the_training_loop_is_whole_each_time(ranks, n, world, size, inner):
    def rank(ctx):
        outer = accel.prepare_loader(ctx, DataLoader(range(n), batch_size=size, shuffle=True))
        evaluation = accel.prepare_loader(ctx, DataLoader(range(inner), batch_size=3), tail="pad")
        ids = []
        for batch in accel.batches(ctx, outer, Cursor()):
            seen = []
            for each in accel.batches(ctx, evaluation, Cursor()):
                seen += accel.gather_for_metrics(ctx, each.data, each).tolist()
            assert seen == list(range(inner))
            ids += accel.gather_for_metrics(ctx, batch.data, batch).tolist()
        return sorted(ids)

    assert ranks.run(rank, world) == [list(range(n))] * world


def test_dropped_samples_are_the_only_ones_missing(ranks):
    def rank(ctx):
        loader = accel.prepare_loader(ctx, DataLoader(range(11), batch_size=2, drop_last=True))
        gathered = [accel.gather_for_metrics(ctx, b.data, b).tolist() for b in accel.batches(ctx, loader, Cursor())]
        return [each for ids in gathered for each in ids]

    assert ranks.run(rank, 2) == [list(range(8))] * 2


def _first_batch(ctx: accel.DistContext) -> accel.Batch:
    return next(accel.batches(ctx, accel.prepare_loader(ctx, DataLoader(range(8), batch_size=2)), Cursor()))


@pytest.mark.parametrize(
    ("wrong", "error", "fields"),
    [
        (
            {"logits": torch.zeros(3, 2)},
            DataError,
            {"problem": "rank 1:", "expected": "2 rows", "got": r"shape \[3, 2\]", "where": r"\$\.logits"},
        ),
        ({"logits": {1}}, TreeError, {"problem": "rank 1: a container", "where": r"\$\.logits"}),
        ({"other": torch.zeros(2, 2)}, CollectiveMismatch, {"got": r"rank 1: gather at test_metrics.py.*\$\.other"}),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks, wrong, error, fields):
    def rank(ctx):
        batch = _first_batch(ctx)
        with assert_raises(error, **fields):
            accel.gather_for_metrics(ctx, wrong if ctx.rank == 1 else {"logits": torch.zeros(2, 2)}, batch)
        accel.wait_for_everyone(ctx)
        return True

    assert ranks.run(rank, 3) == [True] * 3


def test_places_that_leave_a_part_unread_are_refused_on_every_rank(ranks):
    def rank(ctx):
        loader = accel.prepare_loader(ctx, DataLoader(range(8)), data_parallel=(0, 2))
        with assert_raises(
            DataError, problem="read by no rank", expected="indices 0 to 1, equally often", got=r"\[0, 0\] by rank"
        ):
            next(accel.batches(ctx, loader, Cursor()))
        return True

    assert ranks.run(rank, 2) == [True, True]


def test_places_that_ranks_take_unequally_often_are_refused(ranks):
    """Their samples would weigh more in a step than those of the other places."""

    def rank(ctx):
        loader = accel.prepare_loader(ctx, DataLoader(range(8)), data_parallel=(int(ctx.rank == 3), 2))
        with assert_raises(
            DataError, problem="by more ranks than another", expected="equally often", got=r"\[0, 0, 0, 1\] by rank"
        ):
            next(accel.batches(ctx, loader, Cursor()))
        return True

    assert all(ranks.run(rank, 4))


@pytest.mark.parametrize("place", [(2, 3, 1), 3, (3, 3), (-1, 3), (0, 2), (0, 0)])
def test_a_place_that_is_none_is_refused(ranks, place):
    def rank(ctx):
        with assert_raises(accel.errors.ConfigError, expected="an index below a count that divides 3 ranks"):
            accel.prepare_loader(ctx, DataLoader(range(8)), data_parallel=place)
        return True

    assert all(ranks.run(rank, 3))


@settings(deadline=None, max_examples=share(0.6))
@given(
    n=st.integers(1, 30),
    world=st.integers(1, 5),
    size=st.integers(1, 7),
    tail=st.sampled_from(["ragged", "pad"]),
    shared=st.booleans(),
)
def test_gathered_objects_are_those_of_the_dataset_each_once(ranks, n, world, size, tail, shared):
    """Whatever stands in for a sample, and where several ranks hold the same ones."""

    def rank(ctx):
        place = (0, 1) if shared else None
        loader = accel.prepare_loader(ctx, DataLoader(range(n), batch_size=size), tail=tail, data_parallel=place)
        found = []
        for batch in accel.batches(ctx, loader):
            texts = tuple({"text": f"sample {each}"} for each in batch.data.tolist())
            got = accel.gather_for_metrics(ctx, texts, batch, use_gather_object=True)
            assert [each["text"] for each in got] == [
                f"sample {each}" for each in accel.gather_for_metrics(ctx, batch.data, batch).tolist()
            ]
            found += [each["text"] for each in got]
        return found

    assert ranks.run(rank, world) == [[f"sample {each}" for each in range(n)]] * world


@pytest.mark.parametrize("wrong", [["one"], "ab", {"texts": ["a", "b"]}, torch.zeros(2), None])
def test_what_is_not_an_object_a_row_is_refused_on_every_rank(ranks, wrong):
    def rank(ctx):
        batch = _first_batch(ctx)
        with assert_raises(
            DataError, problem="rank 1: the objects do not match the rows of the batch", expected="^a list of 2$"
        ):
            accel.gather_for_metrics(ctx, wrong if ctx.rank == 1 else ["a", "b"], batch, use_gather_object=True)
        assert accel.gather_for_metrics(ctx, ["a", "b"], batch, use_gather_object=True) == ["a", "b"] * 2
        return True

    assert ranks.run(rank, 2) == [True] * 2


def test_ranks_that_differ_in_what_they_gather_are_told(ranks):
    def rank(ctx):
        batch = _first_batch(ctx)
        values, objects = (["a", "b"], True) if ctx.rank == 1 else (batch.data, False)
        with assert_raises(CollectiveMismatch, got=r"gather_object at test_metrics\.py"):
            accel.gather_for_metrics(ctx, values, batch, use_gather_object=objects)
        return True

    assert ranks.run(rank, 2) == [True] * 2


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


UNSLICED = {
    "nested": (lambda: _nested(torch.strided), "tensor.to_padded_tensor(0.0)"),
    "jagged": (lambda: _nested(torch.jagged), "tensor.to_padded_tensor(0.0)"),
    "coo": (lambda: torch.eye(2).to_sparse(), "tensor.to_dense()"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "tensor.to_dense()"),
    "csc": (lambda: torch.eye(2).to_sparse_csc(), "tensor.to_dense()"),
    "bsr": (lambda: torch.eye(2).to_sparse_bsr((1, 1)), "tensor.to_dense()"),
    "mkldnn": (lambda: torch.eye(2).to_mkldnn(), "tensor.to_dense()"),
    "meta": (lambda: torch.ones(2, 2, device="meta"), ".to(ctx.device)"),
}


@pytest.mark.parametrize("name", UNSLICED)
@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:.*Sparse .* tensor support is in beta")
def test_a_tensor_that_cannot_be_cut_is_refused_on_all_ranks_before_a_slice(ranks, name):
    make, line = UNSLICED[name]

    def rank(ctx):
        batch = _first_batch(ctx)
        for wrong in ({0, 1}, {1}):  # others wait for no slice of theirs
            tree = {"id": batch.data, "wrong": [make() if ctx.rank in wrong else torch.ones(2, 2)]}
            with pytest.raises(TreeError) as caught:
                accel.gather_for_metrics(ctx, tree, batch)
            assert caught.value.where == "gather_for_metrics, $.wrong[0]"
            assert line in caught.value.fix
        dense = torch.ones(2, 2) if name == "meta" else eval(line, {"tensor": make()})  # the line of the error
        assert len(accel.gather_for_metrics(ctx, dense, batch)) == 4
        return True

    assert ranks.run(rank, 2) == [True] * 2
