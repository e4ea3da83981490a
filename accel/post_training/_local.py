# SPDX-License-Identifier: Apache-2.0
"""Servers of weights: the protocol, and one in this process, which draws samples from its model.

`publish` calls the methods in the order begin, load (again and again), commit; between begin and commit a server is
half new, and refuses to sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from accel.checkpoint._live_tensors import tied
from accel.comm import adopt, all_reduce_flat
from accel.context import DistContext, group_of
from accel.errors import ConfigError, ServerError
from accel.errors._checks import check_count
from accel.items._whole import live_tensors
from accel.parallel import split_sequence
from accel.parallel._micro_batches import first_tensor
from accel.parallel._modules import is_pipelined, prepared_of, unwrap_model
from accel.parallel._sharded import is_sharded
from accel.post_training._logprobs import token_logprobs
from accel.post_training._sample import DrawnTokens, Place, SampleOptions, SampleRequest, samples_of
from accel.post_training._samples import Samples, Version
from accel.tensors import checksums, integers
from accel.training._decoding import (
    CachedTokens,
    Decoder,
    WholeSequences,
    decode,
    numbers_of,
    share_tokens,
    takes_cache,
)
from accel.training._evaluating import evaluating
from accel.training._generate import check_causal

_padded_in_front = partial(pad_sequence, batch_first=True, padding_side="left")
Layout = Literal["hub", "model"]
Check = Literal["digest", "dtype", "version"]


class WeightServer(Protocol):
    """A server that weights are published to.

    Attributes:
        layout: names of tensors that it takes: "hub" for names in the hub's checkpoints, "model" for the model's.
        checks: names of facts that the server itself compares. After a publish to one that does not compare the
            "digest" of what it holds, `publish` compares log-probabilities.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def checks(self) -> frozenset[Check]: ...

    def begin(self, version: Version) -> None:
        """Begin to take weights; raise `ServerError` for a version that is not newer."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take some whole tensors, on the CPU or a device; raise `ServerError` for names, shapes or dtypes that do not
        fit."""
        ...

    def commit(self, digest: str, count: int) -> None:
        """End with the digest and the number of all tensors; raise `ServerError` if others have arrived."""
        ...


