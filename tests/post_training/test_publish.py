# SPDX-License-Identifier: Apache-2.0
"""Published weights are those of `save_pretrained`, from any mesh; a server that fails is one error on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from catching import assert_raises
from hypothesis import given, settings, strategies as st
from processes import job, patience
from profiles import share
from safetensors.torch import load_file
from torch import Tensor, nn

import accel
from accel.errors import AccelError, ServerError
from accel.post_training import Version, publish, servers
from accel.post_training.servers import Digest
from accel.testing import Simulator, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # as peft reads it
SIZES = {
    "vocab_size": 68,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def made(name: str, *, adapted: bool = False) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=name == "tied")
    model = transformers.LlamaForCausalLM(config)
    if adapted:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, lora)
    return model


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


class Kept:
    """A server that keeps what it is sent, by the names of the hub, and may fail in one of its calls."""

    layout: Any = "hub"
    checks = frozenset({"digest", "dtype", "version"})

    def __init__(self, fails: str = "") -> None:
        self.tensors: dict[str, Tensor] = {}
        self.most = 0
        self._fails = fails
        self._digest = Digest()

    def _enter(self, call: str) -> None:
        if call == self._fails:
            raise ConnectionResetError(f"gone in {call}")

    def begin(self, version: Version) -> None:
        self._enter("begin")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._enter("load")
        assert not self.tensors.keys() & tensors.keys()
        self.most = max(self.most, sum(each.nbytes for each in tensors.values()))
        self.tensors |= {name: each.clone() for name, each in tensors.items()}
        self._digest.add(tensors)

    def commit(self, digest: str, count: int) -> None:
        self._enter("commit")
        servers.check_arrived(self._digest, digest, count)


MESHES = [
    pytest.param("llama", "dp=2", "ddp", marks=pytest.mark.slow),
    ("llama", "dp=2", "fsdp"),
    pytest.param("llama", "dp_replicate=2,dp_shard=2", "fsdp", marks=pytest.mark.slow),
    ("llama", "tp=2", "ddp"),
    pytest.param("llama", "pp=2", "ddp", marks=pytest.mark.slow),
    ("tied", "dp=2", "fsdp"),
    pytest.param("tied", "pp=2", "ddp", marks=pytest.mark.slow),
    pytest.param("llama", "dp=2,tp=2", "fsdp", marks=pytest.mark.slow),
    ("mixtral", "dp=2,ep=2", "fsdp"),
    pytest.param("mixtral", "pp=2,dp=2,ep=2", "fsdp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mesh", "strategy"), MESHES)
def test_any_mesh_publishes_what_save_pretrained_writes(
    ranks: Simulator, tmp_path: Path, name: str, mesh: str, strategy: Any
) -> None:
    expected = saved(made(name), tmp_path)

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
        model, server = accel.prepare_model(ctx, made(name)), Kept() if ctx.is_main_process else None
        return publish(ctx, server, model, version=Version("a", 1), chunk_bytes=4096), server

    size = torch.tensor([int(each.split("=")[1]) for each in mesh.split(",") if not each.startswith("ep")]).prod()
    found = ranks.run(rank, int(size), default_group=True)
    (first, server), *others = found
    assert all(each == first and nothing is None for each, nothing in others)
    assert (first.count, first.digest) == (len(expected), digest(expected))
    assert server.tensors.keys() == expected.keys()
    assert all(torch.equal(server.tensors[key], each) for key, each in expected.items())
    assert server.most <= 4096 + max(each.nbytes for each in made(name).parameters())


@pytest.mark.parametrize("mesh", ["", "dp=2", "tp=2"])
@pytest.mark.parametrize("adapters", ["merged", "alone"])
def test_adapters_are_published_merged_or_alone(ranks: Simulator, tmp_path: Path, mesh: str, adapters: Any) -> None:
    twin = made("llama", adapted=True)
    expected = saved(twin.merge_and_unload() if adapters == "merged" else twin, tmp_path)

    def rank(ctx: accel.DistContext) -> Any:
        ctx = accel.replace(ctx, mesh=mesh, strategy="fsdp" if "dp" in mesh else "ddp") if mesh else ctx
        model, server = accel.prepare_model(ctx, made("llama", adapted=True)), Kept()
        publish(ctx, server, model, version=Version("a", 1), adapters=adapters)
        return server.tensors

    for found in ranks.run(rank, 2 if mesh else 1, default_group=True):
        assert found.keys() == expected.keys()
        for key, each in expected.items():
            torch.testing.assert_close(found[key], each, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "adapters", "refused"),
    [
        ({"modules_to_save": ["lm_head"]}, "merged", ""),
        ({"modules_to_save": ["lm_head"]}, "alone", ""),
        ({"bias": "all"}, "merged", ""),
        ({"bias": "all"}, "alone", "q_proj.base_layer.bias"),
        ({"lora_bias": True}, "merged", "lora_B.default.bias"),
        ({"lora_bias": True}, "alone", "lora_B.default.bias"),
        ({"target_modules": ["embed_tokens"]}, "merged", "embed_tokens.lora_embedding_A"),
        ({"target_modules": ["embed_tokens"]}, "alone", "embed_tokens.lora_embedding_A"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "merged", "trainable_tokens_delta"),
    ],
)
def test_other_tensors_of_adapters_are_published_or_refused(
    options: dict[str, Any], adapters: Any, refused: str
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attention_bias=True)
    lora = peft.LoraConfig(r=4, **{"target_modules": ["q_proj"]} | options, init_lora_weights=False)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.5 * each.requires_grad)
    server = Kept()
    if refused:
        with assert_raises(AccelError, problem="not low-rank") as caught:
            publish(accel.single(), server, model, version=Version("a", 1), adapters=adapters)
        assert refused in caught.value.got
        return
    publish(accel.single(), server, model, version=Version("a", 1), adapters=adapters)
    expected = peft.get_peft_model_state_dict(model)
    if adapters == "merged":
        model.merge_adapter()
        merged = Kept()
        publish(accel.single(), merged, model, version=Version("a", 1))
        model.unmerge_adapter()
        expected = model.merge_and_unload().state_dict()
        assert all(torch.allclose(merged.tensors[name], each) for name, each in expected.items())  # merged once
    assert server.tensors.keys() == expected.keys()
    assert all(torch.allclose(server.tensors[name], each) for name, each in expected.items())


@pytest.mark.parametrize("how", ["merged", "alone"])
def test_an_adapter_may_have_the_name_of_a_module(how: Any) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model, server = peft.get_peft_model(base, lora, adapter_name="layers"), Kept()
    publish(accel.single(), server, model, version=Version("a", 1), adapters=how)
    alone = peft.get_peft_model_state_dict(model, adapter_name="layers")
    expected = model.merge_and_unload().state_dict() if how == "merged" else alone
    assert server.tensors.keys() == expected.keys()
    assert all(torch.allclose(server.tensors[name], each) for name, each in expected.items())


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_adapters_of_a_tied_head_are_published_alone() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    config = transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": True})
    model, server = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora), Kept()
    publish(accel.single(), server, model, version=Version("a", 1), adapters="alone")
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert server.tensors.keys() == expected.keys()
    assert all(torch.equal(server.tensors[name], each) for name, each in expected.items())
    with assert_raises(AccelError, problem="not low-rank"):  # a merge would change the embedding too
        publish(accel.single(), server, model, version=Version("a", 2), adapters="merged")


@pytest.mark.parametrize("fails", ["begin", "load", "commit"])
def test_a_server_that_fails_is_one_error_on_every_rank(fails: str) -> None:
    def rank(ctx: accel.DistContext) -> str:
        ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
        model = accel.prepare_model(ctx, nn.Linear(4, 4))
        server: Any = Kept(fails) if ctx.is_main_process else None
        with pytest.raises(ServerError) as caught:
            publish(ctx, server, model, version=Version("a", 1))
        return caught.value.got

    assert simulate(rank, 2, default_group=True) == [f"ConnectionResetError: gone in {fails}"] * 2


def test_a_local_server_refuses_what_it_should_not_sample_from() -> None:
    ctx, trained, sampled = accel.single(), nn.Linear(4, 2), nn.Linear(4, 2)
    server = servers.local(sampled)
    publish(ctx, server, trained, version=Version("a", 1))
    assert torch.equal(trained.weight, sampled.weight)
    server.check_version(Version("a", 1))
    slips: list[tuple[Any, str]] = [
        (lambda: publish(ctx, server, trained, version=Version("a", 1)), "version 1 of session 'a'"),
        (lambda: server.check_version(Version("b", 1)), "version 1 of session 'a'"),
        (lambda: publish(ctx, server, nn.Linear(4, 3), version=Version("a", 2)), "torch.float32 of shape [3, 4]"),
        (lambda: server.check_version(None), "some of version 1 of session 'a'"),  # half loaded since the line before
        (lambda: publish(ctx, server, trained, version=Version("a", 2), dtype=torch.float64), "torch.float64"),
        (lambda: publish(ctx, None, trained, version=Version("a", 2)), "None"),
        (lambda: publish(ctx, server, nn.Linear(4, 2, bias=False), version=Version("a", 2)), "all but 1, such as bias"),
        (lambda: server.check_version(None), "some of version 1 of session 'a'"),
        (lambda: publish(ctx, cast(Any, sampled), trained, version=Version("a", 2)), "Linear"),
        (lambda: publish(ctx, server, trained, version=cast(Any, 2)), "int"),
        (lambda: publish(ctx, server, trained, version=Version("a", 2), dtype=cast(Any, "bf16")), "str"),
        (lambda: publish(ctx, server, trained, version=Version("a", 2), layout=cast(Any, "hf")), "hf"),
    ]
    for call, got in slips:
        with pytest.raises(AccelError) as caught:
            call()
        assert got in caught.value.got
    publish(ctx, server, trained, version=Version("a", 2))  # the line of the fix
    server.check_version(Version("a", 2))
    publish(ctx, server, trained, version=Version("b", 0))  # a trainer that resumes opens a session


def test_a_spread_model_takes_no_weights() -> None:
    def rank(ctx: accel.DistContext) -> None:
        ctx = accel.replace(ctx, mesh="dp=2", strategy="fsdp")
        model = accel.prepare_model(ctx, nn.Linear(4, 4))
        with assert_raises(ServerError, fix="to a plain copy"):
            publish(ctx, servers.local(model), model, version=Version("a", 1))

    simulate(rank, 2, default_group=True)


def digest(given: Mapping[str, Tensor]) -> str:
    made = Digest()
    for name, each in given.items():
        made.add({name: each})
    return made.value


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


@settings(max_examples=share(0.3), deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from([1, 2, 3, 7, 8, 64]), st.sampled_from([0, 16_380, 540_000]))
def test_a_digest_sees_elements_in_another_order(data: Any, dtype: torch.dtype, count: int, before: int) -> None:
    values = st.sampled_from([0, 1, -1] if dtype.is_signed else [0, 1])
    first = data.draw(st.lists(values, min_size=count, max_size=count))
    second = data.draw(st.permutations(first))
    filling = torch.zeros(before, dtype=dtype)  # so that the elements lie in other rows and parts of the sum
    one, other = (torch.cat([torch.tensor(each, dtype=dtype), filling]) for each in (first, second))
    assert (digest({"a": one}) == digest({"a": other})) == (first == second)
    far = torch.cat([filling, torch.tensor(first, dtype=dtype)])
    assert (digest({"a": far}) == digest({"a": one})) == torch.equal(far, one)
    apart = one[:, None].expand(-1, 2)[:, 1]  # the same elements at other distances
    assert digest({"a": apart}) == digest({"a": one}) == digest({"a": one.clone()})


def test_a_digest_sees_a_transposed_matrix_and_takes_any_size() -> None:
    square = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    assert digest({"a": square}) != digest({"a": square.T})
    assert digest({"a": square.T}) == digest({"a": square.T.contiguous()})
    shapes = [(), (0,), (3, 0), (1,), (5,)]
    assert len({digest({"a": torch.zeros(shape)}) for shape in shapes}) == len(shapes)


def test_a_digest_sees_each_change_and_no_order() -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 2), "c": torch.ones(4, dtype=torch.int32)}
    whole = digest(tensors)
    assert digest(dict(reversed(tensors.items()))) == whole
    for changed in (
        {**tensors, "a": tensors["a"] + 1},
        {**tensors, "b": tensors["b"].view(4)},
        {**tensors, "c": tensors["c"].float()},
        {**tensors, "a": tensors["b"].view(4), "b": tensors["a"].view(2, 2)},
        {"a": tensors["a"], "b": tensors["b"]},
    ):
        assert digest(changed) != whole


PEAK = """
import sys
from pathlib import Path

