# SPDX-License-Identifier: Apache-2.0
"""Axes of a mesh: how a model is spread along each, a folder an axis, each with one `Spread`, its record of functions.

Begin with `replicate`, the shortest. `accel/parallel/_prepare_model.py` composes the records in one order.
"""
