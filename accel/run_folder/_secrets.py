# SPDX-License-Identifier: Apache-2.0
"""Texts, command lines and configurations with stars in place of credentials: the one rule of what a credential is.

A value is hidden for whole words of its name, or for its own form. Patterns pass over a character a
bounded number of times, so no text takes longer than its length asks for; and texts are bounded before they are read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from accel.run_folder._secret_names import is_secret_before_colon, is_secret_name, words_of

STARS = "***"
MOST_TEXT = 20_000  # characters of a text that is read and stored
_MOST_BRACKET, _MOST_PEM = 1_000, 8_000  # characters in which the end of a bracket, or of a PEM block, is looked for

# A name, what closes it, and the sign behind it. A name begins where no other can, so that none is read twice.
_FIELD = re.compile(
    r"""(?<![\w.-])((?i:(?:api|access|private|secret)[ ]key)|[\w.-]++)(?:\\*+["'])?\]?"""
    r"""([ \t]*+)(:?=(?!=)|:(?!:|//|=))[ \t]*+"""
)
# The annotation of a name, and the sign behind it.
_TYPED = re.compile(
    r"""["']?[\w.]++(?:\[[^\]\n]{0,100}\]{1,3})?(?:[ \t]*+\|[ \t]*+[\w.]++)*+["']?"""
    r"""(?:[ \t]++=(?!=)[ \t]++|[ \t]*+=[ \t]*+(?=[bBuUrRfF]{0,2}["'(\\]))"""
)
_STARTS = re.compile(r"""(?:^|\n)[-+ ]?[ \t]*+(?:-[ \t]++)?(?:export[ \t]++)?["']?$""")
_NEXT_LINE = re.compile(r"""\\?\r?\n[-+ ]?[ \t]*+(?=[bBuUrRfF]{0,2}(?:"(?!"")|'(?!'')))""")
_NEXT_WORD = re.compile(r"""\r?\n[-+ ]?[ \t]++(?=[^\s:=#'"]{6,}[ \t]*+(?:[\r\n]|$))""")
_BLOCK = re.compile(r"[|>][-+]?\d?[ \t]*+\r?\n")
_BLOCK_LINE = re.compile(r"[-+ ]?[ \t]++[^\r\n]*+(?:\r?\n)?")
# A literal in a separate bracket, and calls that pass one on.
_HOLDS_LITERAL = re.compile(r"""\([^()\[\]{}"']{0,200}["']""")
_WRAPPER = re.compile(
    r"""(?i:[\w.]*+(?<=auth)|[\w.]*?(?:secret\w*|credentials?|str|bytes|field|option|argument|getenv|environ\.get))"""
    r"""(?=\(\s*+(?:default\s*+=\s*+|value\s*+=\s*+)?[bBuUrRfF]{0,2}["'])"""
)
_LONE = re.compile(r"(?=[^\d\s]*\d)(?=[^A-Za-z\s]*[A-Za-z])([\w+/=~-]{8,})[ \t]*+(?=[\r\n;#]|$)")
_IDENTIFIER = re.compile(r"[a-z_]\w*|[A-Z_][A-Z0-9_]*")
_HEXADECIMAL = re.compile(r"[0-9a-f]{20,}")
_LOGIN = re.compile(r"(?i:login|log_in|sign_?in|auth\w*|client|connect\w*|configure|session|api|fernet|hmac|encrypt)$")
# What is before a value that another word names: an option with its default, a pair of name and value.
_DEFAULT_OF = re.compile(r"""(?i:argument|option|flag|define\w*|field)\(([^()]{0,300})$""")
_VALUE_OF = re.compile(r"""\b(?i:name|key|id)["']?\s{0,4}[:=]\s{0,4}["']?([\w.-]{1,128})["']?[\s,+-]{0,40}["']?$""")
_WORD = re.compile(r"""["']([\w.-]++)["']""")
_PAIR = re.compile(r"""(?<!\\)(\\*+["'])([\w.-]++)\1\s{0,40},\s{0,40}(?=[bBuUrRfF]{0,2}\\*+["'])""")
_SETS = re.compile(r"(?i:set\w*|put\w*|add\w*|\w*env|define\w*|replace\w*)\((?:[^()]{0,60},\s{0,40})?$")
_GETS = re.compile(r"(?i:get\w*|pop)\((?:[^()]{0,60},\s{0,40})?$|[(\[]\s{0,40}$")
_PLAIN_WORD = re.compile(r"[a-z_ -]*")
_LOGIN_CALL = re.compile(r"""\b(?:login|set_access_token|set_token|set_password)(?=\(\s*+[bBuUrRfF]{0,2}["'])""")
_ELEMENT = re.compile(r"<([\w:.-]++)(?:\s[^<>]*+)?>([^<>]++)(?=</)")
_USER_FLAG = re.compile(r"""(?<![\w-])(?:-u|--user|--proxy-user)[ \t=]*+["']?[^\s"':=]++:([^\s"']++)""")
_FETCHES = re.compile(r"\b(?:curl|wget|https?)\b")
_SPACED = re.compile(
    r"(?m)^[-+ ]?[ \t]*+(?:(?:ENV|setenv)[ \t]++([\w.-]++)"
    r"|(?:(?:machine|login)[ \t][^\r\n]{0,200}?\b)?password(?=[ \t]++\S++[ \t]*+$))[ \t]++([^\s=]++)"
)
_PASSWORD_FLAG = re.compile(
    r"\b(?:sshpass[ \t]++-p|(?:mysql|mysqldump|mysqladmin|mariadb)\b[^\r\n|;&]{0,200}?[ \t]-p(?=\S)"
    r"|(?:docker|podman|helm|oc|az)[ \t]++(?:[\w-]++[ \t]++)?login\b[^\r\n|;&]{0,200}?[ \t]-p"
    r"""|redis-cli\b[^\r\n|;&]{0,200}?[ \t]-a|sqlcmd\b[^\r\n|;&]{0,200}?[ \t]-P)[ \t]*+["']?([^\s"']++)"""
)
_QUOTED = re.compile(r"""[bBuUrRfF]{0,2}(\\*+)(\"""|'''|["'])(.*?)(?<!\\)\1\2""")
_TRIPLE = re.compile(r"""[bBuUrRfF]{0,2}(\"{3}|'{3})(.{0,2000}?)(?:\1|$)""", re.DOTALL)
_MORE = re.compile(r"""(?:[ \t]*+\+[ \t]*+|[ \t]++)(?=[bBuUrRfF]{0,2}["'])""")  # literals that are joined
_NEXT_ITEM = re.compile(r"""[ \t]*+,[ \t]*+(?=[bBuUrRfF]{0,2}["'])""")
_FALLBACK = re.compile(r"""[^\r\n]{0,200}?\b(?:or|else)[ \t]++(?=[bBuUrRfF]{0,2}["'])""")
_UNPACKED = re.compile(r"(?:^|\n)[-+ ]?[ \t]*+\(?((?:[\w.]++,[ \t]*+)++)$")
_IS_QUOTED = re.compile(r"""[bBuUrRfF]{0,2}\\*+["']""")
_BARE = re.compile(r"[^\s&;,]++")
_LINE = re.compile(r"[^\r\n]*+")
_PLACEHOLDER = re.compile(r"[{\[]\w*+[}\]]|<[\w -]*+>")
# A flag and its value as two words of a shell, or of a printed list; prose has plain words behind a flag.
_PASSED = re.compile(r"""(?<![\w-])(--?[A-Za-z][\w.-]*+)(?:["'],)?[ \t]++(["']?)(?=[^\s"']{6})([^\s"']++)""")
_IS_MADE = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])")
_BRACKETS = re.compile(r"[{}\[\]()]")
_OPENING = re.compile(r"[{\[(]")
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


