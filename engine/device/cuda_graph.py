"""A captured graph: recorded on one stream, instantiated, uploaded, and read back node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.device.cuda_driver import call


@dataclass(frozen=True, slots=True)
class Census:
    """What the driver says is in a graph: nodes by type, kernels by name, edges."""

    types: Mapping[str, int]
    kernels: Mapping[str, int]
    edges: int


@dataclass(frozen=True, slots=True)
class OverLink:
    """Weight bytes that one replay moves over the link: copied, and read in place by its kernels."""

    staged_bytes: int
    in_place_bytes: int


class CudaGraph:
    """An executable graph; `modelled_ns` is what the device profile makes of one replay."""

    def __init__(self, driver: Any, recorded: Any, stream: Any, modelled_ns: int, over_link: OverLink) -> None:
        self._driver = driver
        self.modelled_ns = modelled_ns
        self.over_link = over_link
        try:
            self.census = _census(driver, recorded)
            self.executable = call(driver.cuGraphInstantiate, recorded, 0)
        finally:
            call(driver.cuGraphDestroy, recorded)
        call(driver.cuGraphUpload, self.executable, stream)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.census.types.values())

    @property
    def kernel_nodes(self) -> int:
        """Number of nodes that are kernels."""
        return self.census.types.get("kernel", 0)

    def __del__(self) -> None:
        if hasattr(self, "executable"):
            self._driver.cuGraphExecDestroy(self.executable)  # the context may be gone: there is nobody to tell


def _census(driver: Any, graph: Any) -> Census:
    count = call(driver.cuGraphGetNodes, graph, 0)[1]
    nodes = call(driver.cuGraphGetNodes, graph, count)[0] if count else []
    types, names = Counter[str](), Counter[str]()
    for node in nodes:
        kind = call(driver.cuGraphNodeGetType, node).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        types[kind] += 1
        if kind == "kernel":
            function = call(driver.cuGraphKernelNodeGetParams, node).func
            names[call(driver.cuFuncGetName, function).decode()] += 1
    return Census(dict(types), dict(names), int(call(driver.cuGraphGetEdges, graph, 0)[-1]))
