# SPDX-License-Identifier: Apache-2.0
"""Loggers of ranks: who logs, in which order, from which line, at which level; the logging module stays as it was."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
from collections.abc import Iterator

import pytest
from catching import assert_raises

import accel


class Kept(logging.Handler):
    """A handler that keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    """A handler on the logger of the test's name; afterwards the root is as it was."""
    root, handler = logging.getLogger(), Kept()
    before = (root.level, list(root.handlers))
    logger = logging.getLogger(request.node.originalname)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    assert (root.level, list(root.handlers)) == before
    assert logger.level == logging.NOTSET


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_each_way_to_log_has_the_callers_line_and_the_rank(ranks, kept):
    lines: dict[str, int] = {}

    def rank(ctx):
        log = accel.get_logger("test_each_way_to_log_has_the_callers_line_and_the_rank", ctx, "info")
        log.info("info %d", 1), lines.update({"info 1": _line()})
        log.log(logging.INFO, "log"), lines.update(log=_line())
        log.warning_once("once %s", [2]), lines.update({"once [2]": _line()})
        log.warning_once("once %s", [2])
        log.info("all", main_process_only=False), lines.update(all=_line())
        log.info("order", main_process_only=False, in_order=True), lines.update(order=_line())
        try:
            raise ValueError("bad")
        except ValueError:
            log.exception("exception"), lines.update(exception=_line())

        def inner() -> None:
            log.error("deep", stacklevel=2, extra={"mine": 3})

        inner(), lines.update(deep=_line())

    ranks.run(rank, 2)
    assert {record.filename for record in kept.records} == {"test_logger.py"}
    texts = [(record.getMessage().removeprefix(f"[rank {record.rank}] "), record.rank) for record in kept.records]
    assert sorted(texts) == sorted(
        [*((name, 0) for name in lines), ("all", 1), ("order", 1)]  # from rank 0 alone, unless all were asked for
    )
    assert [text for text in texts if text[0] == "order"] == [("order", 0), ("order", 1)]
    for record, (text, _) in zip(kept.records, texts, strict=True):
        assert record.lineno == lines[text], text
        assert record.world_size == 2
        assert record.funcName == "rank"
        assert (record.exc_info is not None) == (text == "exception")
        assert getattr(record, "mine", None) == (3 if text == "deep" else None)


def test_levels_that_differ_between_ranks_still_log_in_order(ranks, kept):
    def rank(ctx):
        level = "error" if ctx.rank == 0 else "info"
        log = accel.get_logger("test_levels_that_differ_between_ranks_still_log_in_order", ctx, level)
        log.info("x", main_process_only=False, in_order=True)
        return log.isEnabledFor(logging.INFO)

    assert ranks.run(rank, 3) == [False, True, True]
    assert [record.getMessage() for record in kept.records] == ["[rank 1] x", "[rank 2] x"]


def test_logging_once_per_node_is_by_the_first_rank_of_each(kept):
    for rank in range(4):
        position = {"rank": rank, "local_rank": rank % 2, "node_rank": rank // 2}
        ctx = dataclasses.replace(accel.single(), world_size=4, local_world_size=2, num_nodes=2, **position)
        log = accel.get_logger("test_logging_once_per_node_is_by_the_first_rank_of_each", ctx, "info")
        log.info("x", once_per_node=True)
        log.debug("y", once_per_node=True)
    assert [(record.getMessage(), record.rank) for record in kept.records] == [("[node 0] x", 0), ("[node 1] x", 2)]


def test_a_message_of_one_process_has_no_rank_in_front(kept):
    log = accel.get_logger("test_a_message_of_one_process_has_no_rank_in_front", accel.single(), "info")
    log.info("x", main_process_only=False)
    assert [record.getMessage() for record in kept.records] == ["x"]


def test_the_level_is_the_callers_else_the_settings_else_that_of_logging(kept):
    name = "test_the_level_is_the_callers_else_the_settings_else_that_of_logging"
    quiet, loud = accel.single(), accel.single(log_level="debug")
    accel.get_logger(name, quiet).info("no: the root's level is warning")
    accel.get_logger(name, loud).debug("setting")
    accel.get_logger(name, loud, "error").warning("no: the caller's level")
    log = accel.get_logger(name, quiet, logging.INFO)
    log.info("number")
    log.setLevel("error")
    log.info("no: changed")
    assert log.getEffectiveLevel() == logging.ERROR
    logging.disable(logging.CRITICAL)
    log.error("no: all of logging is off")
    logging.disable(logging.NOTSET)
    assert [record.getMessage() for record in kept.records] == ["setting", "number"]
    with accel.session({"ACCEL_LOG_LEVEL": "info"}, device="cpu") as ctx:
        assert accel.get_logger(name, ctx).isEnabledFor(logging.INFO)


def test_what_makes_no_logger_is_refused():
    with assert_raises(accel.errors.ConfigError, problem="no such level", expected="critical", got="'loud'"):
        accel.get_logger("x", accel.single(), "loud")
    with assert_raises(accel.errors.ConfigError, expected=r"accel\.get_logger\(name, ctx\)"):
        accel.get_logger("x", "info")
    with assert_raises(accel.errors.ConfigError, problem="a logger does not take these keywords", got="all_ranks"):
        accel.get_logger("x", accel.single(), "info").info("x", all_ranks=True)


def test_rich_shows_messages_and_is_an_extra(kept, monkeypatch):
    import io

    from rich.console import Console

    shown = io.StringIO()
    logger = logging.getLogger("test_rich_shows_messages_and_is_an_extra")
    handler = accel.trackers.rich_handler(accel.single(), console=Console(file=shown, width=80))
    logger.addHandler(handler)
    accel.get_logger(logger.name, accel.single(), "info").info("hello %s", "you")
    logger.removeHandler(handler)
    assert "hello you" in shown.getvalue()
    assert "test_logger.py" in shown.getvalue()
    monkeypatch.setitem(sys.modules, "rich.logging", None)
    with assert_raises(accel.errors.MissingExtraError, fix=r"accel-torch\[rich\]"):
        accel.trackers.rich_handler(accel.single())
