# SPDX-License-Identifier: Apache-2.0
"""Samples: sequences that a model began from prompts, who drew which tokens, and how probable they were.

They come from `sample`, or from a user's own rollouts by `Samples.of`. All else takes them from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, Literal, cast, get_args

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from accel.errors import DataError
from accel.errors._checks import check_choice

FinishReason = Literal["stop", "length", "abort"]
Drawn = Literal["model", "sampler"]
_OF = "Samples.of"


class Version(msgspec.Struct, frozen=True, order=True):
    """Weights that drew a sample.

    Attributes:
        session: name of the publisher's session; each start of a trainer opens a new one.
        number: number of the weights within the session, which grows.
    """

    session: str = ""
    number: int = 0


class SampleRow(msgspec.Struct, frozen=True, eq=False):
    """One sequence of a user's own rollout, for `Samples.of`.

    Attributes:
        ids: tokens of the prompt and behind it, in order.
        prompt_length: number of the prompt's tokens.
        mask: whether the model drew each token behind the prompt: False for the output of a tool. None if it drew all.
        logprobs: log-probability of each token behind the prompt; any number where `mask` is False. None if unknown.
        prompt: number of the prompt.
        sample: number of the sample among those of its prompt.
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
        samples: number of each row among those of its prompt.
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
        """Return samples of a user's own rollouts. No communication.

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
        _check(rows)
        return join_samples([_of_row(row, drawn_from, version) for row in rows], pad_id=pad_id)

    @property
    def truncated(self) -> Tensor:
        """Whether each row ended by the limit of tokens, bool of shape [rows], as DAPO leaves them out of the loss."""
        return torch.tensor([each == "length" for each in self.finish_reasons], device=self.ids.device)

    def rows(self, which: Sequence[int]) -> Samples:
        """Return some rows, as wide as the longest of them: no trace of the rows beside them. Waits for the device."""
        at = list(which)
        lengths = self.lengths[at]
        widest = int(lengths.max()) if at else 0

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[at, :widest].contiguous()

        return msgspec.structs.replace(
            self,
            ids=cut(self.ids),
            prompt_lengths=self.prompt_lengths[at],
            lengths=lengths,
            mask=cut(self.mask),
            prompts=tuple(self.prompts[each] for each in at),
            samples=tuple(self.samples[each] for each in at),
            finish_reasons=tuple(self.finish_reasons[each] for each in at),
            logprobs=cut(self.logprobs),
            routed=cut(self.routed),
        )


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
    for name, kinds in (
        ("drawn_from", {each.drawn_from for each in parts}),
        ("routed", {each.routed is not None for each in parts}),
    ):
        if len(kinds) > 1:
            raise DataError(
                "samples of several kinds cannot be joined",
                expected=f"samples with the same {name}",
                got=", ".join(sorted(map(repr, kinds))),
                where="join_samples",
            )
    _check_widths(parts)
    wide = width or widest
    versions = {each.version for each in parts}
    logprobs = [each.logprobs for each in parts if each.logprobs is not None]
    routed = [each.routed for each in parts if each.routed is not None]

    def joined(tensors: Sequence[Tensor], value: float = 0) -> Tensor:
        sides = [(0, 0) * (each.ndim - 2) + (0, wide - each.shape[1]) for each in tensors]
        return torch.cat([pad(each, side, value=value) for each, side in zip(tensors, sides, strict=True)])

    return Samples(
        ids=joined([each.ids for each in parts], pad_id),
        prompt_lengths=torch.cat([each.prompt_lengths for each in parts]),
        lengths=torch.cat([each.lengths for each in parts]),
        mask=joined([each.mask for each in parts]),
        prompts=tuple(at for each in parts for at in each.prompts),
        samples=tuple(at for each in parts for at in each.samples),
        finish_reasons=tuple(reason for each in parts for reason in each.finish_reasons),
        logprobs=joined(logprobs) if len(logprobs) == len(parts) else None,
        drawn_from=parts[0].drawn_from,
        version=versions.pop() if len(versions) == 1 else None,
        routed=joined(routed) if len(routed) == len(parts) else None,
    )


def _check_widths(parts: Sequence[Samples]) -> None:
    """Raise `DataError` for a tensor that is wider than its tokens: padding would cut it."""
    for at, part in enumerate(parts):
        tensors = {"mask": part.mask, "logprobs": part.logprobs, "routed": part.routed}
        sizes = {name: each.shape[1] for name, each in tensors.items() if each is not None}
        if wider := {name: size for name, size in sizes.items() if size > part.ids.shape[1]}:
            raise DataError(
                f"{' and '.join(wider)} of samples {at} do not fit their tokens",
                expected=f"at most {part.ids.shape[1]} in a row",
                got=", ".join(map(str, wider.values())),
                where="join_samples",
            )


def token_ids(ids: Any, where: str, *, or_one: bool = False) -> Tensor:
    """Return tokens as int64 of shape [tokens], with `or_one` also of a single number; raise `DataError` for others."""
    if isinstance(ids, Set | Iterator | bytes):
        ids = [*cast("Iterable[Any]", ids)]
    try:  # a copy: torch warns of memory that may only be read, as of a file of tokens
        found = ids if isinstance(ids, Tensor) else torch.tensor(ids)
    except (TypeError, ValueError, RuntimeError):  # texts, objects, rows of several lengths
        found = torch.zeros((1, 1))
    found = found.reshape(-1) if or_one and found.ndim < 2 else found
    whole = (found.real if found.is_complex() else found).to(torch.int64)
    # torch compares unsigned integers of 16 bits and more with no others; those beyond int64 are below 0 here.
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


def _check(rows: Sequence[SampleRow]) -> None:
    problem = expected = got = ""
    if not rows:
        problem, expected, got = "no rows", "one row at least", "none"
    for at, row in enumerate(rows):
        if not hasattr(row.prompt_length, "__index__"):
            problem, expected, got = (
                f"the prompt length in row {at} is not valid",
                "an integer",
                repr(row.prompt_length),
            )
            break
        behind = len(row.ids) - row.prompt_length
        sizes = {"mask": row.mask, "logprobs": row.logprobs}
        wrong = {name: len(each) for name, each in sizes.items() if each is not None and len(each) != behind}
        if behind < 0 or row.prompt_length < 0:
            problem, expected = f"the prompt of row {at} is longer than the row", f"at most {len(row.ids)} tokens"
            got = f"prompt_length={row.prompt_length}"
        elif wrong:
            problem, expected = (
                f"{' and '.join(wrong)} of row {at} do not fit its tokens",
                f"{behind} behind the prompt",
            )
            got = ", ".join(map(str, wrong.values()))
        elif row.routed is not None and len(row.routed) > len(row.ids):
            problem, expected = f"experts of row {at} do not fit its tokens", f"those of at most {len(row.ids)} tokens"
            got = str(len(row.routed))
        elif row.finish_reason not in get_args(FinishReason):
            problem, expected = f"unknown reason of the end of row {at}", ", ".join(get_args(FinishReason))
            got = repr(row.finish_reason)
        elif (row.logprobs is None) != (rows[0].logprobs is None):
            problem, expected, got = "some rows have log-probabilities", "those of all rows, or of none", f"row {at}"
        elif (row.routed is None) != (rows[0].routed is None):
            problem, expected, got = "some rows have experts", "those of all rows, or of none", f"row {at}"
    if problem:
        raise DataError(problem, expected=expected, got=got, where=_OF)


def _of_row(row: SampleRow, drawn_from: Drawn, version: Version | None) -> Samples:
    """Return samples of one row."""
    ids = token_ids(row.ids, "SampleRow(ids=)")
    mask = torch.ones(len(ids) - row.prompt_length, dtype=torch.bool)
    if row.mask is not None:
        mask = torch.as_tensor(row.mask, dtype=torch.bool)
    logprobs = None
    if row.logprobs is not None:
        logprobs = torch.as_tensor(row.logprobs, dtype=torch.float64).where(mask, 0.0)
        if not bool(logprobs.isfinite().all()):
            problem, got = "log-probabilities of a row are not finite", str(row.logprobs)[:80]
            raise DataError(problem, expected="finite ones of the tokens that the model drew", got=got, where=_OF)
    before = (row.prompt_length, 0)
    return Samples(
        ids=ids[None],
        prompt_lengths=torch.tensor([row.prompt_length]),
        lengths=torch.tensor([len(ids)]),
        mask=pad(mask, before)[None],
        prompts=(row.prompt,),
        samples=(row.sample,),
        finish_reasons=(row.finish_reason,),
        logprobs=None if logprobs is None else pad(logprobs, before)[None],
        drawn_from=None if logprobs is None else drawn_from,
        version=version,
        routed=None if row.routed is None else row.routed[None],
    )
