"""The engine and PyTorch in turns on one card, on the same weights: a dense decoder of the zoo, one token at a time.

PyTorch is what the adapter `torch` makes of it (jobs/adapters/torch.py): weights widened to half precision, a static
cache, one CUDA graph a step. It reads four times the bytes. Beside the ratio stands parity: how many ids agree before
the first that does not, both fed their own; half precision rounds where the engine does not, so that they part in time.

    python -m benchmarks.cuda_peers --model models/qwen2.5-0.5b --out cuda-peers.json        (needs a GPU and torch)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cuda_decode import PROMPT_IDS, arm
from engine.onnx_load import load, recorded_digest
from jobs.adapters.peer import Decoder
from jobs.adapters.torch import TorchDecoder

ROUNDS, TOKENS = 5, 128
CAPACITY = 256


def generated(decoder: Decoder, tokens: int) -> tuple[list[int], float]:
    """Ids, and tokens a second of those that follow the first."""
    made = decoder.generate(PROMPT_IDS, tokens, ignore_eos=True)
    return made.ids, (tokens - 1) * 1e9 / sum(made.step_ns)


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many ids are the same before the first that is not."""
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def main() -> int:
    """Measure in turns, write the record, print it short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch: Any = import_module("torch")  # not of this project: whoever measures beside it has it
    model = arguments.model.absolute()
    with torch.inference_mode():
        decoder = TorchDecoder(load(model), torch, "cuda", "float16", CAPACITY, capture=True)
        ours: list[dict[str, Any]] = []
        theirs: list[tuple[list[int], float]] = []
        for _ in range(ROUNDS):
            ours.append(arm(model, TOKENS, 2, {}))
            theirs.append(generated(decoder, TOKENS))
    rates = [run["tokens_per_s"]["median"] for run in ours], [rate for _, rate in theirs]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": recorded_digest(model),
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(),
        "engine_tokens_per_s": rates[0],
        "torch_tokens_per_s": rates[1],
        "ratio": median(rates[0]) / median(rates[1]),
        "ids_before_the_first_that_differs": agreeing(ours[0]["ids"], theirs[0][0]),
        "torch_repeats_itself": len({tuple(one) for one, _ in theirs}) == 1,
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
