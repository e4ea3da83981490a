# SPDX-License-Identifier: Apache-2.0
"""vLLM itself on a CPU, where it is installed: `VLLM` names its program, which may be in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from processes import free_port, patience, wait_for

import accel
from accel.post_training import Samples, Version, publish, sample, servers
from accel.seeding import Key

PROGRAM = os.environ.get("VLLM") or shutil.which("vllm")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.multiprocess,
    pytest.mark.skipif(PROGRAM is None, reason="there is no vLLM on this machine"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # as peft reads it
]
WORDS = 64
PROMPTS = {0: [3, 4, 5], 1: [6]}
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


def save_model(folder: Path) -> Any:
    """Save a Llama and a tokenizer of numbered words, without which vLLM returns no log-probabilities."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes))
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words)).save_pretrained(folder)
    return model


@contextmanager
def engine(folder: Path, log: Path) -> Generator[str]:
    """Run the server on a model's folder; return its address."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    words = [str(PROGRAM), "serve", str(folder), "--host", "127.0.0.1", "--port", port, "--dtype", "float32"]
    words += ["--max-model-len", "64", "--enforce-eager", "--enable-lora", "--max-lora-rank", "8"]
    words += ["--logprobs-mode", "processed_logprobs"]

    def is_up() -> bool:
        assert server.poll() is None, log.read_text()[-4000:]
        with suppress(URLError, OSError), urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
        return False

    with log.open("w") as output:
        server = subprocess.Popen(words, env=os.environ | SETTINGS, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(is_up, 300)
            yield url
        finally:
            server.terminate()
            server.wait(patience(60))


def assert_same(found: Samples, model: Any, **limits: Any) -> None:
    """The most probable tokens and their log-probabilities are those of the local engine."""
    expected = sample(accel.single(), servers.local(model), PROMPTS, **limits)
    assert torch.equal(found.ids, expected.ids)
    assert found.logprobs is not None
    assert torch.allclose(found.logprobs, torch.as_tensor(expected.logprobs), atol=1e-4)


def test_weights_and_adapters_reach_vllm_which_gives_the_log_probabilities_of_the_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, adapters, ctx = tmp_path / "model", tmp_path / "adapters", accel.single()
    model = save_model(folder)
    adapters.mkdir()
    greedy: dict[str, Any] = {"key": Key(1), "max_new_tokens": 6, "temperature": 0.0}
    with engine(folder, tmp_path / "log") as url:
        limits: dict[str, Any] = {"logprobs": "processed", "timeout_s": patience(120)}
        client = servers.vllm(url, folder, **limits)
        for number in (1, 2):
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(0.05 * torch.randn_like(each))
            version = Version("weights", number)
            published = publish(ctx, client, model, version=version)
            assert published.mismatch is not None
            assert published.mismatch < 1e-4
            assert_same(sample(ctx, client, PROMPTS, version=version, **greedy), model, **greedy)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        )
        config = adapted.peft_config["default"]
        client = servers.vllm(url, adapters, model=str(folder), adapter=config, **limits)
        for number in (1, 2):
            with torch.no_grad():
                for each in adapted.parameters():
                    each.add_(0.1 * torch.randn_like(each) * each.requires_grad)
            published = publish(ctx, client, adapted, version=Version("adapters", number), adapters="alone")
            assert published.mismatch is not None
            assert published.mismatch < 1e-4
            assert_same(sample(ctx, client, PROMPTS, **greedy), adapted, **greedy)
        drawn = sample(ctx, client, PROMPTS, n=4, key=Key(1), max_new_tokens=6, temperature=0.7, top_p=0.9)
        assert drawn.drawn_from == "sampler"
        assert drawn.logprobs is not None
        assert (drawn.logprobs.sum(1) < 0).any()
    assert [each.name for each in adapters.iterdir() if each.is_dir()] == ["adapters-2"]
