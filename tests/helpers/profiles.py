# SPDX-License-Identifier: Apache-2.0
"""How many examples Hypothesis draws: the default tests few, CI's slow tests some more, the nightly run 500."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

COUNTS = {"quick": 20, "ci": 25, "nightly": 500}


def load() -> None:
    """Register the profiles and load the quick one; `--hypothesis-profile NAME` loads another one afterwards."""
    for name, count in COUNTS.items():
        kept = [HealthCheck.too_slow]
        settings.register_profile(name, max_examples=count, deadline=None, suppress_health_check=kept)
    settings.load_profile("quick")


def share(of_examples: float) -> int:
    """Return a share of the examples that the loaded profile draws, for tests that need more or can afford fewer."""
    return max(1, round(of_examples * settings().max_examples))
