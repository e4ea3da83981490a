# SPDX-License-Identifier: Apache-2.0
"""Models that others made, divided by the plan that is found for them: they compute and train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from steps import two_steps
from tensor_models import whole
from torch import nn

import accel
from accel.errors import ConfigError, PrepareError
from accel.testing import Simulator

TOLERANCE = {"rtol": 0, "atol": 1e-10}
CLASSES = 32


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return make().double()


def assert_steps_as_one_process(
    ranks: Simulator,
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], torch.Tensor],
    *,
    size: int = 2,
    plan: accel.parallel.Plan | None = None,
    tolerance: float = 1e-10,
) -> None:
    """Two steps on every rank, and in one process."""

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=f"tp={size}") if ctx.world_size > 1 else ctx
        model = _seeded(make)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5)
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
        norms = [norm for _, norm in two_steps(ctx, model, optimizer, lambda: loss_of(model))]
        return norms, whole(model)

    expected = rank(accel.single())
    for got in ranks.run(rank, size, default_group=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def _tokens() -> torch.Tensor:
    return torch.randint(0, CLASSES, (2, 8), generator=torch.Generator().manual_seed(5))


def _language_loss(model: nn.Module) -> torch.Tensor:
    ids = _tokens()
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _llama(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": CLASSES, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, "use_cache": False, **options}))


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": CLASSES, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))


SLOW = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tied", "sequence", "overlap"),
    [
        (True, False, False),
        (False, True, True),
        pytest.param(False, False, True, marks=SLOW),
        pytest.param(True, True, False, marks=SLOW),
    ],
)
def test_a_llama_trains_by_its_own_plan(ranks, tied, sequence, overlap):
    plan = accel.parallel.Plan(sequence=sequence, overlap=overlap)
    assert_steps_as_one_process(ranks, lambda: _llama(tie_word_embeddings=tied), _language_loss, size=4, plan=plan)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=SLOW)])
def test_a_tied_gpt2_trains_by_the_plan_that_is_known_for_it(ranks, sequence, overlap):
    assert_steps_as_one_process(
        ranks, _gpt2, _language_loss, plan=accel.parallel.Plan(sequence=sequence, overlap=overlap)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=SLOW)])
def test_adapters_follow_the_layers_that_they_adapt(ranks, sequence, overlap):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make() -> nn.Module:
        targets = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
        return peft.get_peft_model(_llama(), config)

    plan = accel.parallel.Plan(sequence=sequence, overlap=overlap)
    assert_steps_as_one_process(ranks, make, _language_loss, size=4 if sequence else 2, plan=plan)


@SLOW
@pytest.mark.filterwarnings("ignore")
def test_adapters_follow_the_layers_of_a_plan_that_is_found(ranks):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    sizes = {"vocab_size": CLASSES, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}

    def make() -> nn.Module:
        heads = {"num_attention_heads": 4, "max_position_embeddings": 16}
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **heads, **drops))
        config = peft.LoraConfig(
            r=2, target_modules=["query", "value", "dense"], lora_dropout=0.0, init_lora_weights=False
        )
        return peft.get_peft_model(model, config)

    assert_steps_as_one_process(ranks, make, _language_loss, plan=accel.parallel.Plan(overlap=True))


class Adapted(nn.Module):
    """A layer beside a low-rank correction of one's own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.first = nn.Linear(base.in_features, 3, bias=False)
        self.second = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.second(self.first(x))


def test_adapters_of_ones_own_are_named_in_the_plan(ranks):
    plan = accel.parallel.Plan(
        tensor={
            "0": "copy_input",
            "0.base": "colwise",
            "0.first": "replicated_with_grad_allreduce",
            "0.second": "colwise",
            "2.base": "rowwise",
            "2.first": "rowwise",
        }
    )
    inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    assert_steps_as_one_process(
        ranks,
        lambda: nn.Sequential(Adapted(nn.Linear(4, 8)), nn.Tanh(), Adapted(nn.Linear(8, 4))),
        lambda model: model(inputs).square().mean(),
        plan=plan,
    )


