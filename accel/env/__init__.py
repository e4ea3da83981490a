# SPDX-License-Identifier: Apache-2.0
"""The environment of this process, read once and checked, as one frozen record.

Begin with `_read.py`: `read_env` maps variables to a `LaunchEnv` (`_launch_env.py`), and is pure, so that a test needs
no monkeypatch and two contexts can come from two mappings. `_launchers.py` has the variables of each launcher.
"""

from accel.env._launch_env import LaunchEnv as LaunchEnv
from accel.env._launchers import Tasks as Tasks, TpuPod as TpuPod, read_pod as read_pod, read_tasks as read_tasks
from accel.env._read import meeting_file as meeting_file, read_env as read_env
