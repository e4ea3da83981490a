# SPDX-License-Identifier: Apache-2.0
"""vLLM as a server, against a stub of its documented endpoints; `test_vllm_engine.py` runs vLLM itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from catching import assert_raises
from processes import patience
from safetensors.torch import load_file

import accel
from accel.errors import AccelError, ConfigError, ServerError
from accel.post_training import Samples, Version, publish, sample, servers
from accel.seeding import Key
from accel.testing import Simulator, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # as peft reads it
OPTIONS: dict[str, Any] = {"key": Key(3), "max_new_tokens": 5, "n": 2, "stop": 10}
PROMPTS = {number: [number % 7, 1] for number in range(3)}


def llama(seed: int = 0, *, adapted: bool = False) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, **sizes))
    torch.nn.init.normal_(model.lm_head.weight)  # a distribution that is far from an even one
    if adapted:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, lora)
    return model


class Stub:
    """The endpoints of vLLM's server that are used, as its documentation has them."""

    def __init__(self, folder: Path, fault: str = "") -> None:
        self.folder, self.fault = folder, fault
        self.awake = {"weights", "kv_cache"}
        self.calls: list[str] = []
        self.adapters: dict[str, Any] = {}
        self.base = llama(9)
        self.lock = threading.Lock()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        at = urlsplit(path)
        tags = parse_qs(at.query).get("tags", ["weights", "kv_cache"])
        self.calls.append(path)
        if self.fault and self.fault in path:
            return 500, {"error": "of this stub"}
        match at.path:
            case "/sleep":
                self.awake = set()
                for each in self.base.parameters():
                    torch.nn.init.constant_(each, 0.0)
            case "/wake_up":
                self.awake |= {*tags}
            case "/collective_rpc":
                assert body == {"method": "reload_weights"}
                assert self.awake == {"weights"}
                if self.fault != "reads nothing":
                    self.read()
            case "/v1/load_lora_adapter":
                peft = pytest.importorskip("peft")
                if body["lora_name"] in self.adapters:
                    return 400, {"error": "already loaded"}
                self.adapters[body["lora_name"]] = peft.PeftModel.from_pretrained(llama(), body["lora_path"]).eval()
            case "/v1/unload_lora_adapter":
                if self.adapters.pop(body["lora_name"], None) is None:
                    return 404, {"error": "no such adapter"}
            case "/v1/completions":
                return self.complete(body)
            case _:
                return 404, {"detail": "Not Found"}
        return 200, {}

    def read(self) -> None:
        index = json.loads((self.folder / "model.safetensors.index.json").read_text())["weight_map"]
        found = {name: each for file in {*index.values()} for name, each in load_file(self.folder / file).items()}
        assert found.keys() == index.keys()
        self.base.load_state_dict(found)

    def complete(self, body: Any) -> tuple[int, Any]:
        if self.awake != {"weights", "kv_cache"}:
            return 500, {"error": "asleep"}
        known = {str(self.folder): self.base, **self.adapters}
        if body["model"] not in known:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        server = servers.local(known[body["model"]])
        found = sample(
            accel.single(),
            server,
            {0: body["prompt"]},
            key=Key(body["seed"]),
            max_new_tokens=body["max_tokens"],
            stop=body["stop_token_ids"],
            temperature=body["temperature"],
            top_p=body["top_p"] if body["top_p"] < 1 else None,
        )
        assert body["return_token_ids"]
        assert body["ignore_eos"]
        assert found.logprobs is not None
        start = len(body["prompt"])
        choice = {
            "index": 0,
            "text": "",
            "token_ids": found.ids[0, start:].tolist(),
            "prompt_token_ids": body["prompt"] if self.fault != "other prompt" else [1],
            "logprobs": {"token_logprobs": found.logprobs[0, start:].tolist(), "tokens": [], "top_logprobs": []},
            "finish_reason": found.finish_reasons[0],
        }
        if self.fault == "old":
            del choice["token_ids"]
        return 200, {"id": "cmpl-1", "choices": [choice]}


