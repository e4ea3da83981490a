# SPDX-License-Identifier: Apache-2.0
"""Samples of any rollouts: rows in, the same rows out, with no trace of the rows beside them."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from catching import assert_raises
from hypothesis import given, strategies as st
from tables import rows

from accel.errors import AccelError, DataError
from accel.post_training import SampleRow, Samples, Version, join_samples
from accel.post_training._samples import token_ids

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64", "float16", "float64")


@st.composite
def sample_rows(draw: st.DrawFn) -> list[SampleRow]:
    """Rows of a rollout, some with a tool's output between the model's own tokens."""
    scored, made = draw(st.booleans()), list[SampleRow]()
    for at in range(draw(st.integers(1, 5))):
        prompt, behind = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        row = SampleRow(
            ids=draw(st.lists(st.integers(1, 9), min_size=prompt + behind, max_size=prompt + behind)),
            prompt_length=prompt,
            mask=draw(st.none() | st.lists(st.booleans(), min_size=behind, max_size=behind)),
            logprobs=draw(st.lists(st.floats(-9, 0), min_size=behind, max_size=behind)) if scored else None,
            prompt=draw(st.integers(0, 3)),
            sample=at,
            finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        )
        made.append(row)
    return made


def described(samples: Samples) -> list[tuple[Any, ...]]:
    """Each row by what it is, without the filling."""
    found: list[tuple[Any, ...]] = []
    for at, length in enumerate(samples.lengths.tolist()):
        logprobs = None if samples.logprobs is None else samples.logprobs[at, :length].tolist()
        found.append(
            (
                samples.ids[at, :length].tolist(),
                int(samples.prompt_lengths[at]),
                samples.mask[at, :length].tolist(),
                logprobs,
                samples.prompts[at],
                samples.samples[at],
                samples.finish_reasons[at],
            )
        )
    return found


@given(sample_rows())
def test_rows_come_out_as_they_went_in(rows: list[SampleRow]) -> None:
    samples = Samples.of(rows, pad_id=11, version=Version("a", 3))
    for row, found in zip(rows, described(samples), strict=True):
        ids, prompt_length, mask, logprobs, prompt, sample, reason = found
        assert (ids, prompt_length, prompt, sample, reason) == (
            row.ids,
            row.prompt_length,
            row.prompt,
            row.sample,
            row.finish_reason,
        )
        drawn = [True] * (len(ids) - prompt_length) if row.mask is None else row.mask
        assert mask == [False] * prompt_length + list(drawn)
        if row.logprobs is not None:
            assert logprobs == [0.0] * prompt_length + [
                value if own else 0.0 for value, own in zip(row.logprobs, drawn, strict=True)
            ]
    behind = torch.arange(samples.ids.shape[1]) >= samples.lengths[:, None]
    assert (samples.ids[behind] == 11).all()
    assert not samples.mask[behind].any()
    assert samples.truncated.tolist() == [row.finish_reason == "length" for row in rows]


FORMS: dict[str, Callable[[list[int]], Any]] = {
    **{f"torch {name}": lambda ids, name=name: torch.tensor(ids).to(getattr(torch, name)) for name in DTYPES},
    **{f"numpy {name}": lambda ids, name=name: np.array(ids, dtype=name) for name in DTYPES},
    "numbers": lambda ids: [np.uint16(each) for each in ids],
    "a file": lambda ids: np.frombuffer(np.array(ids, dtype=np.uint16).tobytes(), dtype=np.uint16),
    "bytes": bytes,
    "bytearray": bytearray,
    "array": lambda ids: array("H", ids),
    "deque": deque,
    "complex": lambda ids: torch.tensor(ids).to(torch.complex64),
}


@pytest.mark.filterwarnings("error")
@rows("form", FORMS)
def test_whole_numbers_of_any_kind_are_tokens(form: str) -> None:
    for ids in ([], [0, 3, 100]):
        found = token_ids(FORMS[form](ids), "here")
        assert (found.dtype, found.tolist()) == (torch.int64, ids)


@pytest.mark.parametrize(
    "ids", [np.array([2**63], dtype=np.uint64), [2**70], torch.tensor([1j]), torch.tensor([1.5]).half(), np.array([-1])]
)
def test_other_numbers_are_no_tokens(ids: Any) -> None:
    with assert_raises(DataError, problem="the tokens are not valid"):
        token_ids(ids, "here")


def test_tokens_are_a_copy_of_an_array() -> None:
    ids = np.array([1, 2])
    samples = Samples.of([SampleRow(ids, 1)])  # type: ignore[arg-type]
    ids[0] = 7
    assert samples.ids.tolist() == [[1, 2]]


@given(sample_rows(), st.data())
def test_parts_are_joined_and_taken_again(rows: list[SampleRow], data: st.DataObject) -> None:
    whole = Samples.of(rows)
    cuts = sorted(data.draw(st.lists(st.integers(1, len(rows)), max_size=2)))
    places = [range(begin, end) for begin, end in itertools.pairwise([0, *cuts, len(rows)]) if begin < end]
    parts = [whole.rows(each) for each in places]
    for part, each in zip(parts, places, strict=True):
        assert part.ids.shape[1] == max(len(rows[at].ids) for at in each)
    width = data.draw(st.none() | st.just(whole.ids.shape[1] + 2))
    joined = join_samples(parts, width=width)
    assert described(joined) == described(whole)
    assert joined.ids.shape[1] == (width or whole.ids.shape[1])


def test_versions_are_ordered_within_a_session_and_joined_where_they_are_one() -> None:
    assert Version("a", 2) > Version("a", 1)
    one, other = (Samples.of([SampleRow([1, 2], 1)], version=Version("a", at)) for at in range(2))
    assert join_samples([one, one]).version == Version("a", 0)
    assert join_samples([one, other]).version is None


def test_rows_that_do_not_fit_are_refused() -> None:
    one = Samples.of([SampleRow([1, 2], 1, logprobs=[-1.0])])
    refused: list[tuple[Any, str]] = [
        (lambda: Samples.of([]), "none"),
        (lambda: Samples.of([SampleRow([1], 2)]), "2"),
        (lambda: Samples.of([SampleRow([1], 1.0)]), "1.0"),  # type: ignore[arg-type]
        (lambda: Samples.of([SampleRow([1], "1")]), "'1'"),  # type: ignore[arg-type]
        (lambda: Samples.of([SampleRow([1], None)]), "None"),  # type: ignore[arg-type]
        (lambda: Samples.of([SampleRow([1, 2, 3], 1, routed=torch.ones(5, 1, 1))]), "5"),
        *(
            (lambda wide=wide: join_samples([one, msgspec.structs.replace(one, **wide)]), "3")
            for wide in ({"logprobs": torch.zeros(1, 3)}, {"mask": torch.ones(1, 3, dtype=torch.bool)})
        ),
        (lambda: Samples.of([SampleRow([1.5], 1)]), "[1.5]"),  # type: ignore[list-item]
        (lambda: Samples.of([SampleRow([1, 2], 1, logprobs=[float("nan")])]), "nan"),
        (lambda: Samples.of([SampleRow([1, 2], 1, logprobs=[-float("inf")])]), "inf"),
        (lambda: Samples.of([SampleRow([1], 1, finish_reason="eos")]), "eos"),  # type: ignore[arg-type]
        (
            lambda: join_samples([one, Samples.of([SampleRow([1], 1, logprobs=[], routed=torch.ones(1, 1, 1))])]),
            "None, a tensor",
        ),
        (lambda: Samples.of([SampleRow([1, 2], 1, mask=[True, True])]), "2"),
        (lambda: Samples.of([SampleRow([1, 2], 1, logprobs=[])]), "0"),
        (lambda: Samples.of([SampleRow([1, 2], 1, logprobs=[-1.0]), SampleRow([1, 2], 1)]), "None, a tensor"),
        (lambda: Samples.of([SampleRow([1], 1)], drawn_from="users"), "users"),  # type: ignore[arg-type]
        (lambda: join_samples([]), "none"),
        (lambda: join_samples([one], width=1), "width=1"),
        (lambda: join_samples([one, Samples.of([SampleRow([1, 2], 1)])]), "None, a tensor"),
        (lambda: join_samples([one, msgspec.structs.replace(one, logprobs=None)]), "None, a tensor"),
        (lambda: join_samples([one, msgspec.structs.replace(one, drawn_from="sampler")]), "'model', 'sampler'"),
    ]
    for call, got in refused:
        with pytest.raises(AccelError) as caught:
            call()
        assert got in caught.value.got
    length: Any = torch.tensor(1).numpy()[()]
    assert described(Samples.of([SampleRow([1, 2], length)])) == described(Samples.of([SampleRow([1, 2], 1)]))
    routed = [torch.arange(2.0).view(2, 1, 1), torch.arange(3.0).view(3, 1, 1)]  # of the last token none is known
    found = Samples.of([SampleRow([1, 2, 3], 1, routed=each) for each in routed]).routed
    assert found is not None
    assert found[:, :, 0, 0].tolist() == [[0, 1, 0], [0, 1, 2]]
    tool = SampleRow([1, 2, 3], 1, mask=[False, True], logprobs=[float("nan"), -0.5])  # any number of a tool's token
    assert described(Samples.of([tool]))[0][3] == [0.0, 0.0, -0.5]
