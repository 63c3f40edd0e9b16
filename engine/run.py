"""One run: load, plan, generate, count; every exit path says what it had measured."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import engine
from engine.attribution import Key, Run, floor_bytes, over_floor
from engine.banks import bank_rows, expert_sums, heat
from engine.batch import Prompts, chunk_rows
from engine.bind import lower
from engine.capture_rules import parse_rules
from engine.choice import Choice, choose
from engine.choice import foreseen as foreseen_of
from engine.config import EngineConfig, RunRequest, cards_can_be_called
from engine.counters import COUNTERS, Tally
from engine.decode import Decoder
from engine.device.base import Device
from engine.device.plan_only import PlanDevice
from engine.device.sim import SimDevice
from engine.equations import Equation, Sums, evaluate
from engine.errors import BadRequest, EngineError, OutOfMemory
from engine.generate import Clock, Progress, emitted_tokens, generate
from engine.graph import Graph, sources
from engine.interrupt import INTERRUPTED, Interrupted
from engine.journal import Emit
from engine.kv import KvCache
from engine.onnx_load import load, recorded_digest
from engine.paging.experts import BankPlan, split
from engine.paging.grants import Grant, Grants
from engine.paging.ledger import Ledger, Pool
from engine.paging.residency import Residency, make_pager
from engine.paging.traffic import KeyTraffic
from engine.plan import Plan
from engine.prefix import check_no_states
from engine.routed import given_for, record
from engine.routing import Given


def execute(request: RunRequest, emit: Emit, clock: Clock) -> int:
    """Run a request, saying everything through `emit`; the exit code.

    Every EngineError ends in an `error` line with counters and tokens so far, and so does an interrupt, which goes on.
    """
    progress = Progress()
    try:
        _run(request, emit, clock, progress)
    except MemoryError as error:
        return _fail(
            OutOfMemory(f"the host ran out of memory: {error}", "use a smaller model or budget"), emit, progress
        )
    except EngineError as error:
        return _fail(error, emit, progress)
    except KeyboardInterrupt as error:
        told = error if isinstance(error, Interrupted) else Interrupted()
        line = {"type": "error", "code": 128 + told.number, "kind": INTERRUPTED, "message": str(told)}
        emit({**line, "remedy": "run it again", "reasons": [], **_so_far(progress)})
        raise
    return 0


def make_device(request: RunRequest) -> Device:
    """The device of a request. Raises BadRequest where there is no such card or no library to call it with."""
    if request.arithmetic == "none":
        return PlanDevice(request.uuid or "PLAN-0", request.config.granule)
    if request.device == "sim" or (request.device == "auto" and not _has_card(request.uuid)):
        return SimDevice(request.uuid or "SIM-0", request.config.granule)
    from engine.device.cuda import CudaDevice

    return CudaDevice(request.uuid, request.config.granule)


def _has_card(uuid: str | None) -> bool:
    """What `auto` turns on: the UUID that was given is a card's, or none was given and a card can be called."""
    if uuid is not None:
        return uuid.startswith("GPU-")
    if not cards_can_be_called():
        return False
    from engine.device.cuda_card import find_card

    try:
        find_card(None)
    except BadRequest:
        return False
    return True


def plans_for(graph: Graph, prompts: Prompts, chunk: int, target: str = "plain") -> dict[int, Plan]:
    """Plans by rows: the one-token step and each size of prompt chunk."""
    return {r: lower(graph, r, target=target) for r in sorted({1} | chunk_rows(prompts, chunk))}


def target_for(config: EngineConfig, device: Device) -> str:
    """The target of a run's plans: what was asked for, or what suits the device."""
    return config.target or ("fused" if device.kind == "cuda" else "plain")


def _fail(error: EngineError, emit: Emit, progress: Progress) -> int:
    line = {
        "type": "error",
        "code": error.exit_code,
        "kind": error.kind,
        "message": error.message,
        "remedy": error.remedy,
    }
    emit({**line, "reasons": list(getattr(error, "reasons", ())), **_so_far(progress)})
    return error.exit_code


