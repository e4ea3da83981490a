# SPDX-License-Identifier: Apache-2.0
"""Loggers that know their rank: the standard library's, seen through a context. The root logger is not changed."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from accel.context import DistContext, check_context, context_first
from accel.errors import ConfigError, MissingExtraError
from accel.errors._checks import did_you_mean
from accel.process import wait_for_everyone

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

_HERE = 2  # frames of this module between a caller of `log` and `findCaller`


class RankLogger(_Adapter):
    """A logger of one rank, from `get_logger`: a `logging.LoggerAdapter` with the same methods.

    Each takes more keywords. `main_process_only=False` logs on every rank, with the rank in front of the message.
    `once_per_node=True` logs on the first rank of every node, with the node in front.
    `in_order=True` in addition logs one rank after another, which is a collective: every rank makes the call. Records
    have the attributes `rank` and `world_size`.

    Attributes:
        ctx: the context.
        level: lowest level of messages that this rank logs; None for the level of the standard logger.
    """

    def __init__(self, logger: logging.Logger, ctx: DistContext, level: int | None) -> None:
        super().__init__(logger, {"rank": ctx.rank, "world_size": ctx.world_size})
        self.ctx = ctx
        self.level = level
        self._seen = set[str]()

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name of the standard library
        """Return whether this rank logs messages of a level."""
        if self.level is None:
            return self.logger.isEnabledFor(level)
        return level >= self.level and level > self.logger.manager.disable

    def getEffectiveLevel(self) -> int:  # noqa: N802
        """Return the lowest level of messages that this rank logs."""
        return self.logger.getEffectiveLevel() if self.level is None else self.level

    def setLevel(self, level: int | str) -> None:  # noqa: N802
        """Set this rank's level; other ranks and the standard logger keep theirs."""
        self.level = _number(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return message and keywords with the rank among the record's attributes, after the caller's attributes."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}

    def log(  # pyright: ignore[reportIncompatibleMethodOverride] - of keywords that the class takes as object
        self,
        level: int,
        msg: object,
        *args: object,
        main_process_only: bool = True,
        once_per_node: bool = False,
        in_order: bool = False,
        stacklevel: int = 1,
        **kwargs: Any,
    ) -> None:
        """Log a message: on rank 0, on all ranks, or on one rank after another, which is a collective.

        Args:
            level: level of the message.
            msg: message, with places for `args`.
            args: values for the places.
            main_process_only: whether only rank 0 logs it.
            once_per_node: whether the first rank of every node logs it, and no other.
            in_order: whether ranks log one after another; every rank must make the call, whatever its level.
            stacklevel: as in `logging.Logger.log`.
            kwargs: `exc_info`, `stack_info` and `extra`, as in `logging.Logger.log`.
        """
        ctx, prefix = self.ctx, ""
        is_chosen = True
        if once_per_node:
            is_chosen, prefix = ctx.is_local_main_process, f"[node {ctx.node_rank}] " if ctx.num_nodes > 1 else ""
        elif main_process_only:
            is_chosen = ctx.is_main_process
        elif ctx.world_size > 1:
            prefix = f"[rank {ctx.rank}] "
        takes_turns = in_order and not once_per_node and not main_process_only
        for rank in range(ctx.world_size) if takes_turns else [ctx.rank]:
            if is_chosen and rank == ctx.rank and self.isEnabledFor(level):
                self._emit(level, f"{prefix}{msg}" if prefix else msg, args, stacklevel + _HERE, kwargs)
            if takes_turns:
                wait_for_everyone(ctx)

    def warning_once(self, msg: object, *args: object, stacklevel: int = 1, **kwargs: Any) -> None:
        """Log a warning, unless this logger has logged the same message with the same values before."""
        text = f"{msg} {args!r}"
        if text not in self._seen:
            self._seen.add(text)
            self.log(logging.WARNING, msg, *args, stacklevel=stacklevel + 1, **kwargs)

    def _emit(
        self, level: int, msg: object, args: tuple[object, ...], stacklevel: int, kwargs: MutableMapping[str, Any]
    ) -> None:
        msg, options = self.process(msg, kwargs)
        exc_info = _exception(options.pop("exc_info", None))
        stack_info = bool(options.pop("stack_info", False))
        extra: dict[str, object] = options.pop("extra")
        if options:
            raise ConfigError(
                "a logger does not take these keywords",
                expected="main_process_only, once_per_node, in_order, stacklevel, exc_info, stack_info, extra",
                got=", ".join(options),
            )
        file, line, function, stack = self.logger.findCaller(stack_info, stacklevel)
        name = self.logger.name
        record = self.logger.makeRecord(name, level, file, line, msg, args, exc_info, function, extra, stack)
        self.logger.handle(record)


def get_logger(name: str, ctx: DistContext, level: int | str | None = None) -> RankLogger:
    """Return the standard library's logger of a name for this rank. No communication.

    By default only rank 0 logs. Handlers and formats come from the `logging` module, which stays as it is: neither
    the root logger nor the level of the logger changes.

    Args:
        name: name of the logger, usually `__name__`.
        ctx: the context.
        level: lowest level that is logged, such as "info"; by default the setting `log_level` (`accel launch
            --log-level`), else the level of the `logging` module.

    Raises:
        ConfigError: no such level, or no context.

    Examples:
        >>> log = accel.get_logger("train", accel.single(), level="info")
        >>> log.info("%d samples", 8)
        >>> log.info("on each rank", main_process_only=False, in_order=True)
        >>> log.warning_once("once")
    """
    check_context(ctx, "accel.get_logger(name, ctx)")
    if level is None and ctx.settings.log_level != "auto":
        level = ctx.settings.log_level
    return RankLogger(logging.getLogger(name), ctx, None if level is None else _number(level))


@context_first
def rich_handler(ctx: DistContext, **options: Any) -> logging.Handler:
    """Return a handler of `rich` that shows time, level, message and line in colour. No communication.

    Args:
        ctx: the context.
        options: options of `rich.logging.RichHandler`.

    Raises:
        MissingExtraError: rich is not installed.

    Examples:
        >>> handler = accel.trackers.rich_handler(accel.single(), show_path=False)
        >>> logging.getLogger("train").addHandler(handler)
    """
    try:
        module = import_module("rich.logging")
        console = import_module("rich.console")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "the package of the coloured log is missing",
            got=str(error),
            where=f"rank {ctx.rank}, rich_handler",
            fix="Run: pip install 'accel-torch[rich]'",
        ) from error
    handler: logging.Handler = module.RichHandler(**{"console": console.Console(stderr=True), **options})
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


def _number(level: int | str) -> int:
    """Return the number of a level, or raise `ConfigError`."""
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    names = logging.getLevelNamesMapping()
    found = names.get(level.upper()) if isinstance(level, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if found is None:
        known = [name.lower() for name in names]
        facts = {"expected": ", ".join(known), "got": repr(level), "fix": did_you_mean(str(level), known)}
        raise ConfigError("no such level", where="get_logger, level=", **facts)
    return found


def _exception(wanted: object) -> Any:
    """Return type, exception and traceback for a record, by `exc_info` of `logging.Logger.log`; None without an
    exception."""
    if isinstance(wanted, BaseException):
        return type(wanted), wanted, wanted.__traceback__
    if isinstance(wanted, tuple):
        return cast(Any, wanted)
    return sys.exc_info() if wanted else None
