# SPDX-License-Identifier: Apache-2.0
"""vLLM's server: weights by a folder that it shares with the trainer, samples by its completions API.

Its documentation has the endpoints: `/sleep`, `/wake_up` and `/collective_rpc` of the development
mode, `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, and `/v1/completions` with `return_token_ids`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from safetensors.torch import load
from torch import Tensor

from accel.context import DistContext
from accel.errors import ConfigError, ServerError
from accel.post_training._http import as_safetensors, check_address, in_threads, request, understood
from accel.post_training._local import Check, Layout, check_held, check_newer
from accel.post_training._sample import DrawnTokens, Place, SampleOptions, SampleRequest, samples_of
from accel.post_training._samples import FinishReason, Samples, Version

_STATE, _STAGE, _INDEX = "accel-version.json", ".accel-coming", "model.safetensors.index.json"


class _FolderState(msgspec.Struct, frozen=True):
    """Weights of the server, in a file of the folder, which every rank reads."""

    version: Version = Version()
    coming: Version | None = None
    adapters: tuple[str, ...] = ()  # that the server may have loaded


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float]


class _Completion(msgspec.Struct, frozen=True):
    token_ids: list[int]
    prompt_token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Completion]


class VllmServer:
    """A server of vLLM; made by `vllm`."""

    layout: Layout = "hub"
    checks: frozenset[Check] = frozenset({"version"})
    place: Place = "remote"

    def __init__(
        self, url: str, folder: Path, model: str, adapter: Any, token: str, timeout_s: float, *, is_processed: bool
    ) -> None:
        self._url, self._folder, self._model, self._adapter = url, folder, model, adapter
        self._token, self._timeout_s, self._is_processed = token, timeout_s, is_processed
        self._coming = Version()
        self._index: dict[str, str] = {}

    def begin(self, version: Version) -> None:
        """Begin to write weights next to the server's; see `WeightServer`."""
        check_newer(version, self._state().version)
        shutil.rmtree(self._stage, ignore_errors=True)
        self._stage.mkdir(parents=True)
        self._coming, self._index = version, {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors as one more file; see `WeightServer`."""
        name = f"{_name(self._coming)}-{len({*self._index.values()}) + 1:05d}.safetensors"
        _ = (self._stage / name).write_bytes(as_safetensors(tensors))
        self._index |= dict.fromkeys(tensors, name)

    def commit(self, digest: str, count: int) -> None:
        """Have the server read the folder again; see `WeightServer`. It refuses to sample until it has."""
        if len(self._index) != count:
            expected, got = f"{count} tensors", str(len(self._index))
            raise ServerError("tensors are missing in the folder", expected=expected, got=got, where=str(self._stage))
        held = self._state()
        adapters = () if self._adapter is None else (*held.adapters, _name(self._coming))
        self._write(_FolderState(held.version, self._coming, adapters))
        if self._adapter is None:
            self._reload()
        else:
            self._forget({*held.adapters} & {_name(self._coming)})  # of a publish that failed
            self._load_adapter()
        self._write(_FolderState(self._coming, None, adapters))
        if held.adapters:  # also of a trainer that died
            self._forget({*held.adapters} - {_name(self._coming)})
            self._write(_FolderState(self._coming, None, adapters[-1:]))

    def sample(self, ctx: DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> Samples:
        """Draw samples, each by a request with its seed; see `SampleServer`. No communication with ranks."""
        state = self._state()
        check_held(state.version, state.coming, options.version)
        if options.temperature != 1 and not self._is_processed:
            raise ConfigError(
                "the server gives log-probabilities of temperature 1",
                expected="temperature=1.0",
                got=f"temperature={options.temperature}",
                where="sample(temperature=)",
                fix='Start it with --logprobs-mode processed_logprobs, and pass vllm(..., logprobs="processed").',
            )
        rows = in_threads(lambda each: self._draw(each, options, state.version), requests)
        return samples_of(requests, rows, state.version, limited=self._is_processed and options.is_limited)

    def _draw(self, asked: SampleRequest, options: SampleOptions, version: Version) -> DrawnTokens:
        body = {
            "model": self._model if self._adapter is None else _name(version),
            "prompt": asked.ids,
            "max_tokens": options.max_new_tokens,
            "seed": options.key.fold_in("sample", asked.prompt, asked.sample).integers(1, bits=31)[0],
            "temperature": options.temperature,
            "top_p": 1.0 if options.top_p is None else options.top_p,
            "top_k": -1 if options.top_k is None else options.top_k,
            "min_p": 0.0,  # a model's own defaults do not count
            "repetition_penalty": 1.0,
            "stop_token_ids": options.stop,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        answer = self._post("v1/completions", body)
        with understood(self._url):
            found = msgspec.json.decode(answer, type=_Answer).choices[0]
            if found.prompt_token_ids != [*asked.ids]:
                raise ValueError("the prompt has other tokens there")
            if len(found.token_ids) != len(found.logprobs.token_logprobs):
                raise ValueError("a log-probability is missing")
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
        return DrawnTokens(found.token_ids, found.logprobs.token_logprobs, reasons.get(found.finish_reason, "abort"))

    def _reload(self) -> None:
        """Move the new files to the old ones, and replace the index, which is complete at any moment, while the server
        has no weights in memory."""
        index = msgspec.json.encode({"metadata": {}, "weight_map": self._index})
        _ = (self._stage / _INDEX).write_bytes(index)
        _ = self._post("sleep?level=2")
        kept = {*self._index.values()}
        for name in (*sorted(kept), _INDEX):
            _ = (self._stage / name).replace(self._folder / name)
        for old in self._folder.glob("*.safetensors"):
            if old.name not in kept:
                old.unlink()
        _ = self._post("wake_up?tags=weights")
        _ = self._post("collective_rpc", {"method": "reload_weights"})
        _ = self._post("wake_up?tags=kv_cache")

    def _load_adapter(self) -> None:
        """Load a folder of the version."""
        parts = [*self._stage.glob("*.safetensors")]  # of adapters, which are small: one file is read
        whole = {name: each for part in parts for name, each in load(part.read_bytes()).items()}
        for part in parts:
            part.unlink()
        _ = (self._stage / "adapter_model.safetensors").write_bytes(as_safetensors(whole))
        self._adapter.save_pretrained(self._stage)
        place = self._folder / _name(self._coming)
        _ = self._stage.rename(place)
        _ = self._post("v1/load_lora_adapter", {"lora_name": place.name, "lora_path": str(place.absolute())})

    def _forget(self, names: set[str]) -> None:
        """Unload adapters and remove their folders; the server may have none, as after a restart."""
        for name in sorted(names):
            _ = self._ask("v1/unload_lora_adapter", {"lora_name": name})
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        data = b"" if body is None else msgspec.json.encode(body)
        return request(f"{self._url}/{path}", data, self._timeout_s, self._token, "application/json")

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        status, answer = self._ask(path, body)
        command = "VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --enable-sleep-mode"
        if self._adapter is not None:
            command = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve FOLDER --enable-lora"
        if status != 200:
            raise ServerError(
                "the server of vLLM has refused a request",
                expected="HTTP status 200",
                got=f"{status}: {answer[:500].decode(errors='replace')}",
                where=f"{self._url}/{path}",
                fix=f"Start it like this: {command}.",
            )
        return answer

    @property
    def _stage(self) -> Path:
        return self._folder / _STAGE

    def _state(self) -> _FolderState:
        path = self._folder / _STATE
        return msgspec.json.decode(path.read_bytes(), type=_FolderState) if path.exists() else _FolderState()

    def _write(self, state: _FolderState) -> None:
        new = self._folder / f"{_STATE}.new"
        _ = new.write_bytes(msgspec.json.encode(state))
        _ = new.replace(self._folder / _STATE)


def vllm(
    url: str,
    folder: str | Path,
    *,
    model: str | None = None,
    adapter: Any = None,
    token: str = "",
    timeout_s: float = 600.0,
    logprobs: Literal["raw", "processed"] = "raw",
) -> VllmServer:
    """Return a server of vLLM that shares a folder with the ranks. No communication yet.

    Args:
        url: address of the server.
        folder: of the model that the server was started with; of adapters, a folder for them. The server and all ranks
            see it under this path.
        model: name of the model at the server; None for the folder.
        adapter: `peft.LoraConfig` of adapters, which `publish(adapters="alone")` then sends; None for whole weights.
        token: the server's API key.
        timeout_s: most seconds of a request.
        logprobs: the server's `--logprobs-mode`. With "raw", its default, log-probabilities are of temperature 1 and of
            all tokens, and other temperatures are refused.
    """
    if logprobs not in ("raw", "processed"):
        raise ConfigError(
            "unknown log-probabilities", expected="raw or processed", got=logprobs, where="vllm(logprobs=)"
        )
    check_address([url], timeout_s, "vllm", "url")
    at = Path(folder)
    processed = logprobs == "processed"
    name = model or str(folder)
    return VllmServer(url.rstrip("/"), at, name, adapter, token, timeout_s, is_processed=processed)


def _name(version: Version) -> str:
    return f"{quote(version.session, safe='') or 'accel'}-{version.number}"
