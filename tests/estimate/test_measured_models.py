# SPDX-License-Identifier: Apache-2.0
"""The memory of a step of a model of any kind, described by a run of its code, held against live tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from estimates import STRATEGIES, kept_by_forward, read_config
from fake_ranks import Live, fake_rank
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import accel
from accel.estimate import EstimatedStep, Input, measure, strategy_memory, summary
from accel.tensors import local_part
from accel.topology import Axes


class Experts(nn.Module):
    """Experts whose products torch computes together, each with rows of its own."""

    def __init__(self, experts: int = 4, width: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.first = nn.Parameter(torch.randn(experts, width, 2 * width))
        self.second = nn.Parameter(torch.randn(experts, 2 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = tokens.flatten(0, -2)
        chosen, order = self.router(rows).argmax(-1).sort()
        counts = nn.functional.one_hot(chosen, len(self.first)).sum(0)
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = nn.functional.grouped_mm(rows[order].to(self.first.dtype), self.first, offs=ends)
        return torch._grouped_mm(inner.relu(), mat2=self.second, offs=ends).sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
def test_grouped_products_of_any_format_keep_what_they_keep_with_values(precision: str) -> None:
    described = measure(Experts, "Experts", [Input((2, 48, 32), "float32")])
    model, inputs = Experts(), torch.randn(2, 48, 32)
    if precision == "pure-bf16":
        model, inputs = model.bfloat16(), inputs.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        kept = kept_by_forward(model, [inputs])
    found = described.activations[precision]
    cast = inputs.nbytes if precision == "pure-bf16" else 0  # the description's inputs are fp32
    assert abs(found.saved - kept.saved) <= cast
    assert found.copies == kept.copies


def test_a_summary_of_experts_has_their_activations() -> None:
    found = summary(Experts(), Input((2, 48, 32), "float32"))
    assert found.total.activation_bytes == kept_by_forward(Experts(), [torch.randn(2, 48, 32)]).saved


@pytest.mark.slow
def test_a_mixture_of_experts_of_transformers_has_activations_in_every_format(tmp_path: Path) -> None:
    _ = pytest.importorskip("transformers")
    fields = {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 3,
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 200, "kv_lora_rank": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "q_lora_rank": 24, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    described = read_config(tmp_path / "config.json")
    found = measure(described.make, "", [Input((2, 32), "int64")], labelled=True)
    model, ids = described.make(), torch.randint(200, (2, 32))
    assert found.activations["fp32"] == kept_by_forward(model, [ids], True)
    assert found.activations["pure-bf16"].saved < found.activations["bf16"].saved < found.activations["fp32"].saved


OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, **named: torch.optim.SGD(parameters, momentum=0.9, **named),
}
# what operations of a backward take for themselves is not counted, and grows with the batch
CALLS = {(4, 16, 256): 0.1, (32, 64, 256): 0.16}
# bf16 takes CPUs without it half a minute a step, and optimizers differ in their state alone
STEPS = [
    pytest.param(precision, name, shape, off, marks=[pytest.mark.slow] * (name != "adamw" and rare))
    for precision in ("fp32", "bf16")
    for name in OPTIMIZERS
    for shape, off in CALLS.items()
    for rare in [precision == "bf16" or shape[0] > 4]
]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...], live: Live, bf16: bool) -> None:
    """Two steps; the second is measured, as it has a state of the optimizer from its start."""
    inputs = torch.zeros(shape)
    for _ in range(2):
        live.restart()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(inputs).float().sum()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("precision", "optimizer", "shape", "off"), STEPS)
def test_a_step_of_one_rank_is_as_estimated(precision: Any, optimizer: str, shape: tuple[int, ...], off: float) -> None:
    described = measure(encoder, "encoder", [Input(shape, "float32")])
    estimated = strategy_memory(described, "ddp", EstimatedStep(precision=precision, optimizer=optimizer))
    model = encoder()
    with Live([*model.parameters()]) as live:
        train(model, OPTIMIZERS[optimizer](model.parameters(), foreach=True), shape, live, precision == "bf16")
    assert estimated.total == pytest.approx(live.peak, rel=off), estimated


@pytest.mark.parametrize(
    ("strategy", "shape", "off"),
    [
        pytest.param(name, shape, off, marks=[pytest.mark.slow] * (name == "fsdp-keep" and shape[0] > 4))
        for name in ("fsdp", "fsdp-keep")
        for shape, off in CALLS.items()
    ],
)
def test_a_step_of_shards_is_as_estimated(
    strategy: str, shape: tuple[int, ...], off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = measure(encoder, "encoder", [Input(shape, "float32")])
    estimated = strategy_memory(described, strategy, EstimatedStep(), 64)
    with fake_rank(monkeypatch, Axes(dp=64), strategy="fsdp") as ctx:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            model = encoder()
        model = accel.prepare_model(ctx, model, plan=STRATEGIES[strategy].plan)
        known = [local_part(each) for each in model.parameters()]
        with fake, Live(known) as live:
            train(model, torch.optim.AdamW(model.parameters(), foreach=True), shape, live, bf16=True)
    assert estimated.total == pytest.approx(live.peak, rel=off), estimated
