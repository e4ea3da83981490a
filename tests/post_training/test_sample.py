# SPDX-License-Identifier: Apache-2.0
"""A sample is a function of key, prompt, sample and place: on any number of ranks, in any batch and order, any mesh."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from profiles import share
from torch import Tensor, nn

import accel
from accel.errors import AccelError, ConfigError
from accel.post_training import SampleRow, Samples, Version, join_samples, publish, sample, servers
from accel.seeding import Key
from accel.testing import Simulator, simulate

WORDS, STOP = 17, 3
KEY = Key(5)


class Recurrent(nn.Module):
    """A causal model without a cache: each logit depends on all tokens before."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(WORDS, 8, generator=generator, dtype=torch.float64))
        self.head = nn.Parameter(torch.randn(8, WORDS, generator=generator, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(1, ids.shape[1] + 1, dtype=torch.float64)[:, None]
        return (self.table[ids] * places.cos()).cumsum(1).tanh() @ self.head


def llama(words: int = WORDS) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).double()


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(vocab_size=WORDS, experts_implementation="eager", **sizes)
    return transformers.MixtralForCausalLM(config).double()


MODELS = {"recurrent": Recurrent, "llama": llama}
PROMPTS = {number: [1 + (number * at) % 11 for at in range(1, 2 + number % 3)] for number in range(5)}


def drawn(ctx: accel.DistContext, model: nn.Module, prompts: Any, *, rows: int = 64, **options: Any) -> Samples:
    given: Any = {"key": KEY, "max_new_tokens": 6, "n": 3, "stop": STOP, **options}
    return sample(ctx, servers.local(model, most_rows=rows), prompts, **given)


def described(samples: Samples) -> dict[tuple[int, int], tuple[Any, ...]]:
    assert samples.logprobs is not None
    found = {}
    for at, length in enumerate(samples.lengths.tolist()):
        logprobs = [round(each, 9) for each in samples.logprobs[at, :length].tolist()]
        found[samples.prompts[at], samples.samples[at]] = (
            samples.ids[at, :length].tolist(),
            logprobs,
            samples.finish_reasons[at],
        )
    return found


@pytest.mark.parametrize("name", MODELS)
def test_any_batch_and_order_gives_the_same_samples(name: str) -> None:
    model, ctx = MODELS[name](), accel.single()
    whole = described(drawn(ctx, model, PROMPTS))
    assert len(whole) == 15
    assert len({str(each) for each in whole.values()}) > 10
    for rows, numbers in ((1, [*PROMPTS]), (4, [3, 0, 4, 1, 2]), (7, [2])):
        some = drawn(ctx, model, {number: PROMPTS[number] for number in numbers}, rows=rows)
        assert described(some) == {at: each for at, each in whole.items() if at[0] in numbers}
    for (prompt, _), (ids, logprobs, reason) in whole.items():
        new = ids[len(PROMPTS[prompt]) :]
        assert (new[-1] == STOP) == (reason == "stop")
        assert STOP not in new[:-1]
        assert reason == "stop" or len(new) == 6
        with torch.no_grad():
            output = model(torch.tensor([ids]))
        logits = output if isinstance(output, Tensor) else output.logits
        expected = logits[0].log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        found = torch.tensor(logprobs[len(PROMPTS[prompt]) :], dtype=torch.float64)
        torch.testing.assert_close(found, expected[len(PROMPTS[prompt]) - 1 :], atol=1e-8, rtol=0)


slow = pytest.mark.slow
MESHES = [
    (llama, "dp=2", "ddp"),
    (llama, "dp=2", "fsdp"),
    pytest.param(llama, "dp_replicate=2,dp_shard=2", "fsdp", marks=slow),
    (llama, "tp=2", "ddp"),
    (llama, "pp=2", "ddp"),
    pytest.param(llama, "dp=2,tp=2", "fsdp", marks=slow),
    pytest.param(llama, "pp=2,dp=2", "ddp", marks=slow),
    pytest.param(llama, "pp=2,dp=2", "fsdp", marks=slow),
    pytest.param(llama, "pp=2,tp=2", "ddp", marks=slow),
    pytest.param(mixtral, "dp=2,ep=2", "ddp", marks=slow),
    pytest.param(mixtral, "dp=2,ep=2", "fsdp", marks=slow),
    pytest.param(mixtral, "dp=2,tp=2,ep=4", "fsdp", marks=slow),
    pytest.param(mixtral, "pp=2,dp=2,ep=2", "fsdp", marks=slow),
    pytest.param(Recurrent, "dp_replicate=2,dp_shard=2", "fsdp", marks=slow),
]


@pytest.mark.parametrize(("make", "mesh", "strategy"), MESHES)
def test_any_mesh_draws_the_samples_of_one_process(ranks: Simulator, make: Any, mesh: str, strategy: Any) -> None:
    whole = described(drawn(accel.single(), make(), PROMPTS))

    def rank(ctx: accel.DistContext) -> Samples:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        part, parts = ctx.data_parallel
        mine = {number: PROMPTS[number] for number in [*PROMPTS][part::parts]}  # of different numbers
        return drawn(ctx, accel.prepare_model(ctx, make()), mine, rows=4)

    size = math.prod(int(each.split("=")[1]) for each in mesh.split(",") if not each.startswith("ep"))
    found: dict[Any, Any] = {}
    for each in ranks.run(rank, size, default_group=True):
        found |= described(each)
    assert {at: each[0] for at, each in found.items()} == {at: each[0] for at, each in whole.items()}


@settings(max_examples=share(0.2))
@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_each_rank_asks_for_its_own_prompts_without_a_message(counts: list[int]) -> None:
    whole = described(drawn(accel.single(), Recurrent(), {at: [at] for at in range(9)}, n=1))

    def rank(ctx: accel.DistContext) -> Samples:
        first = sum(counts[: ctx.rank])
        return drawn(ctx, Recurrent(), {at: [at] for at in range(first, first + counts[ctx.rank])}, n=1)

    parts = simulate(rank, len(counts))
    assert [len(each.prompts) for each in parts] == counts
    if any(counts):
        joined = join_samples([each for each in parts if each.prompts])
        assert described(joined) == {at: each for at, each in whole.items() if at[0] < sum(counts)}


def test_limits_and_the_most_probable_token() -> None:
    ctx, model = accel.single(), Recurrent()
    greedy = drawn(ctx, model, {0: [1]}, n=1, temperature=0.0)
    ids = [1]
    while len(ids) < 7 and ids[-1] != STOP:
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert greedy.ids.tolist() == [ids]
    limited = drawn(ctx, model, PROMPTS, top_k=2)
    assert (limited.drawn_from, drawn(ctx, model, PROMPTS).drawn_from) == ("sampler", "model")
    assert limited.logprobs is not None
    assert bool((limited.logprobs[limited.mask] > -20).all())


@pytest.mark.parametrize("name", MODELS)
def test_rows_leave_the_batch_when_they_end(name: str) -> None:
    model, rows = MODELS[name](), list[int]()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"] if kwargs else args[0])), with_kwargs=True
    )
    found = drawn(accel.single(), model, {0: [1], 1: [2]}, n=4, max_new_tokens=12)
    new = (found.lengths - found.prompt_lengths).tolist()
    assert len({*new}) > 2  # they end at different tokens
    assert rows == [sum(each > step for each in new) for step in range(max(new))]


