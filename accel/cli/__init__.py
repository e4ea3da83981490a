# SPDX-License-Identifier: Apache-2.0
"""The `accel` command. Begin with `_main.py`, which finds the module of a command and calls its `run`.

A command is a thin layer: `_parser.py` parses its words, one function of another room does the work, and errors are
printed in one line. Only the module of the command that runs is imported.
"""

from accel.cli._main import main as main