_KEY_LINE = re.compile(r"(?m)^([ +-])[A-Za-z0-9+/=]{40,}$")  # of a PEM block without its marks in the diff


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
    for pattern, find in _FINDERS:
        text = _without(text, pattern, find)
    text = _PASSED.sub(_passed, text)
    for form in _FORMS:
        text = form.sub(rf"\1{STARS}", text)
    return text


def _without(text: str, pattern: re.Pattern[str], find: Callable[[str, re.Match[str]], tuple[int, int]]) -> str:
    """Return a text with stars in place of the ranges that `find` returns for the matches of a pattern."""
    parts: list[str] = []
    done = 0
    for found in pattern.finditer(text):
        if found.start() < done:
            continue
        start, end = find(text, found)
        if start < end:
            parts += [text[done:start], STARS]
            done = end
    return "".join([*parts, text[done:]])


def _passed(flag: re.Match[str]) -> str:
    """Return a flag with stars in place of its value if that is a credential."""
    is_credential = is_secret_name(flag[1]) and _IS_MADE.match(flag[3]) and not _is_plain(flag[3])
    return f"{flag[0][: flag.start(3) - flag.start()]}{STARS}" if is_credential else flag[0]


def _value(text: str, field: re.Match[str]) -> tuple[int, int]:
    """Return where the credential behind a name begins and ends; an empty range if there is none."""
    name, space, sign = field.groups()
    at = field.end()
    typed = sign == ":" and _TYPED.match(text, at)
    if typed:
        sign, at = "=", typed.end()
    before = text[max(0, field.start() - 300) : field.start()]
    names_secret = is_secret_before_colon(name)
    is_named = _is_named(name) or (_is_key(name) and (before.endswith(("?", "&")) or _is_login(before)))
    unpacked = _UNPACKED.search(before[-200:]) if sign != ":" else None
    if unpacked and any(map(_is_named, [name, *re.findall(r"[\w.]+", unpacked[1])])):
        quoted = _QUOTED.match(text, at)
        return _quoted_range(text, quoted, _NEXT_ITEM) if quoted else (at, at)
    is_key = bool(_STARTS.search(before[-60:])) or before.endswith(("'", '"'))  # of a mapping, or of a file
    is_owned_value = name.lower() in ("default", "value") and _is_value_of_another(before)
    if sign == ":" and not names_secret:
        return _mapped(text, at, name) if is_key and (is_owned_value or is_named) else (at, at)
    if not (is_named or is_owned_value):
        return at, at
    if sign == ":" and is_key and (block := _BLOCK.match(text, at)):
        return at, _block_end(text, block.end(), field.start())
    if is_key or sign != ":":
        following = _NEXT_LINE.match(text, at) or (sign == ":" and _NEXT_WORD.match(text, at))
        at = following.end() if following else at
    if triple := _TRIPLE.match(text, at):
        return triple.span(2)
    if quoted := _QUOTED.match(text, at):
        return _quoted_range(text, quoted)
    if _IS_QUOTED.match(text, at):  # it does not end in this line
        return at, _end(_LINE, text, at)
    return _unquoted(text, at, field, is_code=bool(typed or (space and sign != ":" and not names_secret)))


