# SPDX-License-Identifier: Apache-2.0
"""The environment of this process, read once and checked, as one frozen record.

`read_env` is the only function that knows the names of the variables which make a process a rank. It is pure: a mapping
in, a `LaunchEnv` out, so that a test needs no monkeypatch and two contexts can come from two mappings.
"""

from accel.env._read import read_env as read_env
from accel.env._record import LaunchEnv as LaunchEnv
from accel.env._tpu import TpuPod as TpuPod, read_pod as read_pod
