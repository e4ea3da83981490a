# SPDX-License-Identifier: Apache-2.0
"""Samples asked of a server, now or later: a draw only depends on key, prompt, sample and place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, TimeoutError as FutureTimeout
from math import isfinite
from operator import index
from threading import Thread
from typing import Any, Literal, Protocol, Required, TypedDict, Unpack

import msgspec
from torch import nn

from accel.comm import Call, call_site, shared_failure
from accel.context import DistContext, context_first
from accel.errors import AccelError, ConfigError, ServerError
from accel.errors._checks import check_count, check_kind
from accel.post_training._samples import FinishReason, SampleRow, Samples, Version, token_ids
from accel.random import Key
from accel.tensors import integers
from accel.terminal import show_limit
from accel.training._decoding import Sampling, plain_number

Place = Literal["rank", "ranks", "remote"]
_BY_NUMBER = "the tokens of each prompt by its number, an integer"
_BIAS = (
    "samples are drawn with top_k or top_p, and their log-probabilities are of the full distribution: their ratios"
    " are biased. Have the server return log-probabilities of the limited distribution, or draw without limits."
)


class SampleRequest(msgspec.Struct, frozen=True):
    """A sample to draw.

    Attributes:
        prompt: number of the prompt.
        sample: number of the sample within its prompt.
        ids: the prompt's tokens.
    """

    prompt: int
    sample: int
    ids: tuple[int, ...]


class SampleOptions(Sampling, frozen=True, kw_only=True):
    """Options of a draw; see `sample`."""

    key: Key
    max_new_tokens: int
    temperature: float = 1.0
    stop: tuple[int, ...] = ()
    version: Version | None = None

    @property
    def is_limited(self) -> bool:
        """Whether a draw leaves out tokens."""
        return self.top_k is not None or (self.top_p or 1.0) < 1


class DrawnTokens(msgspec.Struct, frozen=True):
    """Tokens that a server has drawn for a request."""

    tokens: list[int]  # the new tokens
    logprobs: list[float]  # log-probability of each
    finish_reason: FinishReason  # why the last one is the last


class SampleServer(Protocol):
    """A server that samples.

    Attributes:
        place: "rank", "ranks" or "remote". "rank": this process draws samples. "ranks": all ranks together, as from a
            model that is spread over them. "remote": another process; `sample_later` asks from a thread, so that
            `sample` may not communicate with ranks.
    """

    @property
    def place(self) -> Place: ...

    def sample(self, ctx: DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> Samples:
        """Return the samples of requests, in their order; raise `ServerError` for other weights than `version`."""
        ...


@context_first
def sample(
    ctx: DistContext,
    server: SampleServer,
    prompts: Mapping[int, Sequence[int]],
    *,
    key: Key,
    max_new_tokens: int,
    n: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Iterable[int] = (),
    version: Version | None = None,
) -> Samples:
    """Return `n` samples of each prompt, in the order of the prompts.

    A draw only depends on the key, the numbers of prompt and sample, and the token's place. Any number of ranks, any
    batch and any order give the same samples in float64. In fp32 the random numbers are the same, and rows differ where
    two tokens are nearly equal; in bf16 the distribution is the same.

    Each rank along dp asks for its own prompts. No communication, unless the server's model is spread over ranks: then
    a collective, with a message for each token. A failure is raised on all ranks in their next call.

    Args:
        ctx: the context.
        server: such as `servers.local(model)`.
        prompts: tokens of each prompt, at least one, by the prompt's number; ranks along tp and pp pass the same ones.
        key: source of the draws, equal on every rank.
        max_new_tokens: most tokens of a sample, from 1.
        n: number of samples of each prompt.
        temperature: divisor of the logits; 0 takes the most probable token.
        top_k, top_p: limits on the tokens that may be drawn, as in `generate`. With them the log-probabilities are the
            sampler's.
        stop: token or tokens that end a sample; it keeps them.
        version: the weights that the server must have; None for any.

    Returns:
        The samples, with log-probabilities.

    Raises:
        ServerError: the server is gone, has other weights, or its model's logits are not finite.
        ConfigError: an empty prompt, arguments out of range, or a model that is not causal, has no language head, or
            was prepared on a mesh with cp.
        DataError: prompts with their new tokens are longer than the model's table of positions.

    Examples:
        >>> class Next(nn.Module):
        ...     def forward(self, ids):
        ...         return nn.functional.one_hot((ids + 1) % 5, 5).float() * 100
        >>> server = post_training.servers.local(Next())
        >>> found = post_training.sample(ctx, server, {7: [3]}, key=accel.seeding.Key(0), max_new_tokens=3, stop=0)
        >>> found.ids.tolist(), found.prompts, found.finish_reasons
        ([[3, 4, 0]], (7,), ('stop',))
    """
    pending = _begin(
        ctx,
        "sample",
        server,
        prompts,
        key=key,
        max_new_tokens=max_new_tokens,
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        version=version,
    )
    return pending.result()


class _SampleKeywords(TypedDict, total=False):
    """Keywords of `sample`; there without a default are key and max_new_tokens."""

    key: Required[Key]
    max_new_tokens: Required[int]
    n: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: int | Iterable[int]
    version: Version | None


class PendingSamples:
    """Samples that a server may still be drawing; from `sample_later`."""

    def __init__(self, ctx: DistContext, call: Call, found: Future[Samples], options: SampleOptions) -> None:
        self._ctx, self._call, self._found, self._options = ctx, call, found, options

    @property
    def is_done(self) -> bool:
        """Whether `result` would return at once."""
        return self._found.done()

    def result(self, timeout_s: float | None = None) -> Samples:
        """Wait for the samples. No communication; a failure is raised on all ranks in their next call.

        Args:
            timeout_s: most seconds to wait; None for as long as the server lets its requests take.

        Raises:
            ServerError: the server has failed, has other weights, or has not answered in time.
        """
        with shared_failure(self._ctx.comm, self._call):
            try:
                found = self._found.result(timeout_s)
            except FutureTimeout as error:
                raise ServerError(
                    "the samples have not come in time",
                    expected="samples" if timeout_s is None else f"samples within {show_limit(timeout_s)}",
                    got=str(error) or "none",
                    where="PendingSamples.result",
                ) from error
            _check_logprobs(found)
        if found.drawn_from == "model" and self._options.is_limited:
            warnings.warn(_BIAS, stacklevel=2)  # once for each line that asks, by Python's own filter
        return found


@context_first
def sample_later(
    ctx: DistContext, server: SampleServer, prompts: Mapping[int, Sequence[int]], **options: Unpack[_SampleKeywords]
) -> PendingSamples:
    """Begin to draw samples, and return at once if the server is another process. No communication.

    The samples equal `sample`'s. Train meanwhile on earlier ones, ask for the result, and only then publish: a
    server refuses to sample between two versions. A server of this process draws in the call itself, as it may share
    its device, its weights or its collectives with the training.

    Args:
        ctx: the context.
        server: see `sample`.
        prompts: see `sample`.
        **options: the keywords of `sample`.

    Raises:
        ConfigError: as in `sample`.

    Examples:
        >>> class Next(nn.Module):
        ...     def forward(self, ids):
        ...         return nn.functional.one_hot((ids + 1) % 5, 5).float() * 100
        >>> server = post_training.servers.local(Next())
        >>> later = post_training.sample_later(ctx, server, {7: [3]}, key=accel.seeding.Key(0), max_new_tokens=2)
        >>> later.result().ids.tolist()
        [[3, 4, 0]]
    """
    return _begin(ctx, "sample_later", server, prompts, **options)


def _begin(
    ctx: DistContext,
    name: str,
    server: SampleServer,
    prompts: Mapping[int, Sequence[int]],
    **keywords: Unpack[_SampleKeywords],
) -> PendingSamples:
    call = Call(name, site=call_site())
    with shared_failure(ctx.comm, call):
        check_server(server, name)
        requests, options = _asked(prompts, **keywords)
    found: Future[Samples] = Future()
    # "ranks": a failure of a collective is every rank's already; a draw's failure differs between ranks.
    kept = ServerError if server.place == "ranks" else Exception

    def draw() -> None:
        try:
            found.set_result(server.sample(ctx, requests, options))
        except kept as error:  # `result` raises it on all ranks
            is_far = server.place == "remote"  # a failure of a model of this process stays what it is
            found.set_exception(as_server_error(error, name, "drawn the samples") if is_far else error)

    if server.place == "remote":  # nothing in it communicates with ranks
        Thread(target=draw, name="accel-samples", daemon=True).start()
    else:
        draw()
    return PendingSamples(ctx, call, found, options)


def check_server(server: object, where: str) -> None:
    """Raise `ConfigError` for a model in the place of its server."""
    if isinstance(server, nn.Module):
        raise ConfigError(
            "a model is no server",
            expected="a server of accel.post_training.servers",
            got=type(server).__name__,
            where=f"{where}(server)",
            fix="Make it one: server = accel.post_training.servers.local(model).",
        )


def as_server_error(error: Exception, where: str, task: str) -> AccelError:
    """Return the error of a server, which may be another library's, as one that all ranks can raise."""
    if isinstance(error, AccelError):
        return error
    found = ServerError(f"a server has not {task}", got=f"{type(error).__name__}: {error}", where=where)
    found.__cause__ = error
    return found