def _so_far(progress: Progress) -> dict[str, Any]:
    """Counters, and the ids of each sequence of the generation under way."""
    ids = [list(stream.ids) for stream in progress.streams] or [[]]
    return {"counters": progress.read(), "ids": ids[0], **({"further_ids": ids[1:]} if ids[1:] else {})}


def _run(request: RunRequest, emit: Emit, clock: Clock, progress: Progress) -> None:
    device = progress.device = make_device(request)
    choice = None
    try:
        graph = load(request.model, hollow=request.arithmetic == "none")
        _check_prompt(request, graph)
        target = target_for(request.config, device)
        plans = plans_for(graph, request.prompts, request.config.prefill_chunk, target)
        if request.config.prefix_reuse:
            check_no_states(plans[1])
        choice = choose(request, graph, plans, device.granule_bytes)
    finally:  # whatever ends the run, its lines begin with who ran
        emit(_hello(request, device, choice))
    emit({"type": "progress", "phase": "load", "done": 0, "of": 1})
    given = given_for(request, plans[1])
    tell = _teller(emit) if request.log_capture else _silent
    setup = set_up(request, device, graph, plans, progress.tally, given, tell, lambda grant: emit(grant.line()), choice)
    generations = generate(request, emit, clock, progress, setup.decoder, graph)
    record(request, setup.decoder.routing)
    _report(request, emit, progress, setup, graph, generations)


def _silent(decision: str) -> None:
    """Nobody asked."""


def _teller(emit: Emit) -> Callable[[str], None]:
    return lambda decision: emit({"type": "capture", "decision": decision})


@dataclass(slots=True)
class Setup:
    """What the sequences of a batch on one device stand on."""

    ledger: Ledger
    pool: Pool
    pager: Residency
    kv: KvCache
    decoder: Decoder
    budget_bytes: int | None
    capacity_bytes: int
    """What weights might map at first; less may be left of it."""
    plan: Plan
    """The decode step that the decoder goes by."""
    banks: tuple[BankPlan, ...]


def set_up(
    request: RunRequest,
    device: Device,
    graph: Graph,
    plans: dict[int, Plan],
    tally: Tally,
    given: Given | None = None,
    tell: Callable[[str], None] = _silent,
    announce: Callable[[Grant], None] = lambda grant: None,
    choice: Choice | None = None,
) -> Setup:
    """Pager, KV cache and decoder for a request, weights preloaded. Raises Refused where a limit is too small.

    `tell` hears what was decided of captures, `announce` when weights give way to the KV cache.
    `choice` is what was settled for these arguments, where that is done already.
    """
    choice = choice or choose(request, graph, plans, device.granule_bytes)
    config, plan, sequences = request.config, plans[1], len(request.prompts)
    paged = split(plans, choice.banks)
    ledger = Ledger(device.granule_bytes, choice.limit_bytes, tally)
    pool = Pool(device, ledger)
    capture = parse_rules(config.capture_rules) if config.capture else None
    hot = heat(request, paged[1])
    with ExitStack() as undo:  # what was made goes back where the next part cannot be made
        undo.callback(pool.close)
        pager = make_pager(device, paged[1], choice.policy, choice.budget_bytes, ledger, pool, tally, hot)
        undo.callback(pager.close)
        grants = Grants(ledger, tally, pager, choice.kv.peak_bytes, announce)
        kv = KvCache(device, plan.kv, config.kv_layout, choice.buckets, ledger, pool, tally, sequences, grants)
        undo.callback(kv.close)
        decoder = Decoder(device, graph, paged, pager, kv, capture, tally, given, tell)
        undo.callback(decoder.close)
        pager.preload()
        undo.pop_all()
    return Setup(ledger, pool, pager, kv, decoder, choice.budget_bytes, pager.capacity_bytes, paged[1], choice.banks)


