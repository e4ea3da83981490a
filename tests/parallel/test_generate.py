# SPDX-License-Identifier: Apache-2.0
"""Generation on any mesh adds the tokens that one process adds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from language_models import LENGTH, WORDS, make_objects, plan_of
from profiles import share
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import accel
from accel.parallel import Axes
from accel.seeding import Key
from accel.testing import Simulator, simulate
from accel.training._decoding import Sampling, next_tokens

EXPERTS = 4
PROMPTS = torch.randint(WORDS, (5, 3), generator=torch.Generator().manual_seed(1))


def _inputs(ids: torch.Tensor) -> Any:
    return ids, torch.arange(ids.shape[1])[None]


def _generate(ctx: accel.DistContext, axes: Axes, **options: Any) -> torch.Tensor:
    ctx = accel.replace(ctx, mesh=str(axes) or "dp=1", strategy="fsdp")
    model, _ = make_objects(ctx, tied=True, experts=EXPERTS)
    model = accel.prepare_model(ctx, model, plan=plan_of(EXPERTS))
    part, parts = ctx.data_parallel
    if "key" in options:
        options["rows"] = range(len(PROMPTS))[part::parts]
    with accel.evaluating(model):
        return accel.training.generate(
            ctx, model, PROMPTS[part::parts], max_new_tokens=LENGTH - 3, inputs_of=_inputs, **options
        )


@functools.cache
def _alone(**options: Any) -> torch.Tensor:
    return simulate(lambda ctx: _generate(ctx, Axes(), **options), 1, default_group=True)[0]


def _by_hand() -> torch.Tensor:
    model, _ = make_objects(accel.single(), tied=True, experts=EXPERTS)
    ids = PROMPTS
    for _ in range(LENGTH - 3):
        ids = torch.cat([ids, model(*_inputs(ids))[:, -1:].argmax(-1)], 1)
    return ids


def test_one_process_adds_the_most_probable_tokens() -> None:
    assert torch.equal(_alone(), _by_hand())


@pytest.mark.parametrize(
    "axes",
    [
        Axes(pp=2),
        Axes(dp=2, tp=2, ep=4),
        pytest.param(Axes(dp_replicate=2, dp_shard=2), marks=pytest.mark.slow),
        pytest.param(Axes(pp=2, dp_replicate=2, dp_shard=2), marks=pytest.mark.slow),
        pytest.param(Axes(pp=2, dp=2, tp=2, ep=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("draws", [False, True])
def test_any_mesh_adds_the_tokens_of_one_process(ranks: Simulator, axes: Axes, draws: bool) -> None:
    options: dict[str, Any] = {"temperature": 1.3, "top_k": 9, "key": Key(4)} if draws else {}
    expected = _alone(**options)

    def rank(ctx: accel.DistContext) -> Any:
        found = _generate(ctx, axes, vocab_parallel=True, **options)
        part, parts = accel.replace(ctx, mesh=str(axes)).data_parallel
        return part, parts, found

    for part, parts, found in ranks.run(rank, axes.world_size, default_group=True):
        assert torch.equal(found, expected[part::parts])


class Even(torch.nn.Module):
    """Gives every class the same logit, so that tokens are the draws alone."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, 1000)


def _drawn(ctx: accel.DistContext, count: int, **options: Any) -> list[list[int]]:
    ids = torch.zeros(count, 1, dtype=torch.int64)
    found = accel.training.generate(ctx, Even(), ids, max_new_tokens=4, temperature=1.0, key=Key(1), **options)
    return found[:, 1:].tolist()


@settings(max_examples=share(0.4))
@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_draw_is_a_function_of_key_row_and_place(counts: list[int]) -> None:
    whole = _drawn(accel.single(), sum(counts))
    assert len({*map(tuple, whole)}) == sum(counts)  # no two rows draw alike
    found = simulate(lambda ctx: _drawn(ctx, counts[ctx.rank]), len(counts))
    assert [row for each in found for row in each] == whole
    order = sorted(range(sum(counts)), key=lambda at: (at % 2, -at))
    assert _drawn(accel.single(), sum(counts), rows=order) == [whole[at] for at in order]
    alone = _drawn(accel.single(), 1, rows=torch.tensor([sum(counts) - 1]))
    assert alone == whole[-1:]


def test_sequences_end_at_their_token_and_ranks_take_as_many_steps(ranks: Simulator) -> None:
    whole = _by_hand()
    eos = int(whole[0, 4])  # one sequence ends early

    def rank(ctx: accel.DistContext) -> torch.Tensor:
        return _generate(ctx, Axes(dp=2), eos=eos)

    for part, found in enumerate(ranks.run(rank, 2, default_group=True)):
        for row, expected in zip(found.tolist(), whole[part::2].tolist(), strict=True):
            end = expected.index(eos, 3) + 1 if eos in expected[3:] else len(expected)
            assert row == (expected[:end] + [eos] * len(expected))[: len(row)]


