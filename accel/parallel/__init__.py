# SPDX-License-Identifier: Apache-2.0
"""How a model is spread over ranks, and how to get the plain model back."""

from accel.parallel._ddp import check_devices as check_devices
from accel.parallel._ddp import check_exchanged as check_exchanged
from accel.parallel._ddp import check_prepared as check_prepared
from accel.parallel._ddp import no_sync as no_sync
from accel.parallel._ddp import prepare_model as prepare_model
from accel.parallel._unwrap import unwrap_model as unwrap_model
from accel.parallel._unwrap import wrapped_name as wrapped_name