class Even(nn.Module):
    """Gives every token the same logit, in a dtype: the draws are the random numbers alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 1000, dtype=self.dtype)


def test_the_random_numbers_are_the_same_in_any_dtype() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    first, *others = (drawn(accel.single(), Even(dtype), PROMPTS, stop=()).ids for dtype in dtypes)
    assert len({*first.flatten().tolist()}) > 60
    assert all(torch.equal(each, first) for each in others)


NO_TOKENS: list[Any] = [
    [1.5, 2.0],
    [float("nan")],
    [float("inf")],
    [1, -1],
    [[1, 2]],
    torch.ones(1, 2),
    "text",
    None,
    [True],
]


def test_slips_are_refused() -> None:
    ctx, model = accel.single(), Recurrent()
    server = servers.local(model, version=Version("a", 1))
    prompts: Any = [[1, 2]]
    slips: list[tuple[Any, str]] = [
        (lambda: drawn(ctx, model, {4: []}), "prompts [4]"),
        (lambda: drawn(ctx, model, prompts), "list"),
        (lambda: drawn(ctx, model, {"a": [1]}), "'a'"),
        *((lambda ids=ids: drawn(ctx, model, {0: ids}), "the tokens are not valid") for ids in NO_TOKENS),
        *(
            (lambda stop=stop: drawn(ctx, model, PROMPTS, stop=stop), "the tokens are not valid")
            for stop in (-1, "3", [3.5], None)
        ),
        (lambda: drawn(ctx, model, PROMPTS, key=5), "int"),
        (lambda: drawn(ctx, model, PROMPTS, version=1), "int"),
        (lambda: drawn(ctx, model, PROMPTS, temperature="1"), "temperature='1'"),
        (lambda: drawn(ctx, model, PROMPTS, temperature=torch.ones(2)), "temperature=tensor"),
        (lambda: drawn(ctx, model, PROMPTS, temperature=None), "temperature=None"),
        (lambda: drawn(ctx, model, PROMPTS, temperature=torch.tensor(float("nan"))), "temperature=nan"),
        (lambda: drawn(ctx, model, PROMPTS, top_p=0.0), "top_p=0.0"),
        (lambda: drawn(ctx, model, PROMPTS, top_p="0.5"), "top_p='0.5'"),
        (lambda: drawn(ctx, model, PROMPTS, rows=0), "0"),
        (lambda: sample(ctx, cast(Any, model), PROMPTS, key=KEY, max_new_tokens=1), "Recurrent"),
        (lambda: drawn(ctx, model, PROMPTS, n=0), "0"),
        (lambda: drawn(ctx, model, PROMPTS, temperature=-1.0), "-1"),
        (
            lambda: sample(ctx, server, PROMPTS, key=KEY, max_new_tokens=1, version=Version("a", 2)),
            "version 1 of session 'a'",
        ),
    ]
    for call, got in slips:
        with pytest.raises(AccelError) as caught:
            call()
        assert got in str(caught.value)
    assert sample(ctx, server, PROMPTS, key=KEY, max_new_tokens=1, version=Version("a", 1)).version == Version("a", 1)
    numbered: Any = dict(enumerate(prompts))  # the line of the fix
    right = described(drawn(ctx, model, numbered))
    for ids in (torch.tensor([1, 2]), (1, 2), [1.0, 2.0], torch.tensor([1, 2]).int().numpy()):
        assert described(drawn(ctx, model, {torch.tensor(0).numpy()[()]: ids})) == right
    for stop in (torch.tensor(STOP), torch.tensor([STOP]), [STOP], {STOP}, torch.tensor(STOP).numpy()):
        assert described(drawn(ctx, model, numbered, stop=stop)) == right
    assert drawn(ctx, model, numbered, top_p=1.0).drawn_from == "model"  # no limit


@pytest.mark.parametrize("number", [torch.tensor(0.5), torch.tensor(0.5).numpy()[()], Fraction(1, 2), 0.5])
def test_temperatures_are_numbers_of_any_library(number: Any) -> None:
    ctx, model = accel.single(), Recurrent()
    assert described(drawn(ctx, model, PROMPTS, temperature=number, top_p=number)) == described(
        drawn(ctx, model, PROMPTS, temperature=0.5, top_p=0.5)
    )
    ids = torch.ones(2, 1, dtype=torch.int64)
    found, right = (
        accel.training.generate(ctx, model, ids, max_new_tokens=4, key=KEY, temperature=each) for each in (number, 0.5)
    )
    assert torch.equal(found, right)


def test_sequences_beyond_the_declared_context_are_warned_of() -> None:
    model, ids = llama(), torch.ones(1, 60, dtype=torch.int64)
    calls: list[Any] = [
        lambda new: drawn(accel.single(), model, {0: ids[0]}, n=1, max_new_tokens=new),
        lambda new: accel.training.generate(accel.single(), model, ids, max_new_tokens=new),
    ]
    for call in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(4)
        with pytest.warns(UserWarning, match="the 64 positions"):
            call(5)
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(5)
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "default"}


class Positions(Recurrent):
    """A causal model with a table of 8 positions."""

    def __init__(self, bad: float = 0.0) -> None:
        super().__init__()
        self.places = nn.Embedding(8, WORDS, dtype=torch.float64)
        self.bad = bad

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.places(torch.arange(ids.shape[1])) + self.bad


@pytest.mark.parametrize(
    ("prompt", "new", "fits"), [([1] * 3, 6, True), ([1] * 4, 6, False), ([1] * 9, 1, False), ([WORDS], 1, False)]
)
def test_rows_beyond_the_model_s_tables_are_one_error_on_every_rank(prompt: list[int], new: int, fits: bool) -> None:
    def rank(ctx: accel.DistContext) -> str:
        try:
            _ = drawn(ctx, Positions(), {0: prompt if ctx.rank else [1]}, n=1, max_new_tokens=new, stop=())
            accel.wait_for_everyone(ctx)
        except AccelError as error:
            return str(error)
        return ""

    for said in simulate(rank, 2):
        assert ("Shorten the prompts" in said, f"up to {len(prompt)} tokens with {new} new" in said) == (not fits,) * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_draw_nothing(bad: float, temperature: float) -> None:
    def rank(ctx: accel.DistContext) -> str:
        try:
            _ = drawn(
                ctx, Positions(bad * ctx.rank if ctx.rank else 0.0), {3 + ctx.rank: [1]}, n=1, temperature=temperature
            )
            accel.wait_for_everyone(ctx)
        except AccelError as error:
            return str(error)
        return ""

    assert all("inf or NaN in samples of prompts [4]" in said for said in simulate(rank, 2))


class Embedded(nn.Module):
    """A causal model whose logits of some tokens are NaN."""

    def __init__(self, *wrong: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(WORDS, 8, _weight=torch.randn(WORDS, 8, generator=generator))
        self.head = nn.Linear(8, WORDS)
        with torch.no_grad():
            self.table.weight[list(wrong)] = float("nan")

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


class Own:
    """A user's server that returns what it has."""

    place: Any = "rank"

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def sample(self, ctx: accel.DistContext, requests: Any, options: Any) -> Samples:
        return self._samples


