# SPDX-License-Identifier: Apache-2.0
"""Servers of weights: the protocol, and one in this process.

`publish` calls the methods in the order begin, load (again and again), commit; between begin and commit a server is
half new, and refuses to sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from accel.checkpoint._live_tensors import checksums
from accel.context import DistContext
from accel.errors import ServerError
from accel.items._whole import live_tensors
from accel.post_training._sample import (
    DrawnTokens,
    Place,
    SampleOptions,
    SampleRequest,
    draw_tokens,
    is_spread,
    samples_of,
)
from accel.post_training._samples import Samples, Version
from accel.tensors import is_dtensor

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
