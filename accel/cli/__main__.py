# SPDX-License-Identifier: Apache-2.0
"""Lets `python -m accel.cli` stand for `accel`."""

import sys

from accel.cli._main import main

sys.exit(main())
