# SPDX-License-Identifier: Apache-2.0
"""Samples: sequences that a model continued from prompts, with masks of its tokens and their log-probabilities.

They come from `sample`, or from a user's rollouts by `Samples.of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from operator import index
from typing import Any, Literal, cast, get_args

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.errors import DataError
from accel.errors._checks import check_choice, check_count

FinishReason = Literal["stop", "length", "abort"]
Drawn = Literal["model", "sampler"]
# Fields of `Samples` by their shape: tensors [rows, longest, ...], tensors [rows], and tuples of a value for each row.
_PADDED = ("ids", "mask", "logprobs", "routed")
_BY_ROW = ("prompt_lengths", "lengths")
_TUPLES = ("prompts", "samples", "finish_reasons")


class Version(msgspec.Struct, frozen=True, order=True):
    """Weights that drew a sample.

    Attributes:
        session: name of the publisher's session; each start of a trainer opens a new one.
        number: number of the weights within the session, which grows.
    """

    session: str = ""
    number: int = 0


class SampleRow(msgspec.Struct, frozen=True, eq=False):
    """One sequence of a user's rollout, for `Samples.of`.

    Attributes:
        ids: tokens of the prompt and behind it, in order.
        prompt_length: number of the prompt's tokens.
        mask: whether the model drew each token behind the prompt: False for the output of a tool. None if it drew all.
        logprobs: log-probability of each token behind the prompt; any number where `mask` is False. None if unknown.
        prompt: number of the prompt.
        sample: number of the sample within its prompt.
        finish_reason: why it ended: "stop" by its own token, "length" by the limit, "abort" by force.
        routed: experts of each token, [tokens, layers, experts], of a model that routes; None otherwise.
    """

    ids: Sequence[int] | Tensor
    prompt_length: int
    mask: Sequence[bool] | Tensor | None = None
    logprobs: Sequence[float] | Tensor | None = None
    prompt: int = 0
    sample: int = 0
    finish_reason: FinishReason = "stop"
    routed: Tensor | None = None


class Samples(msgspec.Struct, frozen=True, eq=False):
    """Sequences in rows, filled up behind to the longest one.

    Attributes:
        ids: tokens, int64 of shape [rows, longest].
        prompt_lengths: number of tokens of each prompt, int64 of shape [rows].
        lengths: number of tokens of each prompt with what came behind it, int64 of shape [rows].
        mask: tokens that the model drew, bool of shape [rows, longest]: not the prompt's, a tool's, or the filling.
        prompts: number of each row's prompt.
        samples: number of each row within its prompt.
        finish_reasons: why each row ended.
        logprobs: log-probabilities of the tokens that the model drew, 0 elsewhere, shape [rows, longest]; None if
            unknown.
        drawn_from: distribution of the log-probabilities: the "model"'s at its temperature, or the "sampler"'s, after
            limits such as top-p; None without log-probabilities.
        version: the weights that drew them; None if unknown.
        routed: experts of each token, [rows, longest, layers, experts], of a model that routes; None otherwise.
    """

    ids: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    mask: Tensor
    prompts: tuple[int, ...]
    samples: tuple[int, ...]
    finish_reasons: tuple[FinishReason, ...]
    logprobs: Tensor | None = None
    drawn_from: Drawn | None = None
    version: Version | None = None
    routed: Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[SampleRow],
        *,
        pad_id: int = 0,
        drawn_from: Drawn = "model",
        version: Version | None = None,
    ) -> Samples:
        """Return samples of a user's rollouts. No communication.

        Args:
            rows: sequences, at least one.
            pad_id: token behind shorter rows.
            drawn_from: distribution of the rows' log-probabilities; see `Samples`.
            version: the weights that drew them.

        Raises:
            DataError: no row, a prompt that is longer than its row, a mask or log-probabilities of another length than
                the tokens behind the prompt, experts of more tokens than the row's, or log-probabilities of some rows
                alone.
        """
        check_choice(drawn_from, ("model", "sampler"), "unknown distribution", where="Samples.of(drawn_from=)")
        if not rows:
            raise DataError("no rows", expected="one row at least", got="none", where="Samples.of")
        parts = [_of_row(row, f"Samples.of(rows[{at}])", drawn_from, version) for at, row in enumerate(rows)]
        return join_samples(parts, pad_id=pad_id)

    @property
    def truncated(self) -> Tensor:
        """Whether each row ended by the limit of tokens, bool of shape [rows], as DAPO leaves them out of the loss."""
        return torch.tensor([each == "length" for each in self.finish_reasons], device=self.ids.device)

    def rows(self, which: Sequence[int]) -> Samples:
        """Return some rows, as wide as the longest of them: no trace of other rows. Waits for the device."""
        at = list(which)
        widest = int(self.lengths[at].max()) if at else 0
        padded = {name: each[at, :widest].contiguous() for name, each in _padded(self).items()}
        by_row = {name: getattr(self, name)[at] for name in _BY_ROW}
        tuples = {name: tuple(getattr(self, name)[each] for each in at) for name in _TUPLES}
        return msgspec.structs.replace(self, **padded, **by_row, **tuples)


def join_samples(parts: Sequence[Samples], *, pad_id: int = 0, width: int | None = None) -> Samples:
    """Return the rows of several samples as one. No communication.

    Args:
        parts: samples, at least one.
        pad_id: token behind shorter rows.
        width: number of tokens of a row, so that shapes stay alike from step to step; None for the longest row's.

    Raises:
        DataError: no samples, a width below the longest row's, a tensor that is wider than its tokens, or
            log-probabilities, distributions or versions of different kinds. Samples of several versions join as those
            of none: compare them before.
    """
    if not parts:
        raise DataError("no samples to join", expected="one Samples at least", got="none", where="join_samples")
    widest = max(each.ids.shape[1] for each in parts)
    if width is not None and width < widest:
        raise DataError(
            "rows do not fit the width", expected=f"width={widest} or more", got=f"width={width}", where="join_samples"
        )
    tensors = [_padded(each) for each in parts]
    kinds = {name: {"a tensor" if name in each else "None" for each in tensors} for name in ("logprobs", "routed")}
    for name, found in (*kinds.items(), ("drawn_from", {repr(each.drawn_from) for each in parts})):
        if len(found) > 1:
            raise DataError(
                "samples of several kinds cannot be joined",
                expected=f"the same kind of {name} in all samples",
                got=", ".join(sorted(found)),
                where="join_samples",
            )
    for at, each in enumerate(tensors):  # padding would cut a tensor that is wider than its tokens
        sizes = {name: tensor.shape[1] for name, tensor in each.items()}
        if wider := {name: size for name, size in sizes.items() if size > sizes["ids"]}:
            raise DataError(
                f"{' and '.join(wider)} of samples {at} do not fit their tokens",
                expected=f"at most {sizes['ids']} in a row",
                got=", ".join(map(str, wider.values())),
                where="join_samples",
            )

    def joined(name: str) -> Tensor:
        filled: list[Tensor] = []
        for each in tensors:
            behind = (width or widest) - each[name].shape[1]
            sides = (0, 0) * (each[name].ndim - 2) + (0, behind)
            filled.append(pad(each[name], sides, value=pad_id if name == "ids" else 0))
        return torch.cat(filled)

    padded: dict[str, Any] = {name: joined(name) for name in tensors[0]}
    by_row: dict[str, Any] = {name: torch.cat([getattr(each, name) for each in parts]) for name in _BY_ROW}
    tuples: dict[str, Any] = {name: tuple(value for each in parts for value in getattr(each, name)) for name in _TUPLES}
    versions = {each.version for each in parts}
    version = versions.pop() if len(versions) == 1 else None
    return Samples(**padded, **by_row, **tuples, drawn_from=parts[0].drawn_from, version=version)


def _padded(samples: Samples) -> dict[str, Tensor]:
    """Return the tensors [rows, longest, ...] of samples by the field's name, without fields that are None."""
    return {name: each for name in _PADDED if (each := getattr(samples, name)) is not None}


