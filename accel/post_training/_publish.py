# SPDX-License-Identifier: Apache-2.0
"""Weights of a model on any mesh sent to servers: a tensor at a time, under the names of the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal, cast

import msgspec
import torch
from torch import Tensor, nn

from accel.comm import Call, agreed, broadcast_value, call_site, shared_failure
from accel.context import DistContext, context_first
from accel.errors import ConfigError, ServerError
from accel.errors._checks import check_choice, check_count, check_kind
from accel.items._models import check_storable
from accel.items._whole import distinct_tensors, facts, live_tensors, staged_tensors
from accel.parallel._empty import check_filled
from accel.parallel._engines import whole_model
from accel.parallel._modules import unwrap_model
from accel.post_training._local import Digest, Layout, WeightServer, score_row
from accel.post_training._sample import SampleOptions, SampleRequest, SampleServer, as_server_error, check_server
from accel.post_training._samples import Version
from accel.random import Key
from accel.tensors import integers

Adapters = Literal["merged", "alone"]
Whole = Callable[[str], Tensor]
_PROBE, _PROBE_TOKENS = (0, 1, 0, 1), 8  # of any vocabulary


class Published(msgspec.Struct, frozen=True):
    """Weights that servers have taken.

    Attributes:
        version: their version.
        digest: digest of all tensors.
        count: number of tensors.
        nbytes: their bytes.
        mismatch: mean distance of the server's log-probabilities from the model's, of a server that does not compare
            digests; None of another.
    """

    version: Version
    digest: str
    count: int
    nbytes: int
    mismatch: float | None = None


@context_first
def publish(
    ctx: DistContext,
    server: WeightServer | None,
    model: nn.Module,
    *,
    version: Version,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
    adapters: Adapters = "merged",
    chunk_bytes: int = 2**26,
    tolerance: float = 0.1,
    vocab_parallel: bool = False,
) -> Published:
    """Send a model's weights to servers as a version. A collective.

    All ranks gather the tensors one at a time; each rank with a server sends to it. A rank takes memory for the largest
    tensor three times, and for a chunk. A server's failure is kept until all have gathered, and then raised on every
    rank, so that none waits for another.

    Args:
        ctx: the context.
        server: see `servers`; None on ranks that have none. Rank 0 has one.
        model: plain, from `prepare_model`, compiled, or with low-rank adapters of peft.
        version: newer than the server's: numbers grow within a session. A trainer that resumes opens a new session, and
            publishes its checkpoint's weights first.
        dtype: dtype of floating-point tensors on the way; None for the model's.
        layout: "hub" for the names of `save_pretrained`, also of stacked experts; "model" for the model's own; None for
            what the server takes.
        adapters: "merged" into the layers that they adapt, or "alone", as peft saves them.
        chunk_bytes: bytes of tensors that are sent together.
        tolerance: largest mean distance, in nats, of log-probabilities of server and model, for 8 tokens behind a fixed
            prompt. They are compared if the server does not compare digests.
        vocab_parallel: whether each rank along `tp` has the logits of its share of the classes, for that comparison.

    Returns:
        What the servers have, on every rank. Tied tensors are sent once, under the first name.

    Raises:
        ServerError: a server is gone, refuses the version, a name, shape or dtype, or has received other bits,
            or gives other log-probabilities.
        CheckpointError, CollectiveMismatch, PrepareError: as in `save_model`.
        ConfigError: rank 0 without a server, or adapters that are not low-rank ones.

    Examples:
        >>> trained, sampled = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> server = post_training.servers.local(sampled)
        >>> published = post_training.publish(ctx, server, trained, version=post_training.Version("run", 1))
        >>> torch.equal(trained.weight, sampled.weight), published.count
        (True, 2)
    """
    site = call_site()
    call = Call("publish", f"{version} {dtype} {layout} {adapters}", site)
    with shared_failure(ctx.comm, call):
        check_choice(adapters, ("merged", "alone"), "unknown way of adapters", where="publish(adapters=)")
        check_choice(layout or "hub", ("hub", "model"), "the names of tensors are unknown", where="publish(layout=)")
        check_kind(
            version,
            Version,
            "the version is not valid",
            where="publish(version=)",
            fix='Pass Version("session", number).',
        )
        check_kind(
            dtype, torch.dtype | None, "the dtype is not valid", where="publish(dtype=)", fix="Pass torch.bfloat16."
        )
        check_server(server, "publish")
        check_count(chunk_bytes, "the number of bytes is not valid", where="publish(chunk_bytes=)")
        if ctx.is_main_process and server is None:
            raise ConfigError("rank 0 has no server", expected="a server", got="None", where="publish(server)")
        model = whole_model(ctx, model)
        check_filled(model, where="publish")
        own = live_tensors(model)
    stages = staged_tensors(ctx, model, own)
    with shared_failure(ctx.comm, call):
        check_storable(own if stages is None else stages.facts, "publish")
        kept, _, whole = distinct_tensors(own, stages)
        inner = unwrap_model(model)
        if hasattr(inner, "peft_config"):
            kept, whole = _adapted(inner, kept, whole, adapters)
        compares = server is not None and "digest" not in server.checks
        mine = (layout or (server.layout if server is not None else "model"), compares)
    wishes = broadcast_value(ctx.comm, Call("publish", "\n".join(facts(kept)), site), mine, tuple[Layout, bool])
    layout, compares = wishes  # of the server of rank 0
    tensors = (_named(inner, name, _cast(whole(name), dtype), layout) for name in kept)
    digest, nbytes, failure = _send(server, version, _chunks(tensors, chunk_bytes))
    with agreed(ctx.comm, Call("publish: committing", site=site)):
        if failure is not None:
            raise as_server_error(failure, "publish", "taken the weights")
    mismatch = None
    if compares:
        mismatch = _compare(ctx, server, model, version, tolerance, site, vocab_parallel=vocab_parallel)
    return Published(version, digest.value, digest.count, nbytes, mismatch)


def _compare(
    ctx: DistContext,
    server: WeightServer | None,
    model: nn.Module,
    version: Version,
    tolerance: float,
    site: str,
    *,
    vocab_parallel: bool,
) -> float:
    """Return the mean distance of log-probabilities of the server of rank 0 and of the model. A collective."""
    call = Call("publish: comparing", site=site)
    with shared_failure(ctx.comm, call):
        mine: tuple[list[int], list[float]] = ([], [])
        if ctx.is_main_process:
            asked = SampleOptions(key=Key(0), max_new_tokens=_PROBE_TOKENS, version=version)
            drawn = cast(SampleServer, server).sample(ctx, [SampleRequest(0, 0, _PROBE)], asked)
            assert drawn.logprobs is not None
            values = cast("list[float]", drawn.logprobs[0].tolist())  # pyright: ignore[reportUnknownMemberType]
            mine = (integers(drawn.ids[0]), values)
    ids, logprobs = broadcast_value(ctx.comm, call, mine, tuple[list[int], list[float]])
    first = len(_PROBE)
    right = score_row(ctx, model, ids, first, vocab_parallel=vocab_parallel)
    distances = [abs(one - other) for one, other in zip(right, logprobs[first:], strict=True)]
    mismatch = sum(distances) / max(1, len(distances))
    with agreed(ctx.comm, call):
        if ctx.is_main_process and not mismatch <= tolerance:
            raise ServerError(
                "the server gives other log-probabilities than the model",
                expected=f"a mean distance of at most {tolerance:g}",
                got=f"{mismatch:.3g}",
                where="publish(tolerance=)",
                fix="Check that the server reads the files that were sent, in this dtype; or pass a larger tolerance.",
            )
    return mismatch


def _chunks(tensors: Iterable[Mapping[str, Tensor]], least_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Join tensors to chunks of so many bytes."""
    chunk: dict[str, Tensor] = {}
    for each in tensors:
        chunk |= each
        del each  # else the last tensor outlives its chunk
        if _bytes_of(chunk) >= least_bytes:
            yield chunk
            chunk = {}
    if chunk:
        yield chunk


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(each.nbytes for each in tensors.values())


