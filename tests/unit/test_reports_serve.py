"""The served pages: the same as those in a folder, bounded, filtered by their address, told in words when not there."""

from __future__ import annotations

import base64
import html
import re

import pytest

from reports.render.environment import ASSETS
from reports.render.pages import Links, sweep_page
from reports.serve import pages
from reports.serve.guard import POLICY, Door
from reports.view import SweepView
from tests.unit.reports_parsing import Page
from tests.unit.served_store import HOSTILE, LARGE, Served

pytest_plugins = ("tests.unit.jobs_store_cases", "tests.unit.served_store")

BEHIND = "Behind these figures: runs in order, samples, token lists, certificates, logs and the command to rerun"
TOKEN = b"0123456789abcdef-token"


def flat(page: str) -> str:
    return " ".join(Page(page).text.split())


def got(served: Served, path: str, status: int = 200) -> str:
    answer = served.client().get(path)
    assert answer.status_code == status, answer.text
    return answer.text


def sweep_path(served: Served, name: str) -> str:
    return f"/sweeps/{served.sweeps[name]}"


# ---- pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["broken", "hostile", "retracted", "measured", "bare"])
def test_a_sweep_has_the_page_that_is_written_into_a_folder(served_file: Served, name: str) -> None:
    whole = served_file.store.verdict(served_file.sweeps[name])
    assert whole is not None
    written = Page(sweep_page(SweepView(whole, " --store here"), Links(root="../", index="../")))
    page = Page(got(served_file, sweep_path(served_file, name)))
    ways_on = ("This scenario over sweeps", f"All {len(whole.cells)} cells, worst first", BEHIND)
    assert [line for line in page.text.splitlines() if line.strip() and line not in ways_on] == [
        line for line in written.text.splitlines() if line.strip()
    ]
    assert page.unbalanced == []


def test_a_large_sweep_is_cut_to_its_worst_and_says_what_is_left_out(served_file: Served) -> None:
    page = got(served_file, sweep_path(served_file, "large"))
    text = flat(page)
    assert f"{LARGE} of {LARGE} cells judged: " in text
    assert f"{LARGE - pages.WORST_CELLS} more rows left out of this table" in text
    assert f"All {LARGE} cells, worst first" in text
    assert f"of the {pages.WORST_CELLS} worst cells" in text
    listed = [got(served_file, f"{sweep_path(served_file, 'large')}/cells?page={number}") for number in (1, 2, 3)]
    links = [link for one in listed for link in Page(one).links if link.startswith("cell?name=")]
    assert len(set(links)) == len(links) == LARGE
    assert "Page 3 of 3" in flat(listed[2])
    only = got(served_file, f"{sweep_path(served_file, 'large')}/cells?outcome=REGRESSED&text=no-such")
    assert f"0 cells of {LARGE}" in flat(only)


def test_every_link_of_every_page_leads_somewhere(served_file: Served) -> None:
    client = served_file.client()
    seen: set[str] = set()
    todo = ["/", *(sweep_path(served_file, name) for name in ("broken", "measured", "open", "retracted"))]
    while todo and len(seen) < 60:
        path = todo.pop()
        answer = client.get(path)
        fine = answer.status_code == 200 or (answer.status_code == 404 and "has measured anything yet" in answer.text)
        fine |= "has no cell" in answer.text and answer.status_code == 404  # the samples' verdicts are of no manifest
        assert fine, (path, answer.text)
        if "text/html" not in answer.headers["content-type"]:
            continue
        page = Page(answer.text)
        assert page.unbalanced == [], path
        fetched = [attrs.get("href") or attrs.get("src") or "" for tag, attrs in page.tags if tag in ("link", "script")]
        for link in [*page.links, *fetched]:
            target = str(answer.url.join(html.unescape(link)).copy_with(fragment=None)).removeprefix("http://localhost")
            assert target.startswith("/"), link
            if target not in seen:
                seen.add(target)
                todo.append(target)
    assert len(seen) > 20


