# SPDX-License-Identifier: Apache-2.0
"""How many examples Hypothesis draws: the default tests few, CI's slow tests some more, the nightly run 500."""

from __future__ import annotations

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.internal.conjecture import providers

COUNTS = {"quick": 20, "ci": 25, "nightly": 500}


def load() -> None:
    """Register the profiles and load the quick one; `--hypothesis-profile NAME` loads another one afterwards.

    Hypothesis draws no constants from the sources of the modules that a process has imported: each worker would read
    a thousand files for them, in a fresh clone with a parser.
    """
    providers._get_local_constants = lambda: providers._local_constants
    for name, count in COUNTS.items():
        kept = [HealthCheck.too_slow]
        settings.register_profile(name, max_examples=count, deadline=None, suppress_health_check=kept)
    settings.load_profile("quick")


def write_tables() -> None:
    """Write the tables of characters that texts are drawn from, which take 1.5 seconds, once for all workers."""
    st.text().validate()


def share(of_examples: float) -> int:
    """Return a share of the examples that the loaded profile draws, for tests that need more or can afford fewer."""
    return max(1, round(of_examples * settings().max_examples))
