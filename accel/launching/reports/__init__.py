# SPDX-License-Identifier: Apache-2.0
"""Reports of a launch. Read `_failure.py` first: a failing rank writes a `FailureRecord`, its launcher reads it.

Of all failures `culprit` names the one that caused the others. `_report.py` turns it into the text on stderr, and
`_journal.py` into the launch's log, lines that `accel.run_folder` folds again for `accel report` and `accel watch`.
"""
