# SPDX-License-Identifier: Apache-2.0
"""Texts, command lines and configurations with stars in place of credentials: the one rule of what a credential is.

A value is hidden for whole words of its name, or for its own form. Patterns pass over a character a
bounded number of times, so no text takes longer than its length asks for; and texts are bounded before they are read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

STARS = "***"
MOST_TEXT = 20_000  # characters of a text that is read and stored
_MOST_NAME = 128  # characters at the end of a name that are read
_MOST_BRACKET, _MOST_PEM = 1_000, 8_000  # characters in which the end of a bracket, or of a PEM block, is looked for

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_JOINED = re.compile(r"(\w*?)(keys?|tokens?|secrets?|passwords?|passwd|passphrase)")  # `apikey`, `dbpassword`
_PASSWORDS = {"password", "passwords", "passwd", "passphrase", "passcode"}
_TOLD = {*_PASSWORDS, "secret", "secrets", "authorization", "bearer", "cookie", "cookies"}  # before a colon, too
_HOOKS = {"webhook", "webhooks"}  # whose URLs are credentials
_ANYWHERE = {*_TOLD, "credential", "credentials", "creds", "auth", "jwt", "pwd"}
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
    words = _words(name)
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


def _is_told_name(name: str) -> bool:
    """Return whether the name of a credential is one that prose has before a colon with nothing else in mind."""
    before, last = ["", "", *_words(name)][-2:]
    return (
        last in _TOLD
        or _is_hook([before, last])
        or (last in ("key", "keys") and before in _OPEN)
        or (last in ("token", "tokens") and before in _OPEN_TOKENS)
    )


def _is_hook(words: Sequence[str]) -> bool:
    """Return whether a name is that of a webhook or its URL."""
    before, last = ["", "", *words][-2:]
    return last in _HOOKS or (last in ("url", "urls", "uri") and before in _HOOKS)


def _is_owned(word: str, before: str) -> bool:
    return word in ("key", "keys", "token", "tokens") and before in _OWNERS


def _words(name: str) -> list[str]:
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


# A name, what closes it, and the sign behind it. A name begins where no other can, so that none is read twice.
_FIELD = re.compile(
    r"""(?<![\w.-])((?i:(?:api|access|private|secret)[ ]key)|[\w.-]++)(?:\\*+["'])?\]?"""
    r"""([ \t]*+)(=(?!=)|:(?!:|//))[ \t]*+"""
)
_QUOTED = re.compile(r"""[bBuUrRfF]{0,2}(\\*+)(\"""|'''|["'])(.*?)(?<!\\)\1\2""")
_IS_QUOTED = re.compile(r"""[bBuUrRfF]{0,2}\\*+["']""")
_BARE = re.compile(r"[^\s&;,]++")
_LINE = re.compile(r"[^\r\n]*+")
_PLACEHOLDER = re.compile(r"[{\[]\w*+[}\]]|<[\w -]*+>")
# A flag and its value as two words of a shell, or of a printed list; prose has plain words behind a flag.
_PASSED = re.compile(r"""(?<![\w-])(--?[A-Za-z][\w.-]*+)(?:["'],)?[ \t]++(["']?)(?=[^\s"']{6})([^\s"']++)""")
_IS_MADE = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])")
_BRACKETS = re.compile(r"[{}\[\]]")
_SCHEME = re.compile(r"(?i:bearer|basic|token|negotiate|apikey)[ \t]++[^\s\"']++")
_FLAG = re.compile(r"([\w.+-]++)=(.+)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*+\.?\d*+|\.\d++)(?:[eE][-+]?\d++)?")
_PLAIN = re.compile(
    r"(?i:true|false|none|null|yes|no|on|off|nan|inf|str|bytes|bool|int|float|dict|list|any|optional(?:\[.*)?)"
    r"|\*+|\.+|<[\w ]*>|%s|\{\w*\}|\$\{?[A-Z_][A-Z0-9_]*\}?"
)
_USER = re.compile(r"(?<=://)[^/\s]*@")  # user:password@host
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{1,40}-----")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]{1,40}-----")
_PEM_LINES = re.compile(r"(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]{16,}+)++(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]++)?")
_BASE64 = re.compile(r"[A-Za-z0-9+/=]{16,}+")
# The look-aheads distinguish tokens from words such as hf_hub_download: these hold no digit and no capital.
_FORMS = (
    re.compile(r"\b(hf_)(?=[a-z]{0,60}[A-Z0-9])[A-Za-z0-9]{8,}+"),
    re.compile(r"\b(sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|npm_|pypi-)(?=[a-z_-]{0,60}[A-Z0-9])[\w-]{8,}+"),
    re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{8,}+"),
    re.compile(r"\b(AIza)[\w-]{8,}+"),
    re.compile(
        r"(?i)(https://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.-]*\.webhook\.office\.com)/)[^\s\"'<>]++"
    ),
    re.compile(r"(?<![\w-])(eyJ)[\w-]{8,}+\.[\w-]{8,}+\.[\w-]*+"),  # a JWT: header, claims, signature
    re.compile(r"(?<![\w-])((?i:bearer)[ \t]++)(?=[A-Za-z_.~+/-]{0,60}[0-9])[\w.~+/-]{8,}+=*+"),
)
# In the name of a variable any part counts: who made it up is not known.
_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)


