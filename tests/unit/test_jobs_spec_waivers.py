"""Waivers and goldens as files: read at base's commit, refused with their line where they are not sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.model import Manifest
from jobs.spec import load, plan
from tests.unit import reviewed_repository
from tests.unit.reviewed_repository import OneCommit, committed, git

SWEEP = (
    reviewed_repository.SWEEP
    + """\
waivers: waivers.yaml
goldens: goldens.yaml
"""
)
WAIVER = """\
waivers:
  - cell: "toy/*"
    metric: segments
    class: REGRESSED
    reason: known
    evidence: https://example.org/1
    written: 2026-11-02
    expires: 2026-12-31
    by: Ada
"""
GOLDEN = f"""\
goldens:
  - id: gld_{"0" * 26}
    cell: toy/short
    model_digest: digest
    prompt_digest: {"a" * 64}
    tokens: 4
    ignore_eos: false
    card: sim-h200
    streams: [{{ids: [1, 2, 3, 4], stop: length, gaps: [1.0, 2, 0.5, 3]}}]
    reason: checked by hand
    by: Ada
    at: 2026-11-02T10:00:00+00:00
    sweep: swp_1
    arm: base
    runs: [run_1]
    engine_digest: e
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository whose one commit holds a sweep file alone; both files lie beside it, uncommitted."""
    git(tmp_path, "init", "-q")
    (tmp_path / "gate.yaml").write_text(SWEEP.format(base='"git:main"'))
    committed(tmp_path)
    (tmp_path / "waivers.yaml").write_text(WAIVER)
    (tmp_path / "goldens.yaml").write_text(GOLDEN)
    return tmp_path


def test_what_base_lacks_is_proposed_and_what_it_holds_is_in_force(folder: Path) -> None:
    first = git(folder, "rev-parse", "HEAD").strip()
    second = committed(folder)
    before, after = (_planned(folder, commit).reviewed for commit in (first, second))
    assert (before.waivers, before.goldens, before.at) == ((), (), first)
    assert [len(before.proposed_waivers), len(before.proposed_goldens)] == [1, 1]
    assert (after.proposed_waivers, after.proposed_goldens) == ((), ())
    assert (after.waivers, after.goldens) == (before.proposed_waivers, before.proposed_goldens)
    assert after.goldens[0].streams[0].gaps == (1.0, 2.0, 0.5, 3.0)
    manifest = _planned(folder, second)
    assert Manifest.model_validate_json(manifest.canonical()) == manifest


def test_a_later_word_of_head_changes_nothing_that_base_holds(folder: Path) -> None:
    commit = committed(folder)
    (folder / "waivers.yaml").write_text(WAIVER.replace("2026-12-31", "2027-10-31"))
    reviewed = _planned(folder, commit).reviewed
    assert [str(row.expires) for row in reviewed.waivers] == ["2026-12-31"]
    assert [str(row.expires) for row in reviewed.proposed_waivers] == ["2027-10-31"]


def test_a_dirty_checkout_as_base_is_read_at_its_commit(folder: Path) -> None:
    (folder / "gate.yaml").write_text(SWEEP.format(base="checkout"))
    commit = committed(folder)
    (folder / "waivers.yaml").write_text("waivers: []\n")
    assert len(_planned(folder, f"{commit}-dirty").reviewed.waivers) == 1


@pytest.mark.parametrize(("branch", "in_force"), [("main", 1), ("topic", 0), ("fix/main", 0)])
def test_an_earlier_push_of_the_change_s_own_branch_waives_nothing(folder: Path, branch: str, in_force: int) -> None:
    """A base that only the branch under test holds was reviewed by nobody; the same commit of a trunk was."""
    git(folder, "branch", "-q", "-M", "main")
    git(folder, "checkout", "-q", "-B", branch)
    push = committed(folder)
    (folder / "change").write_text("more")
    committed(folder)
    (folder / "gate.yaml").write_text(SWEEP.format(base=f'"git:{push}"'))
    reviewed = _planned(folder, push).reviewed
    assert (len(reviewed.waivers), len(reviewed.proposed_waivers)) == (in_force, 1 - in_force)
    assert (reviewed.at == push, len(reviewed.goldens)) == (bool(in_force), 1)


@pytest.mark.parametrize("base", ["checkout", '"git:HEAD"'])
@pytest.mark.parametrize(("branch", "in_force"), [("main", 1), ("topic", 0), ("", 0), ("held elsewhere", 1)])
def test_what_the_branch_under_test_committed_itself_is_reviewed_by_nobody(
    folder: Path, base: str, branch: str, in_force: int
) -> None:
    """Its own newest commit is no more than its own earlier push: on a branch, and on none as CI checks out."""
    git(folder, "branch", "-q", "-M", "main")
    git(folder, "checkout", "-q", *(["--detach"] if not branch else ["-B", branch.split(maxsplit=1)[0]]))
    (folder / "gate.yaml").write_text(SWEEP.format(base=base))
    head = committed(folder)
    if branch == "held elsewhere":
        git(folder, "branch", "-q", "-f", "main", head)
    reviewed = _planned(folder, head).reviewed
    assert (len(reviewed.waivers), len(reviewed.proposed_waivers)) == (in_force, 1 - in_force)


def test_a_merge_base_is_the_commit_that_is_read(folder: Path) -> None:
    commit = committed(folder)
    (folder / "gate.yaml").write_text(SWEEP.format(base='"merge-base:main"'))
    (folder / "waivers.yaml").write_text("waivers: []\n")
    reviewed = _planned(folder, commit).reviewed
    assert (reviewed.at, len(reviewed.waivers)) == (commit, 1)


def test_without_a_commit_nothing_is_waived_and_goldens_are_the_trees_own(folder: Path) -> None:
    (folder / "gate.yaml").write_text(SWEEP.format(base="installed"))
    reviewed = _planned(folder, None).reviewed
    assert (reviewed.at, reviewed.waivers, len(reviewed.proposed_waivers)) == ("", (), 1)
    assert (len(reviewed.goldens), reviewed.proposed_goldens) == (1, ())


def test_a_broken_file_at_base_is_said_with_its_commit_and_line(folder: Path) -> None:
    (folder / "waivers.yaml").write_text(WAIVER.replace("expires: 2026-12-31", "expires: soon"))
    commit = committed(folder)
    (folder / "waivers.yaml").write_text(WAIVER)
    with pytest.raises(SpecError, match=f"waivers.yaml at {commit[:12]}:8: 'soon' is no day"):
        _planned(folder, commit)


def test_a_file_that_is_not_there_is_told_at_the_key(folder: Path) -> None:
    (folder / "goldens.yaml").unlink()
    with pytest.raises(SpecError, match=r"gate.yaml:9: cannot read .*goldens.yaml"):
        load(folder / "gate.yaml")


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        (
            "class: REGRESSED",
            "class: REGRESED",
            5,
            "'REGRESED' is no class that can be waived (did you mean 'REGRESSED'",
        ),
        ("class: REGRESSED", "class: MISSING", 5, "'MISSING' is no class that can be waived"),
        ("class: REGRESSED", "class: PASS", 5, "'PASS' is no class that can be waived"),
        ("metric: segments", "metric: segmens", 4, "unknown metric 'segmens'"),
        ("    evidence: https://example.org/1\n", "", 2, "lacks the key 'evidence'"),
        ("evidence: https://example.org/1", 'evidence: " "', 7, "the waiver gives no evidence"),
        ("reason: known", 'reason: ""', 6, "waivers[0].reason is empty"),
        ("by: Ada", 'by: "  "', 10, "the waiver gives no by"),
        ("written: 2026-11-02", "written: 2026-13-02", 8, "'2026-13-02' is no day"),
        ("expires: 2026-12-31", "expires: 2026-11-01", 9, "it expires on 2026-11-01, before it was written"),
        ("expires: 2026-12-31", "expires: 2030-01-01", 9, "more than 366 days after 2026-11-02"),
        ("expires: 2026-12-31", "until: 2026-12-31", 9, "unknown key 'until'"),
    ],
)
def test_a_waiver_that_is_not_sound_is_refused_with_its_line(
    folder: Path, old: str, new: str, line: int, says: str
) -> None:
    assert old in WAIVER
    (folder / "waivers.yaml").write_text("# reviewed\n" + WAIVER.replace(old, new))
    with pytest.raises(SpecError) as raised:
        load(folder / "gate.yaml")
    error = raised.value
    assert error.file == str(folder / "waivers.yaml")
    assert says in str(error)
    assert error.line == (3 if "lacks" in says else line)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (f"gld_{'0' * 26}", "golden-1", "goldens[0].id"),
        ("10:00:00+00:00", "10:00:00", "is no time with its zone"),
        ("2026-11-02T10:00:00+00:00", "yesterday", "'yesterday' is no time"),
        ("tokens: 4", "tokens: 3", "4 ids, and tokens is 3"),
        ("gaps: [1.0, 2, 0.5, 3]", "gaps: [1.0]", "1 gaps for 4 ids"),
        ("gaps: [1.0, 2, 0.5, 3]", "gaps: [-1, 2, 0.5, 3]", "is -1"),
        ("ids: [1, 2, 3, 4]", "ids: []", "is empty"),
        ("runs: [run_1]", "runs: []", "is empty"),
        ("reason: checked by hand", 'reason: " "', "the golden gives no reason"),
        ("stop: length", "stop: cut", "expected 'length' or 'eos'"),
    ],
)
def test_a_golden_that_is_not_sound_is_refused_with_its_line(folder: Path, old: str, new: str, says: str) -> None:
    assert old in GOLDEN
    (folder / "goldens.yaml").write_text(GOLDEN.replace(old, new))
    with pytest.raises(SpecError) as raised:
        load(folder / "gate.yaml")
    assert says in str(raised.value)
    assert (raised.value.line or 0) > 1


def test_two_goldens_of_a_cell_need_the_later_to_supersede_the_earlier(folder: Path) -> None:
    again = GOLDEN.removeprefix("goldens:\n").replace("0" * 26, "1" * 26)
    (folder / "goldens.yaml").write_text(GOLDEN + again)
    with pytest.raises(SpecError, match="does not supersede gld_0"):
        load(folder / "gate.yaml")
    (folder / "goldens.yaml").write_text(GOLDEN + again + f"    supersedes: gld_{'0' * 26}\n")
    assert len(load(folder / "gate.yaml").disk.goldens) == 2
    (folder / "goldens.yaml").write_text(GOLDEN + GOLDEN.removeprefix("goldens:\n"))
    with pytest.raises(SpecError, match="stands twice"):
        load(folder / "gate.yaml")


def _planned(folder: Path, commit: str | None) -> Manifest:
    return plan(load(folder / "gate.yaml"), OneCommit(commit))
