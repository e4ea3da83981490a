# SPDX-License-Identifier: Apache-2.0
"""Streams: datasets without a length, divided by the dataset itself, by accel, or read by one rank for all."""

from accel.data.stream._loader import StreamLoader as StreamLoader
