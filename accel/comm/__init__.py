# SPDX-License-Identifier: Apache-2.0
"""The only door to torch.distributed: groups and who owns them, one checked message per call, flat tensors."""

from accel.comm._call import Call as Call
from accel.comm._call import call_site as call_site
from accel.comm._call import check_tag as check_tag
from accel.comm._call import tagged as tagged
from accel.comm._exchange import exchange as exchange
from accel.comm._exchange import exchange_values as exchange_values
from accel.comm._exchange import shared_failure as shared_failure
from accel.comm._exchange import start_values as start_values
from accel.comm._handle import Comm as Comm
from accel.comm._handle import adopt as adopt
from accel.comm._handle import alone as alone
from accel.comm._handle import connect as connect
from accel.comm._mesh import mesh_group as mesh_group
from accel.comm._mesh import open_mesh as open_mesh
from accel.comm._mesh import place_on_mesh as place_on_mesh
from accel.comm._message import HEADER_BYTES as HEADER_BYTES
from accel.comm._message import Answers as Answers
from accel.comm._message import as_bytes as as_bytes
from accel.comm._message import as_tensor as as_tensor
from accel.comm._message import blank as blank
from accel.comm._message import fail as fail
from accel.comm._message import fill as fill
from accel.comm._message import inline_bytes as inline_bytes
from accel.comm._message import start as start
from accel.comm._regroup import mesh_of_dims as mesh_of_dims
from accel.comm._regroup import mesh_of_group as mesh_of_group
from accel.comm._torch import ReduceOp as ReduceOp
from accel.comm._torch import all_gather_flat as all_gather_flat
from accel.comm._torch import all_reduce_flat as all_reduce_flat
from accel.comm._torch import broadcast_flat as broadcast_flat
from accel.comm._torch import gather_bytes as gather_bytes
from accel.comm._torch import peer_error as peer_error
from accel.comm._torch import receive_flat as receive_flat
from accel.comm._torch import send_flat as send_flat
from accel.comm._torch import start_all_reduce as start_all_reduce
