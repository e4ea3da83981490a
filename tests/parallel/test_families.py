# SPDX-License-Identifier: Apache-2.0
"""One family for each mechanism of found plans trains on a mesh as in a plain loop; the rest is a benchmark's table."""

from __future__ import annotations

from typing import Any

import pytest
from families import MESHES, TOLERANCE, Mesh, cell

import accel


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("BERT", "tp=2"),  # a tied head whose bias two modules name
        ("BLOOM", "tp=2"),  # a fused projection, biases with an entry for each head
        pytest.param("T5", "dp=2,tp=2", marks=pytest.mark.slow),  # relative positions that blocks hand on
        pytest.param("DeepSeek-V2", "tp=2", marks=pytest.mark.slow),  # latents, whose gradients are summands
        pytest.param("DeepSeek-V3", "tp=2", marks=pytest.mark.slow),  # latents beside a plan that is declared
        pytest.param("Mamba", "tp=2", marks=pytest.mark.slow),  # parameters that are read without a call
        ("Swin", "tp=2"),  # modules that make biases with an entry for each head
        pytest.param("MPNet", "tp=2", marks=pytest.mark.slow),  # biases made once for all blocks, a width of all heads
        pytest.param("CodeGen", "tp=2", marks=pytest.mark.slow),  # groups of packs in one layer
        pytest.param("Falcon, grouped", "tp=4", marks=pytest.mark.slow),  # fewer keys than ranks, in one layer
        pytest.param("Falcon, multi-query ALiBi", "tp=2", marks=pytest.mark.slow),  # one key, biases of all heads
        pytest.param("GPT-BigCode", "tp=2", marks=pytest.mark.slow),  # one key behind the queries, in one layer
        pytest.param("Switch Transformers", "tp=2", marks=pytest.mark.slow),  # experts that ask for values
        pytest.param("XLM", "tp=2", marks=pytest.mark.slow),  # values that decide outside of single modules
        pytest.param("Doge", "tp=2", marks=pytest.mark.slow),  # a declared plan that no rank can compute
        pytest.param("AST", "tp=2", marks=pytest.mark.slow),  # spectra
        pytest.param("DeBERTa-v2", "pp=2", marks=pytest.mark.slow),  # a trace of scripted functions
        pytest.param("BLOOM", "pp=2,tp=2", marks=pytest.mark.slow),  # biases with an entry for each head, in a trace
        pytest.param("DeiT", "pp=2,tp=2", marks=pytest.mark.slow),  # micro-batches of one row, tokens that all share
        pytest.param("DeiT", "pp=4", marks=pytest.mark.slow),  # gradients that are views of received memory
        pytest.param("GPT-2", "dp=2,pp=2", marks=pytest.mark.slow),  # stages that are sharded
        ("T5", "cp=2"),  # relative positions, cross-attention, padding in an encoder
        pytest.param("BART", "cp=2", marks=pytest.mark.slow),  # tables of positions that count from 0
        pytest.param("RoBERTa", "cp=2", marks=pytest.mark.slow),  # positions that are kept for padding
        pytest.param("Mistral", "cp=2", marks=pytest.mark.slow),  # windows beside padding
        ("BLOOM", "cp=2"),  # scores of its own, and padding
        pytest.param("GPT-J", "cp=2", marks=pytest.mark.slow),  # whole again behind its blocks
        pytest.param("StableLM", "cp=2", marks=pytest.mark.slow),  # keywords that a block drops
        pytest.param("Whisper", "cp=2", marks=pytest.mark.slow),  # sounds that are not cut
        pytest.param("CLIP", "cp=2", marks=pytest.mark.slow),  # texts and images that the model cuts
        pytest.param("BigBird, sparse", "cp=2", marks=pytest.mark.slow),  # modules that follow from the length
        pytest.param("LLaVA", "cp=2", marks=pytest.mark.slow),  # images among tokens
        pytest.param("Switch Transformers", "cp=2", marks=pytest.mark.slow),  # masks of keys alone, experts left out
        pytest.param("T5Gemma", "cp=2", marks=pytest.mark.slow),  # positions of two sequences, windows around each
        pytest.param("nn.Transformer", "cp=2", marks=pytest.mark.slow),  # torch's attention
        pytest.param("T5", "tp=2,cp=2", marks=pytest.mark.slow),  # relative positions of own heads, at own positions
        pytest.param("CodeGen", "tp=2,cp=2", marks=pytest.mark.slow),  # scores of its own, of groups of packs
        pytest.param("LLaVA", "tp=2,cp=2", marks=pytest.mark.slow),  # images among tokens
    ],
)
def test_a_family_trains_as_in_a_plain_loop(ranks: Any, name: str, mesh: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert cell(ranks, name, MESHES.get(mesh) or Mesh(mesh), accumulations=(3,)) <= TOLERANCE


def _in_parts(ctx: accel.DistContext, model: Any, optimizer: Any, _example: Any) -> Any:
    return accel.prepare(ctx, model, optimizer, plan=accel.parallel.Plan(sequence=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "OLMo 2",  # norms over all heads
        pytest.param("GLM-4", marks=pytest.mark.slow),
        pytest.param("Mixtral", marks=pytest.mark.slow),
        pytest.param("Phi-3", marks=pytest.mark.slow),
        pytest.param("CodeGen", marks=pytest.mark.slow),  # found plans from here on
        pytest.param("Falcon, multi-query ALiBi", marks=pytest.mark.slow),
        pytest.param("StableLM", marks=pytest.mark.slow),
        pytest.param("DeepSeek-V2", marks=pytest.mark.slow),
    ],
)
def test_modules_that_need_all_tokens_stand_between_those_that_work_on_parts(ranks: Any, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert cell(ranks, name, Mesh("tp=2", prepare=_in_parts), accumulations=(3,)) <= TOLERANCE
