# SPDX-License-Identifier: Apache-2.0
"""`DistContext`, what a rank knows about itself and its peers, as a frozen value; and the ways to make one.

`session` opens what a launcher asked for and closes it again; `from_group` and `from_mesh` adopt what another framework
made; `single` needs nothing. Whatever talks to other ranks takes the context as its first argument.
"""

from accel.context._adopt import from_group as from_group, from_mesh as from_mesh, replace as replace
from accel.context._first import check_context as check_context, context_first as context_first
from accel.context._groups import group_of as group_of
from accel.context._record import DistContext as DistContext
from accel.context._session import close as close, from_env as from_env, session as session, single as single
