"""Every adapter by the word that an arm names it with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jobs.adapters import onnxruntime, torch
from jobs.adapters.base import Adapter
from jobs.adapters.command import CommandAdapter
from jobs.adapters.native import NativeAdapter
from jobs.adapters.peer import Peer
from jobs.adapters.peer_run import PeerAdapter

PEERS: Mapping[str, Peer] = MappingProxyType({peer.name: peer for peer in (onnxruntime.PEER, torch.PEER)})
"""Engines that nobody here wrote and that a file of this package drives."""

KNOWN = ("native", "command", *PEERS)


def adapters() -> dict[str, Adapter]:
    """One of each, as a worker has them."""
    peers: dict[str, Adapter] = {name: PeerAdapter(peer) for name, peer in PEERS.items()}
    return {"native": NativeAdapter(), "command": CommandAdapter(), **peers}
