# SPDX-License-Identifier: Apache-2.0
"""The only door to torch.distributed. Begin with `_group.py`: `Comm`, the handle on a group that every function takes.

A call goes from `_exchange.py` (payloads, agreements) to `_message.py` (the first message of every call) and
`_header.py` (its bytes, and the errors where ranks differ), then to `_torch.py`, which picks a collective of torch or
rounds of pairs (`_rounds.py`). `_call.py` has the user's place of a call; `_rendezvous.py` opens a group,
`_lost.py` names ranks that left it, `_units.py` the units that ranks run. `_mesh.py` and `_gradients.py` are for
models: no checked message there. `_marks.py` has marks of guards, also on weights that a block has replaced.
"""

from accel.comm._call import (
    Call as Call,
    FirstValue as FirstValue,
    call_site as call_site,
    check_tag as check_tag,
    tagged as tagged,
)
from accel.comm._exchange import (
    agreed as agreed,
    agreed_values as agreed_values,
    barrier as barrier,
    broadcast_bytes as broadcast_bytes,
    broadcast_value as broadcast_value,
    exchange as exchange,
    exchange_values as exchange_values,
    foreign_call as foreign_call,
    notes_of_ranks as notes_of_ranks,
    raise_lost as raise_lost,
    reduce_ints as reduce_ints,
    shared_failure as shared_failure,
    start_values as start_values,
)
from accel.comm._gradients import (
    Passage as Passage,
    copied as copied,
    exchanged as exchanged,
    gathered as gathered,
    gathered_summed as gathered_summed,
    group_named as group_named,
    mark_recording as mark_recording,
    own_gradient as own_gradient,
    own_part as own_part,
    passed as passed,
    records as records,
    scattered as scattered,
    start_gather as start_gather,
    start_scatter as start_scatter,
    start_shift as start_shift,
    start_sum as start_sum,
    summed as summed,
)
from accel.comm._group import Comm as Comm, adopt as adopt, alone as alone, connect as connect
from accel.comm._header import (
    HEADER_BYTES as HEADER_BYTES,
    Answers as Answers,
    as_bytes as as_bytes,
    as_tensor as as_tensor,
)
from accel.comm._lost import Alarm as Alarm
from accel.comm._marks import (
    is_replaced as is_replaced,
    refuse_replaced as refuse_replaced,
    refuse_replaced_memory as refuse_replaced_memory,
    replaced as replaced,
)
from accel.comm._mesh import (
    MERGED as MERGED,
    grid_mesh as grid_mesh,
    group_along as group_along,
    group_of_rows as group_of_rows,
    merged_mesh as merged_mesh,
    merged_order as merged_order,
    mesh_group as mesh_group,
    mesh_of_dims as mesh_of_dims,
    mesh_of_group as mesh_of_group,
    open_mesh as open_mesh,
    position_on_mesh as position_on_mesh,
    ranks_around as ranks_around,
    ranks_of_group as ranks_of_group,
)
from accel.comm._message import (
    blank as blank,
    fill as fill,
    inline_bytes as inline_bytes,
    reduced_bytes as reduced_bytes,
    start as start,
)
from accel.comm._rounds import (
    in_unit as in_unit,
    lost_rank as lost_rank,
    peer_error as peer_error,
    receive_flat as receive_flat,
    send_flat as send_flat,
    unit_of as unit_of,
)
from accel.comm._threads import SilentGroup as SilentGroup, ThreadGroup as ThreadGroup, run_in_threads as run_in_threads
from accel.comm._torch import (
    PAIRWISE as PAIRWISE,
    ReduceOp as ReduceOp,
    all_gather_flat as all_gather_flat,
    all_reduce_flat as all_reduce_flat,
    broadcast_flat as broadcast_flat,
    fills as fills,
    gather_bytes as gather_bytes,
    start_all_reduce as start_all_reduce,
)
from accel.comm._units import SUM_OF as SUM_OF, UnitLog as UnitLog, parting as parting, way_out as way_out
