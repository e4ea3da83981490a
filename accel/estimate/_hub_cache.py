# SPDX-License-Identifier: Apache-2.0
"""Models by name: the folder of one in the local cache of Hugging Face's Hub. Nothing is downloaded.

Reference: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from accel.errors import ConfigError, did_you_mean

_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w.-]+)?", re.ASCII)


def cached_model(name: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of a model's files in the cache.

    Args:
        name: "organisation/model", or with a revision "organisation/model@v1"; else that of `main`.
        environ: variables that say where the cache is: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME or HOME.

    Raises:
        ConfigError: the model, or that revision of it, is not there.
    """
    repository, _, revision = name.partition("@")
    cache = _cache(environ)
    folder = cache / f"models--{repository.replace('/', '--')}"
    if not folder.is_dir():
        known = [each.name.removeprefix("models--").replace("--", "/") for each in cache.glob("models--*")]
        hint = did_you_mean(repository, known) if known else ""
        raise ConfigError(
            "there is no such source, nor such a model in the cache of the Hub",
            expected=f"a path, module:function, timm/NAME, or a model in {cache}",
            got=repr(name),
            fix=hint if hint.startswith("Did") else f"Fetch it first: hf download {repository} config.json",
        )
    wanted = revision or "main"
    reference = folder / "refs" / wanted
    snapshot = folder / "snapshots" / (reference.read_text().strip() if reference.is_file() else wanted)
    if not snapshot.is_dir():
        there = sorted(each.name for each in folder.glob("refs/*"))
        raise ConfigError(
            "the cache of the Hub has no such revision of the model",
            expected=" or ".join(there) or "a revision",
            got=repr(wanted),
            where=str(folder),
        )
    return snapshot


def is_model_name(source: str) -> bool:
    """Return whether a text may be the name of a model on the Hub, and is not that of a file."""
    return _NAME.fullmatch(source) is not None and not source.endswith(_FILES)


def _cache(environ: Mapping[str, str]) -> Path:
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := environ.get("HF_HOME"):
        return Path(home) / "hub"
    general = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    return Path(general) / "huggingface" / "hub"
