# SPDX-License-Identifier: Apache-2.0
"""The environment of this process, read once and checked, as one frozen record.

`read_env` is the only function that knows the names of the variables which make a process a rank. It is pure: a mapping
in, a `LaunchEnv` out, so that a test needs no monkeypatch and two contexts can come from two mappings.
"""

from accel.env._launchers import Tasks as Tasks, TpuPod as TpuPod, read_pod as read_pod, read_tasks as read_tasks
from accel.env._read import meeting_file as meeting_file, read_env as read_env
from accel.env._record import LaunchEnv as LaunchEnv
