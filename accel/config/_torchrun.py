# SPDX-License-Identifier: Apache-2.0
"""Fields of a launch from torchrun's own variables: `PET_*`, which Kubeflow's jobs set in every pod.

Each stands for a flag of torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel.errors import ConfigError

# A launch follows these, and ignores the others.
TORCHRUN_VARIABLES = (
    "PET_NPROC_PER_NODE",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_MAX_RESTARTS",
    "PET_RDZV_ID",
    "PET_RDZV_CONF",
    "PET_ROLE",
)
# `timeout` is what hosts of a fixed number have in place of `join_timeout`.
_OPTIONS = MappingProxyType(
    {"timeout": "rdzv_timeout_s", "join_timeout": "rdzv_timeout_s", "last_call_timeout": "rdzv_last_call_s"}
)
_RDZV_PORT, _MASTER_PORT = "29400", "29500"  # torchrun's defaults


def read_torchrun(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the fields that torchrun's variables set: for each the variable, and the text of our own one.

    Raises:
        ConfigError: the hosts are to meet in another way than at a port of one of them.
    """
    given = {name: text for name in TORCHRUN_VARIABLES if (text := environ.get(name, "").strip())}
    if (backend := given.get("PET_RDZV_BACKEND", "c10d")) not in ("c10d", "static"):
        raise ConfigError(
            "hosts meet at a port of one of them, and in no other way",
            expected="c10d or static",
            got=repr(backend),
            where="PET_RDZV_BACKEND",
        )
    names = {
        "nproc_per_node": "PET_NPROC_PER_NODE",
        "nnodes": "PET_NNODES",
        "max_restarts": "PET_MAX_RESTARTS",
        "rdzv_id": "PET_RDZV_ID",
        "role": "PET_ROLE",
    }
    if ":" not in given.get("PET_NNODES", ""):  # torchrun, too, lets hosts that come and go take any place
        names["node_rank"] = "PET_NODE_RANK"
    found = {field: (name, given[name]) for field, name in names.items() if name in given}
    if given.get("PET_NPROC_PER_NODE") == "gpu":
        found["nproc_per_node"] = ("PET_NPROC_PER_NODE", "auto")
    if endpoint := given.get("PET_RDZV_ENDPOINT"):
        host, _, port = endpoint.rpartition(":")
        whole = port.isdecimal() and (":" not in host or host.endswith("]"))
        found["rdzv_endpoint"] = ("PET_RDZV_ENDPOINT", endpoint if whole else _joined(endpoint, _RDZV_PORT))
    elif host := given.get("PET_MASTER_ADDR"):
        found["rdzv_endpoint"] = ("PET_MASTER_ADDR", _joined(host, given.get("PET_MASTER_PORT", _MASTER_PORT)))
    timeouts, _ = rendezvous_fields(given.get("PET_RDZV_CONF", ""))
    found |= {field: ("PET_RDZV_CONF", text) for field, text in timeouts.items()}
    return found


def rendezvous_fields(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the fields that torchrun's `--rdzv-conf` sets, and the names of its options that set none.

    Args:
        text: pairs such as "join_timeout=900,last_call_timeout=10", in seconds.
    """
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    options = {name.strip(): value.strip() for name, _, value in pairs}
    found = {_OPTIONS[name]: value for name, value in options.items() if name in _OPTIONS}
    return found, [name for name in options if name not in _OPTIONS]


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
