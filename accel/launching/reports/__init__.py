# SPDX-License-Identifier: Apache-2.0
"""Records and reports of a launch: failures, its journal, its text."""
