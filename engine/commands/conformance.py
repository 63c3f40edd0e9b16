"""`engine conformance`: the ONNX standard's own node cases, for every operator that the engine claims."""

from __future__ import annotations

import argparse
import difflib
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import BadRequest

if TYPE_CHECKING:
    from engine.conformance import CaseResult, Outcome

OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "refused", "not claimed")
HEADING = """\
# Operators claimed

What the engine claims, out of its registry, and what became of the ONNX standard's own node cases (those of the
installed `onnx` package), each run through plan and simulated device. A case counts for every operator in it. *Refused*
cases are of element types that the engine does not carry (float8, 4 and 2 bits, strings), of sequences, or of a
reduction over nothing; they are refused by name, before anything is computed. Operators of `com.microsoft` have no
cases there: they are held against onnxruntime's numbers for whole models, and against the float32 reference
(`assay engine oracle`).

Where onnxruntime's kernels for experts disagree with each other, the CUDA ones and the operators' text are followed: of
equal router logits the lower expert is taken (the CPU kernels take the higher), weights are normalised where the node
says so (the CPU's QMoE always does it), and activations meet 8-bit experts as they are (the CPU's QMoE rounds them to 8
bits, which moves a small model's logits by up to half of the largest). With experts in the other order, or dequantised
into MoE, the CPU's numbers are these. It also makes MatMulNBits of DequantizeLinear before MatMul, and rounds
activations there too (1e-2 to 1e-1 of the largest logit): compare such graphs with its optimisations off.

Written by `assay engine conformance --markdown`; the command without it prints the same table for every operator of the
standard, and `--op NAME` the cases of one.

| operator | passed | failed | refused |
|---|---|---|---|
"""


def add(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "conformance", help="run the standard's node cases; exit 1 when an operator that is claimed fails one"
    )
    parser.set_defaults(command=run)
    parser.add_argument("--op", help="only cases with this operator: Add, com.microsoft::Gelu")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    shown.add_argument("--markdown", action="store_true", help="print docs/conformance.md")


def run(arguments: argparse.Namespace) -> int:
    """Run the cases and print what became of them by operator; 1 when one failed."""
    from engine import conformance  # the standard's cases take seconds to make

    results = conformance.run_all()
    only = None if arguments.op is None else _known(arguments.op, results)
    if only is not None:
        results = [result for result in results if only in result.ops]
    if arguments.json:
        print(json.dumps(document(results, only)))
    elif arguments.markdown:
        print(markdown(results), end="")
    else:
        print(text(results, only))
    return 1 if any(result.outcome == "failed" for result in results) else 0


def _known(given: str, results: Sequence[CaseResult]) -> str:
    """An operator's full name; one without a domain is the standard's where both have it. Raises BadRequest."""
    from engine import conformance

    known = {op for result in results for op in result.ops} | set(conformance.claims())
    found = sorted(name for name in known if given in (name, name.partition("::")[2]))
    if not found:
        near = difflib.get_close_matches(given, sorted(n.partition("::")[2] for n in known), n=1, cutoff=0.6)
        remedy = f"did you mean {near[0]!r}?" if near else "the command without --op lists all of them"
        raise BadRequest(f"no case and no claim has the operator {given!r}", remedy)
    return found[0]


def document(results: Sequence[CaseResult], only: str | None = None) -> dict[str, Any]:
    """Totals, the table by operator, and every case that was not passed over, for machines."""
    from engine import conformance

    table = conformance.by_op(results)
    shown = sorted(table) if only is None else [only]
    claims = set(conformance.claims())
    return {
        "totals": _counts(Counter(result.outcome for result in results)),
        "ops": {name: _counts(table.get(name, Counter())) | {"claimed": name in claims} for name in shown},
        "cases": [
            {"name": r.name, "ops": list(r.ops), "outcome": r.outcome, "why": r.why}
            for r in results
            if r.outcome != "not claimed"
        ],
    }


def text(results: Sequence[CaseResult], only: str | None = None) -> str:
    """The table for people; of one operator its cases too, of all of them those that failed."""
    from engine import conformance

    table = conformance.by_op(results)
    shown = sorted(table) if only is None else [only]
    width = max((len(name) for name in shown), default=0)
    lines = [f"{'operator':<{width}} " + " ".join(f"{outcome:>11}" for outcome in OUTCOMES)]
    for name in shown:
        lines.append(f"{name:<{width}} " + " ".join(f"{table.get(name, Counter())[o]:>11}" for o in OUTCOMES))
    for r in results:
        if r.outcome == "failed" or only is not None:
            lines.append(f"{r.outcome}: {r.name}{f': {r.why}' if r.why else ''}")
    totals = Counter(result.outcome for result in results)
    return "\n".join([*lines, f"{len(results)} cases: " + ", ".join(f"{totals[o]} {o}" for o in OUTCOMES)])


def markdown(results: Sequence[CaseResult]) -> str:
    """docs/conformance.md: what is claimed, with counts."""
    from engine import conformance

    table = conformance.by_op(results)
    rows = []
    for name in conformance.claims():
        counts = table.get(name, Counter())
        cells = " | ".join(str(counts[o]) for o in OUTCOMES[:3]) if counts else "no case | |"
        rows.append(f"| {name} | {cells} |")
    totals = Counter(result.outcome for result in results)
    summary = ", ".join(f"{totals[outcome]} {outcome}" for outcome in OUTCOMES)
    return HEADING + "\n".join(rows) + f"\n\n{len(results)} cases of onnx {conformance.VERSION}: {summary}.\n"


def _counts(counter: Counter[Any]) -> dict[str, int]:
    return {outcome: counter[outcome] for outcome in OUTCOMES}
