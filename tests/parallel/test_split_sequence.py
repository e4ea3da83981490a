# SPDX-License-Identifier: Apache-2.0
"""A batch of sequences, cut among ranks: labels first shifted, places exact, lengths checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor

import accel
from accel.errors import ConfigError, DataError
from accel.testing import Simulator

IDS = torch.arange(10, 34).view(2, 12)


def together(parts: list[dict[str, Tensor]], name: str) -> Tensor:
    """The ranks' parts of a tensor, by their places."""
    values = torch.cat([part[name] for part in parts], 1)
    at = torch.cat([part["position_ids"] for part in parts], 1)[0]
    assert at.sort().values.tolist() == list(range(len(at)))
    return values[:, at.argsort()]


@settings(max_examples=share(0.8))
@given(
    size=st.integers(1, 6), each=st.integers(1, 3), batch=st.integers(1, 3), width=st.sampled_from([None, 2]),
    ignore=st.sampled_from([-100, -1]),
)  # fmt: skip
def test_parts_are_the_batch_with_shifted_labels(
    ranks: Simulator, size: int, each: int, batch: int, width: int | None, ignore: int
) -> None:
    length = 2 * size * each
    ids = torch.arange(batch * length).view(batch, length)
    labels = ids if width is None else torch.stack([ids, -ids], -1)

    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        ctx = accel.replace(ctx, mesh=f"cp={size}")
        return accel.parallel.split_sequence(ctx, {"ids": ids, "labels": labels}, ignore=ignore)

    parts = ranks.run(rank, size, default_group=True)
    assert torch.equal(together(parts, "ids"), ids)
    whole = together(parts, "labels")
    assert torch.equal(whole[:, :-1], labels[:, 1:])
    assert whole[:, -1].eq(ignore).all()
    assert whole.dtype == labels.dtype
    assert {tuple(part["ids"].shape) for part in parts} == {(batch, 2 * each)}


def test_ranks_that_share_no_sequence_keep_all_positions() -> None:
    part = accel.parallel.split_sequence(accel.single(), {"ids": IDS, "labels": IDS})
    assert torch.equal(part["ids"], IDS)
    assert torch.equal(part["labels"][:, :-1], IDS[:, 1:])
    assert torch.equal(part["position_ids"], torch.arange(12).expand(2, -1))
    assert part["position_ids"].dtype == torch.int64


def test_positions_of_packed_documents_stay_the_users(ranks: Simulator) -> None:
    packed = torch.arange(12).expand(2, -1) % 5

    def rank(ctx: accel.DistContext) -> tuple[Tensor, Tensor]:
        ctx = accel.replace(ctx, mesh="cp=2")
        own = accel.parallel.sequence_positions(ctx, 12)
        return accel.parallel.split_sequence(ctx, {"ids": IDS, "position_ids": packed})["position_ids"], packed[:, own]

    assert all(torch.equal(part, expected) for part, expected in ranks.run(rank, 2, default_group=True))


def test_nothing_is_shifted_if_asked_and_other_names_are(ranks: Simulator) -> None:
    ctx = accel.single()
    assert torch.equal(accel.parallel.split_sequence(ctx, {"labels": IDS}, shift=())["labels"], IDS)
    part = accel.parallel.split_sequence(ctx, {"labels": IDS, "weights": IDS.float()}, shift=("weights",), ignore=0.5)
    assert torch.equal(part["labels"], IDS)
    assert part["weights"][:, -1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("mesh", "multiple_of", "whole"), [("cp=2", 1, 16), ("cp=2", 4, 16), ("cp=2", 3, 24)])
def test_padding_fills_up_to_the_next_length(ranks: Simulator, mesh: str, multiple_of: int, whole: int) -> None:
    ids = torch.arange(1, 14)[None]

    def rank(ctx: accel.DistContext) -> dict[str, Tensor]:
        ctx = accel.replace(ctx, mesh=mesh)
        batch = {"ids": ids, "labels": ids, "documents": torch.ones_like(ids)}
        return accel.parallel.split_sequence(ctx, batch, pad={"ids": 0, "documents": -1}, multiple_of=multiple_of)

    parts = ranks.run(rank, 2, default_group=True)
    assert together(parts, "ids").tolist() == [[*range(1, 14), *[0] * (whole - 13)]]
    assert together(parts, "labels").tolist() == [[*range(2, 14), *[-100] * (whole - 12)]]
    assert together(parts, "documents").tolist() == [[*[1] * 13, *[-1] * (whole - 13)]]
    assert together(parts, "position_ids").tolist() == [list(range(whole))]
    assert all(part["ids"].shape[1] % multiple_of == 0 for part in parts)


def test_one_rank_pads_to_what_its_layers_need() -> None:
    part = accel.parallel.split_sequence(accel.single(), {"ids": IDS}, pad={"ids": 0}, multiple_of=5)
    assert part["ids"].shape == part["position_ids"].shape == (2, 15)
    assert accel.parallel.split_sequence(accel.single(), {"ids": IDS}, pad={"ids": 0})["ids"].shape == (2, 12)


def test_parts_follow_the_device_and_the_dimension() -> None:
    part = accel.parallel.split_sequence(accel.single(), {"x": torch.zeros(6, 2, device="meta")}, dim=0)
    assert part["position_ids"].shape == (6,)
    assert part["position_ids"].device.type == "meta"


@pytest.mark.parametrize(
    ("batch", "options", "error", "words"),
    [
        ({"ids": torch.zeros(2, 14)}, {}, DataError, ("a multiple of 4", "Pad it to 16")),
        ({"ids": torch.zeros(2, 14)}, {"multiple_of": 3}, DataError, ("a multiple of 12", "Pad it to 24")),
        ({"ids": IDS, "labels": IDS[:, 1:]}, {}, DataError, ("ids 12, labels 11",)),
        ({"ids": IDS, "size": torch.tensor(3)}, {}, DataError, ("size", "Leave it out")),
        ({"ids": IDS, "text": "a"}, {}, DataError, ("text", "Leave it out")),
        ({}, {}, ConfigError, ("the batch does not map names to tensors",)),
        (IDS, {}, ConfigError, ("the batch does not map names to tensors",)),
        ({"ids": IDS}, {"shift": ("label",)}, ConfigError, ("no such tensor",)),
        ({"ids": IDS}, {"pad": {"id": 0}}, ConfigError, ("no such tensor", "ids")),
        ({"ids": IDS, "other": IDS}, {"pad": {"ids": 0}}, ConfigError, ("none for other",)),
        ({"ids": IDS}, {"multiple_of": 0}, ConfigError, ("multiple_of",)),
    ],
)
def test_refused_with_the_way_out(ranks: Simulator, batch: Any, options: Any, error: Any, words: Any) -> None:
    def rank(ctx: accel.DistContext) -> str:
        with pytest.raises(error) as caught:
            accel.parallel.split_sequence(accel.replace(ctx, mesh="cp=2"), batch, **options)
        return str(caught.value)

    for said in ranks.run(rank, 2, default_group=True):
        assert all(word in said for word in words), said


def test_positions_of_a_length_that_cannot_be_cut_are_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(DataError, expected="a multiple of 4"):
            accel.parallel.sequence_positions(accel.replace(ctx, mesh="cp=2"), 6)

    ranks.run(rank, 2, default_group=True)
    assert accel.parallel.sequence_positions(accel.single(), 3).tolist() == [0, 1, 2]