def told(ctx: accel.DistContext, server: Any, prompts: Any) -> str:
    """Return the error of a draw, or of the collective behind it."""
    try:
        _ = sample(ctx, server, prompts, key=KEY, max_new_tokens=1)
        _ = accel.gather(ctx, torch.ones(1))
    except AccelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "fsdp"), ("pp=2", "ddp")])
@pytest.mark.parametrize("wrong", [(), (9,)])
def test_logits_of_one_rank_fail_the_draw_on_all(ranks: Simulator, mesh: str, strategy: Any, wrong: Any) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        own = 9 if strategy == "ddp" or ctx.rank else 1  # stages share the prompts
        return told(ctx, servers.local(accel.prepare_model(ctx, Embedded(*wrong))), {own: [own]})

    said = ranks.run(rank, 2, default_group=True)
    assert all(("inf or NaN in samples of prompts [9]" in each) == bool(wrong) for each in said), said


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("-inf")])
def test_samples_of_one_s_own_server_are_checked(bad: float) -> None:
    def rank(ctx: accel.DistContext) -> str:
        samples = Samples.of([SampleRow([1, 2, 3], 1, logprobs=[-1.0, -1.0], prompt=4 + ctx.rank)])
        assert samples.logprobs is not None
        samples.logprobs[0, 1] = bad if ctx.rank else -1.0
        return told(ctx, Own(samples), {4 + ctx.rank: [1]})

    said = simulate(rank, 2)
    assert all(("inf or NaN in samples of prompts [5]" in each) == (bad != -0.5) for each in said), said


