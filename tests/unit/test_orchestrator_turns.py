"""In which order a cluster's workers are started: a few of each node at a time."""

from __future__ import annotations

from orchestrator.ray_cluster import AT_ONCE, Place, _turns


def test_a_node_starts_a_few_workers_at_a_time_and_every_worker_once() -> None:
    counts = {"a": 5, "b": 1, "c": 4}
    places = {f"{node}.{n}": Place(node, node, None) for node, count in counts.items() for n in range(count)}
    turns = _turns(places)
    assert sorted(worker for turn in turns for worker in turn) == sorted(places)
    assert len(turns) == -(-max(counts.values()) // AT_ONCE)
    for turn in turns:
        for node in counts:
            assert sum(places[worker].node == node for worker in turn) <= AT_ONCE
    assert _turns({}) == []