@contextmanager
def stubbed(folder: Path, fault: str = "") -> Generator[tuple[Stub, str]]:
    stub = Stub(folder, fault)

    class Handler(BaseHTTPRequestHandler):
        wbufsize = -1

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if data and self.headers["Content-Type"] != "application/json":  # as vLLM does
                status, value = 400, {"error": {"message": "Unsupported Media Type"}}
            else:
                with stub.lock:
                    status, value = stub.answer(self.path, json.loads(data) if data else None)
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        yield stub, f"http://127.0.0.1:{listener.server_address[1]}"
        listener.shutdown()


def scored(model: Any, samples: Samples) -> float:
    """The largest distance of samples' log-probabilities from a model's."""
    assert samples.logprobs is not None
    with torch.no_grad():
        found = model(samples.ids).logits.log_softmax(-1)[:, :-1].gather(-1, samples.ids[:, 1:, None])[..., 0]
    return float(((found - samples.logprobs[:, 1:]).abs() * samples.mask[:, 1:]).max())


@pytest.mark.parametrize(
    ("mesh", "strategy", "head"),
    [
        ("", "ddp", None),
        pytest.param("dp=2", "fsdp", None, marks=pytest.mark.slow),
        pytest.param("tp=2", "ddp", None, marks=pytest.mark.slow),
        pytest.param("tp=2", "ddp", "colwise", marks=pytest.mark.slow),
        pytest.param("pp=2", "ddp", None, marks=pytest.mark.slow),
        pytest.param("cp=2", "ddp", None, marks=pytest.mark.slow),
    ],
)
def test_weights_reach_the_server_and_are_compared(
    ranks: Simulator, tmp_path: Path, mesh: str, strategy: Any, head: Any
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"older weights")
    with stubbed(tmp_path) as (stub, url):

        def rank(ctx: accel.DistContext) -> Any:
            ctx = accel.replace(ctx, mesh=mesh, strategy=strategy) if mesh else ctx
            model = accel.prepare_model(ctx, llama(), plan=accel.parallel.Plan(head=head) if head else None)
            client = servers.vllm(url, tmp_path, timeout_s=patience(60))
            version = Version("a/b", 1)
            sends = client if ctx.is_main_process else None
            options: Any = {"version": version, "chunk_bytes": 4096, "vocab_parallel": head == "colwise"}
            published = publish(ctx, sends, model, **options)
            return published, sample(ctx, client, PROMPTS, version=version, **OPTIONS)

        for published, samples in ranks.run(rank, 2 if mesh else 1, default_group=True):
            assert published.mismatch < 1e-5
            assert (samples.drawn_from, samples.version, len(samples.prompts)) == ("model", Version("a/b", 1), 6)
            assert scored(llama(), samples) < 1e-5
    assert not (tmp_path / "model.safetensors").exists()
    verbs = [each for each in stub.calls if "completions" not in each]
    assert verbs == ["/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]


def test_adapters_alone_are_loaded_by_the_name_of_their_version(tmp_path: Path) -> None:
    ctx = accel.single()
    model = llama(adapted=True)
    with stubbed(tmp_path) as (stub, url):
        client = servers.vllm(url, tmp_path, adapter=model.peft_config["default"], timeout_s=patience(60))
        for number in (1, 2):
            with torch.no_grad():
                for name, each in model.named_parameters():
                    each.add_(0.1 * number if "lora_A" in name else 0.0)
            version = Version("a/b", number)
            assert publish(ctx, client, model, version=version, adapters="alone", chunk_bytes=64).mismatch is not None
            assert [*stub.adapters] == [f"a%2Fb-{number}"]
            assert scored(model.eval(), sample(ctx, client, PROMPTS, version=version, **OPTIONS)) < 1e-5
    assert [each.name for each in sorted(tmp_path.iterdir()) if each.is_dir()] == ["a%2Fb-2"]


@pytest.mark.slow
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("adapted", [True, False])
def test_a_trainer_that_dies_in_a_publish_leaves_weights_that_the_next_one_replaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapted: bool, at: int
) -> None:
    ctx, model, writes = accel.single(), llama(adapted=adapted), list[Any]()
    config = model.peft_config["default"] if adapted else None
    options: Any = {"adapters": "alone"} if adapted else {}

    class Died(BaseException):
        pass

    with stubbed(tmp_path) as (stub, url):
        client = servers.vllm(url, tmp_path, adapter=config, timeout_s=patience(60))
        for number in (1, 2):
            publish(ctx, client, model, version=Version("a", number), **options)

        def dies(self: Any, state: Any) -> None:
            writes.append(state)
            if len(writes) > at // 2:
                if at % 2:  # behind the write
                    real(self, state)
                raise Died
            real(self, state)

        real = servers.VllmServer._write
        with monkeypatch.context() as patched:
            patched.setattr(servers.VllmServer, "_write", dies)
            with pytest.raises(Died):
                publish(ctx, client, model, version=Version("a", 3), **options)
        if not adapted:
            stub.read()  # a server that starts again finds all tensors of one version
        again = servers.vllm(url, tmp_path, adapter=config, timeout_s=patience(60))
        same = [] if at == 3 else [Version("a", 3)]  # the same again, unless it was complete
        for version in (*same, Version("b", 0), Version("b", 1)):
            publish(ctx, again, model, version=version, **options)
            assert scored(model.eval(), sample(ctx, again, PROMPTS, version=version, **OPTIONS)) < 1e-5
        assert [*stub.adapters] == ["b-1"] * adapted
        left = {each.name for each in tmp_path.glob("[!.]*") if each.is_dir() or each.suffix == ".safetensors"}
        assert left == ({"b-1"} if adapted else {"b-1-00001.safetensors"})