@pytest.mark.parametrize("kind", ["LlamaModel", "BertLMHeadModel", "T5ForConditionalGeneration"])
def test_models_that_add_no_tokens_are_refused_as_generate_refuses_them(kind: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    wide = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4, "num_attention_heads": 4}
    made: Any = getattr(transformers, kind)
    model = made(made.config_class(**sizes, **(wide if kind.startswith("T5") else {"num_attention_heads": 4})))
    said: list[str] = []
    for call in (
        lambda: drawn(accel.single(), model, PROMPTS),
        lambda: accel.training.generate(accel.single(), model, torch.tensor([[1, 2]]), max_new_tokens=6),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(f"{caught.value.problem} {caught.value.fix}")
    assert said[0] == said[1]
    if kind == "BertLMHeadModel":
        model.config.is_decoder = True
        assert drawn(accel.single(), made(model.config), PROMPTS).prompts  # the line of the fix


def test_a_model_of_a_mesh_with_cp_is_refused_with_the_copy_that_draws(ranks: Simulator) -> None:
    whole = described(drawn(accel.single(), llama(), PROMPTS))

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh="cp=2")
        model, copy = accel.prepare_model(ctx, llama()), llama()
        with assert_raises(ConfigError, fix=r"servers\.local\(copy\)"):
            _ = drawn(ctx, model, PROMPTS)
        for each in copy.parameters():
            _ = each.data.zero_()
        server = servers.local(copy)
        version = publish(ctx, server, model, version=Version("a", 1)).version
        return described(sample(ctx, server, PROMPTS, key=KEY, max_new_tokens=6, n=3, stop=STOP, version=version))

    assert ranks.run(rank, 2, default_group=True) == [whole] * 2