def _of_row(row: SampleRow, where: str, drawn_from: Drawn, version: Version | None) -> Samples:
    """Return samples of one row; raise an error unless its parts fit each other."""
    ids = token_ids(row.ids, "SampleRow(ids=)")
    begin = index(row.prompt_length) if hasattr(row.prompt_length, "__index__") else row.prompt_length
    problem = "the prompt length is not valid"
    check_count(begin, problem, least=0, most=len(ids), where=f"{where}.prompt_length", error=DataError)
    reasons, problem = get_args(FinishReason), "unknown reason of the end"
    check_choice(row.finish_reason, reasons, problem, where=f"{where}.finish_reason", error=DataError)
    behind = len(ids) - begin
    for name, part, least, most in (
        ("mask", row.mask, behind, behind),
        ("logprobs", row.logprobs, behind, behind),
        ("routed", row.routed, 0, len(ids)),
    ):
        if part is not None and not least <= len(part) <= most:
            expected = f"{most} behind the prompt" if least else f"at most {most}"
            problem = f"{name} do not fit the row's tokens"
            raise DataError(problem, expected=expected, got=str(len(part)), where=f"{where}.{name}")
    mask = torch.ones(behind, dtype=torch.bool)
    if row.mask is not None:
        mask = torch.as_tensor(row.mask, dtype=torch.bool)
    logprobs = None
    if row.logprobs is not None:
        logprobs = torch.as_tensor(row.logprobs, dtype=torch.float64).where(mask, 0.0)
        if not bool(logprobs.isfinite().all()):
            problem, got = "log-probabilities of a row are not finite", str(row.logprobs)[:80]
            raise DataError(problem, expected="finite ones of the tokens that the model drew", got=got, where=where)
    return Samples(
        ids=ids[None],
        prompt_lengths=torch.tensor([begin]),
        lengths=torch.tensor([len(ids)]),
        mask=pad(mask, (begin, 0))[None],
        prompts=(row.prompt,),
        samples=(row.sample,),
        finish_reasons=(row.finish_reason,),
        logprobs=None if logprobs is None else pad(logprobs, (begin, 0))[None],
        drawn_from=None if logprobs is None else drawn_from,
        version=version,
        routed=None if row.routed is None else row.routed[None],
    )