FAULTS = {
    "reads nothing": "",
    "sleep": "500",
    "collective_rpc": "500",
    "kv_cache": "500",
    "completions": "500",
    "old": "token_ids",
    "other prompt": "other tokens",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_server_is_one_error_on_every_rank(tmp_path: Path, fault: str) -> None:
    with stubbed(tmp_path, fault) as (stub, url):

        def rank(ctx: accel.DistContext) -> tuple[str, str]:
            client = servers.vllm(url, tmp_path, timeout_s=patience(30)) if ctx.is_main_process else None
            with pytest.raises(ServerError) as caught:
                publish(ctx, client, llama(), version=Version("a", 1))
            return caught.value.problem, caught.value.got

        first, second = simulate(rank, 2)
        assert first == second
        assert FAULTS[fault] in first[1]
        client = servers.vllm(url, tmp_path, timeout_s=patience(30))
        if fault in ("sleep", "collective_rpc", "kv_cache"):
            with assert_raises(ServerError, problem="weights of two versions"):
                sample(accel.single(), client, PROMPTS, **OPTIONS)
        stub.fault = ""
        published = publish(accel.single(), client, llama(), version=Version("a", 2))  # the line of the fix
        assert published.mismatch is not None
        with assert_raises(ServerError, problem="other weights"):
            sample(accel.single(), client, PROMPTS, version=Version("a", 1), **OPTIONS)


def test_log_probabilities_say_whose_they_are(tmp_path: Path) -> None:
    ctx = accel.single()
    with stubbed(tmp_path) as (_, url):
        raw, processed = (servers.vllm(url, tmp_path, logprobs=each) for each in ("raw", "processed"))
        publish(ctx, raw, llama(), version=Version("a", 1))
        with pytest.warns(UserWarning, match="are biased"):
            assert sample(ctx, raw, PROMPTS, top_p=0.5, **OPTIONS).drawn_from == "model"
        assert sample(ctx, processed, PROMPTS, top_p=0.5, **OPTIONS).drawn_from == "sampler"
        assert sample(ctx, processed, PROMPTS, temperature=0.5, **OPTIONS).drawn_from == "model"
        with assert_raises(ConfigError, fix="processed_logprobs"):
            sample(ctx, raw, PROMPTS, temperature=0.5, **OPTIONS)
    slips: list[Any] = [
        lambda: servers.vllm(url, tmp_path, logprobs="some"),  # pyright: ignore[reportArgumentType]
        lambda: publish(ctx, raw, llama(), version=Version("a", 1)),
    ]
    for call in slips:
        with pytest.raises(AccelError):
            call()
