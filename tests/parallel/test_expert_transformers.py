# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of transformers train on ranks that share their experts as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import ByState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accel
from accel.testing import simulate

transformers = pytest.importorskip("transformers", minversion="5.0")

ROWS, LENGTH, WORDS = 8, 5, 12
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "mlp_only_layers": [0], "norm_topk_prob": True},
}


def build(kind: str, implementation: str = "eager") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, **MODELS[kind], attn_implementation="eager", experts_implementation=implementation
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.double() if implementation == "eager" else model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(ctx: accel.DistContext, model: nn.Module, mesh: str) -> tuple[dict[str, Tensor], list[float]]:
    """Three clipped steps on rows of unequal length, shared unevenly among the ranks."""
    if mesh:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp")
    model, optimizer = accel.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
    run = ByState(ctx)
    norms = []
    generator = torch.Generator().manual_seed(1)
    at, count = ctx.data_parallel
    cuts = [round(ROWS * (i / count) ** 1.5) for i in range(count + 1)]
    for _ in range(3):
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)[cuts[at] : cuts[at + 1]]
        run.begin()
        with run.accumulate(model):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten())
            run.backward(loss, weight=ids[:, 1:].numel())
        run.step(optimizer, max_norm=0.1)
        norms.append(float(run.grad_norm))
    return {name: whole(each) for name, each in model.named_parameters()}, norms


@pytest.mark.parametrize(
    ("kind", "mesh", "implementation"),
    [
        ("Mixtral", "dp=2,ep=2", "eager"),
        pytest.param("Mixtral", "dp=2,ep=2", "grouped_mm", marks=pytest.mark.slow),
        pytest.param("Mixtral", "dp=4,ep=2", "eager", marks=pytest.mark.slow),
        pytest.param("Mixtral", "dp=2,tp=2,ep=4", "eager", marks=pytest.mark.slow),
        pytest.param("Mixtral", "dp=2,tp=2", "eager", marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", "dp=2,ep=2", "eager", marks=pytest.mark.slow),
    ],
)
def test_the_models_own_plan_spreads_its_experts(kind, mesh, implementation):
    ranks = accel.parallel.Axes(
        **{name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    ).world_size
    assert set(accel.parallel.expert_plan(build(kind)).values()) == {"dispatch"}
    parameters, norms = train(accel.single(), build(kind, implementation), "")
    found = simulate(lambda ctx: train(ctx, build(kind, implementation), mesh), ranks, default_group=True)
    for own, own_norms in found:
        # routers and normalizations of these models compute in float32
        assert own_norms == pytest.approx(norms, rel=1e-5)
        for name, each in parameters.items():
            torch.testing.assert_close(own[name], each, rtol=0, atol=1e-4)
