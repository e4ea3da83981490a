# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in the field, each case as a function that two real processes run; `test_field.py` starts them.

    accel launch --nproc-per-node 2 tests/data/field_cases.py

Names say which finding of the survey of Accelerate 1.15 a case answers.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import accel
from accel import Cursor


class Watched(Dataset):
    """Its own positions; remembers which were read."""

    def __init__(self, n: int, seconds: float = 0.0) -> None:
        self.n, self.seconds, self.read = n, seconds, []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        self.read.append(index)
        return index


def gathered(ctx, raw, cursor=None, **options) -> list[int]:
    loader = accel.prepare_loader(ctx, raw, **options)
    found = [accel.gather_for_metrics(ctx, b.data, b).tolist() for b in accel.batches(ctx, loader, cursor or Cursor())]
    return [each for step in found for each in step]


def case_w13_subset(ctx):
    got = gathered(ctx, DataLoader(range(100), batch_size=4, sampler=SubsetRandomSampler(range(10, 20))))
    assert sorted(got) == list(range(10, 20))


def case_w13_fewer_and_more_than_the_dataset(ctx):
    for count in (7, 16):
        got = gathered(ctx, DataLoader(range(9), batch_size=4, sampler=RandomSampler(range(9), num_samples=count)))
        assert len(got) == count
    assert len(gathered(ctx, DataLoader(range(9), batch_size=4, sampler=WeightedRandomSampler([1.0] * 9, 24)))) == 24


def case_w13_after_skipping(ctx):
    raw = DataLoader(range(13), batch_size=2)
    cursor = accel.skip_first_batches(Cursor(), 2, accel.prepare_loader(ctx, raw))
    assert gathered(ctx, raw, cursor) == list(range(8, 13))


def case_w13_numbers_of_a_batch(ctx):
    loader = accel.prepare_loader(ctx, DataLoader(range(5), batch_size=2))
    means = [accel.gather_for_metrics(ctx, b.data.double().mean(), b) for b in accel.batches(ctx, loader, Cursor())]
    assert [each.tolist() for each in means] == [[0.5, 2.5], [4.0]]


def case_w13_a_batch_sampler_that_drops(ctx):
    made = BatchSampler(SequentialSampler(range(11)), 2, drop_last=True)
    assert gathered(ctx, DataLoader(range(11), batch_sampler=made)) == list(range(8))


def case_w14_and_w15_gathering_depends_on_the_batch_alone(ctx):
    loader = accel.prepare_loader(ctx, DataLoader(range(5), batch_size=2), tail="pad")
    kept = list(accel.batches(ctx, loader, Cursor()))
    assert accel.gather_for_metrics(ctx, kept[1].data, kept[1]).tolist() == [4]
    assert accel.gather_for_metrics(ctx, kept[0].data, kept[0]).tolist() == [0, 1, 2, 3]
    assert accel.gather(ctx, torch.arange(3)).tolist() == [0, 1, 2, 0, 1, 2]
    with assert_raises(accel.errors.DataError, expected="^2 rows"):
        accel.gather_for_metrics(ctx, torch.zeros(3), kept[0])


def case_w16_a_break_leaves_nothing_behind(ctx):
    loader = accel.prepare_loader(ctx, DataLoader(range(12), batch_size=2, shuffle=True))
    for batch in accel.batches(ctx, loader, Cursor()):
        cursor = batch.next
        break
    rest = [accel.gather_for_metrics(ctx, b.data, b).tolist() for b in accel.batches(ctx, loader, cursor)]
    assert sorted(sum(rest, accel.gather_for_metrics(ctx, batch.data, batch).tolist())) == list(range(12))
    later = gathered(ctx, DataLoader(range(12), batch_size=2, shuffle=True), Cursor(epoch=1))
    assert later != gathered(ctx, DataLoader(range(12), batch_size=2, shuffle=True), Cursor())


def case_w17_ranks_with_seeds_of_their_own_share_one_order(ctx):
    torch.manual_seed(ctx.rank)
    for raw in (
        DataLoader(range(16), batch_size=2, shuffle=True),
        DataLoader(range(16), batch_size=2, sampler=SubsetRandomSampler(range(16))),
    ):
        assert sorted(gathered(ctx, raw)) == list(range(16))


def case_w18_a_generator_keeps_its_say(ctx):
    def read(seed):
        return gathered(ctx, DataLoader(range(16), shuffle=True, generator=torch.Generator().manual_seed(seed)))

    assert read(1) == read(1) != read(2)


def case_w19_preparing_and_reading_change_nothing_of_the_users(ctx):
    raw = DataLoader(range(16), batch_size=2, shuffle=True)
    before = torch.get_rng_state()
    gathered(ctx, raw)
    assert torch.equal(torch.get_rng_state(), before)
    assert raw.sampler.generator is None
    assert (raw.batch_size, len(raw)) == (2, 8)


def case_w20_and_w21_uneven_ends_need_no_join(ctx):
    """Ranks take equally many steps, so collectives in the loop always meet; gathers take any number of rows."""
    model = accel.prepare_model(ctx, torch.nn.Linear(1, 1))
    for n in (1, 3, 5, 6, 7):
        raw = DataLoader(range(n), batch_size=2)
        loader = accel.prepare_loader(ctx, raw)
        for batch in accel.batches(ctx, loader, Cursor()):
            model(batch.data[:, None].float()).mean().backward()
            accel.wait_for_everyone(ctx)
        assert gathered(ctx, raw) == list(range(n))