def hide_in_text(text: str, *, newest: bool = False) -> str:
    """Return a text with stars in place of credentials; of a long one the beginning, or with `newest` the end."""
    if len(text) <= MOST_TEXT or not newest:
        return _starred(bounded(text))
    shown = _starred(text[-2 * MOST_TEXT :])  # with the text before the kept part, as that may be a name
    kept = shown[-min(MOST_TEXT, len(shown) // 2) :]
    kept = kept[len(_half(kept.split(maxsplit=1)[0])) :] if kept.strip() and not kept[0].isspace() else kept
    return f"[{len(text) - len(kept)} characters before]\n{kept}"


def hide_in_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with stars in place of credentials, also of a value behind a flag for one."""
    shown: list[str] = []
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
        flag = _FLAG.fullmatch(word)
        if is_value and is_secret_name(before):
            shown.append(word if _is_plain(word) else STARS)
        elif flag and is_secret_name(flag[1]):
            shown.append(word if _is_plain(flag[2]) else f"{flag[1]}={STARS}")
        else:
            shown.append(hide_in_text(word))
    return tuple(shown)


def hide_in_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a nested configuration with stars in place of credentials, and the dotted names of what was replaced.

    Texts are bounded. Below the name of a credential every text is one; a number is never a credential.
    """
    hidden: list[str] = []
    return {name: _shown(value, is_secret_name(name), name, hidden) for name, value in config.items()}, tuple(hidden)


_KEY_LINE = re.compile(r"(?m)^([ +-])[A-Za-z0-9+/=]{40,}$")  # of a PEM block whose marks the diff does not show


def hide_in_diff(diff: str) -> str:
    """Return the differences of one file with stars in place of credentials, however long; lines keep their signs."""
    blocks = itertools.groupby(_starred(diff).splitlines(keepends=True), key=lambda line: line[:1])
    shown: list[str] = []
    for sign, lines in blocks:
        if sign in ("+", "-"):  # which would part the lines of one value
            inner = _starred("".join(line[1:] for line in lines))
            shown += [f"{sign}{line}" for line in inner.splitlines(keepends=True)]
        else:
            shown += lines
    return _KEY_LINE.sub(rf"\1{STARS}", "".join(shown))


def hide_variable(name: str, value: str) -> str:
    """Return the value of a variable of the environment with stars in place of credentials."""
    return STARS if _VARIABLE.search(name) else hide_in_text(value)


def _shown(value: Any, is_secret: bool, path: str, hidden: list[str]) -> Any:
    if isinstance(value, Mapping):
        parts = cast("Mapping[Any, Any]", value)
        return {
            key: _shown(each, is_secret or is_secret_name(str(key)), f"{path}.{key}", hidden)
            for key, each in parts.items()
        }
    if isinstance(value, list | tuple):
        rows = cast("Sequence[Any]", value)
        if is_secret or not all(isinstance(each, str) for each in rows):
            return [_shown(each, is_secret, f"{path}[{at}]", hidden) for at, each in enumerate(rows)]
        texts = hide_in_words(rows)  # it may be a command line
        hidden += [f"{path}[{at}]" for at, text in enumerate(texts) if text != bounded(rows[at])]
        return list(texts)
    if not isinstance(value, str) or not value:
        return value
    whole = bounded(value)
    is_credential = is_secret and (_NUMBER.fullmatch(value) or not _PLAIN.fullmatch(value))  # digits in quotes are one
    text = STARS if is_credential else _starred(whole)
    if text != whole:
        hidden.append(path)
    return text


def _is_plain(value: str) -> bool:
    return bool(_NUMBER.fullmatch(value) or _PLAIN.fullmatch(value))


def bounded(text: str, most: int = MOST_TEXT) -> str:
    """Return the beginning of a text that is too long, without the half of a word that may be a credential."""
    if len(text) <= most:
        return text
    kept = text[:most]
    if not text[most].isspace() and not kept[-1].isspace():
        kept = kept[: len(kept) - len(_half(kept.rsplit(maxsplit=1)[-1]))]
    return f"{kept}[{len(text) - len(kept)} characters more]"


def _half(word: str) -> str:
    """Return a word that is cut in two; nothing if it holds letters and digits alone, as no form of credential does."""
    return "" if word.isalnum() else word


def _starred(text: str) -> str:
    text = _USER.sub(f"{STARS}@", _without_pem(text))
    parts: list[str] = []
    done = 0
    for field in _FIELD.finditer(text):
        if field.start() < done:
            continue
        start, end = _value(text, field)
        if start < end:
            parts += [text[done:start], STARS]
            done = end
    text = _PASSED.sub(_passed, "".join([*parts, text[done:]]))
    for form in _FORMS:
        text = form.sub(rf"\1{STARS}", text)
    return text


def _passed(flag: re.Match[str]) -> str:
    """Return a flag with stars in place of its value if that is a credential."""
    is_credential = is_secret_name(flag[1]) and _IS_MADE.match(flag[3]) and not _is_plain(flag[3])
    return f"{flag[0][: flag.start(3) - flag.start()]}{STARS}" if is_credential else flag[0]


def _value(text: str, field: re.Match[str]) -> tuple[int, int]:
    """Return where the credential behind a name begins and ends; an empty range if there is none."""
    name, space, sign = field.groups()
    at = field.end()
    is_told = _is_told_name(name)
    is_query = text[max(0, field.start() - 1) : field.start()] in ("?", "&")
    if not (is_told if sign == ":" else is_secret_name(name) and (name.lower() != "key" or is_query)):
        return at, at
    if quoted := _QUOTED.match(text, at):
        return (at, at) if not quoted[3] or _is_plain(quoted[3]) else quoted.span(3)
    if _IS_QUOTED.match(text, at):  # it does not end in this line
        return at, _end(_LINE, text, at)
    if space and sign == "=" and not is_told:  # a line of code
        return at, at
    if _PLACEHOLDER.match(text, at):
        return at, at
    if text[at : at + 1] in ("{", "["):
        return at, _bracket_end(text, at)
    if sign == ":" and _words(name)[-1] in ("authorization", "cookie", "cookies", "passphrase"):
        return at, _header_end(text, field)
    end = _end(_BARE, text, at)
    end = at + len(text[at:end].rstrip("\"')]}>\\"))
    return (at, at) if _is_plain(text[at:end]) else (at, end)


def _header_end(text: str, field: re.Match[str]) -> int:
    if scheme := _SCHEME.match(text, field.end()):
        return scheme.end()
    end = _end(_LINE, text, field.end())
    opened = text[max(0, field.start() - 1) : field.start()]
    closed = text.find(opened, field.end(), end) if opened in ("'", '"') else -1
    return end if closed < 0 else closed


def _bracket_end(text: str, at: int) -> int:
    depth = 0
    for bracket in _BRACKETS.finditer(text, at, at + _MOST_BRACKET):
        depth += 1 if bracket[0] in "{[" else -1
        if not depth:
            return bracket.end()
    return max(_end(_LINE, text, at), min(len(text), at + _MOST_BRACKET))


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _without_pem(text: str) -> str:
    """Return a text without the bodies of PEM blocks, or beside one whose other mark is missing."""
    if "-----" not in text:
        return text
    parts, done = list[str](), 0
    for mark in sorted((*_PEM.finditer(text), *_PEM_END.finditer(text)), key=lambda mark: mark.start()):
        if mark.start() < done:
            continue
        if mark[0].startswith("-----E"):
            near = mark.start() if parts else max(done, mark.start() - _MOST_PEM)
            parts += [text[done:near], _BASE64.sub(STARS, text[near : mark.start()]), mark[0]]
            done = mark.end()
            continue
        end = _PEM_END.search(text, mark.end(), mark.end() + _MOST_PEM)
        until = end.start() if end else _end(_PEM_LINES, text, mark.end())
        parts += [text[done : mark.end()], STARS] if until > mark.end() else [text[done:until]]
        done = until
    return "".join([*parts, text[done:]])
