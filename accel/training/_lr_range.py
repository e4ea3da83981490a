# SPDX-License-Identifier: Apache-2.0
"""`LrRange`, the record of a range test: its losses smoothed, the suggested rate, a table and a figure; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import NamedTuple

import msgspec

from accel.terminal import show_table

_TIMES = 3.0  # a smoothed loss that has risen by so many times the larger of the lowest loss and the fall diverges
_SMOOTHED = 0.9  # share of the past in the average that is watched
_PARTS = 16  # half of a smoothing window is this part of the test
_SLOPES = 8  # of the lines with compared slopes: a slope is noisier than an average
_START = 5  # the losses before any fall are at least this part of the test
_NOISES = 2.5  # a fall of fewer standard errors is none
_FEWEST = 5  # losses with a deviation to speak of
_ROWS = 12  # of the table


class LrRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range test, from `accel.schedules.find_lr`. `print` shows it as a table.

    Attributes:
        learning_rates: tested rates, rising.
        losses: mean loss of each step's window over all ranks, before the step at that rate.
        suggestion: the rate where the smoothed loss falls fastest; None where it falls by less than its noise.
        diverged: whether the test ended early, because the loss rose far or was not finite.
    """

    learning_rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float | None
    diverged: bool

    @property
    def smoothed(self) -> tuple[float, ...]:
        """Averages of the losses over a window around each."""
        return tuple(fmean(window) for window in _windows(self.losses))

    def __str__(self) -> str:
        shown = range(0, len(self.losses), max(1, len(self.losses) // _ROWS))
        smoothed = self.smoothed
        rows = [(f"{self.learning_rates[at]:.2e}", f"{self.losses[at]:.4g}", f"{smoothed[at]:.4g}") for at in shown]
        return "\n".join([show_table([("LEARNING RATE", "LOSS", "SMOOTHED"), *rows]), "", *self._facts()])

    def figure(self) -> str:
        """Return the losses over the learning rates as an SVG image, with the suggestion as a line."""
        return _figure(self)

    def _facts(self) -> Iterator[str]:
        if self.diverged and self.learning_rates:
            yield f"diverged at {self.learning_rates[-1]:.2e}"
        yield (
            "suggestion: none, the loss fell by no more than its noise"
            if self.suggestion is None
            else (f"suggestion: {self.suggestion:.2e}, where the loss falls fastest")
        )


def lr_range(learning_rates: Sequence[float], losses: Sequence[float], *, diverged: bool) -> LrRange:
    """Return the record of a test; `losses` are finite, one for each rate."""
    at = _steepest(losses)
    return LrRange(
        learning_rates=tuple(learning_rates),
        losses=tuple(losses),
        suggestion=None if at is None else learning_rates[at],
        diverged=diverged,
    )


def spaced(low: float, high: float, steps: int) -> list[float]:
    """Return rates from `low` to `high`, each the same multiple of the one before."""
    ratio = math.log(high / low) / (steps - 1)
    return [*(low * math.exp(ratio * at) for at in range(steps - 1)), high]


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether the average of the latest losses has risen far above its lowest value."""
    sums = accumulate(losses, lambda total, loss: _SMOOTHED * total + loss, initial=0.0)
    weights = accumulate(losses, lambda total, _: _SMOOTHED * total + 1.0, initial=0.0)
    averages = [total / weight for total, weight in zip(sums, weights, strict=True) if weight]
    if not averages:
        return False
    lowest = min(averages)
    return averages[-1] - lowest > _TIMES * max(abs(lowest), averages[0] - lowest)


def _windows(losses: Sequence[float]) -> list[Sequence[float]]:
    half = max(2, len(losses) // _PARTS)
    return [losses[max(0, at - half) : at + half + 1] for at in range(len(losses))]


def _steepest(losses: Sequence[float]) -> int | None:
    """Return the step of the steepest fall up to the lowest loss; None where losses fall by no more than their noise.

    A fall after the lowest loss follows a rise: its rate is too large.
    """
    if len(losses) < _FEWEST:
        return None
    start = losses[: max(_FEWEST, len(losses) // _START)]
    risen = next(at for at in range(len(losses), 0, -1) if losses[at - 1] <= max(start))
    windows = _windows(losses[:risen])  # without the rise at the end, which would hide the fall before it
    smoothed = [fmean(window) for window in windows]
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    error = stdev(start) * math.sqrt(1 / len(start) + 1 / len(windows[lowest]))
    if not fmean(start) - smoothed[lowest] > _NOISES * error:
        return None
    half = max(2, risen // _SLOPES)
    centres = range(half, max(half, min(lowest, risen - 1 - half)) + 1)  # lines over fewer losses lean with the noise
    return min(centres, key=lambda at: _slope(losses[at - half : at + half + 1]))


def _slope(values: Sequence[float]) -> float:
    """Return the slope of the line of least squares."""
    middle = (len(values) - 1) / 2
    square = sum((at - middle) ** 2 for at in range(len(values)))
    return sum((at - middle) * value for at, value in enumerate(values)) / square


_WIDTH, _HEIGHT = 640, 360
_LEFT, _END, _TOP, _FOOT = 64, 624, 28, 316  # of the plot
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.grid{stroke:#d0d7de}.raw{fill:none;stroke:#a5b4fc}"
    ".line{fill:none;stroke:#4338ca;stroke-width:2}.mark{stroke:#c53030;stroke-dasharray:5 4}"
    "@media (prefers-color-scheme:dark){text{fill:#adbac7}.grid{stroke:#444c56}.raw{stroke:#5b65a8}"
    ".line{stroke:#a5b4fc}.mark{stroke:#f47067}}"
)


class _Plot(NamedTuple):
    """The area of a figure."""

    rates: tuple[float, float]  # logarithms of the first and the last rate
    losses: tuple[float, float]  # lowest and highest loss

    def x(self, rate: float) -> float:
        """Return the place of the logarithm of a rate."""
        first, last = self.rates
        return _LEFT + (rate - first) / ((last - first) or 1.0) * (_END - _LEFT)

    def y(self, loss: float) -> float:
        """Return the place of a loss."""
        lowest, highest = self.losses
        return _FOOT - (loss - lowest) / (highest - lowest) * (_FOOT - _TOP)

    def line(self, rates: Sequence[float], losses: Sequence[float], kind: str) -> str:
        """Return a curve."""
        points = " ".join(f"{self.x(rate):.1f},{self.y(loss):.1f}" for rate, loss in zip(rates, losses, strict=True))
        return f'<polyline class="{kind}" points="{points}" clip-path="url(#plot)"/>'

    def axes(self) -> Iterator[str]:
        """Yield lines and labels of decades and of losses."""
        first, last = self.rates
        for decade in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1):
            yield _vertical(self.x(decade), "grid")
            yield _text(self.x(decade), _FOOT + 16, f"1e{decade}")
        lowest, highest = self.losses
        for part in range(5):
            loss = lowest + (highest - lowest) * part / 4
            yield f'<line class="grid" x1="{_LEFT}" x2="{_END}" y1="{self.y(loss):.1f}" y2="{self.y(loss):.1f}"/>'
            yield _text(_LEFT - 8, self.y(loss) + 4, f"{loss:.3g}", "end")
        yield _text((_LEFT + _END) / 2, _HEIGHT - 8, "learning rate")


def _figure(found: LrRange) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
    parts = [f'{head} aria-label="Loss over the learning rate">', f"<style>{_STYLE}</style>"]
    if found.losses:
        rates, smoothed = [math.log10(rate) for rate in found.learning_rates], found.smoothed
        plot = _Plot((rates[0], rates[-1]), _limits(found.losses, smoothed))
        area = f'x="{_LEFT}" y="{_TOP}" width="{_END - _LEFT}" height="{_FOOT - _TOP}"'
        parts += [f'<clipPath id="plot"><rect {area}/></clipPath>', *plot.axes()]
        parts += [plot.line(rates, found.losses, "raw"), plot.line(rates, smoothed, "line")]
        if found.suggestion is not None:
            at = plot.x(math.log10(found.suggestion))
            parts += [_vertical(at, "mark"), _text(at, _TOP - 8, f"{found.suggestion:.2e}")]
    return "\n".join([*parts, "</svg>"])


def _vertical(x: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_FOOT}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _limits(losses: Sequence[float], smoothed: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest loss that a figure shows; a loss that rises far leaves it."""
    lowest = min(losses)
    fall = smoothed[0] - lowest
    highest = min(max(losses), smoothed[0] + fall) if fall > 0 else max(losses)
    return (lowest, highest) if highest > lowest else (lowest - 0.5, lowest + 0.5)
