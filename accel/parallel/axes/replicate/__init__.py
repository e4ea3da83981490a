# SPDX-License-Identifier: Apache-2.0
"""Replicas: each rank holds the whole model, and gradients are averaged. Begin with `_ddp.py`.

`_comm_hooks.py` has options of the exchange, `_local_sgd.py` averages parameters every few steps in its place.
"""
