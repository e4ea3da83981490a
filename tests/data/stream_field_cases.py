# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with streams in the field, each case as a function that two real processes run.

    accel launch --nproc-per-node 2 tests/data/stream_field_cases.py FOLDER

`test_stream_field.py` starts them. Names say which finding of the survey of Accelerate 1.15 a case answers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from catching import assert_raises
from stream_helpers import Stateful, Stream, make_loader, seen
from torch.utils.data import DataLoader, IterableDataset

import accel
from accel import Cursor
from accel.errors import DataError

MODES = ["shards", "elements", "dispatch"]


class Wide(IterableDataset):
    """Samples of four tensors and a text; counts what has been read."""

    def __init__(self, n):
        self.n, self.read = n, 0

    def __iter__(self):
        for i in range(self.n):
            self.read += 1
            yield {"id": i, "a": torch.full((2000,), float(i)), "b": (torch.full((3, 50), i), f"text {i}")}


def gathered(ctx, loader, cursor=None):
    found = []
    for batch in accel.batches(ctx, loader, cursor or Cursor()):
        found += accel.gather_for_metrics(ctx, batch.data[0], batch).tolist()
    return found


def case_w13_gathering_over_a_stream(ctx):
    for mode in MODES:
        for tail in ("ragged", "pad"):
            for workers in (0, 2):
                ids = gathered(ctx, make_loader(ctx, Stream(11), mode, 2, tail=tail, num_workers=workers))
                assert sorted(ids) == list(range(11)), (mode, tail, workers, ids)