import torch
from torch import nn

import accel
from accel.post_training import Version, publish
from accel.post_training.servers import Digest, check_arrived


class Counted:
    layout, checks = sys.argv[3], frozenset({"digest"})
    def begin(self, version):
        self.arrived = Digest()
    def load(self, tensors):
        self.arrived.add(tensors)
    def commit(self, digest, count):
        check_arrived(self.arrived, digest, count)


def status(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024


def made(ctx, width, blocks):
    if "ep" not in sys.argv[1]:
        plan = accel.parallel.Plan(tensor={str(at): "colwise_gather_output" for at in range(blocks)})
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))
        return accel.prepare_model(ctx, model, plan=plan if "tp" in sys.argv[1] else None)
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": width // 2, "intermediate_size": width // 4, "num_local_experts": 8, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return accel.prepare_model(ctx, MixtralForCausalLM(MixtralConfig(num_hidden_layers=blocks // 4, **sizes, **heads)))


def run(ctx, model, number):
    server = Counted() if ctx.is_main_process else None
    return publish(ctx, server, model, version=Version("a", number), chunk_bytes=2**24, dtype=torch.float32)


with accel.session() as ctx:
    ctx = accel.replace(ctx, mesh=sys.argv[1], strategy=sys.argv[2])
    model = made(ctx, 2048, 12)
    run(ctx, made(ctx, 64, 4), 0)  # what torch makes once
    base = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    published = run(ctx, model, 1)
    sizes = [each.numel() * 4 for each in model.state_dict().values()]  # of a DTensor the whole
    print("peak", status("VmHWM") - base, published.nbytes, max(sizes), sum(sizes))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mesh", "strategy", "layout"),
    [
        ("dp=2", "fsdp", "model"),
        pytest.param("pp=2", "ddp", "model", marks=pytest.mark.nightly),
        pytest.param("tp=2", "ddp", "model", marks=pytest.mark.nightly),
        pytest.param("dp=2,ep=2", "fsdp", "model", marks=pytest.mark.nightly),
        pytest.param("dp=2,ep=2", "fsdp", "hub", marks=pytest.mark.nightly),
    ],
)
def test_a_publish_takes_memory_for_three_tensors(tmp_path: Path, mesh: str, strategy: str, layout: str) -> None:
    if "ep" in mesh:
        pytest.importorskip("transformers")
    script = tmp_path / "peak.py"
    script.write_text(PEAK)
    common = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}  # else glibc keeps some of what is given free
    words = [sys.executable, str(script), mesh, strategy, layout]
    ranks = [subprocess.Popen(words, env={**common, **each}, stdout=subprocess.PIPE, text=True) for each in job(2)]
    try:
        said = [rank.communicate(timeout=patience(100))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), said
    for each in said:
        peak, nbytes, largest, held = map(int, each.split("peak", 1)[1].split())
        assert nbytes == held or "pp" in mesh  # a stage holds a part
        assert peak <= 3 * largest, peak / largest


