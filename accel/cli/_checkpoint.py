# SPDX-License-Identifier: Apache-2.0
"""`accel checkpoint`: look at checkpoints, check, compare, convert and delete them; torch is loaded only to convert."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from accel.checkpoint import (
    RANKS,
    Keep,
    Manifest,
    all_tensors,
    check_keep,
    compare,
    describe,
    find_checkpoint,
    manifest_of,
    prune,
    same_bytes,
    survey,
    verify,
)
from accel.cli._parser import Parser
from accel.errors import ConfigError, did_you_mean
from accel.storage import as_place
from accel.terminal import byte_progress, show_age, show_size, show_table, show_text

_DIFFERENT = 1
_ONE_RUN = "RUN is the folder that was given to save_state."
_ONE_CHECKPOINT = "CHECKPOINT is the folder of one step; of a run's folder, the newest one counts."


class Verb(NamedTuple):
    """What can be done: its name, its usage, what it does, and the function that does it."""

    name: str
    words: str
    summary: str
    run: Callable[[Sequence[str]], int]


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what the first word says; return the exit status: 1 for damage and differences that were found."""
    verbs = _verbs()
    if not words or words[0] in ("-h", "--help"):
        print(_help(verbs))
        return 0 if words else 2
    for verb in verbs:
        if verb.name == words[0]:
            return verb.run(words[1:])
    fix = did_you_mean(words[0], [verb.name for verb in verbs])
    raise ConfigError("unknown command", got=repr(words[0]), where="accel checkpoint", fix=fix)


def _verbs() -> tuple[Verb, ...]:
    return (
        Verb("ls", "RUN", "list a run's checkpoints: size, age, ranks, items", _ls),
        Verb("show", "CHECKPOINT", "tell what one holds", _show),
        Verb("verify", "CHECKPOINT|RUN", "compare every byte with the digests", _verify),
        Verb("diff", "CHECKPOINT CHECKPOINT", "tell in what two differ", _diff),
        Verb("merge", "CHECKPOINT FOLDER", "write a model for Hugging Face's libraries", _merge),
        Verb("import", "FOLDER RUN --step N", "make a checkpoint of a folder of torch's or Accelerate's", _import),
        Verb("export", "CHECKPOINT FOLDER", "write a folder of torch.distributed.checkpoint", _export),
        Verb("prune", "RUN --keep N", "delete older checkpoints", _prune),
    )


def _help(verbs: Sequence[Verb]) -> str:
    listing = show_table([(f"  {verb.name}", verb.words, verb.summary) for verb in verbs])
    return f"""usage: accel checkpoint COMMAND ...

commands:
{listing}

{_ONE_RUN}
{_ONE_CHECKPOINT}
`accel checkpoint COMMAND --help` tells more."""


def parser(name: str, usage: str, description: str, *places: str) -> Parser:
    """Make the parser of one command, with the paths that it takes."""
    made = Parser(f"accel checkpoint {name}", usage=f"accel checkpoint {name} {usage}", description=description)
    for place in places:
        _ = made.add_argument(place, type=Path if place == "folder" else as_place, metavar=place.upper())
    return made


def _ls(words: Sequence[str]) -> int:
    args = parser("ls", "RUN", f"List a run's checkpoints. {_ONE_RUN}", "run").read(words)
    found = survey(args.run)
    if not found:
        print(f"no checkpoints in {args.run}")
        return 0
    rows = [("NAME", "SIZE", "AGE", "RANKS", "HOLDS")]
    for each in found:
        manifest = each.manifest
        holds = f"[{each.problem}]" if manifest is None else " ".join([*manifest.items, *_metrics(manifest)])
        ranks = "-" if manifest is None else str(manifest.world_size)
        rows.append((each.path.name, show_size(each.size), show_age(time.time() - each.changed), ranks, holds))
    print(show_table(rows))
    return 0


def _show(words: Sequence[str]) -> int:
    reader = parser("show", "CHECKPOINT [--tensors]", f"Tell what a checkpoint holds. {_ONE_CHECKPOINT}", "checkpoint")
    _ = reader.add_argument("--tensors", action="store_true", help="list every tensor")
    args = reader.read(words)
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


def _verify(words: Sequence[str]) -> int:
    text = "Compare every byte with the digests of the manifest; of a run, those of all checkpoints."
    args = parser("verify", "CHECKPOINT|RUN", text, "path").read(words)
    steps = [each for each in survey(args.path) if "." not in each.path.name]  # what has one is being written
    found = [each.path for each in steps] or [find_checkpoint(args.path)]
    total = sum(each.size for each in steps) or manifest_of(found[0]).nbytes
    with byte_progress("verify", total) as advance:
        told = {path: verify(path, advance) for path in found}
    for path, problems in told.items():
        print(show_text(f"{path}: {'; '.join(problems) or 'ok'}"))
    return _DIFFERENT if any(told.values()) else 0