def _send(
    server: WeightServer | None, version: Version, chunks: Iterable[dict[str, Tensor]]
) -> tuple[Digest, int, Exception | None]:
    """Send chunks to a server; return their digest and bytes, and the server's first failure, which ends the sending.

    Every rank takes all chunks, with a server or without: gathering them is a collective.
    """
    digest = Digest()
    nbytes = 0
    failures: list[Exception] = []

    def attempt(call: Callable[[WeightServer], None]) -> None:
        if server is not None and not failures:
            try:
                call(server)
            except Exception as error:  # a user's own server may raise any
                failures.append(error)

    attempt(lambda to: to.begin(version))
    for chunk in chunks:
        digest.add(chunk)
        nbytes += _bytes_of(chunk)
        attempt(lambda to, chunk=chunk: to.load(chunk))
        del chunk  # before the next one is gathered
    attempt(lambda to: to.commit(digest.value, digest.count))
    return digest, nbytes, failures[0] if failures else None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach()
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _named(model: nn.Module, name: str, tensor: Tensor, layout: str) -> Mapping[str, Tensor]:
    """Return a tensor under its stored names: several of one that stacks experts."""
    if layout == "model":
        return {name: tensor}
    inner: Any = model
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    with suppress(ImportError):
        convert = import_module("transformers.core_model_loading").revert_weight_conversion
        if callable(getattr(base, "save_pretrained", None)):
            return {key: each.contiguous() for key, each in convert(base, {name: tensor}).items()}
    return {name: tensor}