def case_w45_no_pickle_and_one_message_with_what_is_a_ranks_own(ctx):
    stream = Wide(16)
    batches = accel.batches(ctx, make_loader(ctx, stream, "dispatch", 2, steps_per_message=1), Cursor())
    _ = next(batches)  # its structure goes along
    calls, sizes = [], []

    def counting(name, function):
        def run(*args, **kwargs):
            calls.append(name)
            sizes.extend(arg.numel() for arg in args[:1] if isinstance(arg, torch.Tensor) and name != "first message")
            return function(*args, **kwargs)

        return run

    def refuse(*args, **kwargs):
        raise AssertionError("pickled")

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with pytest.MonkeyPatch.context() as patch:
        for name in (gather, "all_to_all_single"):
            patch.setattr(dist, name, counting("first message", getattr(dist, name)))
        for name in ("isend", "irecv", "broadcast", "scatter"):
            patch.setattr(dist, name, counting(name, getattr(dist, name)))
        for name in ("dumps", "loads", "Pickler", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        batch = next(batches)
    *checked, last = calls
    assert checked == ["first message"]
    assert last == ("irecv" if ctx.rank else "isend")
    own = sum(leaf.nbytes for leaf in (batch.data["id"], batch.data["a"], batch.data["b"][0]))
    assert own <= sizes[-1] < own + 200
    first = 4 + 2 * ctx.rank
    assert list(batch.data["b"][1]) == [f"text {first}", f"text {first + 1}"]
    assert batch.data["a"][:, 0].tolist() == [first, first + 1]


def case_w46_no_workers_and_no_reading_on_other_ranks(ctx):
    stream = Wide(8)
    batches = accel.batches(ctx, make_loader(ctx, stream, "dispatch", 2, num_workers=1), Cursor())
    _ = next(batches)
    assert len(multiprocessing.active_children()) == (ctx.rank == 0)
    assert len(list(batches)) == 1
    alone = make_loader(ctx, stream, "dispatch", 2)
    assert len(list(accel.batches(ctx, alone, Cursor()))) == 2
    assert stream.read == (8 if ctx.rank == 0 else 0)


def case_w49_resume_reads_nothing_again(ctx):
    for mode in MODES:
        whole = list(accel.batches(ctx, make_loader(ctx, Stateful(40), mode, 2), Cursor(seed=1)))
        watched = Stateful(40)
        watched.read = log = []
        loader = make_loader(ctx, watched, "own" if mode == "shards" else mode, 2)
        if mode == "shards":  # the part itself, so that it can be watched
            watched.parts = ((2, ctx.rank),)
        rest = list(accel.batches(ctx, loader, whole[7].next))
        assert [seen(b) for b in rest] == [seen(b) for b in whole[8:]]
        assert not log  # what it reads goes to the list that came with its state


def case_w50_the_first_batch_waits_for_one_sample_more(ctx):
    stream = Wide(40)
    _ = next(accel.batches(ctx, make_loader(ctx, stream, "dispatch", 10), Cursor()))
    assert stream.read == (21 if ctx.rank == 0 else 0)


def case_w51_a_node_reads_each_sample_once(ctx):
    stream = Wide(12)
    assert len(list(accel.batches(ctx, make_loader(ctx, stream, "elements", 2), Cursor()))) == 3
    assert stream.read == (12 if ctx.is_local_main_process else 0)


def case_w60_settings_are_kept_after_a_resume(ctx):
    raw = DataLoader(Stream(23), batch_size=3, drop_last=True, collate_fn=lambda rows: [torch.tensor(rows)[:, 0] * 10])
    loader = accel.prepare_loader(ctx, raw, stream="dispatch")
    whole = list(accel.batches(ctx, loader, Cursor()))
    assert [int(each) for batch in whole for each in [*batch.data[0]]] == [10.0 * i for i in _own(ctx, 18, 3)]
    with torch.no_grad():  # a cursor is read from twice
        rest = list(accel.batches(ctx, loader, whole[0].next))
        assert [b.data[0].tolist() for b in rest] == [b.data[0].tolist() for b in whole[1:]]
        assert gathered(ctx, loader, whole[0].next) == [10.0 * i for i in range(6, 18)]


def _own(ctx, n, size):
    return [i for i in range(n) if i // size % 2 == ctx.rank]


def case_a_reader_that_raises(ctx):
    class Failing(Stream):
        def __iter__(self):
            yield from range(9)
            raise OSError("the disk is gone")

    for mode in ("own", "elements", "dispatch"):
        stream = Failing(0) if ctx.rank == 0 else Wide(0)
        if mode == "own" and ctx.rank == 1:
            stream = Range(100)
        batches = accel.batches(ctx, make_loader(ctx, stream, mode, 2), Cursor())
        _ = next(batches)
        with assert_raises(DataError, problem="rank 0: reading the stream failed: OSError: the disk is gone"):
            list(batches)
        accel.wait_for_everyone(ctx)


def case_a_worker_that_is_killed(ctx):
    class Dying(Stream):
        def __iter__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    with assert_raises(DataError, problem="rank 0: reading the stream failed: RuntimeError: DataLoader worker"):
        list(accel.batches(ctx, make_loader(ctx, Dying(0), "dispatch", 2, num_workers=1), Cursor()))
    accel.wait_for_everyone(ctx)


def case_a_run_on_two_ranks_goes_on_in_one_process(ctx):
    """Each rank does it alone afterwards, from the checkpoint of both."""
    folder = f"{sys.argv[1]}/run"
    whole = list(accel.batches(ctx, make_loader(ctx, Stateful(30), "dispatch", 2, num_workers=2), Cursor()))
    path = accel.save_state(ctx, folder, {"cursor": whole[2].next}, step=1)
    rest = [i for b in whole[3:] for i in accel.gather_for_metrics(ctx, b.data[0], b).tolist()]
    alone = accel.single()
    cursor = accel.load_state(alone, path, {"cursor": Cursor()})["cursor"]
    loader = make_loader(alone, Stateful(30), "dispatch", 1, global_batch=4, num_workers=2)
    assert gathered(alone, loader, cursor) == rest


class Range(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


def main() -> None:
    torch.set_num_threads(1)
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
