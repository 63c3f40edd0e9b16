"""Where the numbers come from: revisions, digests, ids, and the commands that lead back to the runs."""

from __future__ import annotations

from jobs.model import Stamp
from jobs.verdict import ArmView, tested_arms
from reports.blocks import Details, Inlines, KeyValue, Name, Section, Verbatim, joined, words
from reports.format import integer, revision
from reports.view import Scope, SweepView

_RUNS_SHOWN = 12


def build(view: SweepView, scope: Scope) -> Section:
    """Facts of origin, and commands."""
    verdict, stamp = view.verdict, view.verdict.stamp
    arms: dict[str, ArmView] = {}
    for cell in scope.cells:
        for arm in cell.source.arms:
            arms.setdefault(arm.arm, arm)
    pairs: list[tuple[str, Inlines]] = [
        (f"{arm.arm} ({arm.role})" if arm.arm != arm.role else arm.arm, _origin(arm)) for arm in arms.values()
    ]
    pairs += [
        ("varies on purpose", joined([Name(name) for name in verdict.varies]) or words("nothing")),
        ("gate", words(", ".join(f"{kind} {action}" for kind, action in sorted(verdict.gate.items())) or "default")),
        (
            "sweep",
            words(
                Name(stamp.sweep_id),
                f", request {integer(stamp.request)}, submitted {stamp.created_at or 'at an unknown time'}",
            ),
        ),
        ("harness", words(f"version {stamp.harness_version}, ", Name(_short(stamp.harness_digest)))),
        *_other_judge(stamp),
        *_false_alarms(verdict.time_false_alarms),
        ("input digest", words(Name(_short(verdict.input_digest)))),
        ("cards", joined([Name(card) for card in stamp.cards]) or words("none named")),
        ("runs", _runs(view)),
    ]
    summary = words(
        f"{view.under_test} ",
        *_made_from(arms, "head", stamp.head_source),
        " against base ",
        *_made_from(arms, "base", stamp.base_source),
        ", sweep ",
        Name(stamp.sweep_id),
        *_rates(view, scope),
    )
    blocks = (KeyValue(tuple(pairs)), Verbatim(commands(view, scope), "commands"))
    fold = Details(words("Stamp: revisions, digests, runs, and the commands that lead back to them"), blocks, open=True)
    return Section("stamp", "Stamp", summary, folded=(fold,), minor=True)


def _other_judge(stamp: Stamp) -> list[tuple[str, Inlines]]:
    """The harness that judged, where it is not the one that ran the sweep."""
    if stamp.judge_digest in ("", stamp.harness_digest):
        return []
    return [("judged by", words(f"another harness, version {stamp.judge_version}, ", Name(_short(stamp.judge_digest))))]


def _false_alarms(share: float | None) -> list[tuple[str, Inlines]]:
    """The rate that the judge of time keeps to, over all rows of a sweep."""
    if share is None:
        return []
    return [("false alarms", words(f"of sweeps without a change, {100 * share:.2g} % at most show one in a time row"))]


def commands(view: SweepView, scope: Scope) -> tuple[str, ...]:
    """Commands that lead from the verdict to its runs."""
    sweep = view.verdict.stamp.sweep_id
    explain = [view.command("explain", sweep, cell.name) for cell in scope.cells[:3]]
    return (*explain, view.command("report", sweep, "--format", "html"), view.command("gate", sweep))


def _origin(arm: ArmView) -> Inlines:
    commit = words(" commit ", Name(arm.commit)) if arm.commit else ()
    digest = (
        words(" engine ", Name(_short(arm.engine_digest)))
        if arm.engine_digest
        else words(" engine digest not recorded")
    )
    return (Name(arm.source), *commit, *digest)


def _made_from(arms: dict[str, ArmView], role: str, source: str) -> Inlines:
    """What was built for base or for what is held against it, and at which commit where the arms shown agree on one."""
    known = list(arms.values())
    mine = tested_arms(known) if role == "head" else [arm for arm in known if arm.role == role]
    commits = {arm.commit for arm in mine}
    name = source or (mine[0].source if mine else "unknown")
    commit = commits.pop() if len(commits) == 1 else None
    return words(Name(name), *((" at ", Name(revision(commit))) if commit and commit not in name else ()))


def _rates(view: SweepView, scope: Scope) -> Inlines:
    """How often a finding is false, where a time was measured; an exact counter repeats, or says that it does not."""
    share = view.verdict.time_false_alarms
    timed = any(row.klass != "NOT_MEASURED" for cell in scope.cells for row in cell.source.time)
    return () if share is None or not timed else words(f"; false alarms in time: {100 * share:.2g} % of sweeps at most")


def _runs(view: SweepView) -> Inlines:
    runs = view.run_ids
    if not runs:
        return words("none cited")
    left = len(runs) - _RUNS_SHOWN
    more = " and others" if view.cells_left_out else f" and {integer(left)} more" if left > 0 else ""
    return (*joined([Name(run) for run in runs[:_RUNS_SHOWN]]), *words(more))


def _short(digest: str) -> str:
    return digest[:12] if digest else "none"