def test_a_cell_goes_down_to_samples_and_a_scenario_over_sweeps(served_file: Served) -> None:
    [cell] = served_file.store.judge_input(served_file.sweeps["measured"]).cells
    at = sweep_path(served_file, "measured")
    page = got(served_file, f"{at}/cell?name={cell.plan.cell.replace('%', '%25')}")
    assert cell.runs[0].run_id in Page(page).text and "assay engine run" in Page(page).text
    over = got(served_file, f"{at}/scenario?name={cell.plan.cell.replace('%', '%25')}")
    assert f"../{served_file.sweeps['measured']}" in Page(over).links
    assert "charts.js" in over


def test_an_open_sweep_says_how_far_it_is_and_renews_itself_without_script(served_file: Served) -> None:
    at = sweep_path(served_file, "open")
    page = got(served_file, at)
    text = flat(page)
    assert "0 of 12 runs complete, 1 under way. Not judged yet." in text
    assert "clearing → running" in text and "no scheduler serves this store" in text
    assert '<meta http-equiv="refresh" content="5">' in page and "<script" not in page
    assert "refresh" not in got(served_file, f"{at}?hold=1")
    assert '<meta http-equiv="refresh"' in got(served_file, "/") and "refresh" not in got(served_file, "/?state=judged")
    assert "refresh" not in got(served_file, sweep_path(served_file, "large"))
    cells = got(served_file, f"{at}/progress")
    assert [link for link in Page(cells).links if "cell?" in link] == [f"cell?name=cell{n}" for n in range(3)]
    assert "Not judged yet: its runs so far." in flat(got(served_file, f"{at}/cell?name=cell0"))


def test_the_list_keeps_its_filter_in_the_address_and_on_the_form(
    served_file: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SWEEPS_A_PAGE", 2)
    first = got(served_file, "/?state=judged&text=&verdict=")
    assert "Page 1 of 3" in flat(first)
    page = Page(first)
    assert "?state=judged&page=2" in page.links
    chosen = [attrs["value"] for tag, attrs in page.tags if tag == "option" and "selected" in attrs]
    assert chosen == ["judged", ""]
    names = [link for link in page.links if link.startswith("sweeps/")]
    later = [link for link in Page(got(served_file, "/?state=judged&page=2")).links if link.startswith("sweeps/")]
    assert len(names) == len(later) == 2 and not set(names) & set(later)
    assert "No sweep fits." in got(served_file, "/?page=900")
    assert "form-action 'self'" in html.unescape(first)


def test_hostile_names_stay_text_on_every_page(served_file: Served) -> None:
    at = sweep_path(served_file, "hostile")
    whole = served_file.store.verdict(served_file.sweeps["hostile"])
    assert whole is not None and whole.cells[0].cell == HOSTILE
    for path in ("/", at, f"{at}/cells", f"{at}/findings"):
        page = Page(got(served_file, path))
        assert page.unbalanced == []
        assert not {"script", "img", "b", "iframe"} & {tag for tag, _ in page.tags}
    typed = got(served_file, '/?text="><script>alert(1)</script>')
    assert "<script" not in typed and '"&gt;' not in re.sub(r'value="[^"]*"', "", typed)


# ---- what is not there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/sweeps/swp_nowhere", 404, "no id begins with 'swp_nowhere' in this store"),
        ("/sweeps/..%2f..%2fetc%2fpasswd", 404, "nothing stands at"),
        ("/assets/..%2freport.css", 404, "nothing stands at"),
        ("/assets/report.css.bak", 404, "there is no asset report.css.bak"),
        ("/assets/%2e%2e", 404, ""),
        ("/sweeps/swp_%00", 422, "should match pattern"),
        ("/sweeps/sw-p", 422, "should match pattern"),
        ("/?page=0", 422, "page: Input should be greater than or equal to 1"),
        ("/?page=1e3", 422, "page: Input should be a valid integer"),
        ("/?page=1&page=2", 422, "'page' is given 2 times"),
        ("/?pgae=2", 422, "there is no parameter 'pgae'; this address has hold, model, page"),
        ("/?state=done", 422, "state: "),
        ("/?text=%00", 422, "text: "),
        ("/?model=" + "x" * 201, 422, "model: "),
        ("/docs", 404, "nothing stands at /docs"),
    ],
)
def test_what_is_not_there_gets_a_plain_answer(served_file: Served, path: str, status: int, words: str) -> None:
    page = got(served_file, path, status)
    assert words in html.unescape(page)
    told = served_file.client().get(f"/api/v1{path}" if path.startswith("/sweeps") else "/api/nope")
    assert told.status_code in (404, 422) and set(told.json()) == {"error", "remedy"}