class Loose:
    """A server that compares nothing, and may lose what it is sent."""

    layout: Any = "model"
    checks = frozenset[Any]()
    place: Any = "rank"

    def __init__(self, model: nn.Module, *, loses: bool) -> None:
        self._server, self._loses = servers.local(model), loses

    def begin(self, version: Version) -> None:
        self._server.begin(version)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._server.load({name: each * (not self._loses) for name, each in tensors.items()})

    def commit(self, digest: str, count: int) -> None:
        arrived = self._server._arrived
        self._server.commit(arrived.value, arrived.count)

    def sample(self, *asked: Any) -> Any:
        return self._server.sample(*asked)


@pytest.mark.parametrize("vocabulary", [2, 3, 50])
def test_log_probabilities_are_compared_for_any_vocabulary(vocabulary: int) -> None:
    ctx, trained, sampled = accel.single(), *(nn.Embedding(vocabulary, vocabulary) for _ in range(2))
    with torch.no_grad():
        trained.weight.copy_(torch.arange(float(vocabulary)).expand(vocabulary, -1))
        sampled.weight.zero_()
    published = publish(ctx, Loose(sampled, loses=False), trained, version=Version("a", 1))
    assert published.mismatch == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        sampled.weight.zero_()
    with assert_raises(ServerError, problem="other log-probabilities"):
        publish(ctx, Loose(sampled, loses=True), trained, version=Version("a", 1))