def _asked(prompts: Any, *, n: int = 1, stop: Any = (), **options: Any) -> tuple[list[SampleRequest], SampleOptions]:
    """Return checked requests and options."""
    check_count(n, "the number of samples is not valid", where="sample(n=)")
    check_kind(options["key"], Key, "the key is not valid", where="sample(key=)", fix="Pass accel.seeding.Key(seed).")
    check_kind(options.get("version"), Version | None, "the version is not valid", where="sample(version=)")
    ends = token_ids(stop, "sample(stop=)", or_one=True)
    options |= {name: plain_number(options[name]) for name in ("temperature", "top_p") if name in options}
    asked = SampleOptions(stop=tuple(integers(ends)), **options)
    check_count(asked.max_new_tokens, "the number of tokens is not valid", where="sample(max_new_tokens=)")
    asked.check(has_key=asked.temperature != 0, where="sample")
    fix = "Number them: prompts = dict(enumerate(prompts))."
    check_kind(prompts, Mapping, "the prompts have no numbers", expected=_BY_NUMBER, where="sample(prompts)", fix=fix)
    if wrong := [number for number in prompts if not hasattr(number, "__index__")]:
        problem, got = "the prompts have no numbers", repr(wrong)[:80]
        raise ConfigError(problem, expected=_BY_NUMBER, got=got, where="sample(prompts)", fix=fix)
    rows = {index(number): tuple(integers(token_ids(each, "sample(prompts)"))) for number, each in prompts.items()}
    if empty := [number for number, ids in rows.items() if not ids]:
        problem = "a prompt without tokens"
        raise ConfigError(problem, expected="a token at least", got=f"prompts {empty}", where="sample")
    return [SampleRequest(number, at, ids) for number, ids in rows.items() for at in range(n)], asked