def test_an_open_sweep_has_no_cells_of_a_verdict_and_says_so(served_file: Served) -> None:
    page = html.unescape(got(served_file, f"{sweep_path(served_file, 'open')}/cells", 404))
    assert "is not judged yet" in page and "look at how far it is" in page


def test_only_reading_is_served(served_file: Served) -> None:
    client = served_file.client()
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = client.request(method, "/")
        assert answer.status_code == 405 and answer.headers["allow"] == "GET"
        assert "this server only reads" in answer.text
    head = client.head("/")
    assert head.status_code == 200 and head.content == b""
    assert int(head.headers["content-length"]) == len(client.get("/").content)


def test_a_store_without_an_answer_is_told_with_its_remedy(
    served_file: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_file.reader, "_head", "none")
    monkeypatch.setattr("jobs.store.revision.head", lambda _folder=None: "9999")
    answer = served_file.client().get("/")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert "this assay needs 9999" in answer.text and "assay db upgrade" in answer.text


# ---- the door ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8642", "[::1]:8642", "10.1.2.3", "box.example.org", "LOCALHOST."]
)
def test_a_host_that_is_an_address_or_allowed_comes_in(served_file: Served, host: str) -> None:
    client = served_file.client(Door(frozenset({"box.example.org"})))
    assert client.get("/assets/report.css", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "a b", "[::1", "localhost:x", "127.0.0.1@evil"],
)
def test_a_host_that_another_site_may_have_named_is_turned_away(served_file: Served, host: str) -> None:
    answer = served_file.client().get("/", headers={"host": host})
    assert answer.status_code in (400, 421)
    assert served_file.sweeps["large"] not in answer.text
    assert answer.headers["content-security-policy"] == POLICY


def test_a_token_is_asked_of_everything_and_never_shown(served_file: Served, caplog: pytest.LogCaptureFixture) -> None:
    client = served_file.client(Door(token=TOKEN))
    basic = base64.b64encode(b"ada:" + TOKEN).decode()
    for good in (f"Bearer {TOKEN.decode()}", f"bearer {TOKEN.decode()}", f"Basic {basic}"):
        assert client.get("/", headers={"authorization": good}).status_code == 200
    wrong = (
        "",
        "Bearer",
        "Bearer x",
        f"Bearer {TOKEN.decode()}x",
        f"Token {TOKEN.decode()}",
        "Basic !",
        f"Basic {basic[8:]}",
    )
    for bad in wrong:
        for path in ("/", "/assets/report.css", "/api/openapi.json", "/nope", f"/?token={TOKEN.decode()}"):
            answer = client.get(path, headers={"authorization": bad})
            assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic ")
            assert TOKEN.decode() not in answer.text
    assert TOKEN.decode() not in caplog.text
    assert TOKEN.decode() not in repr(client.get("/nope", headers={"authorization": f"Basic {basic}"}).text)


def test_every_response_binds_the_browser(served_file: Served) -> None:
    client = served_file.client()
    for path in ("/", "/nope", "/assets/charts.js", "/api/openapi.json", sweep_path(served_file, "large")):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers
    assert "unsafe" not in POLICY and "http" not in POLICY
    for source in ASSETS:
        assert client.get(f"/assets/{source.name}").content == source.read_bytes()
