#!/usr/bin/env python3
"""A decoder in a screenful: six layers of whole numbers, four of which stay where they were copied to.

It stands for an engine of your own. It prints the lines of assay's child protocol: who it is, each generation, and at
the end what it counted.
"""

import json
import os
from pathlib import Path

MODULUS, VOCABULARY = 65_521, 512
RESIDENT = 4  # layers that stay; the others are copied each time that they are read


class Engine:
    """Layers by number, those that stay, and what was copied."""

    def __init__(self, path: str) -> None:
        self.layers = json.loads(Path(path).read_text())["layers"]
        self.here: dict[int, list[list[int]]] = {}
        self.counters = {"htod_bytes": 0, "page_ins": 0, "hits": 0, "touches": 0}

    def layer(self, number: int) -> list[list[int]]:
        """A layer's rows, copied if they are not here."""
        self.counters["touches"] += 1
        if number in self.here:
            self.counters["hits"] += 1
            return self.here[number]
        rows = [list(row) for row in self.layers[number]]
        self.counters["page_ins"] += 1
        self.counters["htod_bytes"] += 8 * sum(map(len, rows))
        if len(self.here) < RESIDENT:
            self.here[number] = rows
        return rows

    def step(self, state: list[int], token: int) -> tuple[int, float]:
        """Feed a token; the next one, and how far it stands above the second. `state` is changed in place."""
        state[token % len(state)] += token
        for number in range(len(self.layers)):
            state[:] = [sum(w * s for w, s in zip(row, state, strict=True)) % MODULUS for row in self.layer(number)]
        scores = [state[v % len(state)] * (v + 1) % MODULUS for v in range(VOCABULARY)]
        second, best = sorted(scores)[-2:]
        return scores.index(best), float(best - second)


def main() -> None:
    """Serve one run."""
    asked = os.environ
    engine = Engine(asked["ASSAY_MODEL"])
    with Path(asked["ASSAY_RESULT"]).open("w", buffering=1) as out:
        say = lambda **line: print(json.dumps(line), file=out)  # noqa: E731
        say(type="hello", protocol=1, device={"uuid": asked["ASSAY_CARD"]})
        for index in range(int(asked["ASSAY_WARMUPS"]) + int(asked["ASSAY_GENERATIONS"])):
            is_warmup = index < int(asked["ASSAY_WARMUPS"])
            if index == int(asked["ASSAY_WARMUPS"]):
                engine.counters = dict.fromkeys(engine.counters, 0)
            state = [1] * len(engine.layers[0])
            for token in map(int, asked["ASSAY_PROMPT_IDS"].split()):
                chosen = engine.step(state, token)
            made = [chosen]
            while len(made) < int(asked["ASSAY_TOKENS"]):
                made.append(engine.step(state, made[-1][0]))
            ids, gaps = zip(*made, strict=True)
            say(type="generation", index=index, warmup=is_warmup, ids=ids, gaps=gaps, stop_reason="length")
        say(type="result", counters=engine.counters)


if __name__ == "__main__":
    main()
