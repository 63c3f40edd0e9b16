"""Expected changes as base's commit holds them: a head cannot excuse itself by a file in its own tree."""

from __future__ import annotations

from pathlib import Path

from jobs.errors import SpecError
from jobs.git_trees import run_git
from jobs.spec.faults import parse
from jobs.spec.form import ExpectationForm, ExpectationsForm
from jobs.spec.yaml_lines import read_lines


def expectations_at(commit: str, file: Path) -> tuple[ExpectationForm, ...] | None:
    """The expectations in `file` at a commit of the repository around it: none where the commit lacks the file.

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
    return parse(ExpectationsForm, read_lines(text, where)).expectations