MASKS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "none": dict,
    "causal": lambda: {"attn_mask": torch.ones(3, 3, dtype=torch.bool).triu(1)},
    "summands": lambda: {"attn_mask": torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)},
    "by head": lambda: {"attn_mask": torch.linspace(-1, 1, 2 * 4 * 9, dtype=torch.float64).view(8, 3, 3)},
    "padding": lambda: {"key_padding_mask": torch.tensor([[False, False, True], [False, True, True]])},
    "both": lambda: {
        "attn_mask": torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3),
        "key_padding_mask": torch.tensor([[False, False, True], [False, True, True]]),
    },
}


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@settings(max_examples=share(0.3), deadline=None)
@given(
    mask=st.sampled_from(sorted(MASKS)),
    options=st.fixed_dictionaries(
        {
            "bias": st.booleans(),
            "batch_first": st.booleans(),
            "kdim": st.sampled_from([None, 6]),
            "add_bias_kv": st.booleans(),
            "add_zero_attn": st.booleans(),
        }
    ),
    weights=st.sampled_from(["", "mean", "each"]),
    cross=st.booleans(),
    frozen=st.booleans(),
)
def test_attention_with_divided_heads_is_that_of_torch(ranks, mask, options, weights, cross, frozen):
    def make() -> nn.Module:
        return nn.Sequential(nn.MultiheadAttention(8, 4, **options)).requires_grad_(not frozen)

    generator = torch.Generator().manual_seed(7)
    shape = (2, 3) if options["batch_first"] else (3, 2)
    inputs = [torch.randn(*shape, width, generator=generator, dtype=torch.float64) for width in (8, 6)]

    def outputs(model: nn.Module) -> list[torch.Tensor | None]:
        query, other = (each.clone().requires_grad_() for each in inputs)
        value = query * 2 if cross else query
        key = other if options["kdim"] else value
        told = {"need_weights": bool(weights), "average_attn_weights": weights == "mean"}
        output, found = model[0](query, key, value, **told, **MASKS[mask]())
        loss = output.square().sum() + (found.cos().sum() if found is not None else 0)
        loss.backward()
        return [output, found, query.grad, other.grad]

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        model = accel.prepare(ctx, _seeded(make))
        found = [each.detach().clone() if each is not None else None for each in outputs(model)]
        grads = [each.grad for each in model.parameters()]
        return found, [each.full_tensor() if hasattr(each, "full_tensor") else each for each in grads]

    expected = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_a_hint_of_a_mask_that_is_not_given_is_refused(ranks):
    """torch refuses it too; without, no mask would apply."""
    x = torch.ones(2, 3, 8)

    def rank(ctx: accel.DistContext) -> None:
        model = accel.prepare(accel.replace(ctx, mesh="tp=2"), nn.Sequential(nn.MultiheadAttention(8, 4)))
        with assert_raises(PrepareError, got="is_causal, which is a hint"):
            model[0](x, x, x, is_causal=True)

    ranks.run(rank, 2, default_group=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch makes an autograd function while it traces one, and warns of it
def test_attention_of_torch_compiles_in_one_graph(ranks):
    x = torch.linspace(-1, 1, 80, dtype=torch.float64).view(2, 5, 8)

    def rank(ctx: accel.DistContext) -> list[torch.Tensor]:
        model = _seeded(lambda: nn.TransformerEncoderLayer(8, 4, 16, 0.0, batch_first=True))
        if ctx.world_size > 1:
            torch.compiler.reset()
            model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), model)
            model = accel.compile_model(model, nn.TransformerEncoderLayer, backend="aot_eager", fullgraph=True)
        given = x.clone().requires_grad_()
        output = model(given)
        output.square().sum().backward()
        return [output.detach(), given.grad]

    expected = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_attention_without_a_batch(ranks):
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)
    padding = torch.tensor([False, False, True])

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        model = accel.prepare(ctx, _seeded(lambda: nn.Sequential(nn.MultiheadAttention(8, 4))))
        return [each.detach() for each in model[0](inputs, inputs, inputs, key_padding_mask=padding)]

    expected = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore")
