# SPDX-License-Identifier: Apache-2.0
"""The trackers of a run as users hold them: an item of the run's checkpoints."""

from __future__ import annotations

from typing import Any

import msgspec

from accel.errors import CheckpointError
from accel.observe._tracked_run import SavedRun, TrackedRun
from accel.observe._tracker import Run


class Trackers:
    """The trackers of a run, from `tracking`. An item for `save_state` and `resume`, such as `"trackers": trackers`.

    A checkpoint holds the run's identity and its last logged step. It commits once local files hold all steps up to
    that. A run that loads it is the same run in each tracker that can go on, and local files are cut back to that step.

    Args:
        tracked: the run and its writers.
        strict, debug: as for `tracking`.
    """

    def __init__(self, tracked: TrackedRun, *, strict: bool, debug: bool) -> None:
        self.tracked = tracked
        self.strict = strict
        self.debug = debug

    def __repr__(self) -> str:
        return f"Trackers({', '.join(tracker.name for tracker in self.tracked.all)}; run {self.run.name})"

    @property
    def run(self) -> Run:
        """The run."""
        return self.tracked.run

    def state_dict(self) -> dict[str, Any]:
        """Return the run's identity and last logged step, once local files hold all steps up to it.

        Raises:
            CheckpointError: a local file lacks some of them, or could not be written in time.
        """
        return msgspec.structs.asdict(self.tracked.save())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run of a checkpoint after its last step. Trackers that have started are finished.

        Raises:
            CheckpointError: no saved run, or one of another project; or a local file is still being written.
        """
        try:
            saved = msgspec.convert(state_dict, SavedRun)
        except msgspec.ValidationError as error:
            raise CheckpointError("not a run of trackers", got=str(error), where="load_state_dict") from error
        self.tracked.load(saved)
