# SPDX-License-Identifier: Apache-2.0
"""Mixtures whose experts are called in ways of their own train on ranks that share them as in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
from families import TOLERANCE, Mesh, cell, make

import accel


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "axes", "accumulations"),
    [
        ("Llama 4", "dp=2,ep=2", (1, 3)),
        ("Phi-MoE", "dp=2,ep=2", (3,)),
        pytest.param("Llama 4", "dp=2,tp=2,ep=2", (1, 3), marks=pytest.mark.slow),
        pytest.param("Llama 4", "dp=4,ep=2", (1, 3), marks=pytest.mark.slow),
        pytest.param("Llama 4", "tp=2,ep=2", (1, 3), marks=pytest.mark.slow),
        pytest.param("Phi-MoE", "dp=2,tp=2,ep=2", (1, 3), marks=pytest.mark.slow),
    ],
)
def test_a_family_trains_as_in_a_plain_loop(ranks: Any, name: str, axes: str, accumulations: tuple[int, ...]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert cell(ranks, name, Mesh(axes), accumulations=accumulations) <= TOLERANCE


def test_the_experts_of_llama_4_are_known_by_their_class() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    styles = {f"model.layers.{layer}.feed_forward.experts": "sorted" for layer in range(2)}
    assert accel.parallel.expert_plan(make("Llama 4")) == styles
