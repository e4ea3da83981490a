# SPDX-License-Identifier: Apache-2.0
"""Memory and messages of a rank of a mesh, held against a step of a real Llama on fake ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fake_ranks import Counted, Live, fake_mesh
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import accel
from accel.estimate import Step, Transformer, rank_memory, step_traffic
from accel.topology import Axes, Plan


def sizes_of(**changes: Any) -> Transformer:
    sizes = {
        "layers": 4, "width": 1024, "heads": 16, "kv_heads": 4, "head_width": 64, "inner": 2816, "vocabulary": 8000,
    }  # fmt: skip
    return Transformer(**sizes | changes)


def llama(sizes: Transformer) -> Any:
    """A model of transformers, with the attention that GPUs run."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        tie_word_embeddings=sizes.tied,
        use_cache=False,
    )

    def attend(_module: Any, q: Any, k: Any, v: Any, _mask: Any, scaling: float | None = None, **_: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("without_a_mask", attend)
    config._attn_implementation = "without_a_mask"
    return transformers.LlamaForCausalLM(config)


def train(model: Any, step: Step, live: Live, counted: Counted) -> None:
    """Two steps; the second is measured, as it has a state of the optimizer from its start."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on GPUs
    ids = torch.zeros(step.rows, step.tokens, dtype=torch.long)
    for _ in range(2):
        live.restart()
        counted.bytes.clear()
        counted.calls.clear()
        for batch in range(step.micro_batches):
            model.set_requires_gradient_sync(not step.held or batch == step.micro_batches - 1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, position_ids=torch.arange(step.tokens)[None]).loss
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()


def sharded(sizes: Transformer, axes: Axes, step: Step, plan: Plan) -> tuple[int, Mapping[Any, int], Mapping[Any, int]]:
    """The peak of a rank, and bytes and calls by axis and operation, with torch's own `fully_shard`."""
    with fake_mesh({"dp_replicate": axes.dp_replicate, "dp_shard": axes.dp_shard}) as mesh:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            model = llama(sizes)
        if step.recompute:
            accel.checkpoint_activations(model)
        options: dict[str, Any] = {
            "mesh": mesh if axes.dp_replicate > 1 else mesh["dp_shard"],
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        }
        if plan.reshard_after_forward is not None:
            options["reshard_after_forward"] = plan.reshard_after_forward
        for block in model.model.layers:  # outside of the mode: a mesh looks its own rank up
            fully_shard(block, **options)
        fully_shard(model, **options)
        groups = {name: mesh[name].get_group() for name in mesh.mesh_dim_names or ()}
        local = [each.to_local() for each in model.parameters()]
        with fake, Counted(groups) as counted, Live([*local, *model.buffers()]) as live:
            train(model, step, live, counted)
    return live.peak, counted.bytes, counted.calls


CASES = {
    "of the default run": (Axes(dp_replicate=16, dp_shard=64), Step(tokens=1024), Plan(), {"layers": 2}),
    "held": (Axes(dp_shard=1024), Step(tokens=2048, micro_batches=2), Plan(), {}),
    "exchanged each time": (Axes(dp_shard=1024), Step(tokens=2048, micro_batches=2, held=False), Plan(), {}),
    "uneven shards": (Axes(dp_shard=1000), Step(tokens=512), Plan(), {"vocabulary": 1000}),
    "kept whole": (Axes(dp_shard=64), Step(tokens=512), Plan(reshard_after_forward=False), {"vocabulary": 1000}),
    "put apart": (Axes(dp_shard=64), Step(tokens=2048), Plan(reshard_after_forward=True), {}),
    "recomputed": (Axes(dp_replicate=4, dp_shard=16), Step(tokens=4096, recompute=True), Plan(), {"vocabulary": 1000}),
    "replicas": (Axes(dp_replicate=1024, dp_shard=1), Step(tokens=1024), Plan(), {}),
}


@pytest.mark.parametrize("name", [*CASES][:1] + [pytest.param(name, marks=pytest.mark.slow) for name in [*CASES][1:]])
def test_a_step_of_a_sharded_llama_is_as_estimated(name: str) -> None:
    axes, step, plan, changes = CASES[name]
    sizes = sizes_of(**changes)
    peak, total, calls = sharded(sizes, axes, step, plan)
    assert rank_memory(sizes, axes, step, plan).total == pytest.approx(peak, rel=0.1)
    expected = step_traffic(sizes, axes, step, plan)
    assert {(each.axis, each.operation): each.bytes for each in expected} == total
    assert {(each.axis, each.operation): each.calls for each in expected} == calls
