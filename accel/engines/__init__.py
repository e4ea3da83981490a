# SPDX-License-Identifier: Apache-2.0
"""Engines: one file or folder each, which nothing below imports. Import the one you use by its name."""
