# SPDX-License-Identifier: Apache-2.0
"""`DistContext`, what a rank knows about itself and its peers, as a frozen value; and the ways to make one.

`session` opens what a launcher asked for and closes it again; `from_group` and `from_mesh` adopt what another framework
made; `single` needs nothing. Whatever talks to other ranks takes the context as its first argument.
"""

from accel.context._make import (
    close as close,
    from_env as from_env,
    from_group as from_group,
    from_mesh as from_mesh,
    replace as replace,
    session as session,
    single as single,
)
from accel.context._record import (
    DistContext as DistContext,
    check_context as check_context,
    context_first as context_first,
    group_of as group_of,
)
