# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh: how a model is spread along each, one folder an axis."""
