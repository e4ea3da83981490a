# SPDX-License-Identifier: Apache-2.0
"""The `accel` command: a thin layer that parses words, calls one function, and prints errors in one line."""

from accel.cli._main import main as main
