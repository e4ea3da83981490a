# SPDX-License-Identifier: Apache-2.0
"""Models and loaders that Fabric, Accelerate or HF's Trainer have wrapped: loaders are read whole, models refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

import accel
from accel.testing import simulate

DATA = TensorDataset(torch.arange(10.0).view(10, 1))


class _FabricDataLoader:
    """The public attributes of Fabric's, which holds the loader and moves batches to a device."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._dataloader = loader

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._dataloader


class _FabricModule(nn.Module):
    """Fabric's: a forward under a precision of its own around the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._forward_module = self._original_module = inner


class BatchSamplerShard(BatchSampler):
    """Accelerate's: every other batch of a batch sampler."""

    def __init__(self, batches: BatchSampler, *, split_batches: bool = False) -> None:
        self.batch_sampler, self.split_batches = batches, split_batches
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    def __iter__(self) -> Iterator[Any]:
        yield from list(self.batch_sampler)[::2]


class IterableDatasetShard(IterableDataset[Any]):
    """Accelerate's: every other sample of a stream."""

    def __iter__(self) -> Iterator[float]:
        yield from [0.0, 2.0]


def shares(wrap: Any) -> list[list[int]]:
    """Samples that two ranks read of what a wrapper gives."""

    def read(ctx: accel.DistContext) -> list[int]:
        loader = accel.prepare(ctx, wrap(DataLoader(DATA, batch_size=2, shuffle=True)))
        return [int(each) for batch in accel.batches(ctx, loader) for each in batch.data[0].flatten()]

    return simulate(read, 2)


def _half(loader: DataLoader[Any]) -> DataLoader[Any]:
    assert isinstance(loader.batch_sampler, BatchSampler)
    return DataLoader(DATA, batch_sampler=BatchSamplerShard(loader.batch_sampler))


@pytest.mark.parametrize("wrap", [_FabricDataLoader, _half])
def test_wrapped_loaders_are_read_as_the_ones_inside(wrap: Any) -> None:
    found = shares(wrap)
    assert found == shares(lambda loader: loader)
    assert sorted(found[0] + found[1]) == list(range(10))


def _begun(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Accelerate's loader of a stream, after its `skip_first_batches`."""
    loader.__dict__["skip_batches"] = 2
    return loader


def _split(loader: DataLoader[Any]) -> DataLoader[Any]:
    assert isinstance(loader.batch_sampler, BatchSampler)
    return DataLoader(DATA, batch_sampler=BatchSamplerShard(loader.batch_sampler, split_batches=True))


@pytest.mark.parametrize(
    ("wrap", "fields"),
    [
        (_split, {"problem": "the batch sampler is divided among processes already"}),
        (
            _begun,
            {
                "problem": "a cursor marks the start of a pass",
                "got": "skip_batches=2",
                "fix": "Use accel.skip_first_batches, or pass the loader.*before it is wrapped",
            },
        ),
        (lambda _: DataLoader(IterableDatasetShard()), {"problem": "the stream is divided among processes already"}),
        (
            lambda _: _FabricDataLoader(DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=0))),
            {"problem": "the sampler shards already"},
        ),
    ],
)
def test_loaders_that_read_a_part_are_refused(wrap: Any, fields: dict[str, str]) -> None:
    with assert_raises(accel.errors.DataError, **({"fix": "before it is wrapped"} | fields)):
        _ = shares(wrap)


def _by_accelerate() -> nn.Module:
    inner = nn.Linear(1, 1)
    vars(inner)["_original_forward"] = inner.forward
    vars(inner)["forward"] = torch.no_grad()(inner.forward)
    return nn.Sequential(inner)


@pytest.mark.parametrize("make", [lambda: _FabricModule(nn.Linear(1, 1)), _by_accelerate])
def test_models_that_others_have_prepared_are_refused(make: Any) -> None:
    with assert_raises(accel.errors.PrepareError, fix="Pass the model before it is wrapped"):
        _ = accel.prepare(accel.single("cpu"), make())


def test_a_model_with_a_forward_of_its_own_passes() -> None:
    net = nn.Linear(1, 1)
    vars(net)["forward"] = net.forward  # as users and tools do
    assert accel.prepare(accel.single("cpu"), net) is net


@pytest.mark.slow
def test_what_accelerate_has_prepared_passes_once_it_is_unwrapped() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    ctx, net = accel.single("cpu"), nn.Linear(1, 1)
    model, loader = accelerator.prepare(net, DataLoader(DATA, batch_size=2))
    with assert_raises(accel.errors.PrepareError, fix="keep_fp32_wrapper=False"):
        _ = accel.prepare(ctx, model)
    assert accel.prepare(ctx, accelerator.unwrap_model(model, keep_fp32_wrapper=False)) is net
    assert len(accel.prepare(ctx, loader)) == 5
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