def test_a_transformer_of_torch_trains_and_evaluates(ranks):
    source, target = (torch.linspace(-1, 1, 2 * n * 8, dtype=torch.float64).view(2, n, 8).sin() for n in (4, 3))
    padding = torch.tensor([[False] * 4, [False, False, True, True]])

    def make() -> nn.Module:
        return nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return model(source, target, src_key_padding_mask=padding).square().mean()

    assert_steps_as_one_process(ranks, make, loss_of)

    def rank(ctx: accel.DistContext) -> torch.Tensor:
        ctx = accel.replace(ctx, mesh="tp=2") if ctx.world_size > 1 else ctx
        model = accel.prepare(ctx, _seeded(make)).eval()
        with torch.no_grad():
            encoded = model.encoder(source, src_key_padding_mask=padding)
        return encoded.masked_fill(padding[..., None], 0.0)  # torch's fused inference leaves zeros there

    expected = rank(accel.single())
    for got in ranks.run(rank, 2, default_group=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "config", "divided"),
    [
        (
            "IA3Config",
            {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
            "k_proj.base_layer",
        ),
        pytest.param(
            "LoraConfig", {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}, "q_proj.base_layer", marks=SLOW
        ),
        pytest.param(
            "LoHaConfig", {"r": 2, "target_modules": ["q_proj", "down_proj"]}, "q_proj.base_layer", marks=SLOW
        ),
        pytest.param(
            "LoraConfig", {"r": 2, "target_modules": ["q_proj"], "use_dora": True}, "q_proj.base_layer", marks=SLOW
        ),
    ],
)
def test_a_plan_is_found_for_adapters_that_the_declared_plan_does_not_know(ranks, kind, config, divided):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make() -> nn.Module:
        model = peft.get_peft_model(_llama(), getattr(peft, kind)(**config))
        for at, each in enumerate(parameter for parameter in model.parameters() if parameter.requires_grad):
            torch.nn.init.normal_(each, std=0.1, generator=torch.Generator().manual_seed(at))
        return model

    def placement(ctx: accel.DistContext) -> list[str]:
        model = accel.prepare_model(accel.replace(ctx, mesh="tp=2"), _seeded(make))
        weights = [each for name, each in model.named_parameters() if name.endswith(f"{divided}.weight")]
        return [str(each.placements[0]) for each in weights]

    assert ranks.run(placement, 2, default_group=True)[1] == ["S(0)"] * 2
    assert_steps_as_one_process(ranks, make, _language_loss)


@pytest.mark.filterwarnings("ignore")
def test_a_model_computes_the_loss_of_its_labels_from_logits_that_no_rank_gathers(ranks):
    plan = accel.parallel.Plan(head="colwise")
    ids = _tokens().where(torch.rand(2, 8, generator=torch.Generator().manual_seed(1)) < 0.8, torch.tensor(-100))
    seen: list[int] = []

    def loss_of(model: nn.Module) -> torch.Tensor:
        output = model(input_ids=_tokens(), labels=ids)
        seen.append(output.logits.shape[-1])
        return output.loss

    # transformers computes the loss in fp32
    assert_steps_as_one_process(ranks, lambda: _llama(vocab_size=CLASSES + 1), loss_of, plan=plan, tolerance=1e-6)
    assert set(seen) == {CLASSES + 1, CLASSES // 2, CLASSES // 2 + 1}


def test_an_unknown_style_of_a_head_is_refused() -> None:
    with assert_raises(ConfigError, where=r"plan\.head"):
        _ = accel.parallel.Plan(head="rowwise")  # type: ignore[arg-type]
