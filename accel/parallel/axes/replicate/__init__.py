# SPDX-License-Identifier: Apache-2.0
"""Replicas: each rank holds the whole model, and gradients are averaged."""
