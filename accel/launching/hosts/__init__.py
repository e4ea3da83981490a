# SPDX-License-Identifier: Apache-2.0
"""A launch over several hosts. Read `_hosts.py` first: it waits for the first host, and starts this host's agent.

`_agent.py` meets the other hosts in torch's rendezvous, and gives each round to the supervisor of `local/` as its
`Peers`: a `HostRound` (`_round.py`) carries failures, places of ranks, heartbeats and ends through the hosts' store.
`_hostfile.py` comes before all that: it starts a launcher on each host of a file by a remote shell, or as a Slurm job.
"""
