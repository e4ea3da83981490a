# SPDX-License-Identifier: Apache-2.0
"""`DistContext`: a rank's place, device, settings and handle on its peers as a frozen value; and the ways to make one.

Begin with `_dist_context.py`, the value, which all that communicates takes as its first argument. `_make.py` has the
ways: `session` opens what a launcher asked for and closes it again; `from_group` and `from_mesh` adopt what another
framework made; `single` needs nothing.
"""

from accel.context._dist_context import (
    DistContext as DistContext,
    check_context as check_context,
    context_first as context_first,
    group_of as group_of,
)
from accel.context._make import (
    close as close,
    from_env as from_env,
    from_group as from_group,
    from_mesh as from_mesh,
    replace as replace,
    session as session,
    single as single,
)
