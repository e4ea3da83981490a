# SPDX-License-Identifier: Apache-2.0
"""A line through points: its best fit and each step of gradient descent are known without a framework."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset


class Line(NamedTuple):
    """A line: y = slope * x + intercept."""

    slope: float
    intercept: float


class RegressionDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points near a line, as pairs of x and y of shape (1,).

    Args:
        length: number of points.
        line: the line near the points.
        noise: standard deviation of y around it; 0 puts them on the line.
        seed: seed of the points; equal arguments give equal points on any machine.
        dtype: dtype of x and y.

    Examples:
        >>> dataset = accel.testing.RegressionDataset(64, noise=0.0)
        >>> dataset.best()
        Line(slope=2.0, intercept=3.0)
    """

    def __init__(
        self,
        length: int = 64,
        line: Line = Line(2.0, 3.0),  # noqa: B008 - a frozen value
        *,
        noise: float = 0.1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(2, length, 1, generator=generator, dtype=torch.float64)
        self.x = draws[0].to(dtype)
        self.y = (line.slope * draws[0] + line.intercept + noise * draws[1]).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]

    def best(self) -> Line:
        """Return the line with the least mean squared error, rounded to 9 digits. No communication."""
        x = self.x.double()
        y = self.y.double()
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
        return Line(round(slope, 9), round(float(y.mean()) - slope * float(x.mean()), 9))

    def descend(self, *, lr: float, steps: int, start: Line = Line(0.0, 0.0)) -> Line:  # noqa: B008 - a frozen value
        """Return the line after steps of SGD on all points at once, by arithmetic in float64. No communication.

        However a step's points are split into ranks and micro-batches, training gives this line.

        Args:
            lr: learning rate of SGD without momentum, on the mean squared error.
            steps: number of steps.
            start: line of the model before the first.
        """
        x = self.x.double()
        y = self.y.double()
        line = start
        for _ in range(steps):
            off = line.slope * x + line.intercept - y
            line = Line(line.slope - lr * float((2 * off * x).mean()), line.intercept - lr * float((2 * off).mean()))
        return line


class RegressionModel(nn.Module):
    """A line as a model, with parameters `slope` and `intercept` of shape (1,).

    Args:
        start: line to begin with.
        dtype: dtype of the parameters.
    """

    def __init__(self, start: Line = Line(0.0, 0.0), *, dtype: torch.dtype = torch.float32) -> None:  # noqa: B008
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([start.slope], dtype=dtype))
        self.intercept = nn.Parameter(torch.tensor([start.intercept], dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y for each x, of the same shape."""
        return self.slope * x + self.intercept

    def line(self) -> Line:
        """Return the line that the parameters describe. Waits for the device."""
        return Line(float(self.slope.detach()), float(self.intercept.detach()))
