# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to a CUDA device, and streams that end there: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accel
from accel.data._transfer import moved

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda", 0)


def _batches(count: int, rows: int, *, pinned: bool) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    for i in range(count):
        data = torch.full((rows, 256), float(i))
        yield {"x": data.pin_memory() if pinned else data, "i": torch.tensor(i)}, i


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_computed_on_is_what_was_read(ahead: bool, pinned: bool) -> None:
    """The device is kept busy, so that a copy that is not waited for, or memory given away too early, would show."""
    weight = torch.eye(256, device=CUDA)
    sums: list[torch.Tensor] = []
    for batch, i in moved(_batches(60, 4096, pinned=pinned), accel.single(CUDA).streams, ahead=ahead):
        assert batch["x"].device == CUDA
        x = batch["x"]
        for _ in range(20):
            x = x @ weight
        sums.append((x.mean() - i).abs() + (batch["i"] - i).abs())
    assert float(torch.stack(sums).max()) == 0


def test_a_pinned_copy_is_made_on_a_stream_of_its_own() -> None:
    """While the computation's stream is blocked, the next batch still arrives."""
    items = moved(
        iter(list(_batches(3, 1024, pinned=True))), accel.single(CUDA).streams, ahead=True
    )  # pinning itself may wait
    first, _ = next(items)
    assert float(first["x"].sum()) == 0
    torch.cuda._sleep(200_000_000)  # pyright: ignore[reportPrivateUsage] - about 0.1 s on the current stream
    busy = torch.cuda.Event()
    busy.record()
    second, _ = next(items)
    assert not busy.query()
    assert float(second["x"].mean()) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_and_other_data_arrive_on_the_device(workers: int) -> None:
    class Numbers(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            info = torch.utils.data.get_worker_info()
            start, step = (0, 1) if info is None else (info.id, info.num_workers)
            return (torch.full((3,), float(i)) for i in range(start, 23, step))

    ctx = accel.single(CUDA)
    data = TensorDataset(torch.arange(23.0)[:, None].expand(-1, 3).contiguous())
    for mode in ("dispatch", "own", None):
        source = Numbers() if mode is not None else data
        raw = DataLoader(source, batch_size=4, num_workers=workers, pin_memory=True)
        loader = accel.prepare_loader(ctx, raw) if mode is None else accel.prepare_loader(ctx, raw, stream=mode)
        cursor, ids = accel.Cursor(), []
        while cursor.epoch == 0:
            for batch in accel.batches(ctx, loader, cursor):
                rows = batch.data if mode is not None else batch.data[0]
                assert rows.device == CUDA
                ids += rows[:, 0].tolist()
                cursor = batch.next
                if len(ids) in (8, 16):
                    break  # and go on from the cursor, although a batch more may have been read
        assert sorted(ids) == list(range(23))