def _is_key(name: str) -> bool:
    return name.strip("-").lower() == "key"  # which may be any key; a line of a diff has a sign before it


def _is_named(name: str) -> bool:
    return is_secret_name(name) and not _is_key(name)


def _unquoted(text: str, at: int, field: re.Match[str], *, is_code: bool) -> tuple[int, int]:
    """Return where a value without quotes begins and ends; in a line of code variables and most calls are none."""
    if is_code or field[3] != ":":
        fallback = _FALLBACK.match(text, at)
        quoted = _QUOTED.match(text, fallback.end()) if fallback else None
        if quoted and quoted[3] and not (_is_plain(quoted[3]) or _PLACEHOLDER.fullmatch(quoted[3])):
            return quoted.span(3)
    if _HOLDS_LITERAL.match(text, at):
        return at, _bracket_end(text, at)
    if wrapper := _WRAPPER.match(text, at):
        return at, _bracket_end(text, wrapper.end())
    if is_code:
        lone = _LONE.match(text, at)
        is_made = lone and (not _IDENTIFIER.fullmatch(lone[1]) or _HEXADECIMAL.fullmatch(lone[1]))
        return lone.span(1) if lone and is_made else (at, at)
    if _PLACEHOLDER.match(text, at):
        return at, at
    if text[at : at + 1] in ("{", "["):
        return at, _bracket_end(text, at)
    if field[3] == ":" and words_of(field[1])[-1] in ("authorization", "cookie", "cookies", "passphrase"):
        return at, _header_end(text, field)
    begin, end = at, _end(_BARE, text, at)
    while opened := _OPENING.search(text, at, end):  # the arguments of a call
        at = _bracket_end(text, opened.start())
        end = _end(_BARE, text, at)
    end = at + len(text[at:end].rstrip("\"')]}>\\"))
    parts = text[begin:end].strip("()").split(",")
    return (begin, begin) if all(_is_plain(each.strip()) for each in parts) else (begin, end)


def _quoted_range(text: str, quoted: re.Match[str], more: re.Pattern[str] = _MORE) -> tuple[int, int]:
    """Return the range of a literal and of those that it is joined with, or that are on the next lines: a diff has
    the old value and the new one."""
    last = quoted
    is_plain = not quoted[3] or _is_plain(quoted[3])
    while following := more.match(text, last.end()) or _NEXT_LINE.match(text, last.end()):
        literal = _QUOTED.match(text, following.end())
        if literal is None:
            break
        last = literal
        is_plain = is_plain and (not last[3] or _is_plain(last[3]))
    return (last.end(), last.end()) if is_plain else (quoted.start(3), last.end(3))


