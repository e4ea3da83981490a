# SPDX-License-Identifier: Apache-2.0
"""The processes of a launch on this machine. Read `_supervisor.py` first: it waits for ranks, and ends them together.

`_machine.py` reads cores and accelerators; `_launch_plan.py` turns them and the settings into a `LaunchPlan`, without
effects. `_children.py` starts the planned processes and relays their output. Each runs `_worker.py`, which executes the
script, or `_function_rank.py` for a function. The supervisor waits in `_signals.py` for ends and signals; when the
ranks are silent, or one is missing, `_hang.py` asks them where they are.
"""