def _check_prompt(request: RunRequest, graph: Graph) -> None:
    worst = max(map(max, request.prompts))
    if worst >= graph.info.vocabulary:
        raise BadRequest(
            f"prompt id {worst} is outside the vocabulary of {graph.info.vocabulary}",
            "give ids of this model's own tokenizer",
        )
    needed = max(map(len, request.prompts)) + request.tokens
    if graph.info.context_length is not None and needed > graph.info.context_length:
        raise BadRequest(
            f"prompt and tokens need {needed} positions, the model has {graph.info.context_length}",
            "ask for fewer tokens",
        )


def _report(
    request: RunRequest,
    emit: Emit,
    progress: Progress,
    setup: Setup,
    graph: Graph,
    generations: list[dict[str, Any]],
) -> None:
    device, plan = progress.device, setup.plan
    assert device is not None
    setup.ledger.audit(device.mapped_bytes, setup.pool.free_bytes)
    counters = progress.read()
    facts = _facts(request, setup, generations)
    facts["bound_by"] = sources(graph.info.bound_by)
    facts |= _attribution(setup, plan, counters, len(request.prompts))
    routing = setup.decoder.routing
    traffic = list(zip(plan.keys, setup.pager.traffic, strict=True))
    sums = Sums(
        hits=sum(t.hits for _, t in traffic),
        retained=sum(t.retained for _, t in traffic),
        bypassed=sum(t.bypassed for _, t in traffic),
        bypassed_bytes=sum(t.bypassed * k.nbytes for k, t in traffic),
        staged=sum(t.staged for _, t in traffic),
        staged_bytes=sum(t.staged * k.nbytes for k, t in traffic),
        in_place=sum(t.in_place for _, t in traffic),
        in_place_bytes=sum(t.in_place * k.nbytes for k, t in traffic),
        evicted=sum(t.evicted for _, t in traffic),
        gathered_bytes=sum(setup.decoder.gathered.values()),
        routed_bytes=routing.asked_bytes if routing.banks and routing.is_known else None,
        experts=expert_sums(plan, setup.pager.traffic, routing),
    )
    close(setup, facts)
    equations = evaluate(counters, facts, sums, request.config.capture)
    seams = setup.decoder.capture_plan.seams if setup.decoder.capture_plan is not None else ()
    measured = _measured([g for g in generations if not g["warmup"]], counters)
    if not routing.is_known:
        del measured["routed_experts"], measured["routed_bytes"]
    line = {
        "type": "result",
        "counters": measured,
        "facts": facts,
        "equations": [_equation(e) for e in equations],
        "seams": [
            {
                "step": s.step.index,
                "node": s.step.node,
                "op": s.step.op,
                "reason": s.reason,
                "path": s.path,
                "detail": s.detail,
            }
            for s in seams
        ],
        "keys": _key_rows(plan, setup),
        "peak_rss_bytes": _peak_rss_bytes(),
    }
    if setup.banks:
        line["experts"] = bank_rows(plan, setup.banks, setup.pager.traffic, routing)
    emit(line)


def _key_rows(plan: Plan, setup: Setup) -> list[dict[str, Any]]:
    """What each key did, and each table whose rows were read in place, which may be a key too."""
    gathered = dict(setup.decoder.gathered)
    rows = [
        {"key": k.name, "nbytes": k.nbytes, **asdict(t), "gathered_bytes": gathered.pop(k.name, 0)}
        for k, t in zip(plan.keys, setup.pager.traffic, strict=True)
    ]
    sizes = {table.name: table.nbytes for table in plan.hosts}
    nothing = asdict(KeyTraffic())
    rows += [{"key": n, "nbytes": sizes[n], **nothing, "gathered_bytes": b} for n, b in gathered.items()]
    return rows


