# SPDX-License-Identifier: Apache-2.0
"""Memory and messages of stages and of experts, held against a step of simulated ranks that train a small model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from estimates import memory_by_moment
from fake_ranks import Live
from live_bytes import _key
from model_configs import transformer_of
from small_llamas import attend_as_on_gpus, llama, sizes_of
from steps import begin_batch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

import accel
from accel.estimate import EstimatedStep, Latent, Transformer, _memory, step_traffic
from accel.estimate._cost import Traffic
from accel.optim import _streamed_state
from accel.parallel._labels import has_state_on_host
from accel.tensors import local_part
from accel.testing import Simulator
from accel.testing._group import SimulatedGroup
from accel.topology import Axes, Plan

SIZES = {"width": 256, "heads": 4, "kv_heads": 4, "inner": 704, "vocabulary": 1000}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, str]]:
    """Bytes that ranks send, by rank and operation; what simulated ranks copy on the way is not theirs."""
    found = Counter[tuple[int, str]]()

    def count(name: str, operation: str, given: Any) -> None:
        inner = getattr(SimulatedGroup, name)

        def counted(self: SimulatedGroup, *args: Any, **options: Any) -> Any:
            size = given(args).nbytes
            if self.size() > 1 and (operation != "all-reduce" or size > 184):  # norms, and figures of batches
                found[self._world_rank(self.rank()), operation] += size
            with _disable_current_modes():
                return inner(self, *args, **options)

        monkeypatch.setattr(SimulatedGroup, name, counted)

    count("send", "send", lambda args: args[0][0])
    for name in ("all_to_all_single", "alltoall_base"):
        count(name, "all-to-all", lambda args: args[1])
    for name in ("all_gather_single", "_allgather_base"):
        count(name, "all-gather", lambda args: args[0])
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        count(name, "reduce-scatter", lambda args: args[1])
    count("allreduce", "all-reduce", lambda args: args[0][0])
    return found


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is not counted, and buckets of state are small."""
    storages = set[int]()
    streams = type(accel.single("cpu").streams)
    pinned, note = streams.pinned, Live._note

    def remembered(self: Any, *args: Any) -> torch.Tensor:
        with _disable_current_modes():
            made = pinned(self, *args)
        storages.add(_key(made))
        return made

    def of_device(self: Live, tensor: torch.Tensor) -> None:
        part = getattr(tensor, "_local_tensor", tensor)
        if _key(part) not in storages:
            note(self, tensor)

    monkeypatch.setattr(streams, "pinned", remembered)
    monkeypatch.setattr(Live, "_note", of_device)
    for module in (_memory, _streamed_state):
        monkeypatch.setattr(module, "STATE_BUCKET", 2**20)


def mixtral(sizes: Transformer) -> Any:
    """A model of transformers whose experts compute one after another."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.MixtralConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_width,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.experts_per_token,
        experts_implementation="eager",
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


def deepseek(sizes: Transformer) -> Any:
    """A model of transformers whose experts compute one after another."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    latent = sizes.latent
    assert latent is not None
    kind = "V3" if sizes.corrected else "V2"
    config = getattr(transformers, f"Deepseek{kind}Config")(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.dense_inner,
        moe_intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=sizes.experts_per_token,
        n_shared_experts=sizes.shared_inner // sizes.inner,
        first_k_dense_replace=sizes.dense,
        n_group=1,
        topk_group=1,
        q_lora_rank=latent.queries,
        kv_lora_rank=latent.keys,
        qk_rope_head_dim=latent.rotated,
        qk_nope_head_dim=sizes.head_width - latent.rotated,
        v_head_dim=latent.values,
        experts_implementation="eager",
        use_cache=False,
    )
    return getattr(transformers, f"Deepseek{kind}ForCausalLM")(config)