def _diff(words: Sequence[str]) -> int:
    text = f"Tell in what two checkpoints differ. {_ONE_CHECKPOINT}"
    reader = parser("diff", "CHECKPOINT CHECKPOINT [--values]", text, "first", "second")
    _ = reader.add_argument("--values", action="store_true", help="read the tensors and compare their values, too")
    args = reader.read(words)
    paths = [find_checkpoint(args.first), find_checkpoint(args.second)]
    one, other = map(manifest_of, paths)
    lines = compare(one, other)
    if args.values:
        from accel.checkpoint import differing_values

        total = one.nbytes + other.nbytes
        with byte_progress("diff", total) as advance:
            lines += differing_values(*paths, advance=advance)
    elif not same_bytes(one, other):
        lines.append("tensors may have other values: the files differ (--values tells which)")
    print("\n".join(map(show_text, lines)) or "no difference")
    return _DIFFERENT if lines else 0


def _merge(words: Sequence[str]) -> int:
    text = f"Write a model as safetensors that Hugging Face's libraries load. {_ONE_CHECKPOINT}"
    usage = "CHECKPOINT FOLDER [--item NAME] [--max-shard-size SIZE]"
    reader = parser("merge", usage, text, "checkpoint", "folder")
    _ = reader.add_argument("--item", default="model", metavar="NAME", help="what it was saved as (default: model)")
    help_size = "most bytes in a file, such as 5GB or 512MiB (default: 5GB)"
    _ = reader.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help=help_size)
    args = reader.read(words)
    path = find_checkpoint(args.checkpoint)
    total = manifest_of(path).nbytes
    from accel.checkpoint import merge

    with byte_progress("merge", total) as advance:
        merge(path.path, args.folder, item=args.item, max_shard_size=args.max_shard_size, advance=advance)
    print(f"{path}, {args.item} -> {args.folder}")
    return 0


def _import(words: Sequence[str]) -> int:
    text = (
        "Make a checkpoint of what torch.distributed.checkpoint wrote, or Accelerate's save_state (all but optimizers, "
        f"which load_accelerate_state takes); no code of it is run. {_ONE_RUN}"
    )
    reader = parser("import", "FOLDER RUN --step N", text, "folder", "run")
    _ = reader.add_argument("--step", type=int, required=True, metavar="N", help="names the checkpoint, 0 or above")
    args = reader.read(words)
    if args.step < 0:
        raise ConfigError("not a step", expected="an integer from 0", got=str(args.step), where="--step")
    from accel.items import import_accelerate, import_dcp

    of_accelerate = (args.folder / "model.safetensors").exists()
    made = (import_accelerate if of_accelerate else import_dcp)(args.folder, args.run.path, step=args.step)
    print(f"{args.folder} -> {made}")
    return 0


def _export(words: Sequence[str]) -> int:
    text = f"Write a checkpoint as a folder of torch.distributed.checkpoint. {_ONE_CHECKPOINT}"
    args = parser("export", "CHECKPOINT FOLDER", text, "checkpoint", "folder").read(words)
    path = find_checkpoint(args.checkpoint)
    total = manifest_of(path).nbytes
    from accel.items import export_dcp

    with byte_progress("export", total) as advance:
        made = export_dcp(path.path, args.folder, advance=advance)
    print(f"{path} -> {made}")
    return 0


def _prune(words: Sequence[str]) -> int:
    text = f"Delete older checkpoints by the rule of save_state's keep=; never what accel did not write. {_ONE_RUN}"
    reader = parser("prune", "RUN --keep N [--every N] [--best N --by METRIC [--max]] [--dry-run]", text, "run")
    _ = reader.add_argument("--keep", type=int, required=True, metavar="N", help="how many of the newest stay")
    _ = reader.add_argument("--every", type=int, metavar="N", help="steps that are multiples of N stay, too")
    _ = reader.add_argument("--best", type=int, default=0, metavar="N", help="how many with the best metric stay, too")
    _ = reader.add_argument("--by", default="", metavar="METRIC", help="the metric's name")
    _ = reader.add_argument("--max", action="store_true", help="the highest metric is best, and not the lowest")
    _ = reader.add_argument("--dry-run", action="store_true", help="tell what would be deleted, and delete nothing")
    args = reader.read(words)
    if args.keep < 1:
        raise ConfigError("no checkpoint would stay", expected="1 or above", got=str(args.keep), where="--keep")
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
