# SPDX-License-Identifier: Apache-2.0
"""`accel config update`: an older file in the present format, the old one beside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from accel.config import ConfigFile, decode_values, encode, read_text, refuse_yaml, resolve, update_values
from accel.errors import ConfigError
from accel.terminal import show_text


def update(path: str) -> None:
    """Rewrite a file in the present format, print what changed, and keep a copy of the old file.

    Args:
        path: the file, TOML or JSON.

    Raises:
        ConfigError: it cannot be read or written, is malformed, or holds what cannot be mapped; nothing has changed.
    """
    refuse_yaml(path, fix=f"Turn one of Accelerate's into ours with `accel config import {path}`.")
    updated = update_values(decode_values(read_text(path), path), path)
    if not updated.changes:
        print(f"{path} is up to date.")
        return
    config = resolve({}, {}, ConfigFile(path=path, values=updated.values)).config  # refuses contradictions
    text = encode(config, path, only=updated.values)
    for line in updated.changes:
        print(show_text(f"  {line}"))
    print(f"Wrote {path}; the old file is {_replace(Path(path), text)}.")


def _replace(path: Path, text: str) -> Path:
    """Replace a file by one rename; return the copy of the old one, beside it."""
    target = Path(os.path.realpath(path))  # a link stays a link
    kept = next(each for each in _names(path) if not os.path.lexists(each))
    partial = target.with_name(f"{target.name}.partial")
    try:
        _ = shutil.copy2(target, kept)
        _ = partial.write_text(text, encoding="utf-8")
        shutil.copymode(target, partial)
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError("the file cannot be written", got=str(error.strerror), where=str(path)) from None
    return kept


def _names(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}.old{number or ''}") for number in range(1000)]
