"""Every adapter by the word that an arm names it with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jobs.adapters import kernel, llama_cpp, onnxruntime, profile_native, torch, transformers
from jobs.adapters.base import Adapter
from jobs.adapters.command import CommandAdapter
from jobs.adapters.native import NativeAdapter
from jobs.adapters.peer import Peer
from jobs.adapters.peer_run import PeerAdapter

PEERS: Mapping[str, Peer] = MappingProxyType(
    {file.PEER.name: file.PEER for file in (onnxruntime, torch, transformers, llama_cpp)}
)
"""Engines that nobody here wrote and that a file of this package drives."""

PROGRAMS: Mapping[str, tuple[str, ...]] = MappingProxyType({profile_native.NAME: profile_native.COUNTERS})
"""Programs whose output is known, with the counters that they tell: arms of them have a command and no mapping."""
KNOWN = ("native", kernel.NAME, "command", *PROGRAMS, *PEERS)


def adapters() -> dict[str, Adapter]:
    """One of each, as a worker has them."""
    peers: dict[str, Adapter] = {name: PeerAdapter(peer) for name, peer in PEERS.items()}
    known = {profile_native.NAME: CommandAdapter(read=profile_native.read)}
    return {"native": NativeAdapter(), kernel.NAME: kernel.adapter(), "command": CommandAdapter(), **known, **peers}