def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def peak(
    ctx: accel.DistContext,
    sizes: Transformer,
    axes: Axes,
    step: EstimatedStep,
    plan: Plan,
    sent: Counter[tuple[int, str]],
) -> int:
    """The most bytes of the second step, which has a state of the optimizer from its start."""
    ctx = accel.replace(ctx, mesh=str(axes), precision="bf16", strategy=step.strategy)
    with accel.seeding.seeded(ctx, 0):
        model = (deepseek if sizes.latent else mixtral if sizes.experts else llama)(sizes)
    attend_as_on_gpus(model)
    if step.recompute:
        accel.checkpoint_activations(model, keep=step.keep or ())
    if step.offload:
        accel.offload_activations(model, min_bytes=1)
    if step.chunks > 1:
        accel.chunk_sequence(model, lambda name, _: name.endswith("mlp"), parts=step.chunks)
    if sizes.latent and axes.tp > 1 and axes.ep == 1:  # the estimate has styles; parts would divide the experts too
        styles = accel.parallel.tensor_plan(model, example={"input_ids": torch.zeros(1, 4, dtype=torch.int64)})
        plan = msgspec.structs.replace(plan, tensor=styles)
    model = accel.prepare_model(ctx, model, plan=plan)
    optimizer = accel.prepare_optimizer(ctx, torch.optim.AdamW(model.parameters(), foreach=True))  # as on GPUs
    # ranks that share samples get the same; from these seeds tokens go about evenly to experts, as estimates assume
    generator = torch.Generator().manual_seed(10 + ctx.data_parallel[0])
    ids = torch.randint(sizes.vocabulary, (step.rows * step.micro_batches, step.tokens), generator=generator)
    return peak_of_second_step(ctx, model, optimizer, {"input_ids": ids}, ids, sent)


def peak_of_second_step(
    ctx: accel.DistContext,
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    targets: torch.Tensor,
    sent: Counter[tuple[int, str]],
) -> int:
    """The most bytes of the second step; the first one records a forward, whose tensors without memory do not count."""

    def step(state: accel.TrainState) -> accel.TrainState:
        accel.wait_for_everyone(ctx)
        sent.clear()
        accel.wait_for_everyone(ctx)
        begun = begin_batch(ctx, state)
        _, state = accel.forward_backward(
            ctx, model, begun, batch, targets=targets, loss_fn=loss_of, weight=targets.numel()
        )
        return accel.optimizer_step(ctx, optimizer, state)

    state = step(accel.train_state(ctx))
    known = [*model.parameters(), *model.buffers()]
    if not has_state_on_host(optimizer):
        known += [value for each in optimizer.state.values() for value in each.values()]
    with Live([local_part(each) for each in known if not each.is_meta]) as live:
        _ = step(state)
    return live.peak


