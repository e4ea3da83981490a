# SPDX-License-Identifier: Apache-2.0
"""`accel checkpoint`: show, check, compare, convert and delete checkpoints; only conversions load torch."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel.checkpoint import Keep
from accel.checkpoint._manifest import RANKS, Manifest, manifest_of
from accel.checkpoint._retention import (
    BestMode,
    FoundCheckpoint,
    all_tensors,
    check_keep,
    compare,
    describe,
    find_checkpoint,
    prune,
    rank_by,
    survey,
    verify,
)
from accel.cli._parser import Parser
from accel.errors import ConfigError
from accel.errors._checks import did_you_mean
from accel.report._series import better_of
from accel.storage import as_place
from accel.storage._place import LocalPlace
from accel.terminal import byte_progress, show_age, show_size, show_table, show_text

_DIFFERENT = 1
_ONE_RUN = "RUN is the folder that was given to save_state."
_ONE_CHECKPOINT = "CHECKPOINT is the folder of a step, or of a run for its newest checkpoint."


class Verb(NamedTuple):
    """One verb of `accel checkpoint`."""

    run: Callable[[argparse.Namespace], int]  # function of the parsed words; it returns the exit status
    words: str  # its own words, as the overview shows them
    summary: str  # line of the overview
    about: str  # description in its help
    paths: tuple[str, ...]  # positional arguments, by name
    flags: Mapping[str, dict[str, Any]] = {}  # its flags, with argparse's options for each
    usage: str = ""  # its flags in the usage line


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the verb that the first word names; return the exit status, 1 for damage or differences."""
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    name = words[0]
    if name not in _VERBS:
        fix = did_you_mean(name, _VERBS)
        raise ConfigError("unknown command", got=repr(name), where="accel checkpoint", fix=fix)
    verb = _VERBS[name]
    usage = f"accel checkpoint {name} {verb.words}" + (f"\n{' ' * 14}{verb.usage}" if verb.usage else "")
    parser = Parser(f"accel checkpoint {name}", usage=usage, description=verb.about)
    for path in verb.paths:
        _ = parser.add_argument(path, type=Path if path == "folder" else as_place, metavar=path.upper())
    for flag, options in verb.flags.items():
        _ = parser.add_argument(flag, **options)
    args = parser.read(words[1:])
    for path in verb.paths:
        _check_exists(getattr(args, path), is_made=name == "import")
    return verb.run(args)


def _check_exists(place: object, *, is_made: bool) -> None:
    """Raise `ConfigError` for a local folder to read that does not exist."""
    if is_made or not isinstance(place, LocalPlace):
        return
    with contextlib.suppress(OSError):  # which the verb reports
        if not place.path.exists():
            fix = "Pass the folder that the script passes to save_state."
            raise ConfigError("there is no such folder", got=repr(str(place)), where="accel checkpoint", fix=fix)


def _help() -> str:
    listing = show_table([(f"  {name}", verb.words, verb.summary) for name, verb in _VERBS.items()])
    return f"""usage: accel checkpoint COMMAND ...

commands:
{listing}

{_ONE_RUN}
{_ONE_CHECKPOINT}
`accel checkpoint COMMAND --help` lists its flags."""


def _ls(args: argparse.Namespace) -> int:
    found = survey(args.run)
    if not found:
        print(f"no checkpoints in {args.run}")
        return 0
    rows = [("NAME", "SIZE", "AGE", "RANKS", "HOLDS")]
    best = _best(found, args.by, "max" if args.max else "min")
    for each in found:
        manifest = each.manifest
        marks = () if manifest is None else [f"best-{name}" for name, step in best.items() if step == manifest.step]
        holds = f"[{each.problem}]" if manifest is None else " ".join([*manifest.items, *_metrics(manifest), *marks])
        ranks = "-" if manifest is None else str(manifest.world_size)
        rows.append((each.path.name, show_size(each.size), show_age(time.time() - each.changed), ranks, holds))
    print(show_table(rows))
    return 0


