# SPDX-License-Identifier: Apache-2.0
"""`python -m accel.cli`, the same as `accel`."""

import sys

from accel.cli._main import main

sys.exit(main())
