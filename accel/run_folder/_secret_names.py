# SPDX-License-Identifier: Apache-2.0
"""Names of credentials: which words of a name make its value one."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MOST_NAME = 128  # characters at the end of a name that are read
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_JOINED = re.compile(r"(\w*?)(keys?|tokens?|secrets?|passwords?|passwd|passphrase)")  # `apikey`, `dbpassword`
_PASSWORDS = {"password", "passwords", "passwd", "passphrase", "passcode"}
_BEFORE_COLON = {
    *_PASSWORDS,
    "secret",
    "secrets",
    "authorization",
    "bearer",
    "cookie",
    "cookies",
}  # before a colon, too
_HOOKS = {"webhook", "webhooks"}  # their URLs are credentials
_ANYWHERE = {*_BEFORE_COLON, "credential", "credentials", "creds", "auth", "jwt", "pwd"}
_OPEN = {"api", "access", "private", "secret"}  # owners of keys that are hidden behind a colon, too
_OPEN_TOKENS = {"api", "access", "auth", "bearer", "refresh", "secret", "security", "session"}
_OF_KEYS = """account admin aes anthropic app application aws azure clearml client comet consumer crypt decryption
deploy encryption gcp github gitlab google gpg hf hmac hub huggingface kaggle license master mistral neptune openai
pgp rsa sentry service shared signing slack ssh ssl stripe subscription swanlab tls user wandb"""
_OWNERS = {*_OPEN, *_OPEN_TOKENS, *_OF_KEYS.split()}
_SIGNERS = {"access", "amz", "aws", "goog", "request", "url", "webhook"}
# Words of models and loops, before `token` and `pass`, which name nothing secret.
_OF_TOKENS = """additional audio begin boi bos class cls decoder dist distillation end eoi eos eot extra first forced
image img lang language last mask max min new next num pad per previous prompt register role sep source space special
speech src start stop target text tgt think tool total unexpected unk video vision word"""
_OF_PASSES = "all backward band each every first forward high last low multi next num one per second single third two"
_TOKENS = {*_OF_TOKENS.split()}
_PASSES = {*_OF_PASSES.split()}
_AFTER = {
    "b",
    "base",
    "bytes",
    "hex",
    "new",
    "old",
    "pem",
    "prod",
    "read",
    "string",
    "value",
    "write",
}  # of no meaning for the rule
_OF_PLACES = "count dir endpoint env file filename files folder length method mode name path paths size type uri url"
_PLACES = {*_OF_PLACES.split()}


def is_secret_name(name: str) -> bool:
    """Return whether values of a name are credentials: `api_key`, `hf-token`, `dbPassword`, but not `max_tokens`.

    Names of places (`token_path`, `secret_name`) and of counts are not, nor `key` behind other words than an owner's.
    """
    words = words_of(name)
    if _is_hook(words):
        return True
    if not words or (len(words) > 1 and words[-1] in _PLACES):
        return False
    if not _ANYWHERE.isdisjoint(words) or any(map(_is_owned, words[1:], words)):
        return True
    before, last = ["", *words][-2:]
    return (
        (last == "token" and before not in _TOKENS)
        or (last == "pass" and before not in _PASSES)
        or (last in ("sig", "signature") and (not before or before in _SIGNERS))
        or words == ["key"]
    )


def is_secret_before_colon(name: str) -> bool:
    """Return whether the name of a credential is one that prose has before a colon with nothing else in mind."""
    before, last = ["", "", *words_of(name)][-2:]
    return (
        last in _BEFORE_COLON
        or _is_hook([before, last])
        or (last in ("key", "keys") and before in _OPEN)
        or (last in ("token", "tokens") and before in _OPEN_TOKENS)
    )


def _is_hook(words: Sequence[str]) -> bool:
    """Return whether a name is the name of a webhook or its URL."""
    before, last = ["", "", *words][-2:]
    return last in _HOOKS or (last in ("url", "urls", "uri") and before in _HOOKS)


def _is_owned(word: str, before: str) -> bool:
    return word in ("key", "keys", "token", "tokens") and before in _OWNERS


def words_of(name: str) -> list[str]:
    """Return the words of a name in small letters, without numbers, and without meaningless words at its end."""
    words: list[str] = []
    for word in _WORDS.findall(name[-_MOST_NAME:]):
        small = word.lower()
        joined = _JOINED.fullmatch(small)
        if joined and joined[1] and (joined[2] in _PASSWORDS or joined[1].endswith(tuple(_OWNERS))):
            words += [next((each for each in _OWNERS if joined[1].endswith(each)), joined[1]), joined[2]]
        else:
            words.append(small)
    while len(words) > 1 and words[-1] in _AFTER:
        _ = words.pop()
    return words