def _attribution(setup: Setup, plan: Plan, counters: Mapping[str, int | float], batch: int) -> dict[str, int]:
    """The floor under all tokens of a process, and why more crossed the link, in bytes."""
    pager = setup.pager
    passes, tokens = (int(counters.get(name, 0)) for name in ("forward_steps", "emitted_tokens"))
    capacities = (setup.capacity_bytes, pager.capacity_bytes)
    whole = Run(passes, tokens, batch, *capacities, pager.fits, pager.filling, plan.least_read_bytes)
    keys = (
        Key(k.nbytes, t, pager.resident(k.index), bool(k.label)) for k, t in zip(plan.keys, pager.traffic, strict=True)
    )
    return {"floor_bytes": floor_bytes(whole), "all_tokens": tokens, **over_floor(keys, whole)}


def _peak_rss_bytes() -> int:
    """Highest resident memory of this program. ru_maxrss would not do: a child inherits its parent's through exec."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # no such file but on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(row for row in status.splitlines() if row.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def close(setup: Setup, facts: dict[str, int | float | str]) -> None:
    """Give everything back, in the order of a run's end, and say among the facts what is left over: nothing."""
    setup.decoder.close()
    setup.pager.close()
    setup.kv.close()
    facts["mapped_after_close_bytes"] = setup.ledger.mapped_bytes("weights") + setup.ledger.mapped_bytes("kv")
    setup.pool.close()
    facts["owned_after_close_bytes"] = setup.ledger.owned_bytes


def _facts(request: RunRequest, setup: Setup, generations: list[dict[str, Any]]) -> dict[str, int | float | str]:
    plan = setup.plan
    measured = [g for g in generations if not g["warmup"]]
    kv, prompts = setup.kv, request.prompts
    steps = max(len(g["step_ns"]) for g in generations)
    cached = sum(map(len, prompts)) + steps * len(prompts)  # a sequence that stopped goes on beside the others
    starts = 1 if request.config.prefix_reuse and max(map(len, prompts)) > 1 else len(generations)
    foreseen = foreseen_of(request, plan, kv.buckets, setup.ledger.granule_bytes, steps)
    capacity = _measured_capacity(setup, generations)
    streamed = max(0, plan.least_read_bytes - capacity)
    largest = max(plan.keys, key=lambda k: k.nbytes)
    return {
        "weight_bytes": plan.weight_bytes,
        "keys": len(plan.keys),
        "largest_key": largest.name,
        "largest_key_bytes": largest.nbytes,
        "largest_step_bytes": plan.largest_step_bytes,
        "budget_bytes": setup.budget_bytes if setup.budget_bytes is not None else plan.weight_bytes,
        "capacity_bytes": setup.capacity_bytes,
        "capacity_left_bytes": setup.pager.capacity_bytes,
        "measured_capacity_bytes": capacity,
        "resident": int(setup.pager.fits),
        "requested_bytes_per_step": plan.touched_bytes,
        "touches_per_step": plan.touches,
        "floor_bytes_per_token": streamed / len(prompts) if streamed % len(prompts) else streamed // len(prompts),
        "gather_bytes_per_token": plan.gather_bytes,
        "routed_bytes_per_token": sum(b.chosen * b.expert_bytes for b in setup.decoder.routing.banks),
        "bank_bytes_per_step": sum(b.experts * b.expert_bytes for b in setup.decoder.routing.banks),
        "banks_split": sum(bank.is_split for bank in setup.banks),
        "banks_whole": sum(not bank.is_split for bank in setup.banks),
        "kv_bytes_per_token": plan.kv.bytes_per_token,
        "kv_needed_bytes": plan.kv.bytes_per_token * cached,
        "positions_asked": sum(sum(map(len, prompts)) + len(g["step_ns"]) * len(prompts) for g in generations),
        "steps_asked": sum(g["counters"][p].get("decode_steps", 0) for g in generations for p in ("warm", "decode")),
        "steps_given": sum(len(g["step_ns"]) for g in generations),
        "kv_layout": kv.placement.layout,
        "kv_capacity": kv.capacity,
        "kv_foreseen_bytes": foreseen.committed_bytes,
        "kv_foreseen_peak_bytes": foreseen.peak_bytes,
        "kv_foreseen_growths": foreseen.growths * starts,
        "kv_copied_positions": foreseen.copied_positions * starts,
        "workspace_bytes": plan.workspace_bytes,
        "plan_steps": len(plan.steps),
        "peak_weight_mapped_bytes": setup.ledger.peak_weight_bytes,
        "pool_free_bytes": setup.pool.free_bytes,
        "measured_generations": len(measured),
        "measured_tokens": sum(map(emitted_tokens, measured)),
        "batch": len(prompts),
        "link_bytes_per_s": int(setup.decoder.profile.link_bytes_per_s),
        "memory_bytes_per_s": int(setup.decoder.profile.memory_bytes_per_s),
        **({} if setup.ledger.limit_bytes is None else {"limit_bytes": setup.ledger.limit_bytes}),
        **({"capture_declined": setup.decoder.declined} if setup.decoder.declined else {}),
        **setup.pager.facts,
    }


