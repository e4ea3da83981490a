# SPDX-License-Identifier: Apache-2.0
"""Arguments of `context_attention` that do not fit together: a `ConfigError`, before anything is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.errors import ConfigError
from accel.parallel.axes.context._kernels import Terms

_WHERE = "context_attention"


def check_fit(q: Tensor, k: Tensor, v: Tensor, size: int, *, causal: bool) -> None:
    """Raise `ConfigError` for tensors that do not fit together. No communication."""
    fit = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]
    if not fit or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise _misfit("[batch, heads, own, head dim], with key heads that divide the heads", q, k, v)
    if q.shape[2] != k.shape[2] and size > 1 and causal:
        raise ConfigError(
            "queries and keys of other positions",
            expected="as many keys as queries, of the same positions",
            got=f"{q.shape[2]} queries and {k.shape[2]} keys",
            where=_WHERE,
            fix="Leave caches of keys out: use_cache=False. Generation takes a mesh without cp. Cross-attention is "
            "causal=False.",
        )
    if len({(each.dtype, each.device) for each in (q, k, v)}) > 1:
        got = ", ".join(f"{each.dtype} on {each.device}" for each in (q, k, v))
        raise ConfigError("q, k and v differ", expected="one dtype and device", got=got, where=_WHERE)
    if size > 1 and (q.shape[2] % 2 or k.shape[2] % 2):
        raise ConfigError(
            "positions that no rank of cp has",
            expected="an even number, as split_sequence gives",
            got=f"{q.shape[2]} queries and {k.shape[2]} keys",
            where=_WHERE,
            fix="Cut the sequence by accel.parallel.split_sequence.",
        )


def check_terms(q: Tensor, k: Tensor, terms: Terms, size: int) -> None:
    """Raise `ConfigError` for a window, mask, soft cap or sinks that fit no query or no key."""
    window, softcap, sinks = terms.window, terms.softcap, terms.sinks
    if window is not None and (type(window) is not int or window < 1):
        raise ConfigError("not a window", expected="1 position or more", got=repr(window), where=f"{_WHERE}, window=")
    if softcap is not None and not softcap > 0:
        raise ConfigError("not a soft cap", expected="above 0", got=repr(softcap), where=f"{_WHERE}, softcap=")
    if sinks is not None and sinks.shape != (q.shape[1],):
        got = str(list(sinks.shape))
        raise ConfigError("not the sinks of the heads", expected=f"[{q.shape[1]}]", got=got, where=f"{_WHERE}, sinks=")
    _check_documents(q, k, terms, size)
    ignored = terms.ignored
    if ignored is not None and (ignored.shape != (k.shape[0], k.shape[2]) or ignored.dtype != torch.bool):
        raise ConfigError(
            "not a mask of these keys",
            expected=f"torch.bool of shape {[k.shape[0], k.shape[2]]}, True for a key to ignore",
            got=_said(ignored),
            where=f"{_WHERE}, key_padding_mask=",
            fix="Cut it with the keys, by accel.parallel.split_sequence.",
        )
    _check_mask(q, k, terms.mask, size)


def _check_documents(q: Tensor, k: Tensor, terms: Terms, size: int) -> None:
    documents = terms.documents
    if documents is not None and (documents.shape != (q.shape[0], q.shape[2]) or documents.is_floating_point()):
        raise ConfigError(
            "not the documents of these positions",
            expected=f"integers of shape {[q.shape[0], q.shape[2]]}",
            got=_said(documents),
            where=f"{_WHERE}, documents=",
            fix="Cut them with the rest of the batch, by accel.parallel.split_sequence.",
        )
    given = [name for name in ("documents", "window") if getattr(terms, name) is not None]
    if given and q.shape[2] != k.shape[2] and (size > 1 or documents is not None):
        raise ConfigError(
            "documents or a window of two sequences",
            expected="queries and keys of the same positions",
            got=f"{' and '.join(given)}, {q.shape[2]} queries and {k.shape[2]} keys",
            where=_WHERE,
            fix="Say what a query sees of another sequence by attn_mask=.",
        )


def _check_mask(q: Tensor, k: Tensor, mask: Tensor | None, size: int) -> None:
    if mask is None:
        return
    shape = (*q.shape[:3], k.shape[2] * size)
    has_shape = mask.ndim <= 4 and mask.shape[-1] == shape[3]
    pairs = zip(reversed(mask.shape), reversed(shape), strict=False)
    if not has_shape or not all(have in (1, want) for have, want in pairs):
        raise ConfigError(
            "not a mask of the own queries and all keys",
            expected=f"a shape that expands to {list(shape)}",
            got=_said(mask),
            where=f"{_WHERE}, attn_mask=",
            fix="Cut its queries alone, accel.parallel.split_sequence(ctx, {'mask': mask}, dim=2), and keep all keys "
            "in the order of the sequence.",
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ConfigError(
            "not a mask",
            expected="torch.bool, True where a query sees a key, or scores to add",
            got=_said(mask),
            where=f"{_WHERE}, attn_mask=",
            fix="Pass mask.bool().",
        )


def _said(x: Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}"


def check_method(q: Tensor, terms: Terms, method: str, size: int) -> None:
    """Raise `ConfigError` for a method that has no such attention."""
    if method == "heads" and q.shape[1] % size:
        raise ConfigError(
            "heads that the ranks along cp cannot share",
            expected=f"a multiple of {size}",
            got=f"{q.shape[1]} heads",
            where=f"{_WHERE}, method='heads'",
            fix="Take the method 'gather' or 'ring', or a smaller cp.",
        )
    if method != "gather" and terms.mask is not None:
        raise ConfigError(
            "a mask of all keys where ranks have some",
            expected='the method "gather"',
            got=f"attn_mask and the method {method!r}",
            where=_WHERE,
            fix='Take Plan(context="gather"). causal, window, documents and key_padding_mask go with every method.',
        )


def _misfit(expected: str, *tensors: Any) -> ConfigError:
    got = ", ".join(str(list(each.shape)) for each in tensors)
    return ConfigError("q, k and v do not fit together", expected=expected, got=got, where=_WHERE)
