# SPDX-License-Identifier: Apache-2.0
"""`console`: a line on the standard output for each `log`, its numbers in columns."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Iterator, Mapping

from accel.errors import ConfigError
from accel.errors._checks import check_count
from accel.terminal import show_value
from accel.trackers._log import split_times
from accel.trackers._tracker import Tracker, Values

_STEP_WIDTH, _WIDTH = 5, 6  # of the first line; a longer number widens its column from there on


class _Columns:
    """The columns of the lines so far: the widest text of each name."""

    def __init__(self, label: str, names: Collection[str] | None, formats: Mapping[str, str], rates: bool) -> None:
        self._label = label
        self._names = names
        self._formats = formats
        self._rates = rates
        self._widths = {label: _STEP_WIDTH}
        self._unprinted: tuple[Values, int] | None = None

    def print_due(self, values: Values, step: int, every: int) -> None:
        """Print the line of a step that `every` divides; keep another one for the end of the run."""
        self._unprinted = (values, step)
        if step % every == 0:
            self.print_last()

    def print_last(self) -> None:
        """Print the newest line, unless it has been printed."""
        if self._unprinted is not None:
            builtins.print(self.line(*self._unprinted), flush=True)
            self._unprinted = None

    def line(self, values: Values, step: int) -> str:
        """Return the line of a step."""
        numbers, times = split_times(values)
        shown = numbers if self._names is None else {name: numbers[name] for name in self._names if name in numbers}
        cells = [(name, self._text(name, value)) for name, value in shown.items()]
        columns = [self._padded(name, text) for name, text in [(self._label, str(step)), *cells]]
        return "  ".join([*columns, *(_rates(times) if self._rates else ())])

    def _text(self, name: str, value: float) -> str:
        if name in self._formats:
            return format(value, self._formats[name])
        return str(value) if isinstance(value, int) else f"{value:#.4g}".rstrip(".")

    def _padded(self, name: str, text: str) -> str:
        width = max(self._widths.get(name, _WIDTH), len(text))
        self._widths[name] = width
        return f"{name} {text:>{width}}"


def _rates(times: Mapping[str, float]) -> Iterator[str]:
    """Yield the throughput and the utilization, with their units."""
    for name, unit in (("tokens_per_s", "tok/s"), ("samples_per_s", "samples/s")):
        if name in times:
            yield f"{show_value(times[name])} {unit}"
            break
    if "mfu" in times:
        yield f"{times['mfu']:.0%}".replace("%", " % MFU")


def console(
    *,
    every: int = 1,
    label: str = "step",
    names: Collection[str] | None = None,
    formats: Mapping[str, str] | None = None,
    rates: bool = False,
) -> Tracker:
    """Return the tracker that prints a line on rank 0 for each `log`: `step   140  loss 0.5320  accuracy  90.1%`.

    Floats have four digits, and columns are aligned. Of readings of clocks only the ones of `rates` are printed. A
    background thread prints, so a line may appear shortly after its `log`; the end of `tracking` waits for all of them.

    Args:
        every: print steps that are multiples of this number, and the last one.
        label: text before the step.
        names: names of the numbers to print, in this order; None prints all.
        formats: format specification of a number by its name, such as `{"accuracy": ".1%"}`.
        rates: whether lines end with the throughput and the MFU of `step_statistics`: `412k tok/s  41 % MFU`.

    Raises:
        ConfigError: `every` is below 1, `names` is a text, or a specification does not format a float.
    """
    check_count(every, "the number of steps is not valid", where="console, every=")
    if isinstance(names, str):
        raise ConfigError(
            "a text is no list of names", got=repr(names), where="console, names=", fix=f"names=({names!r},)"
        )
    formats = dict(formats or {})
    for name, specification in formats.items():
        _check_format(name, specification)

    return Tracker(
        "console",
        start=lambda run, config: _Columns(label, names, formats, rates),
        log=lambda columns, values, step: columns.print_due(values, step, every),
        finish=lambda columns, ending: columns.print_last(),
    )


def _check_format(name: str, specification: str) -> None:
    try:
        _ = format(1.5, specification)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the format of a float is not valid",
            expected='a specification such as ".3f" or ".1%"',
            got=repr(specification),
            where=f"console, formats={{{name!r}: ...}}",
            fix=f'formats={{{name!r}: ".3f"}}',
        ) from error
