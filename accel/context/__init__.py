# SPDX-License-Identifier: Apache-2.0
"""`DistContext`, what a rank knows about itself and its peers, as a frozen value; and the ways to make one.

`session` opens what a launcher asked for and closes it again; `from_group` and `from_mesh` adopt what another framework
made; `single` needs nothing. Whatever talks to other ranks takes the context as its first argument.
"""

from accel.context._adopt import from_group as from_group
from accel.context._adopt import from_mesh as from_mesh
from accel.context._adopt import replace as replace
from accel.context._first import check_context as check_context
from accel.context._first import context_first as context_first
from accel.context._groups import group_of as group_of
from accel.context._record import DistContext as DistContext
from accel.context._session import close as close
from accel.context._session import from_env as from_env
from accel.context._session import session as session
from accel.context._session import single as single
