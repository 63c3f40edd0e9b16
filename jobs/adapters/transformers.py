"""Hugging Face transformers as an engine: a model folder of its own, its forward pass, its cache, and our greedy loop.

The folder holds the weights as transformers load them, so that they need not be those of the other arms: that they are
the same is what parity shows. `generate` is not called: it would choose and stop by settings of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jobs.adapters.peer import Asked, Logits, Made, Option, Peer, Scalar, checked_best, library, main
from jobs.adapters.torch import place_of

INSTALL = "pip install transformers torch"


class TransformersDecoder:
    """A causal language model of a folder. Raises whatever transformers does."""

    def __init__(self, torch: Any, transformers: Any, folder: str, device: str, dtype: str) -> None:
        self.torch, self.on = torch, device
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
        self.model = loaded.to(device).eval()
        told = self.model.generation_config.eos_token_id
        self.ends = frozenset(told if isinstance(told, list) else [] if told is None else [told])
        served = {"folder": folder, "device": device, "dtype": dtype}
        self.settings: Mapping[str, Scalar] = {f"transformers.{name}": value for name, value in served.items()}

    @property
    def facts(self) -> Mapping[str, int | float | str]:
        """The model's class, and how many numbers it holds."""
        return {"model_class": type(self.model).__name__, "parameters": int(self.model.num_parameters())}

    def generate(self, prompt: Sequence[int], tokens: int, *, ignore_eos: bool = True) -> Made:
        """One generation, by the host's clock: a step ends with its id."""
        ends = frozenset() if ignore_eos else self.ends
        ids: list[int] = []
        times: list[int] = []
        read, past = list(prompt), None
        while len(ids) < tokens and not (ids and ids[-1] in ends):
            start = time.perf_counter_ns()
            row, past = self._fed(read, past)
            ids.append(int(row.argmax()))
            times.append(time.perf_counter_ns() - start)
            read = ids[-1:]
        checked_best(row.float().cpu().numpy())
        return Made(ids, times[0], times[1:], ids[-1] in ends)

    def logits(self, prompt: Sequence[int], forced: Sequence[int]) -> Logits:
        """Logits after the prompt and after each forced id."""
        row, past = self._fed(prompt, None)
        rows = [row]
        for token in forced:
            row, past = self._fed([token], past)
            rows.append(row)
        return np.stack([row.float().cpu().numpy() for row in rows])

    def _fed(self, ids: Sequence[int], past: Any) -> tuple[Any, Any]:
        """The logits behind the last of these ids, on the device, and the cache."""
        with self.torch.inference_mode():
            fed = self.torch.tensor([list(ids)], device=self.on)
            made = self.model(input_ids=fed, past_key_values=past, use_cache=True)
        return made.logits[0, -1], made.past_key_values


def opened(asked: Asked) -> TransformersDecoder:
    """The model that an arm asks for. Raises CannotLoad where a library, or its CUDA, is not there."""
    torch, transformers = (library(name, INSTALL) for name in ("torch", "transformers"))
    device, dtype = place_of(torch, asked)
    folder = asked.options["folder"] or str(asked.request.model)
    return TransformersDecoder(torch, transformers, folder, device, dtype)


PEER = Peer(
    name="transformers",
    module="jobs.adapters.transformers",
    open=opened,
    distributions=("transformers", "torch"),
    blind="transformers does not tell what it copies, allocates or launches",
    any_model=True,
    options={
        "folder": Option(None, "a model folder as transformers loads it; without one the model of the sweep"),
        "device": Option("auto", "where it computes; auto: the card where there is one", ("auto", "cuda", "cpu")),
        "dtype": Option(
            "auto",
            "what weights are loaded as; auto: float16 on a card, float32 elsewhere",
            ("auto", "float16", "bfloat16", "float32"),
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main(PEER))
