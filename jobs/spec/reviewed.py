"""What base's commit holds of the reviewed files: a head cannot excuse itself by a waiver in its own tree.

Of expectations, which a change brings along, the tree under test has a say too: an entry that base lacks counts as the
change's own claim where it says which way or how far, and must then come true (`jobs.declared`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jobs.baselines import is_own
from jobs.errors import SpecError
from jobs.git_trees import run_git
from jobs.model import ArmPlan
from jobs.reviewed import Expectation, Golden, Reviewed, Waiver
from jobs.spec.checks import check_expectations
from jobs.spec.faults import parse
from jobs.spec.form import ExpectationForm, ExpectationsForm, SweepForm
from jobs.spec.reviewed_form import GoldensForm, WaiversForm, goldens_of, waivers_of
from jobs.spec.yaml_lines import Source, read_file, read_lines

Row = TypeVar("Row")
Reader = Callable[[Source], tuple[Row, ...]]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The reviewed files as they lie beside the sweep file, found sound."""

    expectations: tuple[ExpectationForm, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    goldens: tuple[Golden, ...] = ()


def load_reviewed(form: SweepForm, source: Source, folder: Path) -> OnDisk:
    """Read the files that a sweep file names. Raises SpecError with file and line, or with the line of the key."""
    return OnDisk(
        _named(form.expectations, "expectations", source, folder, _declared),
        _named(form.waivers, "waivers", source, folder, _waivers),
        _named(form.goldens, "goldens", source, folder, _goldens),
    )


def expectations(
    form: SweepForm, folder: Path, disk: OnDisk, base: ArmPlan, head: ArmPlan | None
) -> tuple[tuple[Expectation, ...], tuple[Expectation, ...]]:
    """What is declared, and what is proposed alone.

    Where base is a git ref its commit's entries are in force, and before them those that head's tree adds and that say
    which way or how far; else the tree's own word is, marked so.
    """
    if form.expectations is None:
        return (), ()
    file = folder / form.expectations
    found = rows_at(base.commit, file, _lenient) if base.source.startswith("git:") and base.commit else None
    if found is not None and not _reviewed_commit(base, folder):
        found = ()
    if found is None:
        return tuple(Expectation(**row.model_dump(), self_declared=True) for row in disk.expectations), ()
    mine: Sequence[ExpectationForm] = disk.expectations
    if head is not None and head.source.startswith("git:") and head.commit:
        mine = rows_at(head.commit, file, _lenient) or ()
    known = {_claim(row) for row in found}
    new = [row for row in mine if _claim(row) not in known]
    added = [row for row in new if row.change != "any" or row.at_most is not None]
    return (
        (
            *(Expectation(**row.model_dump(), self_declared=True, added=True) for row in added),
            *(Expectation(**row.model_dump()) for row in found),
        ),
        tuple(Expectation(**row.model_dump()) for row in new if row not in added),
    )


def reviewed(form: SweepForm, folder: Path, disk: OnDisk, base: ArmPlan) -> Reviewed:
    """Waivers and goldens of base's commit, and what only the files on disk hold.

    Where base has no commit in the files' repository, or one that the change's branch alone holds, no waiver is in
    force; a golden is then the tree's own, since it can only find more.
    """
    commit = _reviewed_commit(base, folder)
    waivers = _at(commit, folder, form.waivers, _waivers)
    goldens = _at(commit, folder, form.goldens, _goldens)
    in_force = disk.goldens if goldens is None else goldens
    return Reviewed(
        at="" if waivers is None and goldens is None else commit,
        waivers=waivers or (),
        goldens=in_force,
        proposed_waivers=tuple(row for row in disk.waivers if row not in (waivers or ())),
        proposed_goldens=tuple(row for row in disk.goldens if row not in in_force),
    )


def rows_at(commit: str, file: Path, read: Reader[Row]) -> tuple[Row, ...] | None:
    """The entries of `file` at a commit of the repository around it: none where the commit lacks the file.

    None: there is no such repository, or it does not know the commit, so that nothing reviewed can be read. Raises
    SpecError when the file of that commit is not sound.
    """
    folder = file.resolve().parent
    top = run_git(folder, "rev-parse", "--show-toplevel")
    if top.returncode or run_git(folder, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        return None
    inside = file.resolve().relative_to(Path(top.stdout.decode().strip()).resolve())
    done = run_git(folder, "cat-file", "blob", f"{commit}:{inside.as_posix()}")
    if done.returncode:
        return ()
    where = f"{file} at {commit[:12]}"
    try:
        text = done.stdout.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError("the file is not UTF-8 text", "save it as UTF-8", file=where) from error
    return read(read_lines(text, where))


def _reviewed_commit(base: ArmPlan, folder: Path) -> str:
    """Base's commit, where others than the branch under test hold it; else empty: nobody reviewed what is in it."""
    commit = (base.commit or "").removesuffix("-dirty")
    return "" if commit and is_own(folder, commit) else commit


def _at(commit: str, folder: Path, file: str | None, read: Reader[Row]) -> tuple[Row, ...] | None:
    return rows_at(commit, folder / file, read) if commit and file is not None else None


def _named(file: str | None, key: str, source: Source, folder: Path, read: Reader[Row]) -> tuple[Row, ...]:
    """The entries of a file that the sweep file names; one that cannot be opened is the key's fault."""
    if file is None:
        return ()
    try:
        found = read_file(folder / file, "create it, or remove the key")
    except SpecError as error:
        if error.line is None:
            raise source.error((key,), error.message, error.remedy) from error
        raise
    return read(found)


def _claim(row: ExpectationForm) -> tuple[object, ...]:
    """What an expectation says, its reason apart."""
    return (row.metric, row.cell, row.change, row.at_most)


def _declared(source: Source) -> tuple[ExpectationForm, ...]:
    form = parse(ExpectationsForm, source)
    check_expectations(form, source)
    return form.expectations


def _lenient(source: Source) -> tuple[ExpectationForm, ...]:
    """Of a commit: it may be older than a rule, and what does not gate is said by the judge."""
    return parse(ExpectationsForm, source).expectations


def _waivers(source: Source) -> tuple[Waiver, ...]:
    return waivers_of(parse(WaiversForm, source), source)


def _goldens(source: Source) -> tuple[Golden, ...]:
    return goldens_of(parse(GoldensForm, source), source)