def token_ids(ids: Any, where: str, *, or_one: bool = False) -> Tensor:
    """Return tokens as int64 of shape [tokens], with `or_one` also of a single number; raise `DataError` for others."""
    if isinstance(ids, Set | Iterator | bytes):
        ids = [*cast("Iterable[Any]", ids)]
    try:  # a copy: torch warns of read-only memory, such as a file of tokens
        found = ids if isinstance(ids, Tensor) else torch.tensor(ids)
    except (TypeError, ValueError, RuntimeError):  # texts, objects, rows of several lengths
        found = torch.zeros((1, 1))
    found = found.reshape(-1) if or_one and found.ndim < 2 else found
    whole = (found.real if found.is_complex() else found).to(torch.int64)
    # torch compares unsigned integers of 16 bits and more with no others; numbers beyond int64 are below 0 here.
    has_parts = found.is_floating_point() or found.is_complex()
    is_row = found.ndim == 1 and found.dtype != torch.bool
    if not is_row or bool((whole < 0).any()) or (has_parts and not bool((whole == found).all())):
        raise DataError(
            "the tokens are not valid",
            expected="integers from 0 in one row",
            got=repr(ids)[:80],
            where=where,
            fix='Pass the numbers of one text, such as tokenizer(text)["input_ids"].',
        )
    return whole


def check_rewards(rewards: Tensor, where: str) -> None:
    """Raise `DataError` for rewards that are inf or NaN, as one of them makes every advantage of its group NaN."""
    wrong = (~rewards.isfinite()).nonzero()[:, 0]
    if len(wrong):
        raise DataError(
            "rewards are not finite",
            expected="a finite reward of each row",
            got=f"{rewards[wrong[0]].item()} in row {wrong[0].item()}, and {len(wrong) - 1} others",
            where=where,
            fix="rewards = torch.nan_to_num(rewards, nan=0.0, posinf=0.0, neginf=0.0), or correct the reward function.",
        )