REFUSED = [
    ({"temperature": -1.0}, {"got": "temperature=-1.0"}),
    ({"temperature": 1.0}, {"got": "without key="}),
    ({"top_k": 3}, {"got": "without a temperature"}),
    ({"temperature": 1.0, "top_k": 0, "key": Key(0)}, {"got": "top_k=0"}),
    ({"temperature": 1.0, "top_p": 0.0, "key": Key(0)}, {"got": "top_p=0.0"}),
    ({"max_new_tokens": 0}, {"got": "max_new_tokens=0"}),
    ({"cache": True}, {"problem": "keeps no keys and values"}),
    ({"attention_mask": torch.ones(1, 2)}, {"problem": "without a cache"}),
    ({"ids": torch.ones(2)}, {"problem": "not prompts"}),
    ({"rows": [0]}, {"got": "rows= has no effect"}),
    ({"temperature": 1.0, "key": Key(0), "rows": [0, 1]}, {"got": "2 numbers for 1 rows"}),
    ({"temperature": 1.0, "key": Key(0), "rows": [-1]}, {"expected": "from 0, each once"}),
]


@pytest.mark.parametrize(("options", "fields"), REFUSED)
def test_what_cannot_generate_is_refused(options: dict[str, Any], fields: dict[str, str]) -> None:
    model = torch.nn.Embedding(4, 4)
    arguments: dict[str, Any] = {"ids": torch.zeros(1, 2, dtype=torch.int64), "max_new_tokens": 1, **options}
    with assert_raises(accel.errors.ConfigError, **fields):
        accel.training.generate(accel.single(), model, arguments.pop("ids"), **arguments)


def test_a_mesh_with_cp_is_refused(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> None:
        with assert_raises(accel.errors.ConfigError, fix="mesh without cp"):
            _generate(ctx, Axes(cp=2))

    ranks.run(rank, 2, default_group=True)


class NoFloat64(TorchDispatchMode):
    """Refuses float64, as MPS and XLA do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in tree_leaves(found)):
            raise TypeError(f"no float64: {func}")
        return found


class Next(torch.nn.Module):
    """Takes the next number of 5, in a tuple."""

    def forward(self, ids: torch.Tensor) -> Any:
        return (torch.nn.functional.one_hot((ids + 1) % 5, 5).float(),)


@pytest.mark.parametrize(("eos", "expected"), [(None, [3, 4, 0, 1, 2]), (0, [3, 4, 0])])
def test_the_most_probable_tokens_need_no_float64(eos: int | None, expected: list[int]) -> None:
    with NoFloat64(), pytest.raises(TypeError):
        _ = torch.zeros(1).double()
    with NoFloat64():
        found = accel.training.generate(accel.single(), Next(), torch.tensor([[3]]), max_new_tokens=4, eos=eos)
    assert found.tolist() == [expected]


@pytest.mark.parametrize("mesh", ["", "pp=2"])
@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"select": lambda output: (output,)[1]}, {"select": lambda output: (output,)[0]}),
        ({"select": lambda output: output[[7]]}, {"select": lambda output: output[[0]]}),
        ({"inputs_of": lambda ids: [ids][1]}, {"inputs_of": lambda ids: [ids][0]}),
    ],
)
def test_an_index_error_of_one_s_own_function_stays_what_it_is(
    ranks: Simulator, mesh: str, options: Any, right: Any
) -> None:
    def rank(ctx: accel.DistContext, given: Any) -> torch.Tensor:
        ctx = accel.replace(ctx, mesh=mesh)
        model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
        model = accel.prepare_model(ctx, model, example=torch.zeros(1, 4, dtype=torch.int64))
        return accel.training.generate(ctx, model, torch.tensor([[3]]), max_new_tokens=3, **given)

    size = 2 if mesh else 1
    assert ranks.run(lambda ctx: rank(ctx, right), size, default_group=True)[0].shape == (1, 4)
    with pytest.raises((IndexError, accel.errors.StageError)) as caught:  # a stage names the function's line
        ranks.run(lambda ctx: rank(ctx, options), size, default_group=True)
    own = caught.type is IndexError
    assert own or "IndexError" in str(caught.value)
    assert own or mesh


@settings(deadline=None, max_examples=share(0.2))
@given(seed=st.integers(0, 99), top_k=st.integers(1, 6), top_p=st.floats(0.01, 1.0))
def test_draws_are_among_the_most_probable_tokens(seed: int, top_k: int, top_p: float) -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    rule = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
    [tokens] = next_tokens(logits, rule, torch.rand(4, generator=torch.Generator().manual_seed(seed)))
    for row, token in zip(logits / 0.7, tokens.tolist(), strict=True):
        order = row.argsort(descending=True)[:top_k]
        chances = row[order].softmax(-1)
        kept = int((chances.cumsum(-1) - chances < top_p).sum())
        assert token in order[:kept].tolist()


class SeveralTexts:
    """A configuration of transformers in which no text is the only one."""

    def get_text_config(self) -> Any:
        raise ValueError("multiple valid text configs")


class NextWithConfig(Next):
    config = SeveralTexts()


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_a_model_with_several_texts_generates(ranks: Simulator, mesh: str) -> None:
    def rank(ctx: accel.DistContext) -> Any:
        ids = torch.zeros(2, 1, dtype=torch.int64)
        ctx = accel.replace(ctx, mesh=mesh)
        return accel.training.generate(ctx, NextWithConfig(), ids, max_new_tokens=2, cache=False).tolist()

    assert ranks.run(rank, 2, default_group=True) == [[[0, 1, 2]] * 2] * 2
