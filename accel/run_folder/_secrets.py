# SPDX-License-Identifier: Apache-2.0
"""Texts, command lines and configurations with stars in place of credentials."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

STARS = "***"
_HIDDEN = (
    (re.compile(r"(?<=://)[^/\s]*@"), "***@"),  # user:password@host
    (re.compile(r"([\w-]*(?:key|token|secret|pass|credential|auth|sig)[\w-]*)=[^&;,\s]+", re.IGNORECASE), r"\1=***"),
    (re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|AKIA|xox[abprs]-)[\w-]{8,}"), r"\1***"),
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ANYWHERE = {"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "cookie", "auth"}
_LAST = {"key", "keys", "token", "pass", "signature", "pwd"}


def hide_in_text(text: str) -> str:
    """Return a text with stars in place of credentials: those in URLs, values of telling names, well-known tokens."""
    for pattern, stars in _HIDDEN:
        text = pattern.sub(stars, text)
    return text


def hide_in_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with stars in place of credentials, also of a value behind a telling flag."""
    shown: list[str] = []
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
        shown.append(STARS if is_value and is_secret_name(before) else hide_in_text(word))
    return tuple(shown)


def hide_in_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a configuration with stars in place of credentials.

    Args:
        config: values by name, nested in mappings and sequences.

    Returns:
        The configuration, and the dotted names of the values that were replaced. A number is never a credential.
    """
    hidden: list[str] = []
    return {name: _shown(value, name, name, hidden) for name, value in config.items()}, tuple(hidden)


def is_secret_name(name: str) -> bool:
    """Return whether values of a name are credentials: `api_key`, `hf-token`, `dbPassword`, but not `max_tokens`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and (words[-1] in _LAST or not _ANYWHERE.isdisjoint(words))


def _shown(value: Any, name: str, path: str, hidden: list[str]) -> Any:
    if isinstance(value, Mapping):
        parts = cast("Mapping[Any, Any]", value)
        return {key: _shown(each, str(key), f"{path}.{key}", hidden) for key, each in parts.items()}
    if isinstance(value, list | tuple):
        rows = cast("Sequence[Any]", value)
        return [_shown(each, name, f"{path}[{at}]", hidden) for at, each in enumerate(rows)]
    if not isinstance(value, str):
        return value
    shown = STARS if value and is_secret_name(name) else hide_in_text(value)
    if shown != value:
        hidden.append(path)
    return shown