class Digest:
    """Digest of tensors by name, dtype, shape and bits, in any order of the tensors; servers compute their own."""

    def __init__(self) -> None:
        self._sum = 0
        self.count = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Count some tensors in. Waits for the device once."""
        for name, bits in checksums(tensors, by_position=True).items():
            facts = f"{name} {tensors[name].dtype} {list(tensors[name].shape)} {bits}"
            each = hashlib.blake2b(facts.encode(), digest_size=16).digest()
            self._sum = (self._sum + int.from_bytes(each, "little")) % 2**128
        self.count += len(tensors)

    @property
    def value(self) -> str:
        """The digest, 32 hexadecimal digits."""
        return f"{self._sum:032x}"


class LocalServer:
    """A model of this process as a server; made by `local`.

    Attributes:
        version: the weights that it has.
    """

    layout: Layout = "model"
    checks: frozenset[Check] = frozenset({"digest", "dtype", "version"})

    def __init__(self, model: nn.Module, version: Version, *, most_rows: int, vocab_parallel: bool) -> None:
        self.model = model
        self.version = version
        self._most_rows, self._vocab_parallel = most_rows, vocab_parallel
        self._coming: Version | None = None
        self._arrived = Digest()
        self._missing = set[str]()

    def begin(self, version: Version) -> None:
        """Begin to take weights; see `WeightServer`."""
        if self.place == "ranks":
            raise ServerError(
                "a model that is spread over ranks takes no weights",
                expected="a plain model",
                got=type(unwrap_model(self.model)).__name__,
                where="publish(server)",
                fix="Publish to a plain copy: servers.local(copy). The model that trains needs no publish.",
            )
        check_newer(version, self.version)
        self._coming, self._arrived = version, Digest()
        live = live_tensors(self.model)
        self._missing = live.keys() - tied(live).keys()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the model; see `WeightServer`."""
        _ = self._begun("load")
        live = live_tensors(self.model)
        for name, each in tensors.items():
            mine = live.get(name)
            if mine is None or mine.shape != each.shape or mine.dtype != each.dtype:
                raise ServerError(
                    "a tensor does not fit the server's model",
                    expected="no such tensor" if mine is None else f"{mine.dtype} of shape {list(mine.shape)}",
                    got=f"{each.dtype} of shape {list(each.shape)}",
                    where=name,
                    fix="Publish in the dtype of the server: publish(ctx, server, model, version=version, dtype=...).",
                )
            mine.copy_(each)
        self._arrived.add({name: live[name] for name in tensors})  # what the model holds now
        first = tied(live)
        self._missing -= {first.get(name, name) for name in tensors}

    def commit(self, digest: str, count: int) -> None:
        """Compare the tensors that have arrived; see `WeightServer`."""
        coming = self._begun("commit")
        check_arrived(self._arrived, digest, count)
        if self._missing:
            raise ServerError(
                "the server's model has tensors that were not sent",
                expected="all tensors of the server's model",
                got=f"all but {len(self._missing)}, such as {min(self._missing)}",
                where="publish(model)",
                fix="Publish a model of the server's class, and adapters merged into it.",
            )
        self.version, self._coming = coming, None

    @property
    def place(self) -> Place:
        """Return who draws samples: all ranks together if the model is spread over them."""
        return "ranks" if is_sharded(self.model) or is_pipelined(self.model) else "rank"

    def sample(self, ctx: DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> Samples:
        """Draw samples; see `SampleServer`. A collective if the model is spread over ranks."""
        return samples_of(requests, self.draw(ctx, requests, options), self.version, limited=options.is_limited)

    def draw(self, ctx: DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> list[DrawnTokens]:
        """Draw the tokens of each request, as `sample` does, in batches of rows.

        If the model is spread over ranks, all run equally many batches: a rank with fewer repeats a row.
        """
        self.check_version(options.version)
        check_causal(self.model, options.max_new_tokens, where="sample")
        plain = unwrap_model(self.model)
        if "context" in prepared_of(plain):
            raise ConfigError(
                "a token at a time cannot be shared along cp",
                expected="a model that was not prepared on a mesh with cp",
                got=type(plain).__name__,
                where="sample",
                fix="Publish its weights to a plain copy, and sample from that: server = servers.local(copy).",
            )
        batches = _batches(requests, self._most_rows, alike=not takes_cache(self.model))
        if ctx.world_size > 1 and self.place == "ranks":
            count = torch.tensor([len(batches)], dtype=torch.int64, device=ctx.comm.control)
            most = int(all_reduce_flat(ctx.comm, count, "max"))
            filling = [SampleRequest(-1, 0, requests[0].ids if requests else (0,))]
            batches += [filling] * (most - len(batches))
        drawn: dict[tuple[int, int], DrawnTokens] = {}
        with evaluating(self.model), torch.no_grad():
            for batch in batches:
                rows = self._draw_batch(ctx, batch, options)
                drawn |= {(each.prompt, each.sample): row for each, row in zip(batch, rows, strict=True)}
        return [drawn[each.prompt, each.sample] for each in requests]

    def _draw_batch(
        self, ctx: DistContext, requests: Sequence[SampleRequest], options: SampleOptions
    ) -> list[DrawnTokens]:
        """Draw the tokens of requests in one batch. Rows leave it when they end."""
        prompts = [torch.tensor(each.ids) for each in requests]
        ids = _padded_in_front(prompts).to(ctx.device)
        select = partial(first_tensor, containers=ctx.containers)
        decoder: Decoder
        if takes_cache(self.model):
            mask = _padded_in_front([torch.ones_like(each) for each in prompts])
            decoder = CachedTokens(ctx, self.model, mask.to(ctx.device), select)
        else:
            longest = ids.shape[1] + options.max_new_tokens - 1
            decoder = WholeSequences(ctx, self.model, longest, lambda ids: ids, select)
        numbers = None
        if options.temperature:
            keys = [options.key.fold_in("sample", each.prompt, each.sample) for each in requests]
            numbers = numbers_of(keys, options.max_new_tokens, ctx.device)
        found = decode(
            ctx,
            self.model,
            decoder,
            ids,
            options,
            count=options.max_new_tokens,
            numbers=numbers,
            stop=options.stop,
            vocab_parallel=self._vocab_parallel,
            together=ctx.world_size > 1 and self.place == "ranks",
            drops=True,
            scores=True,
            where="sample",
        )
        assert found.logprobs is not None
        rows: list[DrawnTokens] = []
        for tokens, count, logprobs in zip(found.tokens, integers(found.counts), found.logprobs, strict=True):
            new = integers(tokens[:count])
            values = cast("list[float]", logprobs[:count].tolist())  # pyright: ignore[reportUnknownMemberType]
            rows.append(DrawnTokens(new, values, "stop" if new[-1] in options.stop else "length"))
        return rows

    def check_version(self, version: Version | None) -> None:
        """Raise `ServerError` unless all of a version's weights are here; None for any version."""
        check_held(self.version, self._coming, version)

    def _begun(self, call: str) -> Version:
        """Return the version that is on its way; a chunk that comes too late must not change the weights."""
        if self._coming is None:
            raise ServerError("weights that nobody has begun to send", expected="begin", got=call, where=call)
        return self._coming


def local(
    model: nn.Module, *, version: Version | None = None, most_rows: int = 64, vocab_parallel: bool = False
) -> LocalServer:
    """Return a model of this process as a server. No communication.

    A plain model takes published weights. The model that trains, from `prepare_model` on any mesh that `generate`
    serves, needs none.

    Args:
        model: causal; of transformers, or one that maps ids, [rows, length], to logits. Each rank that samples has one.
        version: the weights that it has; none by default.
        most_rows: number of rows that run at once.
        vocab_parallel: whether each rank along `tp` has the logits of its share of the classes.
    """
    check_count(most_rows, "the number of rows is not valid", where="servers.local(most_rows=)")
    return LocalServer(model, version or Version(), most_rows=most_rows, vocab_parallel=vocab_parallel)


def check_newer(version: Version, held: Version) -> None:
    """Raise `ServerError` for a version that is not newer than the server's, in the same session."""
    if version.session == held.session and version.number <= held.number:
        raise ServerError(
            "the version is not newer than the server's",
            expected=f"a number above {held.number}, or another session",
            got=name_version(version),
            where="publish(version=)",
            fix="Count up for each publish. After a resume, open a session: Version(session=new_name, number=0).",
        )


def check_held(held: Version, coming: Version | None, wanted: Version | None) -> None:
    """Raise `ServerError` unless a server has all weights of the wanted version; None for any version."""
    if coming is not None:
        raise ServerError(
            "the server has weights of two versions",
            expected=f"all of {name_version(coming)}",
            got=f"some of {name_version(held)}",
            where="sample",
            fix="Publish the weights again.",
        )
    if wanted is not None and wanted != held:
        raise ServerError(
            "the server has other weights",
            expected=name_version(wanted),
            got=name_version(held),
            where="sample(version=)",
            fix="Publish the weights of this version first.",
        )


def check_arrived(arrived: Digest, digest: str, count: int) -> None:
    """Raise `ServerError` unless all tensors have arrived with the same bits."""
    if (arrived.value, arrived.count) != (digest, count):
        raise ServerError(
            "other weights have arrived than were sent",
            expected=f"{count} tensors with the digest {digest}",
            got=f"{arrived.count} with {arrived.value}",
            where="publish",
            fix="Publish the weights again.",
        )


def name_version(version: Version) -> str:
    """Return a version as errors show it."""
    return f"version {version.number} of session {version.session!r}"


def score_row(
    ctx: DistContext, model: nn.Module, ids: Sequence[int], first: int, *, vocab_parallel: bool
) -> list[float]:
    """Return the log-probabilities of a row's tokens from `first` on, on every rank. A collective."""
    row = torch.tensor([list(ids)], device=ctx.device)
    part = split_sequence(ctx, {"input_ids": row}, pad={"input_ids": 0})  # as it is without cp
    places = part["position_ids"][0]
    group = group_of(ctx, "cp")
    numbered = group is not None and hasattr(unwrap_model(model), "config")
    inputs: Any = part if numbered else part["input_ids"]
    select = partial(first_tensor, containers=ctx.containers)
    found = torch.zeros(len(ids), dtype=torch.float64, device=ctx.device)
    with evaluating(model), torch.no_grad():
        logits = WholeSequences(ctx, model, len(ids), lambda _: inputs, select).every(row)
        if logits is not None:
            inside = places < len(ids) - 1
            following = places[inside] + 1
            logprobs = token_logprobs(ctx, logits[:, inside], row[:, following], vocab_parallel=vocab_parallel)
            found[following] = logprobs[0].double()
        share_tokens(ctx, model, found)
    if group is not None:
        found = all_reduce_flat(adopt(group, ctx.device), found, "sum")
    return cast("list[float]", found[first:].tolist())  # pyright: ignore[reportUnknownMemberType]


def _batches(requests: Sequence[SampleRequest], most: int, *, alike: bool) -> list[list[SampleRequest]]:
    """Divide requests into batches, `alike` of prompts of one length."""
    groups: dict[int, list[SampleRequest]] = {}
    for each in requests:
        groups.setdefault(len(each.ids) if alike else 0, []).append(each)
    return [group[at : at + most] for group in groups.values() for at in range(0, len(group), most)]
