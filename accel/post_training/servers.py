# SPDX-License-Identifier: Apache-2.0
"""Servers that take a trainer's weights and sample from them: a model of this process, accel's own server, and vLLM.

Any object with the methods of `WeightServer` and of `SampleServer` is a server.
"""

from accel.post_training._http import HttpServer, http, serve
from accel.post_training._local import (
    Digest,
    LocalServer,
    WeightServer,
    check_arrived,
    check_newer,
    local,
)
from accel.post_training._vllm import VllmServer, vllm

__all__ = [
    "Digest",
    "HttpServer",
    "LocalServer",
    "VllmServer",
    "WeightServer",
    "check_arrived",
    "check_newer",
    "http",
    "local",
    "serve",
    "vllm",
]
__dir__ = __all__.copy