def _adapted(model: Any, kept: Mapping[str, Tensor], whole: Whole, how: Adapters) -> tuple[dict[str, Tensor], Whole]:
    """Return tensors of a model of peft: the base's with adapters merged, or the adapters' alone, by stored names."""
    adapter = str(model.active_adapter)
    config = model.peft_config[adapter]
    named = re.escape(adapter)
    factor = re.compile(rf"\.lora_([AB])\.{named}\.weight$")
    copied = re.compile(rf"\.modules_to_save\.{named}\.")
    layers = {path: each for path, each in model.named_modules() if adapter in _scales(each)}
    weights = {f"{path}.base_layer.weight": path for path in layers}
    # A merge needs the base's weight, which embeddings and experts have under another name.
    other = [path for name, path in weights.items() if name not in kept] if how == "merged" else []
    trained = {name for name, each in model.named_parameters() if each.requires_grad} if how == "alone" else set[str]()
    holders = {
        re.escape(path.rpartition(".")[2])
        for path, each in model.named_modules()
        if isinstance(each, nn.ModuleDict | nn.ParameterDict) and adapter in each
    }
    own = {name for name in kept if re.search(rf"\.({'|'.join(holders)})\.{named}(\.|$)", name)}
    other += [name for name in sorted(own | trained) if not factor.search(name) and not copied.search(name)]
    if getattr(config, "peft_type", None) != "LORA" or getattr(config, "use_dora", False) or other:
        raise ConfigError(
            "adapters that are not low-rank cannot be published",
            expected="adapters of LoRA for linear layers, without DoRA",
            got=", ".join(other[:3]) or str(getattr(config, "peft_type", config)),
            where="publish(model)",
            fix="Merge them before: model.merge_and_unload().",
        )
    if how == "alone":
        names = {copied.sub(".", factor.sub(r".lora_\1.weight", name)): name for name in own}
        return {new: kept[old] for new, old in names.items()}, lambda new: whole(names[new])
    skipped = re.compile(rf"\.lora_|\.original_module\.|\.modules_to_save\.(?!{named}\.)")
    prefix = "base_model.model."
    names = {
        copied.sub(".", name).removeprefix(prefix).replace(".base_layer.", "."): name
        for name in kept
        if not skipped.search(name)
    }

    def merged(new: str) -> Tensor:
        found = whole(names[new])
        path = weights.get(names[new])
        if path is None or adapter in layers[path].merged_adapters:
            return found
        down, up = (whole(f"{path}.lora_{each}.{adapter}.weight") for each in "AB")
        change = layers[path].scaling[adapter] * (up.float() @ down.float())
        transposed = getattr(layers[path], "fan_in_fan_out", False)
        return found + (change.T if transposed else change).to(found.dtype)

    return {new: kept[old] for new, old in names.items()}, merged


def _scales(module: Any) -> Mapping[str, float]:
    """Return the factor of each adapter of a layer of peft; none of another module."""
    scales = getattr(module, "scaling", None)
    return cast("dict[str, float]", scales) if isinstance(scales, dict) else {}
