# SPDX-License-Identifier: Apache-2.0
"""Launches over several hosts: where they meet, and the agent of each."""
