# SPDX-License-Identifier: Apache-2.0
"""Encoders of transformers are called by themselves and by their models' own `generate`; accel's refuses these."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import assert_raises
from torch.utils.data import DataLoader

import accel
from accel.parallel import Plan
from accel.testing import Simulator

transformers = pytest.importorskip("transformers")

IDS = torch.randint(3, 60, (4, 6), generator=torch.Generator().manual_seed(0))
FRAMES = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1))
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 8, "vocab_size": 64, "dropout": 0.0, **_HEADS}
_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2}
_BERT = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def _bart() -> Any:
    config = transformers.BartConfig(**_LAYERS, **_TOKENS, forced_eos_token_id=None)
    return transformers.BartForConditionalGeneration(config)


def _t5() -> Any:
    sizes = {
        "vocab_size": 64,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def _whisper() -> Any:
    extra = {"num_mel_bins": 8, "max_source_positions": 16, "begin_suppress_tokens": None}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**_LAYERS, **_TOKENS, **extra))


def _two_berts() -> Any:
    parts = [transformers.BertConfig(**_BERT) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    model = transformers.EncoderDecoderModel(config=config)
    model.encoder.pooler = None
    return model


FAMILIES: dict[str, Callable[[], Any]] = {"bart": _bart, "t5": _t5, "whisper": _whisper, "two berts": _two_berts}
CELLS = [
    ("bart", "fsdp", "dp=2"),
    *(pytest.param(family, "fsdp", "dp=2", marks=pytest.mark.slow) for family in list(FAMILIES)[1:]),
    *(pytest.param(family, "ddp", "dp=2", marks=pytest.mark.slow) for family in FAMILIES),
    *(pytest.param(family, "fsdp", "dp_replicate=2,dp_shard=2", marks=pytest.mark.slow) for family in FAMILIES),
]


def _inputs(family: str) -> dict[str, torch.Tensor]:
    return {"input_features": FRAMES} if family == "whisper" else {"input_ids": IDS}


def _made(family: str) -> Any:
    torch.manual_seed(3)
    return FAMILIES[family]().eval()


def _generated(ctx: accel.DistContext, family: str, plan: Plan | None = None) -> Any:
    net = accel.unwrap_model(accel.prepare_model(ctx, _made(family), plan=plan))
    with torch.no_grad():
        return net.generate(**_inputs(family), max_new_tokens=4, do_sample=False).tolist()


def _trained(ctx: accel.DistContext, family: str) -> Any:
    net = _made(family)
    encoder = net.get_encoder()  # before the model is prepared, and called before the model
    model = accel.prepare_model(ctx, net)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = accel.prepare_loader(ctx, DataLoader(list(range(4)) * 2, batch_size=4), global_batch=4)
    state = accel.train_state(ctx, accumulation=2)
    for batch in accel.batches(ctx, loader, state):
        state = state.next(batch)
        given = {name: each[batch.data] for name, each in _inputs(family).items()}
        with accel.accumulate(ctx, state, model):
            hidden = encoder(**given)[0]
            more = encoder(**{name: each.flip(-1) for name, each in given.items()})[0]
            logits = model(encoder_outputs=(hidden,), decoder_input_ids=IDS[batch.data, :3]).logits
            state = accel.backward(ctx, logits.square().mean() + hidden.square().mean() + more.mean(), state)
        if state.sync:
            state = accel.optimizer_step(ctx, sgd, state)
    return accel.get_state_dict(ctx, model)


@functools.cache
def _alone(call: Callable[..., Any], family: str) -> Any:
    return call(accel.single(), family)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # that an output is a view
@pytest.mark.parametrize(("family", "strategy", "mesh"), CELLS)
def test_encoders_called_alone_train_and_generate_as_one_process(
    ranks: Simulator, family: str, strategy: Any, mesh: str
) -> None:
    def run(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, strategy=strategy, mesh=mesh)
        named = _generated(ctx, family, Plan(methods=("generate",)))
        return _generated(ctx, family), named, _trained(ctx, family)

    generated, named, trained = ranks.run(run, 4 if "," in mesh else 2, default_group=True)[0]
    assert generated == _alone(_generated, family)
    assert named == generated
    for name, value in _alone(_trained, family).items():
        torch.testing.assert_close(trained[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_padding_is_masked_by_generate_of_a_sharded_model_in_bf16(ranks: Simulator) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    padded = IDS.clone()
    padded[0, :3] = 0

    def run(ctx: accel.DistContext) -> Any:
        torch.manual_seed(3)
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
        ctx = accel.replace(ctx, precision="bf16", strategy="fsdp" if ctx.world_size > 1 else "ddp")
        net = accel.unwrap_model(accel.prepare_model(ctx, net))
        with torch.no_grad(), accel.autocast(ctx):
            return net.generate(input_ids=padded, max_new_tokens=4, do_sample=False).tolist()

    assert ranks.run(run, 2, default_group=True)[0] == run(accel.single())


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_of_accel_names_the_call_of_an_encoder_decoders_own(family: str) -> None:
    ctx = accel.single()
    net = _made(family)
    with assert_raises(accel.errors.ConfigError, problem="encoder-decoder") as raised:
        _ = accel.training.generate(ctx, net, IDS, max_new_tokens=4)
    names = {"accel": accel, "model": net, "ids": IDS, "input_features": FRAMES}
    with torch.no_grad():
        found = eval(raised.value.fix.partition(": ")[2], names).tolist()
    assert found == _alone(_generated, family)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_named_call_works_on_several_ranks(ranks: Simulator, strategy: Any) -> None:
    def run(ctx: accel.DistContext) -> Any:
        model = accel.prepare_model(accel.replace(ctx, strategy=strategy), _made("bart"))
        mask = torch.ones_like(IDS)
        with assert_raises(accel.errors.ConfigError, problem="encoder-decoder") as raised:
            _ = accel.training.generate(ctx, model, IDS, attention_mask=mask, max_new_tokens=4)
        names = {"accel": accel, "model": model, "ids": IDS, "attention_mask": mask}
        with torch.no_grad():
            return eval(raised.value.fix.partition(": ")[2], names).tolist()

    assert ranks.run(run, 2, default_group=True)[0] == _alone(_generated, "bart")


def test_tokens_of_a_decoder_can_be_added_by_its_inputs() -> None:
    net = _made("t5")
    start = torch.zeros(len(IDS), 1, dtype=torch.long)

    def inputs_of(ids: torch.Tensor) -> Any:
        return {"input_ids": IDS, "decoder_input_ids": ids}

    found = accel.training.generate(
        accel.single(), net, start, max_new_tokens=4, cache=False, inputs_of=inputs_of, select=lambda out: out.logits
    )
    with torch.no_grad():
        own = net.generate(input_ids=IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert found.tolist() == own.tolist()


_LLAMA = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def _without_head() -> Any:
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **_LLAMA))


def _bert(*, is_decoder: bool) -> Any:
    return transformers.BertLMHeadModel(transformers.BertConfig(**_BERT, is_decoder=is_decoder)).eval()


def test_models_without_a_language_head_are_refused() -> None:
    net = _without_head()
    with assert_raises(accel.errors.ConfigError, got=r"can_generate\(\) is False"):
        _ = accel.training.generate(accel.single(), net, IDS, max_new_tokens=2)
    table = torch.randn(8, 64)
    select = lambda output: output.last_hidden_state @ table  # noqa: E731 - a head of the caller's own
    assert accel.training.generate(accel.single(), net, IDS, max_new_tokens=2, select=select).shape == (4, 8)


def test_a_model_that_attends_to_later_tokens_is_refused() -> None:
    with assert_raises(accel.errors.ConfigError, problem="later tokens"):
        _ = accel.training.generate(accel.single(), _bert(is_decoder=False), IDS, max_new_tokens=2)
    assert_same_as_its_own(_bert(is_decoder=True))
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    assert_same_as_its_own(
        transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, intermediate_size=16)).eval()
    )
    config = transformers.BartConfig(**_LAYERS, **_TOKENS, forced_eos_token_id=None)
    assert_same_as_its_own(transformers.BartForCausalLM(config).eval())


def assert_same_as_its_own(net: Any) -> None:
    found = accel.training.generate(accel.single(), net, IDS, max_new_tokens=3)
    with torch.no_grad():
        own = net.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert found.tolist() == own.tolist()
