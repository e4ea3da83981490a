# SPDX-License-Identifier: Apache-2.0
"""Refuse calls that leave the context out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from accel.context._record import DistContext
from accel.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def context_first(function: F) -> F:
    """Decorate a public function of `ctx`: a call that begins with something else raises `ConfigError`.

    The check stands around the function, because Python reports a missing last argument before the body runs.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0] if args else kwargs.get("ctx"), DistContext):
            _refuse(function, args)
        return function(*args, **kwargs)

    # Reports name the outermost frame of this package as the public call.
    checked.__code__ = checked.__code__.replace(co_name=function.__name__)
    functools.update_wrapper(checked, function)
    return cast(F, checked)


def check_context(ctx: object, call: str) -> None:
    """Raise `ConfigError` for what a method got in place of the context.

    Args:
        ctx: the method's argument.
        call: the right call, such as "mean.value(ctx)".
    """
    if not isinstance(ctx, DistContext):
        raise forgotten(call, type(ctx).__name__)


def forgotten(call: str, got: str) -> ConfigError:
    """Make the error of a call without the context."""
    fix = "The context is the `ctx` of `with accel.session() as ctx`."
    return ConfigError("pass the context first", expected=f"`{call}`", got=got, fix=fix)


def _refuse(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    others = "" if len(inspect.signature(function).parameters) == 1 else ", ..."
    raise forgotten(f"accel.{function.__name__}(ctx{others})", type(args[0]).__name__ if args else "no context")