def _best(found: Sequence[FoundCheckpoint], by: str, mode: BestMode) -> dict[str, int]:
    """Return the step with the best value of a metric; without `by`, of each metric with a known direction."""
    saved = {each.manifest.step: each.manifest.metrics for each in found if each.manifest is not None}
    names = dict.fromkeys(name for metrics in saved.values() for name in metrics)
    best = dict[str, int]()
    for name in [by] if by else names:
        better = mode if by else better_of(name)
        if better and (steps := rank_by(saved, name, better)):
            best[name] = steps[0]
    return best


def _show(args: argparse.Namespace) -> int:
    path = find_checkpoint(args.checkpoint)
    manifest = manifest_of(path)
    size = manifest.nbytes
    ranks = _count(manifest.world_size, "rank")
    print(
        f"{path}\nstep {manifest.step}, {show_size(size)} in {_count(len(manifest.files), 'file')}, written by {ranks}"
    )
    print(show_text(f"format {manifest.format}, accel {manifest.accel}, torch {manifest.torch}"))
    if manifest.metrics:
        print(show_text(", ".join(_metrics(manifest))))
    tensors = all_tensors(manifest)
    rows = [("ITEM", "KIND", "TYPE", "TENSORS")]
    for name, item in manifest.items.items():
        count = sum(key == name or key.startswith((f"{name}.", f"{name}[")) for key in tensors)
        rows.append((name, item.kind, item.type, str(count) if count else "-"))
    print("\n" + show_table(rows))
    if args.tensors:
        listed = [("TENSOR", "DTYPE AND SHAPE", "FILES")]
        for name, entry in sorted(tensors.items()):
            if name != RANKS:
                listed.append((name, describe(entry), " ".join(sorted({piece.file for piece in entry.pieces}))))
        print("\n" + show_table(listed))
    return 0


def _verify(args: argparse.Namespace) -> int:
    steps = [each for each in survey(args.path) if "." not in each.path.name]  # what has one is being written
    found = [each.path for each in steps] or [find_checkpoint(args.path)]
    total = sum(each.size for each in steps) or manifest_of(found[0]).nbytes
    with byte_progress("verify", total) as advance:
        found_problems = {path: verify(path, advance) for path in found}
    for path, problems in found_problems.items():
        print(show_text(f"{path}: {'; '.join(problems) or 'ok'}"))
    return _DIFFERENT if any(found_problems.values()) else 0


def _diff(args: argparse.Namespace) -> int:
    paths = [find_checkpoint(args.first), find_checkpoint(args.second)]
    one, other = map(manifest_of, paths)
    lines = compare(one, other)
    if args.values:
        from accel.checkpoint._merge import differing_values

        total = one.nbytes + other.nbytes
        with byte_progress("diff", total) as advance:
            lines += differing_values(*paths, advance=advance)
    elif one.files != other.files:
        lines.append("tensors may have other values: the files differ (--values lists them)")
    print("\n".join(map(show_text, lines)) or "no difference")
    return _DIFFERENT if lines else 0


def _merge(args: argparse.Namespace) -> int:
    path = find_checkpoint(args.checkpoint)
    total = manifest_of(path).nbytes
    from accel.checkpoint import merge

    with byte_progress("merge", total) as advance:
        merge(path.path, args.folder, item=args.item, max_shard_size=args.max_shard_size, advance=advance)
    print(f"{path}, {args.item} -> {args.folder}")
    return 0


def _import(args: argparse.Namespace) -> int:
    if args.step < 0:
        raise ConfigError("the step is not valid", expected="an integer from 0", got=str(args.step), where="--step")
    from accel.items import import_dcp
    from accel.items.foreign import import_accelerate

    of_accelerate = (args.folder / "model.safetensors").exists()
    made = (import_accelerate if of_accelerate else import_dcp)(args.folder, args.run.path, step=args.step)
    print(f"{args.folder} -> {made}")
    return 0


def _export(args: argparse.Namespace) -> int:
    path = find_checkpoint(args.checkpoint)
    total = manifest_of(path).nbytes
    from accel.items import export_dcp

    with byte_progress("export", total) as advance:
        made = export_dcp(path.path, args.folder, advance=advance)
    print(f"{path} -> {made}")
    return 0