def case_w24_a_loop_that_is_left_does_not_shift_the_next(ctx):
    long, short = (accel.prepare_loader(ctx, DataLoader(range(n), batch_size=1)) for n in (10, 4))
    cursors = [Cursor(), Cursor()]
    for one, other in zip(*(accel.batches(ctx, each, Cursor()) for each in (long, short)), strict=False):
        cursors = [one.next, other.next]
    assert cursors == [Cursor(consumed=4, of="10 samples in sequence"), Cursor(epoch=1)]
    assert gathered(ctx, DataLoader(range(10), batch_size=1), cursors[0]) == [4, 5, 6, 7, 8, 9]


def case_w24_a_window_ends_with_the_loop(ctx):
    long, short = (accel.prepare_loader(ctx, DataLoader(range(n), batch_size=1)) for n in (20, 6))
    model = accel.prepare_model(ctx, torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = accel.train_state(ctx, accumulation=2)
    for epoch in range(2):
        ours = accel.batches(ctx, long, Cursor(epoch=epoch))
        for one, other in zip(ours, accel.batches(ctx, short, state), strict=False):
            state = state.next(other)
            with accel.accumulate(ctx, state, model):
                loss = model((one.data + other.data)[:, None].float()).mean()
                state = accel.backward(ctx, loss, state, weight=one.valid)
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state)
        assert (state.accum.micro, state.updates) == (0, 2 * (epoch + 1))
        assert all(each.grad is None or not each.grad.any() for each in model.parameters())


def counting(patch) -> list[str]:
    """The names of torch's collectives, as they are called from now on."""
    called = []

    def counted(name, function):
        def run(*args, **kwargs):
            called.append(name)
            return function(*args, **kwargs)

        return run

    for name in ("all_gather_single", "all_gather_into_tensor", "all_reduce", "broadcast", "scatter", "isend", "irecv"):
        if hasattr(dist, name):
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
    return called


def refuse(*args, **kwargs):
    raise AssertionError("pickled")


def case_w47_an_average_of_many_parameters_is_one_message(ctx):
    model = accel.parallel.prepare_local_model(ctx, torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(20))))
    with pytest.MonkeyPatch.context() as patch:
        called = counting(patch)
        accel.parallel.local_sgd_step(ctx, model, accel.parallel.LocalSgd(every=1))
    assert 1 <= called.count("all_reduce") + called.count("broadcast") <= 1, called
    assert len(called) <= 3, called  # and the small message that checks it


def case_w48_shapes_that_differ_are_told_without_pickle(ctx):
    loader = accel.prepare_loader(ctx, DataLoader(range(11), batch_size=3))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dumps", "loads", "Pickler", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        found = [accel.gather_for_metrics(ctx, b.data, b).tolist() for b in accel.batches(ctx, loader, Cursor())]
        padded = accel.pad_across_processes(ctx, torch.ones(2 + ctx.rank, 3))
    assert found == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert padded.shape == (3, 3)


def case_w49_skipping_reads_nothing(ctx):
    dataset = Watched(4000)
    loader = accel.prepare_loader(ctx, DataLoader(dataset, batch_size=2))
    cursor = accel.skip_first_batches(Cursor(), 900, loader)
    next(accel.batches(ctx, loader, cursor))
    assert dataset.read == [3600 + 2 * ctx.rank, 3601 + 2 * ctx.rank]


def case_w50_a_batch_is_given_as_soon_as_it_is_read(ctx):
    dataset = Watched(8)
    found = accel.batches(ctx, accel.prepare_loader(ctx, DataLoader(dataset, batch_size=1)), Cursor())
    for step in range(1, 4):
        next(found)
        assert len(dataset.read) == step


def case_w60_what_is_skipped_keeps_its_settings(ctx):
    raw = DataLoader(range(13), batch_size=2, shuffle=True, drop_last=True, collate_fn=lambda ids: {"ids": ids})
    loader = accel.prepare_loader(ctx, raw)
    whole = [batch.data for batch in accel.batches(ctx, loader, Cursor())]
    rest = [batch.data for batch in accel.batches(ctx, loader, accel.skip_first_batches(Cursor(), 1, loader))]
    assert rest == whole[1:]
    assert len(whole) == 3


def case_an_evaluation_within_an_epoch_of_training(ctx):
    outer = accel.prepare_loader(ctx, DataLoader(range(10), batch_size=2, shuffle=True))
    ids = []
    for batch in accel.batches(ctx, outer, Cursor()):
        assert gathered(ctx, DataLoader(range(7), batch_size=2), tail="pad") == list(range(7))
        ids += accel.gather_for_metrics(ctx, batch.data, batch).tolist()
    assert sorted(ids) == list(range(10))


def case_workers_that_persist(ctx):
    raw = DataLoader(range(23), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
    loader = accel.prepare_loader(ctx, raw)
    for epoch in range(3):
        mean = accel.metrics.running_metrics(sample="mean")
        for batch in accel.batches(ctx, loader, Cursor(epoch=epoch)):
            mean = mean.add(batch.weights, sample=batch.data)
        assert mean.read(ctx)[0] == {"sample": 11}
    loader.close()


def case_samplers_that_differ_across_ranks(ctx):
    loader = accel.prepare_loader(ctx, DataLoader(range(9), sampler=[1, 2, 3 + ctx.rank]))
    with assert_raises(accel.errors.CollectiveMismatch, expected="rank 0: .*digest", got="rank 1: .*digest"):
        next(accel.batches(ctx, loader, Cursor()))


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


def main() -> None:
    with accel.session(device="cpu") as ctx:
        outcomes = {}
        for case in CASES:
            try:
                case(ctx)
            except Exception:
                outcomes[case.__name__] = traceback.format_exc()
        with open(f"{sys.argv[1]}/{ctx.rank}.json", "w") as file:
            json.dump(outcomes, file)


if __name__ == "__main__":
    main()