@pytest.mark.parametrize(("head", "said"), [("colwise", False), ("colwise_gather_output", True)])
def test_logits_of_a_part_of_the_classes_are_refused_with_the_right_flag(
    ranks: Simulator, head: Any, said: bool
) -> None:
    expected = sample(accel.single(), servers.local(llama(18)), {0: [1, 2]}, key=KEY, max_new_tokens=4)

    def rank(ctx: accel.DistContext) -> Tensor:
        ctx = accel.replace(ctx, mesh="tp=2")
        model = accel.prepare_model(ctx, llama(18), plan=accel.parallel.Plan(head=head))
        with assert_raises(ConfigError, fix=f"vocab_parallel={not said}") as caught:
            sample(ctx, servers.local(model, vocab_parallel=said), {0: [1, 2]}, key=KEY, max_new_tokens=4)
        names: dict[str, Any] = {"servers": servers, "model": model}
        argument = caught.value.fix.removeprefix("Pass ").removesuffix(".")
        exec(f"server = servers.local(model, {argument})", names)
        server = names["server"]
        return sample(ctx, server, {0: [1, 2]}, key=KEY, max_new_tokens=4).ids

    assert all(torch.equal(each, expected.ids) for each in ranks.run(rank, 2, default_group=True))


@pytest.mark.slow
def test_all_stages_refuse_logits_of_a_part_of_the_classes(ranks: Simulator) -> None:
    def rank(ctx: accel.DistContext) -> Tensor:
        ctx = accel.replace(ctx, mesh="tp=2,pp=2")
        model = accel.prepare_model(ctx, llama(18), plan=accel.parallel.Plan(head="colwise"))
        ids = torch.tensor([[1, 2], [3, 4]])
        with assert_raises(ConfigError, expected="18 classes", got="^9 along tp=2", fix="vocab_parallel=True"):
            _ = accel.training.generate(ctx, model, ids, max_new_tokens=3)
        return accel.training.generate(ctx, model, ids, max_new_tokens=3, vocab_parallel=True)

    alone = accel.training.generate(accel.single(), llama(18), torch.tensor([[1, 2], [3, 4]]), max_new_tokens=3)
    assert all(torch.equal(each, alone) for each in ranks.run(rank, 4, default_group=True))
