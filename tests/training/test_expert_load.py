# SPDX-License-Identifier: Apache-2.0
"""Experts balanced by a bias, and their tokens: on any mesh and in any window as in a plain loop of one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from catching import assert_raises
from steps import begin_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.errors import ConfigError, PrepareError, StepError
from accel.testing import simulate

EXPERTS, WIDTH, TOKENS, ROWS, SPEED = 4, 6, 5, 11, 0.05
NAMED = {"layers.*.experts": "dispatch"}


class Router(nn.Module):
    """The router of DeepSeek-V3, without groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = (tokens @ self.weight.T).sigmoid()
        indices = (scores + self.e_score_correction_bias).topk(2, -1).indices
        return indices, scores.gather(1, indices)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) / 2)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            row, choice = torch.where(indices == expert)
            outputs = outputs.index_add(0, row, (tokens[row] @ up.T).tanh() @ down.T * weights[row, choice, None])
        return outputs


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        return hidden + self.experts(tokens, *self.router(tokens)).view_as(hidden)


class Mixture(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.recompute = recompute

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        return hidden


def mixture(**options: Any) -> Mixture:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Mixture(**options).double()


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    lengths = 1 + torch.arange(ROWS) % TOKENS
    return TensorDataset(
        torch.randn(ROWS, TOKENS, WIDTH, generator=draw, dtype=torch.float64), torch.arange(TOKENS) < lengths[:, None]
    )


class Result(NamedTuple):
    state: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    counts: list[list[int]]


def plain(accumulation: int, batch: int, epochs: int = 2) -> Result:
    """A loop of torch alone, which counts by `bincount` and moves the bias by its formula."""
    model = mixture()
    chosen: dict[int, list[Tensor]] = {0: [], 1: []}
    for at, layer in enumerate(model.layers):
        layer.router.register_forward_hook(lambda _, __, output, at=at: chosen[at].append(output[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    result = Result({}, [], [], [])
    rows = [samples()[at] for at in range(ROWS)]
    micro = [rows[at : at + batch] for at in range(0, ROWS, batch)]
    for _ in range(epochs):
        for at in range(0, len(micro), accumulation):
            window = [torch.utils.data.default_collate(each) for each in micro[at : at + accumulation]]
            errors = [((model(data) - 1).square().sum(-1) * mask).sum() for data, mask in window]
            kept = torch.cat([mask.flatten() for _, mask in window])
            loss = torch.stack(errors).sum() / kept.sum()
            loss.backward()
            result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            result.losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            for layer, indices in zip(model.layers, chosen.values(), strict=True):
                counts = torch.cat(indices)[kept].flatten().bincount(minlength=EXPERTS).double()
                layer.router.e_score_correction_bias += SPEED * (counts.mean() - counts).sign()
                result.counts.append(counts.long().tolist())
                indices.clear()
    return result._replace(state=model.state_dict())


def prepared(ctx: accel.DistContext, mesh: str, strategy: str, **options: Any) -> tuple[accel.DistContext, Any, Any]:
    if mesh:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    net = mixture(**options)
    plan = accel.parallel.Plan(experts=NAMED, tensor={})
    return ctx, *accel.prepare(ctx, net, torch.optim.AdamW(net.parameters(), lr=0.05), plan=plan)


def load_of(model: nn.Module, speed: float | None = SPEED) -> accel.training.ExpertLoad:
    return accel.training.ExpertLoad(model, experts=dict.fromkeys(NAMED, EXPERTS), speed=speed)


def train(
    ctx: accel.DistContext, mesh: str, accumulation: int, batch: int, *, strategy: str = "fsdp", out: str = "",
    stop: int = 2, **options: Any,
) -> Result:  # fmt: skip
    ctx, model, optimizer = prepared(ctx, mesh, strategy, **options)
    load = load_of(model)
    loader = accel.prepare_loader(ctx, DataLoader(samples(), batch_size=batch), global_batch=batch)
    state = accel.train_state(ctx, accumulation=accumulation)
    items = {"model": model, "optimizer": optimizer}
    state = accel.resume(ctx, out, items, state) if out else state
    result = Result({}, [], [], [])
    sums: list[Tensor] = []
    while state.epoch < stop:
        for each in accel.batches(ctx, loader, state):
            data, mask = each.data
            state = state.next(each)
            count = int(mask.sum()) if each.valid else 0
            with accel.accumulate(ctx, state, model), load.counting(state, mask=mask):
                error = ((model(data) - 1).square().sum(-1) * mask).sum()
                state = accel.backward(ctx, error / max(count, 1), state, weight=count)
            sums.append(torch.stack([error.detach() * bool(count), torch.tensor(float(count), dtype=torch.float64)]))
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
                counts = load.update_(ctx, state)
                result.counts.extend(each.tolist() for each in counts.layers.values())
                total = accel.reduce(ctx, torch.stack(sums).sum(0))
                result.losses.append(float(total[0] / total[1]))
                result.norms.append(float(state.grad_norm))
                sums = []
        if out:
            accel.save_state(ctx, out, items | {"state": state}, step=state.updates)
    return result._replace(state=accel.get_state_dict(ctx, model, dst=None))


def assert_law(found: list[Result], expected: Result) -> None:
    for each in found:
        assert each.counts == expected.counts[-len(each.counts) :]
        assert each.norms == pytest.approx(expected.norms[-len(each.norms) :], abs=1e-10)
        assert each.losses == pytest.approx(expected.losses[-len(each.losses) :], abs=1e-10)
        for name, value in expected.state.items():
            torch.testing.assert_close(each.state[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("ranks", "mesh", "strategy", "accumulation"),
    [
        (1, "", "", 3),
        (2, "dp=2,ep=2", "fsdp", 1),
        (2, "dp=2,ep=2", "ddp", 3),
        (2, "dp=2", "fsdp", 3),
        pytest.param(4, "dp=4,ep=2", "fsdp", 3, marks=pytest.mark.slow),
        (2, "tp=2,ep=2", "fsdp", 1),
    ],
)
def test_biases_and_counts_are_those_of_one_process(ranks, mesh, strategy, accumulation):
    expected = plain(accumulation, 4)
    assert_law(
        simulate(lambda ctx: train(ctx, mesh, accumulation, 4, strategy=strategy), ranks, default_group=True), expected
    )
    assert any(each.abs().max() > SPEED for name, each in expected.state.items() if name.endswith("bias"))


def test_layers_that_a_backward_computes_again_count_once():
    assert_law([train(accel.single(), "", 3, 4, recompute=True)], plain(3, 4))


def test_a_run_goes_on_with_its_bias_on_another_mesh(tmp_path):
    out = str(tmp_path)
    _ = simulate(lambda ctx: train(ctx, "dp=2,ep=2", 3, 4, out=out, stop=1), 2, default_group=True)
    assert_law([train(accel.single(), "", 3, 4, out=out)], plain(3, 4))


class Run(NamedTuple):
    ctx: accel.DistContext
    model: Any
    optimizer: Any
    load: accel.training.ExpertLoad
    batch: accel.Batch
    state: accel.TrainState


def begun(accumulation: int = 1) -> Run:
    """A loop within its first micro-batch."""
    ctx, model, optimizer = prepared(accel.single(), "", "")
    loader = accel.prepare_loader(ctx, DataLoader(samples(), batch_size=2))
    state = accel.train_state(ctx, accumulation=accumulation)
    batch = next(iter(accel.batches(ctx, loader, state)))
    return Run(ctx, model, optimizer, load_of(model), batch, state.next(batch))


def counted(run: Run, state: accel.TrainState) -> accel.TrainState:
    with accel.accumulate(run.ctx, state, run.model), run.load.counting(state):
        return accel.backward(run.ctx, run.model(run.batch.data[0]).square().mean(), state)


def test_an_update_comes_once_after_each_step():
    run = begun()
    state = counted(run, run.state)
    with assert_raises(StepError, got="micro-batch 1 of 1"):
        _ = run.load.update_(run.ctx, state)
    state = accel.optimizer_step(run.ctx, run.optimizer, state)
    _ = run.load.update_(run.ctx, state)
    bias = run.model.layers[0].router.e_score_correction_bias.clone()
    with assert_raises(StepError, problem="the update has come already"):
        _ = run.load.update_(run.ctx, state)
    assert torch.equal(bias, run.model.layers[0].router.e_score_correction_bias)


@pytest.mark.parametrize("forgotten", [1, 2])
def test_a_micro_batch_that_is_not_counted_is_an_error(forgotten):
    run = begun(2)
    loader = accel.prepare_loader(run.ctx, DataLoader(samples(), batch_size=2))
    state = accel.train_state(run.ctx, accumulation=2)
    for micro, batch in enumerate(accel.batches(run.ctx, loader, state), 1):
        state = state.next(batch)
        if micro == forgotten:
            state = accel.backward(run.ctx, run.model(batch.data[0]).square().mean(), state)
        else:
            state = counted(run, state)
        if state.sync:
            state = accel.optimizer_step(run.ctx, run.optimizer, state)
            with assert_raises(StepError, got="1 counted micro-batches of 2"):
                _ = run.load.update_(run.ctx, state)
            break


def test_counts_that_were_not_taken_are_an_error_in_the_next_window():
    run = begun()
    state = accel.optimizer_step(run.ctx, run.optimizer, counted(run, run.state))
    loader = accel.prepare_loader(run.ctx, DataLoader(samples(), batch_size=2))
    state = state.next(next(iter(accel.batches(run.ctx, loader, state))))
    with assert_raises(StepError, problem="counts of the window before were not taken"):
        _ = counted(run, state)


def test_an_abandoned_window_is_not_counted():
    run = begun(2)
    state = accel.training.discard(counted(run, run.state), run.model)
    loader = accel.prepare_loader(run.ctx, DataLoader(samples(), batch_size=2))
    state = state.next(next(iter(accel.batches(run.ctx, loader, state))), last=True)
    state = accel.optimizer_step(run.ctx, run.optimizer, counted(run, state))
    counts = run.load.update_(run.ctx, state)
    assert [int(each.sum()) for each in counts.layers.values()] == [2 * TOKENS * 2] * 2


def test_a_block_without_a_forward_and_a_state_between_windows_are_errors():
    run = begun()
    with assert_raises(StepError, got=r"none of layers\.0\.experts"), run.load.counting(run.state):
        pass
    with (
        assert_raises(StepError, got="a state between two windows"),
        run.load.counting(accel.train_state(run.ctx)),
    ):
        pass


def test_evaluation_outside_of_the_block_is_not_counted():
    run = begun()
    state = counted(run, run.state)
    _ = run.model(run.batch.data[0])
    counts = run.load.update_(run.ctx, accel.optimizer_step(run.ctx, run.optimizer, state))
    assert [int(each.sum()) for each in counts.layers.values()] == [2 * TOKENS * 2] * 2


def test_a_skipped_step_leaves_the_bias():
    run = begun()
    with accel.accumulate(run.ctx, run.state, run.model), run.load.counting(run.state):
        state = accel.backward(run.ctx, run.model(run.batch.data[0]).sum() * float("nan"), run.state)
    state = accel.optimizer_step(run.ctx, run.optimizer, state, nonfinite="skip")
    counts = run.load.update_(run.ctx, state)
    assert not state.stepped
    assert all(each.sum() for each in counts.layers.values())
    assert not run.model.layers[0].router.e_score_correction_bias.any()


def test_stand_ins_do_not_count():
    """Of three samples on two ranks, two a batch, the second rank's last batch stands in for none."""

    def run(ctx: accel.DistContext) -> list[int]:
        ctx, model, optimizer = prepared(ctx, "dp=2,ep=2", "fsdp")
        load = load_of(model)
        data = TensorDataset(torch.randn(3, TOKENS, WIDTH, dtype=torch.float64))
        loader = accel.prepare_loader(ctx, DataLoader(data, batch_size=1))
        state = accel.train_state(ctx)
        totals = []
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            with accel.accumulate(ctx, state, model), load.counting(state):
                state = accel.backward(ctx, model(batch.data[0]).square().mean(), state)
            state = accel.optimizer_step(ctx, optimizer, state)
            totals += [int(each.sum()) for each in load.update_(ctx, state).layers.values()]
        return totals

    assert simulate(run, 2, default_group=True) == [[2 * TOKENS * 2] * 2 + [TOKENS * 2] * 2] * 2


class Everyone(Experts):
    """All experts on all tokens, so that the host reads no number."""

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        every = torch.einsum("ehw,tw->teh", self.up, tokens).tanh()
        chosen = tokens.new_zeros(len(tokens), EXPERTS).scatter(1, indices, weights)
        return torch.einsum("ewh,teh,te->tw", self.down, every, chosen)


def test_the_host_reads_no_count():
    """On torch's `meta` device, whose tensors hold nothing to read."""
    ctx = dataclasses.replace(accel.single(), device=torch.device("meta"))
    net = mixture()
    for layer in net.layers:
        layer.experts = Everyone().double()
    net = net.to("meta")
    load = load_of(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = begin_batch(ctx, accel.train_state(ctx, scaler=accel.LossScale(scale=1.0)))
    data = torch.ones(2, TOKENS, WIDTH, dtype=torch.float64, device="meta")
    with load.counting(state, mask=torch.ones(2, TOKENS)):
        state = accel.backward(ctx, net(data).square().mean(), state)
    state = accel.optimizer_step(ctx, optimizer, state, nonfinite="ignore")
    figures = load.update_(ctx, state).values()
    assert all(each.is_meta for each in figures["all"].values())
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        _ = float(figures["all"]["idle"])


def test_a_mask_has_an_entry_for_each_token_or_each_sample():
    indices = torch.tensor([[0, 1], [1, 2], [1, 3], [0, 3]])
    assert accel.parallel.expert_counts(indices, 4, mask=torch.tensor([True, False])).tolist() == [1, 2, 1, 0]
    assert accel.parallel.expert_counts(indices, 5, mask=torch.tensor([1, 0, 0, 1])).tolist() == [2, 1, 0, 1, 0]
    with assert_raises(ConfigError, expected="and 4 tokens in the mask", got="3 entries"):
        _ = accel.parallel.expert_counts(indices, 4, mask=torch.ones(3))


def test_what_cannot_be_balanced_is_refused():
    model = mixture()
    with assert_raises(PrepareError, got="a model that names none"):
        _ = accel.training.ExpertLoad(model)
    with assert_raises(PrepareError, got=r"patterns without one: \*\.experts"):
        _ = accel.training.ExpertLoad(model, experts={"*.experts": EXPERTS})
    with assert_raises(PrepareError, expected="a buffer 'expert_bias' in layers"):
        _ = accel.training.ExpertLoad(model, experts={"layers.*.experts": EXPERTS}, speed=1.0, bias="expert_bias")
    with assert_raises(PrepareError, got="torch.bfloat16"):
        _ = load_of(mixture().bfloat16())
    for layer in model.layers:
        del layer.router.e_score_correction_bias
        layer.router.e_score_correction_bias = nn.Parameter(torch.zeros(EXPERTS))
    with assert_raises(PrepareError, got="which trains"):
        _ = load_of(model)


def test_a_bias_moves_once_a_step():
    model = mixture()
    first = load_of(model)
    with assert_raises(PrepareError, problem="would move twice a step", where=r"layers\.0\.experts"):
        _ = load_of(model)
    _ = load_of(copy.deepcopy(model))
    _ = load_of(model, speed=None)
    first.close()
    _ = load_of(model)


def test_routers_show_the_same_counts_as_experts():
    run = begun()
    routers = accel.training.ExpertLoad(run.model, experts={"layers.*.router": EXPERTS})
    with routers.counting(run.state):
        state = counted(run, run.state)
    state = accel.optimizer_step(run.ctx, run.optimizer, state)
    one, other = (each.update_(run.ctx, state).layers.values() for each in (run.load, routers))
    assert [each.tolist() for each in one] == [each.tolist() for each in other]
    routers.close()
    with assert_raises(StepError, problem="no experts were called"), routers.counting(run.state):
        _ = run.model(run.batch.data[0])


TRANSFORMERS = {
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 12, "hidden_size": 8, "intermediate_size": 12,
    "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 4, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "layers"), [("DeepseekV3", 1), ("Glm4Moe", 1), ("MiniMaxM2", 2), ("Ernie4_5_Moe", 2), ("Llama4", 0)]
)
def test_models_of_transformers_balance_by_their_own_bias(kind, layers):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config"
    net = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, config)(**TRANSFORMERS))

    def run(ctx: accel.DistContext, mesh: str) -> tuple[list[list[int]], list[list[float]]]:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp") if mesh else ctx
        model = accel.prepare_model(ctx, copy.deepcopy(net))
        load = accel.training.ExpertLoad(model, speed=0.5 if layers else None)
        ids = torch.arange(24).reshape(4, 6) % 12
        at, count = ctx.data_parallel
        with load.counting(begin_batch(ctx), mask=torch.ones(4 // count, 6)):
            _ = model(input_ids=ids.chunk(count)[at], use_cache=False)
        counts = load.update_(ctx, _Stepped())
        biases = accel.get_state_dict(ctx, model, dst=None)
        return [each.tolist() for each in counts.layers.values()], [
            each.flatten().tolist() for name, each in biases.items() if name.endswith("e_score_correction_bias")
        ]

    counts, biases = run(accel.single(), "")
    assert {sum(each) for each in counts} == {48}
    assert sum(any(each) for each in biases) == layers
    assert simulate(lambda ctx: run(ctx, "dp=2,ep=2"), 2, default_group=True) == [(counts, biases)] * 2


class _Stepped:
    stepped = True