LLAMA = sizes_of(**SIZES)
MIXTRAL = sizes_of(**SIZES | {"layers": 2}, experts=4, experts_per_token=2)
DEEPSEEK = sizes_of(
    **SIZES | {"layers": 3, "inner": 256}, experts=4, experts_per_token=2, shared_inner=256, dense=1, dense_inner=704,
    corrected=True,
    latent=Latent(queries=96, keys=64, rotated=32, values=64),
)  # fmt: skip
V3 = msgspec.structs.replace(DEEPSEEK, latent=Latent(queries=96, keys=128, rotated=32, values=64))
V2 = msgspec.structs.replace(V3, corrected=False)
AGAIN = EstimatedStep(tokens=512, recompute=True, keep="products")
FOUR = {"tokens": 512, "micro_batches": 4}
CASES = {
    "replicas of stages": (LLAMA, Axes(pp=2, dp=2), EstimatedStep(**FOUR, strategy="ddp"), Plan(micro_batches=4)),
    "shards of stages": (LLAMA, Axes(pp=2, dp=2), EstimatedStep(**FOUR), Plan(micro_batches=4)),
    "stages alone": (LLAMA, Axes(pp=4), EstimatedStep(**FOUR, strategy="ddp"), Plan(micro_batches=4)),
    "all forwards first": (
        LLAMA, Axes(pp=2), EstimatedStep(**FOUR, strategy="ddp"), Plan(micro_batches=4, schedule="GPipe"),
    ),
    "recomputed": (
        LLAMA, Axes(pp=2, dp=2), EstimatedStep(**FOUR, recompute=True), Plan(micro_batches=4, schedule="GPipe"),
    ),
    "two stages a rank": (
        LLAMA,
        Axes(pp=2, dp=2),
        EstimatedStep(**FOUR),
        Plan(micro_batches=4, schedule="Interleaved1F1B", stages_per_rank=2),
    ),
    "stages that ranks share": (LLAMA, Axes(pp=2, tp=2), EstimatedStep(**FOUR, strategy="ddp"), Plan(micro_batches=4)),
    "replicas": (LLAMA, Axes(dp=2), EstimatedStep(tokens=512, strategy="ddp"), Plan()),
    "replicas, recomputed": (LLAMA, Axes(dp=2), EstimatedStep(tokens=512, strategy="ddp", recompute=True), Plan()),
    "replicas of stages, recomputed": (
        LLAMA, Axes(pp=2, dp=2), EstimatedStep(**FOUR, strategy="ddp", recompute=True), Plan(micro_batches=4),
    ),
    "stages alone, recomputed": (
        LLAMA, Axes(pp=2), EstimatedStep(**FOUR, strategy="ddp", recompute=True), Plan(micro_batches=4),
    ),
    "replicas that hold gradients": (LLAMA, Axes(dp=2), EstimatedStep(**FOUR, strategy="ddp"), Plan(micro_batches=4)),
    "replicas without logits": (LLAMA, Axes(dp=2), EstimatedStep(tokens=512, strategy="ddp"), Plan(logits="deferred")),
    "shards without logits": (LLAMA, Axes(dp=2), EstimatedStep(tokens=512), Plan(logits="deferred")),
    "split heads without logits": (LLAMA, Axes(tp=2), EstimatedStep(tokens=512), Plan(logits="deferred")),
    "activations on the host": (LLAMA, Axes(dp=2), EstimatedStep(tokens=512, strategy="ddp", offload=True), Plan()),
    "shards, activations on the host": (LLAMA, Axes(dp=2), EstimatedStep(tokens=2048, offload=True), Plan()),
    "recomputed, inputs on the host": (
        LLAMA, Axes(dp=2), EstimatedStep(tokens=2048, offload=True, recompute=True), Plan(),
    ),
    "parts of a sequence": (LLAMA, Axes(dp=2), EstimatedStep(tokens=1024, strategy="ddp", chunks=8), Plan()),
    "shards, parts of a sequence": (LLAMA, Axes(dp=2), EstimatedStep(tokens=2048, chunks=8), Plan()),
    "recomputed, parts of a sequence": (
        LLAMA, Axes(dp=2), EstimatedStep(tokens=2048, chunks=8, recompute=True), Plan(),
    ),
    "state on the host": (LLAMA, Axes(dp=2), EstimatedStep(tokens=64, strategy="ddp"), Plan(offload="optimizer")),
    "shards, state on the host": (LLAMA, Axes(dp=2), EstimatedStep(tokens=64), Plan(offload="optimizer")),
    "experts": (MIXTRAL, Axes(dp=4, ep=2), EstimatedStep(tokens=512), Plan()),
    "experts of ranks that share attention": (MIXTRAL, Axes(dp=2, tp=2, ep=2), EstimatedStep(tokens=512), Plan()),
    "each rank its expert": (MIXTRAL, Axes(dp=2, tp=2, ep=4), EstimatedStep(tokens=512, recompute=True), Plan()),
    "experts along tp alone": (MIXTRAL, Axes(tp=2, ep=2), EstimatedStep(tokens=512), Plan()),
    "experts that keep products": (MIXTRAL, Axes(dp=4, ep=2), AGAIN, Plan()),
    "latents": (DEEPSEEK, Axes(dp=4, ep=2), EstimatedStep(tokens=512), Plan()),
    "latents of stages": (DEEPSEEK, Axes(pp=3, dp=2), EstimatedStep(**FOUR), Plan(micro_batches=4)),
    "latents that keep products": (DEEPSEEK, Axes(dp=4, ep=2), AGAIN, Plan()),
    "latents whose heads ranks share": (V2, Axes(tp=2), EstimatedStep(tokens=512, strategy="ddp"), Plan()),
    "latents whose heads ranks share, recomputed": (
        V2, Axes(dp=2, tp=2), EstimatedStep(tokens=512, recompute=True), Plan(),
    ),
    "latents whose heads ranks share, with experts": (
        V2, Axes(dp=2, tp=2, ep=2), EstimatedStep(tokens=512), Plan(),
    ),
    "latents beside a plan that is declared": (
        V3, Axes(dp=2, tp=2, ep=2), EstimatedStep(tokens=512, recompute=True), Plan(),
    ),
}  # fmt: skip


