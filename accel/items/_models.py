# SPDX-License-Identifier: Apache-2.0
"""Weights for other libraries: a model as Hugging Face's safetensors, written by all ranks; tensors as one file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from accel.checkpoint import Recipe
from accel.checkpoint._boxes import Strided, in_file
from accel.checkpoint._live_tensors import check_tensor
from accel.checkpoint._recipes import apply_recipes, check_recipes, inverse
from accel.checkpoint._retention import warn
from accel.comm import Call, agreed, broadcast_value, call_site, reduce_ints, shared_failure
from accel.context import DistContext, context_first
from accel.errors import CheckpointError, ConfigError
from accel.items._whole import StagedTensors, distinct_tensors, facts, live_tensors, staged_tensors
from accel.parallel._empty import check_filled
from accel.parallel._engines import whole_model
from accel.storage import (
    encode_index,
    file_names,
    is_file_name,
    local_target,
    parse_size,
    plan_shards,
    publish_file,
    publish_weights,
    staged,
    stored_dtype,
    torch_dtypes,
    write_tensors,
)
from accel.tensors import checksum, is_dtensor
from accel.terminal import show_names

_WHERE = "save_model, rename="


class StoredTensors:
    """The tensors that recipes were made from, made again one at a time.

    Attributes:
        facts: tensors on the meta device, by stored name.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], whole: Callable[[str], torch.Tensor], rename: Sequence[Recipe]
    ) -> None:
        """Plan only by names and shapes; `whole` returns one of the model's tensors whole, a collective that every
        rank calls alike."""
        check_recipes(rename, "a sequence of accel.checkpoint.Recipe, which lead in both directions")
        model: dict[str, Strided] = {}
        for name, tensor in tensors.items():
            dtype = stored_dtype(tensor.dtype)
            assert dtype is not None, name
            model[name] = in_file(dtype, tensor.shape, tensor.element_size(), name, 0)
        self._stored = apply_recipes(model, inverse(rename), _WHERE)
        self._whole = whole
        self._last: tuple[str, torch.Tensor] | None = None
        dtypes = torch_dtypes()
        self.facts = {
            name: torch.empty(each.shape, dtype=dtypes[each.dtype], device="meta")
            for name, each in self._stored.items()
        }

    def whole(self, name: str) -> torch.Tensor:
        """Return a stored tensor, in new memory unless the model has it as it is. A collective."""
        stored = self._stored[name]
        made: torch.Tensor | None = None
        for part in stored.parts:
            source = self._source(part.file)
            itemsize = source.element_size()
            strides = [stride // itemsize for stride in part.strides]
            view = source.as_strided(part.box.shape, strides, source.storage_offset() + part.start // itemsize)
            if part.box.shape == stored.shape:
                return view.contiguous()
            if made is None:
                made = torch.empty(stored.shape, dtype=source.dtype, device=source.device)
            index = tuple(slice(at, at + n) for at, n in zip(part.box.offset, part.box.shape, strict=True))
            _ = made[index].copy_(view)
        return torch.empty_like(self.facts[name], device="cpu") if made is None else made

    def _source(self, name: str) -> torch.Tensor:
        """Return a tensor of the model whole; the last one is kept, as its parts mostly follow each other."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._whole(name).contiguous()
        return self._last[1]


@dataclass(frozen=True, slots=True)
class _Weights:
    """Contents of the files: tensors without aliases, the names of each file, and the aliases."""

    tensors: Mapping[str, torch.Tensor]
    shards: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]
    local: int
    whole: Callable[[str], torch.Tensor]


@context_first
def save_model(
    ctx: DistContext,
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    rename: Sequence[Recipe] = (),
) -> Path:
    """Write a model as safetensors that `from_pretrained` of Hugging Face's libraries loads. A collective.

    The folder gets `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with
    `model.safetensors.index.json`, and keeps its other files, such as a `config.json`. Ranks write files in turn; each
    needs memory for one file of sharded tensors. At any moment, also after a crash, the folder holds the old weights or
    the new ones; older files that the old index lists are deleted at the end.

    Args:
        ctx: the context.
        model: plain model, from `prepare_model`, compiled, or spread by `fully_shard` or tensor parallelism. Names are
            those without wrappers. Tied tensors are written under the first name in the model's order, and other names
            are logged.
        folder: folder on a file system that all nodes share; made if it is missing.
        max_shard_size: largest size of a file in bytes, or a text such as "1.5GB" or "512MiB"; a larger tensor has a
            separate file.
        rename: recipes from stored tensors to the model's, as for `load_checkpoint_in_model`; written the other way.

    Returns:
        The folder, on every rank, once everything is on the disk.

    Raises:
        CheckpointError: a tensor cannot be stored, a recipe does not fit, another process is saving there, or the disk
            failed; the same on every rank.
        CollectiveMismatch: ranks hold different models, or passed different sizes.
        ConfigError: the folder is a URL, `max_shard_size` is no size, or `rename` is no sequence of recipes.
        PrepareError: the model was prepared empty, and nobody has filled it.

    Reference: the layout is the one of transformers' `save_pretrained`.
    """
    target = local_target(folder, "save_model, folder")
    site = call_site()
    size = f"max_shard_size={max_shard_size}"
    with shared_failure(ctx.comm, Call("save_model", size, site)):
        limit = parse_size(max_shard_size, "save_model, max_shard_size=")
        model = whole_model(ctx, model)
        check_filled(model, where="save_model")
        live = live_tensors(model)
    stages = staged_tensors(ctx, model, live)
    with shared_failure(ctx.comm, Call("save_model", size, site)):
        weights = _plan(ctx, live, stages, limit)
        weights = _as_stored(weights, rename, limit) if rename else weights
    call = Call("save_model", "\n".join([size, *facts(weights.tensors)]), site)
    most, inverted = reduce_ints(ctx.comm, call, [weights.local, ~weights.local], "max")
    alone = most != ~inverted
    if alone and ctx.is_main_process:
        warn("ranks hold different parameters or buffers; %s gets rank 0's", target)
    with _stage(ctx, target / "model", "save_model", site) as stage:
        error = _write(ctx, stage, weights, writers=1 if alone else ctx.world_size)
        with agreed(ctx.comm, Call("save_model: writing", site=site)):
            if error is not None:
                raise error
        with agreed(ctx.comm, Call("save_model: committing", site=site)):
            if ctx.is_main_process:
                sizes = {name: tensor.nbytes for name, tensor in weights.tensors.items()}
                index = encode_index(weights.shards, sizes) if len(weights.shards) > 1 else None
                publish_weights(stage, file_names(len(weights.shards)), index)
                _warn_of_rivals(target)
                _log_aliases(weights.aliases)
    return target


@context_first
def save(ctx: DistContext, tensors: Mapping[str, torch.Tensor] | None, path: str | os.PathLike[str]) -> Path:
    """Write rank 0's tensors as one safetensors file, which appears by a rename. A collective.

    Args:
        ctx: the context.
        tensors: tensors by name, of any device and stride; used on rank 0, None elsewhere.
        path: path of the file on rank 0. A missing folder is made, and a file of that name replaced.

    Returns:
        The path, on every rank, once the file is on the disk.

    Raises:
        CheckpointError: a value is no dense tensor, named, or the disk failed; the same on every rank.
        ConfigError: a URL, or a name of the file with other characters than letters, digits, "_", "." and "-".
    """
    target = local_target(path, "save, path")
    site = call_site()
    with agreed(ctx.comm, Call("save", site=site)):
        if ctx.is_main_process:
            _check_named(tensors, target)
    with _stage(ctx, target, "save", site) as stage, agreed(ctx.comm, Call("save: writing", site=site)):
        if ctx.is_main_process and tensors is not None:
            write_tensors(stage, target.name, tensors)
            publish_file(stage, target.name, target)
    return target


def _plan(ctx: DistContext, own: Mapping[str, torch.Tensor], stages: StagedTensors | None, limit: int) -> _Weights:
    """List what is written of a model, and in which files."""
    check_storable(own if stages is None else stages.facts, "save_model")
    kept, aliases, whole = distinct_tensors(own, stages)
    shards = plan_shards({name: tensor.nbytes for name, tensor in kept.items()}, limit)
    if stages is not None:
        return _Weights(kept, shards, aliases, 0, whole)
    compared = {name: tensor for name, tensor in kept.items() if ctx.world_size > 1 and not is_dtensor(tensor)}
    return _Weights(kept, shards, aliases, checksum(compared), whole)


def check_storable(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse a model without tensors, and dtypes that safetensors lacks, by a `CheckpointError`."""
    if not tensors:
        raise CheckpointError("the model has no tensors", where=where)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.complex128:
            fix = "Keep it in complex64, or as pairs of float64."
            raise CheckpointError("safetensors holds no complex128", where=name, fix=fix)


def _as_stored(weights: _Weights, rename: Sequence[Recipe], limit: int) -> _Weights:
    """List the stored tensors of a model with another checkpoint layout."""
    stored = StoredTensors(weights.tensors, weights.whole, rename)
    shards = plan_shards({name: tensor.nbytes for name, tensor in stored.facts.items()}, limit)
    aliases = {alias: name for alias, name in weights.aliases.items() if name in stored.facts}
    return _Weights(stored.facts, shards, aliases, weights.local, stored.whole)


def _write(ctx: DistContext, stage: Path, weights: _Weights, *, writers: int) -> Exception | None:
    """Write this rank's files; return what went wrong, after taking part in all that gathers tensors."""
    error: Exception | None = None
    files = file_names(len(weights.shards))
    metadata = {**weights.aliases, "format": "pt"}
    for start in range(0, len(files), writers):
        mine: dict[str, torch.Tensor] = {}
        for at in range(start, min(start + writers, len(files))):
            for name in weights.shards[at]:
                tensor = weights.whole(name)
                if at - start == ctx.rank and error is None:
                    live = weights.tensors[name]
                    mine[name] = tensor.cpu() if is_dtensor(live) or live.is_meta else tensor
        if mine and error is None:
            try:
                write_tensors(stage, files[start + ctx.rank], mine, metadata)
            except (CheckpointError, RuntimeError) as failure:  # RuntimeError: a device that fails while it is read
                error = failure
    return error


@contextlib.contextmanager
def _stage(ctx: DistContext, target: Path, name: str, site: str) -> Generator[Path]:
    """Hold a folder next to the target in which all ranks write, and the lock of their common folder. A collective."""
    parent = target.parent
    with contextlib.ExitStack() as held:

        def make() -> str:
            if not ctx.is_main_process:
                return ""
            return held.enter_context(staged(target)).name

        call = Call(f"{name}: opening the stage", site=site)
        with shared_failure(ctx.comm, call):
            made = make()
        yield parent / broadcast_value(ctx.comm, call, made, str)


def _check_named(tensors: Mapping[str, torch.Tensor] | None, target: Path) -> None:
    if not is_file_name(target.name):
        raise ConfigError(
            "the name of the file is not valid", expected="letters, digits, '_', '.' and '-'", got=repr(target.name)
        )
    if not isinstance(tensors, Mapping):
        fix = "Pass {'name': tensor}; save_state stores other values."
        raise CheckpointError(
            "the value does not map names to tensors", got=type(tensors).__name__, where="save", fix=fix
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            fix = "save_state stores other values."
            raise CheckpointError(
                "the value is not a tensor", got=type(tensor).__name__, where=f"save, {name}", fix=fix
            )
        check_tensor(tensor, f"save, {name}")


def _warn_of_rivals(folder: Path) -> None:
    for path in sorted(folder.glob("pytorch_model*")):
        warn("%s stays, which accel did not write; some readers prefer it to the new weights", path)


def _log_aliases(aliases: Mapping[str, str]) -> None:
    if aliases:
        shown = show_names([f"{alias} (tied to {name})" for alias, name in aliases.items()], 5)
        warn("the files have each tied tensor under one name, and not %s", shown)
