"""A folder of sweeps: what stands where, that every link leads somewhere, what is bounded, what is removed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from jobs.errors import SpecError
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.conclude import judge_sweep, write_site
from reports.escape import slug
from reports.render import folder, site
from reports.render.environment import ASSETS
from reports.render.folder import Behind
from reports.render.pages import shown_first
from reports.view import SweepView
from tests.unit import reports_runs as runs
from tests.unit import reports_samples as samples
from tests.unit.report_pages import write_html
from tests.unit.reports_parsing import Page
from tests.unit.store_sweeps import Clock
from tests.unit.stored_documents import put

pytest_plugins = ("tests.unit.jobs_store_cases",)

NOTHING = Behind(lambda _names: runs.judge_input(word="another cell"))
DAY_S = 86_400


def files(out: Path) -> set[str]:
    return {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}


def lost_links(out: Path) -> list[str]:
    """Links, scripts and style sheets of all pages that lead to no file, or to no place in one."""
    pages = {path.resolve(): path.read_text(encoding="utf-8") for path in out.rglob("*.html")}
    ids = {path: set(re.findall(r' id="([^"]+)"', text)) for path, text in pages.items()}
    lost, found = [], 0
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]*)"', text):
            parts = urlsplit(link)
            assert not parts.scheme and not parts.netloc, link
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found += 1
            if not target.is_file() or (parts.fragment and parts.fragment not in ids[target]):
                lost.append(f"{path.relative_to(out)}: {link}")
    assert found > 20
    return lost


def named(verdict: Verdict, name: str, at: str = "2026-11-29T10:00:00Z") -> Verdict:
    return verdict.model_copy(update={"stamp": samples.stamp(sweep_id=name, created_at=at)})


def test_two_sweeps_share_a_folder_its_assets_and_an_index(
    store: Store, clock: Clock, documents: Any, tmp_path: Path
) -> None:
    out, sweeps = tmp_path / "site", []
    for hits in (100, 140):
        clock.pass_s(DAY_S)
        head = documents.stable_arm(changes={"hits": hits})
        sweeps.append(put(store, documents.sweep(head=head), key=str(hits)))
        page = write_site(store, sweeps[-1], judge_sweep(store, sweeps[-1]), out, "")
        assert page == out / "sweeps" / sweeps[-1] / "index.html"
    cell = store.judge_input(sweeps[0]).cells[0].plan.cell
    (scenario,) = (out / "scenarios").iterdir()
    each = [
        f"sweeps/{sweep}/{name}"
        for sweep in sweeps
        for name in ("index.html", "entry.json", f"cells/{slug(cell)}.html")
    ]
    assets = [f"assets/{source.name}" for source in ASSETS]
    assert files(out) == {"index.html", *each, *assets, f"scenarios/{scenario.name}"}
    assert lost_links(out) == []
    assert list(dict.fromkeys(Page((out / "index.html").read_text()).links[1:])) == [
        f"sweeps/{sweep}/index.html" for sweep in reversed(sweeps)
    ]
    shown = Page(scenario.read_text())
    assert "2 sweeps on sim-h200" in " ".join(shown.text.split())
    moved = shown.table("Changes of level, newest first").rows
    assert [row[:2] for row in moved] == [["count_hit_rate", "head"]]
    assert f"../sweeps/{sweeps[1]}/index.html" in shown.links
    for sweep in sweeps:
        assert f"../../scenarios/{scenario.name}" in Page((out / "sweeps" / sweep / "index.html").read_text()).links


def test_what_is_retracted_later_is_struck_through_wherever_it_stands(
    store: Store, clock: Clock, documents: Any, tmp_path: Path
) -> None:
    sweeps = []
    for key in ("first", "second"):
        clock.pass_s(DAY_S)
        sweeps.append(put(store, documents.sweep(head=documents.stable_arm()), key=key))
        write_site(store, sweeps[-1], judge_sweep(store, sweeps[-1]), tmp_path, "")
    index = (tmp_path / "index.html").read_text()
    assert f"sweep {sweeps[1]} answers" in " ".join(Page(index).text.split()), "the same, asked again"
    store.retract(sweeps[1], "the fan was blocked", "Ada")
    verdict = store.verdict(sweeps[0])
    assert verdict is not None
    write_site(store, sweeps[0], verdict, tmp_path, "")
    index = " ".join(Page((tmp_path / "index.html").read_text()).text.split())
    assert "RETRACTED exit 3" in index and "the fan was blocked" in index
    assert "answers" not in index, "a retracted sweep supersedes nothing"
    page = Page((tmp_path / "sweeps" / sweeps[1] / "index.html").read_text())
    assert page.text.count("RETRACTED") >= 1, "its own pages were written again"
    (scenario,) = (tmp_path / "scenarios").iterdir()
    assert "retracted: all of its sweep: the fan was blocked" in Page(scenario.read_text()).text
    assert "struck-dots" in scenario.read_text().split("</main>")[0].split("chart-plain")[1]


def test_a_folder_that_held_one_sweep_becomes_one_of_sweeps(tmp_path: Path) -> None:
    write_html(samples.many(3), tmp_path)
    (tmp_path / "cells" / "notes.txt").write_text("mine")
    site.write_sweep(tmp_path, named(samples.verdict(), "swp_a"), NOTHING, manifest_digest="m")
    site.write_index(tmp_path)
    assert {path.name for path in (tmp_path / "cells").iterdir()} == {"notes.txt"}
    assert Page((tmp_path / "index.html").read_text()).links[1:] == [f"sweeps/{slug('swp_a')}/index.html"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "Expecting"), ("[]", "its schema"), ('{"schema":"assay.entry/2"}', "its schema"),
     ('{"schema":"assay.entry/1","x":1}', "unknown fields: x"), ('{"schema":"assay.entry/1"}', "missing 3 required")],
)  # fmt: skip
def test_a_damaged_entry_is_named_with_what_to_do(tmp_path: Path, text: str, says: str) -> None:
    site.write_sweep(tmp_path, named(samples.verdict(), "swp_a"), NOTHING, manifest_digest="m")
    entry = next((tmp_path / "sweeps").iterdir()) / "entry.json"
    entry.write_text(text)
    with pytest.raises(SpecError, match=says) as caught:
        site.write_index(tmp_path)
    assert str(entry) in str(caught.value)
    assert "write that sweep's pages again" in caught.value.remedy


def test_many_sweeps_take_further_pages_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "LISTED_SWEEPS", 2)
    for day in range(5):
        site.write_sweep(
            tmp_path, named(samples.verdict(), f"swp_{day}", f"2026-11-{day + 1:02}"), NOTHING, manifest_digest=f"{day}"
        )
    site.write_index(tmp_path)
    listed = [
        [link.split("/")[1] for link in Page((tmp_path / name).read_text()).links if link.startswith("sweeps/")]
        for name in ("index.html", "index-2.html", "index-3.html")
    ]
    assert listed == [[slug(f"swp_{day}") for day in days] for days in ((4, 3), (2, 1), (0,))]
    assert lost_links(tmp_path) == []
    (tmp_path / "sweeps" / slug("swp_0") / "entry.json").unlink()
    site.write_index(tmp_path)
    assert not (tmp_path / "index-3.html").exists()


def test_pages_of_cells_are_bounded_worst_first_and_the_rest_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "CELL_PAGES", 5)
    monkeypatch.setattr(folder, "LISTED_CELLS", 4)
    verdict = samples.many(12)
    page = site.write_sweep(tmp_path, verdict, NOTHING, manifest_digest="m")
    site.write_index(tmp_path)
    there = {path.stem for path in (page.parent / "cells").iterdir()}
    assert there == {slug(name) for name in shown_first(SweepView(verdict))[:5]}
    assert there >= {slug(cell.cell) for cell in verdict.cells if cell.exit_code}
    lists = [Page((page.parent / f"cells-{place}.html").read_text()) for place in (1, 2, 3)]
    rows = [row for one in lists for row in one.table("Cells, worst first; base, then head").rows]
    assert len(rows) == 12
    assert [row[0] for row in rows] == ["REGRESSED"] * 4 + ["IMPROVED"] * 8
    assert rows[0][2] == "htod_bytes rose"
    assert "assay explain" in lists[0].text
    assert "cells-1.html" in Page(page.read_text()).links
    assert lost_links(page.parent.parent.parent) == []


def test_pages_of_cells_stop_at_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = folder.CELL_BYTES
    monkeypatch.setattr(folder, "CELL_BYTES", 1)
    monkeypatch.setattr(folder, "_AT_ONCE", 2)
    page = site.write_sweep(tmp_path, samples.many(6), NOTHING, manifest_digest="m")
    assert len(list((page.parent / "cells").iterdir())) == 2, "the worst have theirs all the same"
    assert whole + site.SCENARIO_BYTES <= 40_000_000, "leaves 10 MB for what is not bounded by bytes"
    assert len([link for link in Page(page.read_text()).links if link.startswith("cells/")]) >= 2


def test_the_vendored_script_is_what_its_source_says(checkout: Path) -> None:
    vendor = checkout / "reports" / "assets" / "vendor" / "uplot"
    source = (vendor / "SOURCE.md").read_text()
    told = dict(re.findall(r"^\| (\S+) \| `([0-9a-f]{64})` \|$", source, re.M))
    assert told == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.iterdir()
        if path.name != "SOURCE.md"
    }
    assert "MIT" in (vendor / "uPlot.LICENSE.txt").read_text()