def _prune(args: argparse.Namespace) -> int:
    if args.keep < 1:
        raise ConfigError("no checkpoint would be kept", expected="1 or above", got=str(args.keep), where="--keep")
    mode = "max" if args.max else "min"
    keep = check_keep(Keep(newest=args.keep, every=args.every, best=args.best, by=args.by, mode=mode))
    assert keep is not None
    gone = prune(args.run, keep, dry_run=args.dry_run)
    verb = "would delete" if args.dry_run else "deleted"
    print("\n".join(f"{verb} {path}" for path in gone) or "nothing to delete")
    return 0


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _metrics(manifest: Manifest) -> list[str]:
    return [f"{name}={value:g}" for name, value in manifest.metrics.items()]


def _option(meaning: str, **options: Any) -> dict[str, Any]:
    return {"help": meaning, **options}


_VERBS = {
    "ls": Verb(
        _ls,
        "RUN",
        "list checkpoints: size, age, items, the best",
        "List a run's checkpoints, and mark the best by each metric with a known direction, such as best-loss, or by "
        f"--by. {_ONE_RUN}",
        ("run",),
        {
            "--by": _option("metric that decides which checkpoint is the best", default="", metavar="METRIC"),
            "--max": _option("the highest value is the best (default: the lowest)", action="store_true"),
        },
        "[--by METRIC [--max]]",
    ),
    "show": Verb(
        _show,
        "CHECKPOINT",
        "print the content of a checkpoint",
        f"Print the content of a checkpoint. {_ONE_CHECKPOINT}",
        ("checkpoint",),
        {"--tensors": _option("list every tensor", action="store_true")},
        "[--tensors]",
    ),
    "verify": Verb(
        _verify,
        "CHECKPOINT|RUN",
        "compare every byte with its digest",
        "Compare every byte of a checkpoint, or of all checkpoints of a run, with the digests in the manifest.",
        ("path",),
    ),
    "diff": Verb(
        _diff,
        "CHECKPOINT CHECKPOINT",
        "list the differences between two checkpoints",
        f"List the differences between two checkpoints. {_ONE_CHECKPOINT}",
        ("first", "second"),
        {"--values": _option("also read the tensors and compare their values", action="store_true")},
        "[--values]",
    ),
    "merge": Verb(
        _merge,
        "CHECKPOINT FOLDER",
        "write a model for Hugging Face's libraries",
        f"Write a model as safetensors that Hugging Face's libraries load. {_ONE_CHECKPOINT}",
        ("checkpoint", "folder"),
        {
            "--item": _option("name of the model among the items (default: model)", default="model", metavar="NAME"),
            "--max-shard-size": _option(
                "largest size of a file, such as 5GB or 512MiB (default: 5GB)", default="5GB", metavar="SIZE"
            ),
        },
        "[--item NAME] [--max-shard-size SIZE]",
    ),
    "import": Verb(
        _import,
        "FOLDER RUN --step N",
        "convert a checkpoint of torch or Accelerate",
        "Convert a folder of torch.distributed.checkpoint, or of Accelerate's save_state, to a checkpoint. Optimizers "
        f"of Accelerate are left out: load_accelerate_state loads them. No code of the folder is run. {_ONE_RUN}",
        ("folder", "run"),
        {"--step": _option("number that names the checkpoint, 0 or above", type=int, required=True, metavar="N")},
    ),
    "export": Verb(
        _export,
        "CHECKPOINT FOLDER",
        "write a folder of torch.distributed.checkpoint",
        f"Write a checkpoint as a folder of torch.distributed.checkpoint. {_ONE_CHECKPOINT}",
        ("checkpoint", "folder"),
    ),
    "prune": Verb(
        _prune,
        "RUN --keep N",
        "delete older checkpoints",
        f"Delete older checkpoints, as keep= of save_state does. Files that accel did not write stay. {_ONE_RUN}",
        ("run",),
        {
            "--keep": _option("number of newest checkpoints to keep", type=int, required=True, metavar="N"),
            "--every": _option("also keep each step that is a multiple of N", type=int, metavar="N"),
            "--best": _option("also keep N checkpoints with the best metric", type=int, default=0, metavar="N"),
            "--by": _option("name of the metric for --best", default="", metavar="METRIC"),
            "--max": _option("the highest value is the best (default: the lowest)", action="store_true"),
            "--dry-run": _option("print what would be deleted, and delete nothing", action="store_true"),
        },
        "[--every N] [--best N --by METRIC [--max]] [--dry-run]",
    ),
}
