# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh: how a model is spread along each. A folder an axis, each with one `Spread`, its record of
functions."""
