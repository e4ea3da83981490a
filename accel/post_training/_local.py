# SPDX-License-Identifier: Apache-2.0
"""Servers of weights: the protocol, and one in this process, which draws samples from its model.

`publish` calls the methods in the order begin, load (again and again), commit; between begin and commit a server is
half new, and refuses to sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from accel.checkpoint._live_tensors import checksums
from accel.comm import all_reduce_flat
from accel.context import DistContext
from accel.errors import ConfigError, DataError, ServerError
from accel.items._whole import live_tensors
from accel.parallel._micro_batches import first_tensor
from accel.parallel._modules import is_pipelined, prepared_of, unwrap_model
from accel.parallel._sharded import is_sharded
from accel.post_training._sample import DrawnTokens, Place, SampleOptions, SampleRequest, samples_of
from accel.post_training._samples import FinishReason, Samples, Version
from accel.tensors import integers, is_dtensor
from accel.training._decoding import (
    CachedTokens,
    Decoder,
    Sampling,
    WholeSequences,
    all_ended,
    log_chances,
    numbers_of,
    share_tokens,
    takes_cache,
    tokens_at,
    whole_rows,
)
from accel.training._evaluating import evaluating
from accel.training._generate import check_causal

Layout = Literal["hub", "model"]
Check = Literal["digest", "dtype", "version"]


class WeightServer(Protocol):
    """A server that weights are published to.

    Attributes:
        layout: names of tensors that it takes: those of the hub's checkpoints, or the model's own.
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
    """A model of this process as a server, with weights of its own; made by `local`.

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

    def begin(self, version: Version) -> None:
        """Begin to take weights; see `WeightServer`."""
        check_newer(version, self.version)
        self._coming, self._arrived = version, Digest()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the model; see `WeightServer`."""
        _ = self._begun("load")
        live = live_tensors(self.model)
        for name, each in tensors.items():
            mine = live.get(name)
            if mine is None or is_dtensor(mine) or mine.shape != each.shape or mine.dtype != each.dtype:
                raise ServerError(
                    "a tensor does not fit the server's model",
                    expected="no such tensor" if mine is None else f"{mine.dtype} of shape {list(mine.shape)}",
                    got=f"{each.dtype} of shape {list(each.shape)}",
                    where=name,
                    fix="Publish in the dtype of the server: publish(ctx, server, model, version=version, dtype=...).",
                )
            mine.copy_(each)
        self._arrived.add({name: live[name] for name in tensors})  # what the model holds now

    def commit(self, digest: str, count: int) -> None:
        """Compare what has arrived; see `WeightServer`."""
        coming = self._begun("commit")
        check_arrived(self._arrived, digest, count)
        self.version, self._coming = coming, None

    @property
    def place(self) -> Place:
        """Return who draws samples: all ranks together if the model is spread over them."""
        return "ranks" if is_spread(self.model) else "rank"

    def sample(self, ctx: DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> Samples:
        """Draw samples; see `SampleServer`. A collective if the model is spread over ranks."""
        return samples_of(requests, self.draw(ctx, requests, options), self.version, limited=options.is_limited)

    def draw(self, ctx: DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> list[DrawnTokens]:
        """Draw the tokens of each request, as `sample` does."""
        self.check_version(options.version)
        rows, vocab_parallel = self._most_rows, self._vocab_parallel
        return draw_tokens(ctx, self.model, requests, options, most_rows=rows, vocab_parallel=vocab_parallel)

    def _begun(self, call: str) -> Version:
        """Return the version that is on its way; a chunk that comes too late must not change the weights."""
        if self._coming is None:
            raise ServerError("weights that nobody has begun to send", expected="begin", got=call, where=call)
        return self._coming

    def check_version(self, version: Version | None) -> None:
        """Raise `ServerError` unless all of a version's weights are here; None for any version."""
        check_held(self.version, self._coming, version)


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
        vocab_parallel: whether each rank along `tp` has the logits of its own classes.
    """
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
            "the weights that have arrived are not those that were sent",
            expected=f"{count} tensors with the digest {digest}",
            got=f"{arrived.count} with {arrived.value}",
            where="publish",
            fix="Publish the weights again.",
        )


def name_version(version: Version) -> str:
    """Return a version as errors show it."""
    return f"version {version.number} of session {version.session!r}"


def draw_tokens(
    ctx: DistContext,
    model: nn.Module,
    requests: Sequence[SampleRequest],
    options: SampleOptions,
    *,
    most_rows: int,
    vocab_parallel: bool,
) -> list[DrawnTokens]:
    """Draw tokens from a model of this process, in batches of rows. A collective if the model is spread over ranks,
    of all ranks alike: those with fewer rows run one of their own again."""
    check_causal(model, options.max_new_tokens, where="sample")
    if "context" in prepared_of(unwrap_model(model)):
        raise ConfigError(
            "a token at a time cannot be shared along cp",
            expected="a model that was not prepared on a mesh with cp",
            got=type(unwrap_model(model)).__name__,
            where="sample",
            fix="Publish its weights to a plain copy, and sample from that: server = servers.local(copy).",
        )
    cached = takes_cache(model)
    batches = _batches(requests, most_rows, alike=not cached)
    together = ctx.world_size > 1 and is_spread(model)
    if together:
        count = torch.tensor([len(batches)], dtype=torch.int64, device=ctx.comm.control)
        most = int(all_reduce_flat(ctx.comm, count, "max"))
        filling = [SampleRequest(-1, 0, requests[0].ids if requests else (0,))]
        batches += [filling] * (most - len(batches))
    drawn: dict[tuple[int, int], DrawnTokens] = {}
    with evaluating(model), torch.no_grad():
        for batch in batches:
            with _rows_fit(batch, options):
                rows = _Batch(ctx, model, batch, options, cached, vocab_parallel).run(together=together)
            drawn |= {(each.prompt, each.sample): row for each, row in zip(batch, rows, strict=True)}
    return [drawn[each.prompt, each.sample] for each in requests]


@contextmanager
def _rows_fit(requests: Sequence[SampleRequest], options: SampleOptions) -> Generator[None]:
    """Raise `DataError` for rows whose tokens or positions a model's tables do not have."""
    try:
        yield
    except IndexError as error:
        longest = max(len(each.ids) for each in requests)
        raise DataError(
            "the model has not so many positions, or not these tokens",
            expected="prompts and new tokens within the model's context, and tokens within its vocabulary",
            got=f"prompts of up to {longest} tokens with {options.max_new_tokens} new ones, and tokens up to"
            f" {max(max(each.ids) for each in requests)}: {error}",
            where="sample",
            fix="Shorten the prompts, or lower max_new_tokens.",
        ) from error


def score_row(ctx: DistContext, model: nn.Module, ids: Sequence[int], first: int) -> list[float]:
    """Return the log-probabilities of a row's tokens from `first` on, on every rank. A collective."""
    row = torch.tensor([list(ids)], device=ctx.device)
    decoder = WholeSequences(ctx, model, len(ids), lambda ids: ids, partial(first_tensor, containers=ctx.containers))
    found: list[float] = []
    with evaluating(model), torch.no_grad():
        for at in range(first, len(ids)):
            logits = decoder.logits(row[:, :at])
            value = torch.zeros(1, dtype=torch.float64, device=ctx.device)
            if logits is not None:
                value = log_chances(logits, Sampling())[:, ids[at]].contiguous()
            share_tokens(ctx, model, value)
            found.append(float(value))
    return found


def is_spread(model: nn.Module) -> bool:
    """Return whether a forward of a model needs other ranks."""
    return is_sharded(model) or is_pipelined(model)


def _batches(requests: Sequence[SampleRequest], most: int, *, alike: bool) -> list[list[SampleRequest]]:
    """Divide requests into batches, `alike` of prompts of one length."""
    groups: dict[int, list[SampleRequest]] = {}
    for each in requests:
        groups.setdefault(len(each.ids) if alike else 0, []).append(each)
    return [group[at : at + most] for group in groups.values() for at in range(0, len(group), most)]


class _Batch:
    """Rows that are drawn together; those that end leave it where the decoder can drop them."""

    def __init__(
        self,
        ctx: DistContext,
        model: nn.Module,
        requests: Sequence[SampleRequest],
        options: SampleOptions,
        cached: bool,
        vocab_parallel: bool,
    ) -> None:
        self._ctx, self._model, self._options = ctx, model, options
        self._vocab_parallel = vocab_parallel
        self._requests = requests
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._reasons: list[FinishReason] = ["length"] * len(requests)
        self._live = list(range(len(requests)))  # number of each row that is still run
        self._ended = set[int]()
        keys = [options.key.fold_in("sample", each.prompt, each.sample) for each in requests]
        self._numbers = [numbers_of(each, options.max_new_tokens) for each in keys]
        widest = max(len(each.ids) for each in requests)
        self._ids = torch.tensor([[0] * (widest - len(each.ids)) + list(each.ids) for each in requests]).to(ctx.device)
        select = partial(first_tensor, containers=ctx.containers)
        self._decoder: Decoder
        if cached:
            mask = torch.tensor([[0] * (widest - len(each.ids)) + [1] * len(each.ids) for each in requests])
            self._decoder = CachedTokens(ctx, model, mask.to(ctx.device), select)
        else:
            self._decoder = WholeSequences(ctx, model, widest + options.max_new_tokens - 1, lambda ids: ids, select)

    def run(self, *, together: bool) -> list[DrawnTokens]:
        """Draw until all rows have ended, `together` those of all ranks."""
        for step in range(self._options.max_new_tokens):
            self._step(step)
            if together:
                left = torch.tensor([len(self._live) > len(self._ended & {*self._live})], device=self._ctx.device)
                if all_ended(self._ctx, ~left):
                    break
            elif self._ended.issuperset(self._live):
                break
        return [DrawnTokens(*row) for row in zip(self._tokens, self._logprobs, self._reasons, strict=True)]

    def _step(self, step: int) -> None:
        """Add a token to each row; drop those that have ended, but for one that keeps the ranks in step."""
        logits = self._decoder.logits(self._ids)
        # tokens, then their log-probabilities, in one message
        drawn = torch.zeros(2 * len(self._live), dtype=torch.float64, device=self._ids.device)
        if logits is not None:
            logits = whole_rows(self._ctx, logits) if self._vocab_parallel else logits
            chances = log_chances(logits, self._options)
            numbers = torch.tensor([self._numbers[at][step] for at in self._live], dtype=torch.float64)
            chosen = tokens_at(chances, numbers) if self._options.temperature else chances.argmax(-1)
            drawn = torch.cat([chosen.double(), chances.gather(-1, chosen[:, None])[:, 0]])
        share_tokens(self._ctx, self._model, drawn)
        tokens = drawn[: len(self._live)].to(self._ids.dtype)
        found = drawn[len(self._live) :]
        self._ids = torch.cat([self._ids, tokens[:, None]], 1)
        values = cast("list[float]", found.tolist())  # pyright: ignore[reportUnknownMemberType]
        for at, token, value in zip(self._live, integers(tokens), values, strict=True):
            if at in self._ended:
                continue
            self._tokens[at].append(token)
            self._logprobs[at].append(value)
            if token in self._options.stop:
                self._reasons[at] = "stop"
                self._ended.add(at)
        stay = [place for place, at in enumerate(self._live) if at not in self._ended] or [0]
        if len(stay) < len(self._live):
            rows = torch.tensor(stay, device=self._ids.device)
            if self._decoder.keep(rows):
                self._ids, self._live = self._ids[rows], [self._live[place] for place in stay]
