# SPDX-License-Identifier: Apache-2.0
"""The collection of hand-written models says the truth about each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handwritten import LENGTH, MODELS, TAGS, Handwritten, tensors_of

from accel.tree import map_tensors


def _called(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: each.grad for name, each in model.named_parameters()}


def test_the_collection_has_unique_names_known_tags_and_each_tag() -> None:
    names = [each.name for each in MODELS]
    assert len(set(names)) == len(names) >= 50
    assert frozenset[str]().union(*(each.tags for each in MODELS)) == set(TAGS)


@pytest.mark.parametrize("each", MODELS, ids=lambda each: each.name)
def test_a_model_is_made_alike_and_every_trained_parameter_gets_a_gradient(each: Handwritten) -> None:
    one, other = each.make(), each.make()
    batch = each.batch(1, 4)
    before = {name: value.clone() for name, value in one.named_buffers()}
    losses = list[torch.Tensor]()
    for model in (one, other):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            losses.append(each.loss(_called(model, batch.inputs), batch.targets))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert sum(parameter.numel() for parameter in one.parameters()) < 20_000
    for name, gradient in _gradients(one).items():
        trained = one.get_parameter(name).requires_grad
        assert trained == (gradient is not None and bool(gradient.any())), name
    assert ("frozen" in each.tags) == any(not parameter.requires_grad for parameter in one.parameters())
    changed = any(not torch.equal(value, before[name]) for name, value in one.named_buffers())
    assert changed == ("buffers" in each.tags)


@pytest.mark.parametrize("each", MODELS, ids=lambda each: each.name)
def test_a_batch_is_the_sum_of_its_samples_unless_its_model_computes_across_them(each: Handwritten) -> None:
    model = each.make().eval() if each.tags & {"random", "counts"} else each.make()
    batch = each.batch(2, 3, LENGTH)
    whole = each.loss(_called(model, batch.inputs), batch.targets)
    parts = torch.zeros_like(whole)
    for at in range(3):
        one = map_tensors(lambda tensor, at=at: tensor[at : at + 1], batch.inputs)
        try:
            parts += each.loss(_called(model, one), batch.targets[at : at + 1])
        except ValueError:  # a batch norm wants several values
            assert "batch_norm" in each.tags
            return
    if not each.tags & {"buffers", "decisions"}:  # whose samples in turn may be other ones than together
        assert torch.allclose(whole, parts, rtol=1e-12) == ("rows" not in each.tags)


@pytest.mark.parametrize("each", [each for each in MODELS if "causal" in each.tags], ids=lambda each: each.name)
def test_a_causal_model_reads_no_later_word(each: Handwritten) -> None:
    model = each.make().eval()
    ids = each.batch(4, 2, 5).inputs
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 32
    one, changed = (tensors_of(_called(model, given))[0] for given in (ids, other))
    assert torch.allclose(one[:, :-1], changed[:, :-1], rtol=1e-12)
    assert not torch.equal(one[:, -1], changed[:, -1])
