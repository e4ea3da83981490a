# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine: their plan, their start, their supervision."""