def _expected(traffic: Iterable[Traffic]) -> Counter[str]:
    """Bytes of each operation."""
    found = Counter[str]()
    for each in traffic:
        found[each.operation] += each.bytes
    return found


def _mean_sent(sent: Counter[Any], ranks: Sequence[int]) -> dict[str, float]:
    """Bytes of each operation that ranks have sent, their mean."""
    operations = {operation for rank, operation in sent if rank in ranks}
    return {each: sum(sent[rank, each] for rank in ranks) / len(ranks) for each in operations}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_simulated_ranks_is_as_estimated(ranks: Simulator, sent: Counter[Any], name: str) -> None:
    sizes, axes, step, plan = CASES[name]
    size = axes.world_size
    peaks = ranks.run(lambda ctx: peak(ctx, sizes, axes, step, plan, sent), size, default_group=True)
    for stage in range(axes.pp):
        own = range(stage * size // axes.pp, (stage + 1) * size // axes.pp)
        messages = _mean_sent(sent, own)
        if plan.logits == "deferred" and axes.tp > 1:  # on CPUs small gathers are sent so
            messages["all-gather"] = messages.pop("all-to-all")
        assert messages == _expected(step_traffic(sizes, axes, step, plan, stage=stage))
        found = min(peaks[rank] for rank in own)  # a rank that sums for others takes more
        largest = max(each.total for each in memory_by_moment(sizes, axes, step, plan, stage))
        assert largest == pytest.approx(found, rel=0.1), (stage, largest / found)


SEEN = {
    "text_config": {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "use_cache": False,
    },
    "image_token_index": 999, "vision_feature_layer": -1,
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 4, "image_size": 56, "patch_size": 7,
    },
}  # fmt: skip
STAGES = {
    "alone": (Axes(pp=2), "ddp", False),
    "recomputed": (Axes(pp=2), "ddp", True),
    "shards": (Axes(pp=2, dp=2), "fsdp", False),
    "that ranks share": (Axes(pp=2, tp=2), "ddp", False),
}


def peak_with_images(
    ctx: accel.DistContext, axes: Axes, strategy: Any, sent: Counter[tuple[int, str]], *, again: bool
) -> int:
    """The most bytes of the second step of a model with an encoder of images."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    ctx = accel.replace(ctx, mesh=str(axes), precision="bf16", strategy=strategy)
    with accel.seeding.seeded(ctx, 0):
        model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**SEEN))
    attend_as_on_gpus(model.model.language_model)
    model.model.vision_tower.config._attn_implementation = "sdpa"
    _ = model.model.vision_tower.post_layernorm.requires_grad_(requires_grad=False)  # without effect
    if again:
        accel.checkpoint_activations(model)
    ids = torch.randint(998, (4, 512), generator=torch.Generator().manual_seed(0))
    ids[:, :64] = 999
    batch = {"input_ids": ids, "pixel_values": torch.zeros(4, 3, 56, 56)}
    plan = Plan(micro_batches=4, stages=[[f"model.language_model.layers.{at}"] for at in (0, 2)])
    model = accel.prepare_model(ctx, model, plan=plan, example=batch)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return peak_of_second_step(ctx, model, optimizer, batch, ids, sent)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STAGES)
def test_stages_with_an_encoder_are_as_estimated(ranks: Simulator, sent: Counter[Any], name: str) -> None:
    axes, strategy, again = STAGES[name]
    size = axes.world_size
    peaks = ranks.run(lambda ctx: peak_with_images(ctx, axes, strategy, sent, again=again), size, default_group=True)
    sizes = transformer_of({"model_type": "llava", **SEEN})
    step = EstimatedStep(tokens=512, micro_batches=4, strategy=strategy, recompute=again)
    plan = Plan(micro_batches=4)
    for stage in range(axes.pp):
        own = range(stage * size // axes.pp, (stage + 1) * size // axes.pp)
        expected = _expected(step_traffic(sizes, axes, step, plan, stage=stage))
        assert _mean_sent(sent, own) == pytest.approx(expected, rel=0.01)
        largest = max(each.total for each in memory_by_moment(sizes, axes, step, plan, stage))
        assert largest == pytest.approx(min(peaks[rank] for rank in own), rel=0.1), stage
