# SPDX-License-Identifier: Apache-2.0
"""Ranks that read streams of their own, and agree on several steps, and on the end, in one checked message."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import msgspec
import torch

from accel.comm import Call, broadcast_bytes, exchange_values, shared_failure
from accel.context import DistContext
from accel.data._cursor import StreamPosition
from accel.data.stream._packing import BatchPacker, BatchUnpacker, PackedBatches
from accel.data.stream._prefetch import AgreedStep, ReadStep, batch_bytes
from accel.data.stream._reader import LocalBatch
from accel.errors import DataError, TreeError
from accel.tree import Container, leaves

_DIGEST_BYTES = 1 << 16  # of each tensor


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """A rank's facts of its next steps.

    Attributes:
        counts: real samples of its batches; none once its stream has ended.
        more: whether it has more after them.
        bare: whether it has neither a batch nor an older one to stand in.
        size: bytes of the first batch.
        digest: of the first batch of an epoch, where ranks read streams of their own.
    """

    counts: list[int]
    more: bool
    bare: bool
    size: int
    digest: str = ""


class IndependentReaders:
    """Every rank reads; its last batch, or another rank's, stands in once its stream has ended.

    Attributes:
        step_bytes: size of the largest first batch in the last message.

    Args:
        ctx: the context.
        call: each message, as all ranks name it.
        data_ranks: data-parallel rank by rank; ranks of one read the same.
        drops: whether the epoch ends at the first rank without another full batch.
        compares: whether to warn if two data-parallel ranks begin with the same samples.
        position: of this rank's reader.
    """

    def __init__(
        self,
        ctx: DistContext,
        call: Call,
        data_ranks: list[int],
        *,
        drops: bool,
        compares: bool,
        position: StreamPosition | None,
    ) -> None:
        self._ctx = ctx
        self._call = call
        self._data_ranks = data_ranks
        self._drops = drops
        self._compares = compares
        self._position = position
        self._latest: LocalBatch | None = None
        self.step_bytes = 0

    def agree(self, steps: list[ReadStep]) -> list[AgreedStep]:
        """Agree on the next steps with the other ranks. A collective.

        Args:
            steps: this rank's; none once its stream has ended.

        Returns:
            The steps that are known of every rank; none at the end.

        Raises:
            DataError: ranks of one data-parallel rank read different streams; on every rank.
            TreeError: a batch to stand in for others cannot be sent; on every rank.
        """
        reports = exchange_values(self._ctx.comm, self._call, self._report(steps), _Report)
        if self._compares and self._ctx.is_main_process:
            _warn_of_equal([report.digest for report in reports], self._data_ranks)
        self._compares = False
        totals = _agreed_totals(reports, self._data_ranks, drops=self._drops)
        if totals and any(report.bare for report in reports):
            self._latest = self._lend(steps, [report.bare for report in reports])
        self.step_bytes = max(report.size for report in reports)
        agreed: list[AgreedStep] = []
        for at, (total, is_last) in enumerate(totals):
            count = 0
            if at < len(steps):
                self._latest = steps[at].batches[0]
                self._position = steps[at].position
                count = steps[at].counts[0]
            assert self._latest is not None  # its own, or a borrowed one
            agreed.append(AgreedStep(self._latest, count, total, is_last, self._position))
        return agreed

    def _report(self, steps: list[ReadStep]) -> _Report:
        first = steps[0].batches[0].data if steps else None
        return _Report(
            counts=[step.counts[0] for step in steps],
            more=bool(steps) and steps[-1].more,
            bare=not steps and self._latest is None,
            size=batch_bytes(first, self._ctx.containers) if steps else 0,
            digest=_digest(first, self._ctx.containers) if steps and self._compares else "",
        )

    def _lend(self, steps: list[ReadStep], bare: list[bool]) -> LocalBatch:
        """Send ranks that have never had a batch the first one of a rank that has, to stand in."""
        ctx = self._ctx
        own = steps[0].batches[0] if steps else self._latest
        lender = bare.index(False)
        payload = torch.empty(0, dtype=torch.uint8)
        if ctx.rank == lender and own is not None:
            with shared_failure(ctx.comm, Call("batches")):
                packed = BatchPacker().pack([own.data], whole=True)
            payload = torch.cat([torch.tensor([packed.header_bytes, own.rows]).view(torch.uint8), packed.buffer])
        lent = broadcast_bytes(ctx.comm, self._call, payload, source=lender)
        if own is not None:
            return own
        head = 16  # two int64
        header_bytes, rows = (int(each) for each in lent[:head].clone().view(torch.int64))
        (data,) = BatchUnpacker().unpack(PackedBatches(header_bytes, lent[head:].clone()))
        return LocalBatch(data, rows)


def _agreed_totals(reports: list[_Report], data_ranks: list[int], *, drops: bool) -> list[tuple[int, bool]]:
    """Return the steps that are known of every rank: real samples of all, and whether the epoch ends with it.

    Every step of a rank with an ended stream is known. A rank with fewer steps than the others, and more to come,
    reports its error in the next message.
    """
    going = [len(report.counts) for report in reports if report.more]
    known = min(going) if going else max(len(report.counts) for report in reports)
    firsts = {data_rank: reports[data_ranks.index(data_rank)] for data_rank in data_ranks}
    for rank, (report, data_rank) in enumerate(zip(reports, data_ranks, strict=True)):
        if report.counts[:known] != firsts[data_rank].counts[:known]:
            raise DataError(
                "ranks of one part of the data read different streams",
                expected=f"batches of {firsts[data_rank].counts[:known]} samples "
                f"as on rank {data_ranks.index(data_rank)}",
                got=f"{report.counts[:known]} on rank {rank}",
                where="batches",
            )
    agreed: list[tuple[int, bool]] = []
    for at in range(known):
        here = [(report.counts[at : at + 1] or [0])[0] for report in firsts.values()]
        more = [at + 1 < len(report.counts) or report.more for report in firsts.values()]
        if drops and not all(here):
            break
        agreed.append((sum(here), not (all if drops else any)(more)))
    return agreed


def _warn_of_equal(digests: Sequence[str], data_ranks: Sequence[int]) -> None:
    """Log a warning if two data-parallel ranks begin with the same samples: the stream was not divided.

    Args:
        digests: of each rank's first batch; empty where it is not known.
        data_ranks: data-parallel rank by rank.
    """
    readers: dict[str, int] = {}
    for rank, (digest, data_rank) in enumerate(zip(digests, data_ranks, strict=True)):
        other = readers.setdefault(digest, rank) if digest else rank
        if data_ranks[other] != data_rank:
            logging.getLogger("accel.data").warning(
                'ranks %d and %d begin their streams with the same samples: stream="own" reads the dataset of each '
                "rank as it is, so every rank reads an undivided one in full; divide it by "
                'ctx.data_parallel, or use stream="shards", "elements" or "dispatch"',
                other,
                rank,
            )
            return


def _digest(data: object, containers: Sequence[Container]) -> str:
    """Return a short text, different for different batches; empty for one of an unknown container."""
    hashed = hashlib.blake2b(digest_size=8)
    try:
        for path, leaf in leaves(data, containers):
            hashed.update(path.encode())
            hashed.update(_leaf_bytes(leaf))
    except TreeError:
        return ""
    return hashed.hexdigest()


def _leaf_bytes(leaf: object) -> bytes:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf).encode()
    flat = leaf.detach().flatten()
    few = flat[: max(1, _DIGEST_BYTES // max(leaf.element_size(), 1))].cpu().contiguous()
    return f"{leaf.dtype} {list(leaf.shape)}".encode() + few.view(torch.uint8).numpy().tobytes()