def _mapped(text: str, at: int, name: str) -> tuple[int, int]:
    """Return the range of a credential behind a key, `"hf_token": "..."`: a literal, or a word that looks made."""
    if (following := _NEXT_LINE.match(text, at)) is not None:
        at = following.end()
    quoted = _QUOTED.match(text, at)
    is_common = len(words_of(name)) < 2 and name.lower() not in ("default", "value")  # a token of a text, say
    if quoted and (not is_common or (len(quoted[3]) >= 8 and _IS_MADE.match(quoted[3]))):
        return _quoted_range(text, quoted)
    lone = None if quoted else _LONE.match(text, at)
    return lone.span(1) if lone else (at, at)


def _is_login(before: str) -> bool:
    """Return whether a text ends inside the call of a login or a client."""
    depth = 0
    for at in range(len(before) - 1, -1, -1):
        if before[at] == ")":
            depth += 1
        elif before[at] == "(":
            depth -= 1
            if depth < 0:
                return _LOGIN.search(before[max(0, at - 60) : at]) is not None
    return False


def _is_value_of_another(before: str) -> bool:
    """Return whether a text ends with the name of a credential, so that its value follows."""
    option = _DEFAULT_OF.search(before)
    names = _WORD.findall(option[1]) if option else []
    pair = _VALUE_OF.search(before[-240:])
    return any(map(_is_named, [*names, *([pair[1]] if pair else [])]))


def _second(text: str, pair: re.Match[str]) -> tuple[int, int]:
    """Return the range of the literal behind the literal of a credential's name, as in `setdefault(name, value)`."""
    quoted = _QUOTED.match(text, pair.end())
    before = text[max(0, pair.start() - 120) : pair.start()]
    if not quoted or not quoted[3] or _is_plain(quoted[3]) or not _is_named(pair[2]):
        return 0, 0
    is_last = text[quoted.end() : quoted.end() + 1] in (")", "]")
    is_value = _SETS.search(before) or (is_last and _GETS.search(before) and not _PLAIN_WORD.fullmatch(quoted[3]))
    return quoted.span(3) if is_value else (0, 0)


def _of_login(text: str, call: re.Match[str]) -> tuple[int, int]:
    return call.end() + 1, _bracket_end(text, call.end()) - 1


def _of_element(_: str, element: re.Match[str]) -> tuple[int, int]:
    is_credential = is_secret_name(element[1].rpartition(":")[2]) and not _is_plain(element[2].strip())
    return element.span(2) if is_credential and element[2].strip() else (0, 0)


def _of_user(text: str, flag: re.Match[str]) -> tuple[int, int]:
    is_credential = not _is_plain(flag[1]) and _FETCHES.search(text[max(0, flag.start() - 300) : flag.start()])
    return flag.span(1) if is_credential else (0, 0)


def _of_line(_: str, line: re.Match[str]) -> tuple[int, int]:
    is_credential = is_secret_name(line[1]) if line[1] else _IS_MADE.match(line[2])
    return line.span(2) if is_credential and not _is_plain(line[2]) else (0, 0)


def _of_flag(_: str, flag: re.Match[str]) -> tuple[int, int]:
    return (0, 0) if _is_plain(flag[1]) and not _NUMBER.fullmatch(flag[1]) else flag.span(1)


_FINDERS: Sequence[tuple[re.Pattern[str], Callable[[str, re.Match[str]], tuple[int, int]]]] = (
    (_FIELD, _value),
    (_PAIR, _second),
    (_LOGIN_CALL, _of_login),
    (_ELEMENT, _of_element),
    (_USER_FLAG, _of_user),
    (_PASSWORD_FLAG, _of_flag),
    (_SPACED, _of_line),
)


def _block_end(text: str, at: int, name_at: int) -> int:
    """Return the end of a block of YAML: of the lines that begin further right than the name."""
    line = text.rfind("\n", max(0, name_at - 300), name_at) + 1
    wide = name_at - line
    while at < len(text) and (found := _BLOCK_LINE.match(text, at)):
        body = found[0].lstrip(" \t") if found[0][:1] not in "+-" else found[0][1:].lstrip(" \t")
        if body.strip() and len(found[0]) - len(body) <= wide:
            break
        at = found.end()
    return at - 1 if text[at - 1 : at] == "\n" else at


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
        depth += 1 if bracket[0] in "{[(" else -1
        if not depth:
            return bracket.end()
    return max(_end(_LINE, text, at), min(len(text), at + _MOST_BRACKET))


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _without_pem(text: str) -> str:
    """Return a text without the bodies of PEM blocks, also of one that lacks a mark."""
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