def samples_of(
    requests: Sequence[SampleRequest], drawn: Sequence[DrawnTokens], version: Version | None, *, limited: bool
) -> Samples:
    """Return the samples of requests; no row for none.

    Args:
        requests: the requests, in the order of the rows.
        drawn: tokens of each.
        version: the weights that drew them.
        limited: whether log-probabilities are of a distribution that leaves out tokens.

    Raises:
        ServerError: log-probabilities that are inf or NaN: the tokens are then drawn from nothing.
    """
    wrong = {asked.prompt for asked, each in zip(requests, drawn, strict=True) if not all(map(isfinite, each.logprobs))}
    if wrong:
        raise _not_finite(wrong)
    rows = [
        SampleRow(
            ids=[*asked.ids, *found.tokens],
            prompt_length=len(asked.ids),
            logprobs=found.logprobs,
            prompt=asked.prompt,
            sample=asked.sample,
            finish_reason=found.finish_reason,
        )
        for asked, found in zip(requests, drawn, strict=True)
    ]
    nothing = SampleRow([0], 1, logprobs=[])
    found = Samples.of(rows or [nothing], drawn_from="sampler" if limited else "model", version=version)
    return found if rows else found.rows([])


def _check_logprobs(samples: Samples) -> None:
    """Raise `ServerError` for log-probabilities that are inf or NaN, as a user's own server may give them."""
    if samples.logprobs is None:
        return
    rows = (~samples.logprobs.isfinite() & samples.mask).any(1)
    if bool(rows.any()):
        raise _not_finite({samples.prompts[at] for at in integers(rows.nonzero()[:, 0])})


def _not_finite(prompts: Set[int]) -> ServerError:
    return ServerError(
        "log-probabilities of samples are not finite",
        expected="finite logits of the server's model",
        got=f"inf or NaN in samples of prompts {sorted(prompts)}",
        where="sample",
        fix="Begin again from a checkpoint of finite weights, and publish them to the server.",
    )