def _measured_capacity(setup: Setup, generations: list[dict[str, Any]]) -> int:
    """What weights might map when measuring began: a floor is the least for the most that there was."""
    before = [g for g in generations if g["warmup"]]
    if not before:
        return setup.capacity_bytes
    phases = before[-1]["counters"]
    return int({**phases["prefill"], **phases["warm"], **phases["decode"]}["weight_capacity_bytes"])


def _measured(generations: list[dict[str, Any]], final: dict[str, int | float]) -> dict[str, int | float]:
    """Counters over measured generations: activity summed over their phases, gauges and peaks as they ended."""
    totals: dict[str, int | float] = {
        name: value if COUNTERS[name].kind != "activity" else 0 for name, value in final.items()
    }
    for generation in generations:
        for phase in ("warm", "prefill", "decode"):
            for name, value in generation["counters"][phase].items():
                if COUNTERS[name].kind == "activity":
                    totals[name] = totals.get(name, 0) + value
    gaps = [gap for g in generations for stream in (g, *g.get("further", ())) for gap in stream["gaps"]]
    if gaps:
        totals["min_logit_margin"] = min(gaps)
    for name, row in COUNTERS.items():
        if row.kind == "activity" or row.scope == "plan":
            totals.setdefault(name, 0)  # counted by this engine, and it never happened
    return totals


def _equation(equation: Equation) -> dict[str, Any]:
    return {
        "name": equation.name,
        "text": equation.text,
        "relation": equation.relation,
        "lhs": equation.lhs,
        "rhs": equation.rhs,
        "holds": equation.holds,
    }


def _hello(request: RunRequest, device: Device, choice: Choice | None) -> dict[str, Any]:
    """Who runs what; `choice` is None where the run ends before one is made."""
    config: dict[str, dict[str, Any]] = {
        name: {"value": value, "source": "request" if name in request.given else "default"}
        for name, value in asdict(request.config).items()
    }
    if "batch" not in request.given:
        config["batch"] = {"value": len(request.prompts), "source": "derived"}
    if request.config.target is None:
        config["target"] = {"value": target_for(request.config, device), "source": "derived"}
    decisions = () if choice is None else choice.decisions
    for decision in decisions:
        if decision.name in config and decision.source == "derived" and decision.name not in request.given:
            config[decision.name] = {"value": decision.value, "source": "derived", "reason": decision.reason}
    return {
        "type": "hello",
        "protocol": engine.PROTOCOL,
        "pid": os.getpid(),
        "module_path": str(Path(engine.__file__).absolute()),
        "version": engine.__version__,
        "effective_config": config,
        "decisions": [decision.line() for decision in decisions],
        "device": {
            "kind": device.kind,
            "name": device.name,
            "uuid": device.uuid,
            "driver": device.driver,
            "granule_bytes": device.granule_bytes,
            "profile": device.profile.name,
        },
        "model": {"path": str(request.model), "digest": recorded_digest(request.model)},
    }
