# SPDX-License-Identifier: Apache-2.0
"""Engines: one folder each, which nothing below imports; import the one you use by its name.

Begin with `accel/parallel/_engines.py`, the record `Engine` of one that owns prepare, backward and step, as `deepspeed`
does. The others bring a context (`megatron`), weights (`quantized`), groups (`torchft`) or a launcher (`ray`).
"""
