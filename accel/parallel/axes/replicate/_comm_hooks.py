# SPDX-License-Identifier: Apache-2.0
"""Exchange of gradients: DDP's communication hooks by name, and PowerSGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage] - a documented name
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from accel.comm import adopt, all_gather_flat
from accel.errors import ConfigError
from accel.errors._checks import check_choice
from accel.tensors import integers


class _BucketPart(NamedTuple):
    """Elements of a bucket that are sent as one matrix product, or uncompressed if `columns` is 0."""

    elements: torch.Tensor
    rows: int
    width: int
    columns: int


class PowerSgdExchange:
    """State and exchange of one replica. Ranks hold equal bases, and different errors.

    Args:
        group: process group of the replicas.
        options: of the exchange.

    Reference: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression", arXiv:1905.13727, algorithm 1.
    """

    def __init__(self, group: Any, options: PowerSgd) -> None:
        self._group = group
        self._options = options
        self._wire = None if options.wire is None else _DTYPES[options.wire]
        self._step = 0
        self._errors: dict[tuple[int, int], torch.Tensor] = {}
        self._bases: dict[tuple[int, int], torch.Tensor] = {}

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Replace a bucket's gradients by an approximation of their mean over ranks. A collective."""
        step = self._step
        self._step += bucket.is_last()
        parts = [] if step < self._options.start_step else self._parts(bucket)
        thin = [part for part in parts if part.columns]
        if not thin:
            return default_hooks.allreduce_hook(self._group, bucket)
        whole = [part.elements for part in parts if not part.columns]
        for elements, mean in zip(whole, self._means(whole), strict=True):
            _ = elements.copy_(mean)
        # all messages are exchanged in here, so that messages of several buckets keep their order on every rank
        self._compress(bucket.index(), step, thin)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def _parts(self, bucket: GradBucket) -> list[_BucketPart]:
        flat = bucket.buffer()
        if self._options.batched:
            side = math.ceil(math.sqrt(flat.numel()))
            return [self._part(flat, side, side)]
        parameters = bucket.parameters()  # a complex element is two real ones of the bucket
        lengths = [each.numel() * (2 if each.is_complex() else 1) for each in parameters]
        split = torch.split(flat, lengths)
        rows = [each.shape[0] if each.dim() > 1 else 1 for each in parameters]
        return [self._part(each, n, each.numel() // n if n else 0) for each, n in zip(split, rows, strict=True)]

    def _part(self, elements: torch.Tensor, rows: int, width: int) -> _BucketPart:
        columns = min(self._options.matrix_rank, rows, width)
        is_worth_it = elements.numel() > self._options.min_compression * (rows + width) * columns
        return _BucketPart(elements, rows, width, columns if is_worth_it else 0)

    def _compress(self, index: int, step: int, parts: Sequence[_BucketPart]) -> None:
        matrices = [self._matrix(part, (index, at)) for at, part in enumerate(parts)]
        of_parts = zip(parts, matrices, range(len(parts)), strict=True)
        bases = [self._basis(part, matrix, step, (index, at)) for part, matrix, at in of_parts]
        products = self._means([matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)], self._wire)
        lefts = [_orthonormal(each) for each in products]
        rights = self._means([matrix.mT @ left for matrix, left in zip(matrices, lefts, strict=True)], self._wire)
        for at, (part, matrix, left, right) in enumerate(zip(parts, matrices, lefts, rights, strict=True)):
            sent = (left @ right.mT).view(-1)[: part.elements.numel()]
            # without a wait for the device: an overflow reaches the gradients, but not what the next step begins with
            is_finite = right.isfinite().all()
            if self._options.error_feedback:
                lost = matrix.view(-1)[: part.elements.numel()] - sent
                before = self._errors.get((index, at), torch.zeros_like(lost))
                self._errors[index, at] = torch.where(is_finite, lost, before)
            if self._options.warm_start:
                self._bases[index, at] = torch.where(is_finite, _orthonormal(right), bases[at])
            _ = part.elements.copy_(sent)

    def _matrix(self, part: _BucketPart, key: tuple[int, int]) -> torch.Tensor:
        """Return a part's gradients and what former steps lost, as a matrix; fillers of 0 may end it."""
        dtype = torch.promote_types(part.elements.dtype, torch.float32)
        matrix = part.elements.new_zeros(part.rows, part.width, dtype=dtype)
        entries = matrix.view(-1)[: part.elements.numel()].copy_(part.elements)
        error = self._errors.get(key)
        if error is not None:
            _ = entries.add_(error)
        return matrix

    def _basis(self, part: _BucketPart, matrix: torch.Tensor, step: int, key: tuple[int, int]) -> torch.Tensor:
        basis = self._bases.get(key)
        if basis is None:
            basis = _random_basis(matrix, part.columns, seed=(step * 1_000_003 + key[0]) * 1_000_003 + key[1])
        return basis

    def _means(self, tensors: Iterable[torch.Tensor], wire: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return the mean over ranks of each tensor, by one message."""
        own = list(tensors)
        if not own:
            return []
        flat = torch.cat([each.reshape(-1) for each in own])
        travelling = flat.to(wire or flat.dtype) / self._group.size()
        cast(Any, dist).all_reduce(travelling, group=self._group)
        means = torch.split(travelling.to(flat.dtype), [each.numel() for each in own])
        return [mean.view(each.shape) for mean, each in zip(means, own, strict=True)]


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return a basis of what columns span, filled up to their number where they depend on each other."""
    return cast(Any, torch).linalg.qr(columns).Q


def _random_basis(like: torch.Tensor, columns: int, seed: int) -> torch.Tensor:
    """Return orthonormal columns, equal on all ranks. Draws from no stream of the process."""
    generator = torch.Generator().manual_seed(seed)
    return _orthonormal(torch.randn(like.shape[1], columns, generator=generator, dtype=like.dtype).to(like.device))


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Wire = Literal["fp16", "bf16"]
Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class PowerSgd(msgspec.Struct, frozen=True, kw_only=True):
    """Send gradients as products of two thin matrices; what that loses is added to the next step's gradients.

    Its memory of errors is in no checkpoint: a resumed run sends whole gradients for `start_step` steps again.
    No messages are sent while the backward runs. Gradients that are not finite do not change the error memory.

    Attributes:
        matrix_rank: columns of the thin matrices; more lose less.
        start_step: number of first steps that send uncompressed gradients, at least 2.
        min_compression: parameters that would not shrink by this factor are sent uncompressed, as are vectors.
        error_feedback: whether the error is added to the next step's gradients.
        warm_start: whether a step's matrices start from the matrices of the step before.
        wire: dtype in which the matrices are sent, "fp16" or "bf16"; None for the matrices' dtype.
        batched: whether a whole bucket is one square matrix, instead of each parameter. Fewer and smaller messages,
            which lose more: rows of that matrix are no rows of a layer.

    Reference: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression", arXiv:1905.13727.
    """

    matrix_rank: int = 1
    start_step: int = 1000
    min_compression: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    wire: Wire | None = None
    batched: bool = False

    def __post_init__(self) -> None:
        facts = {
            "matrix_rank of at least 1": self.matrix_rank >= 1,
            "start_step of at least 2": self.start_step >= 2,
            "min_compression above 0": self.min_compression > 0,
            "a wire of fp16 or bf16, or None": self.wire in (None, *get_args(Wire)),
        }
        for expected, holds in facts.items():
            if not holds:
                raise ConfigError("cannot compress so", expected=expected, got=repr(self), where="PowerSgd")


CommHook = Wire | PowerSgd | Hook


def check_hook(hook: object) -> None:
    """Raise `ConfigError` for a `comm_hook=` that is neither a name, a `PowerSgd` nor a function."""
    if hook is not None and not isinstance(hook, PowerSgd) and not callable(hook):
        check_choice(hook, get_args(Wire), "unknown communication hook", where="comm_hook=")


def gather_sparse(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace a bucket's gradients by their mean over ranks, a sparse one by gathers: NCCL has no sum of those.

    Waits for the device where it is sparse, as ranks hold different numbers of rows. A collective.
    """
    own = bucket.buffer()
    if not own.is_sparse:
        return default_hooks.allreduce_hook(group, bucket)
    own = own.coalesce()
    rows = own.indices()[0]
    values = own.values()
    comm = adopt(group, own.device)
    counts = all_gather_flat(comm, torch.full((1,), len(rows), device=own.device))
    most = max(1, *integers(counts.flatten()))
    padded = values.new_zeros(most, *values.shape[1:])
    padded[: len(rows)] = values / comm.size
    every_row = all_gather_flat(comm, torch.nn.functional.pad(rows, (0, most - len(rows))))
    every_value = all_gather_flat(comm, padded.flatten()).view(comm.size, *padded.shape)
    is_held = torch.arange(most, device=own.device) < counts
    mean = cast(Any, torch).sparse_coo_tensor(
        every_row[is_held].unsqueeze(0), every_value[is_held], own.shape, check_invariants=False
    )
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(mean.coalesce())
    return done


def register_hook(replica: DistributedDataParallel, group: Any, hook: CommHook) -> None:
    """Let a hook exchange the gradients of a replica instead of DDP's own all-reduce."""
    state, function = group, cast(Any, hook)
    if isinstance(hook, PowerSgd):
        state, function = PowerSgdExchange(group, hook), PowerSgdExchange.exchange
    elif isinstance(hook, str):
        function = default_hooks.fp16_compress_hook if hook == "fp16" else default_hooks.bf16_compress_hook
    cast(Any, replica).register_comm_hook(state, _anonymous(function))


def _anonymous(hook: Any) -> Any:
    """The same hook under no name: by their names, DDP refuses torch's bf16 hooks on gloo, which carries bf16."""
    return lambda state, bucket: hook(state, bucket)  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
