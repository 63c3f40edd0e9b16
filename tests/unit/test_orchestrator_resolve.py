"""Words of a sweep file become models, ids and engine trees on this machine, each with a digest computed here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.errors import BadRequest, ModelFilesError
from engine.onnx_load import recorded_digest
from engine.zoo import build, model_digest
from jobs.errors import SpecError
from jobs.provenance import ArmSource, ModelSource, own_root, tree_digest
from orchestrator.resolve import DryResolver, LocalResolver, built_folder
from orchestrator.settings import Settings, settings, store_url


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    here = tmp_path / "checkout" / "deep"
    here.mkdir(parents=True)
    return settings({}, cwd=here)


def engine_at(folder: Path, text: str = "x = 1\n") -> None:
    (folder / "engine").mkdir(parents=True, exist_ok=True)
    (folder / "engine" / "__init__.py").write_text(text)


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_built_model_lands_in_the_cache_once_and_its_digest_is_of_its_files(given: Settings) -> None:
    resolver = LocalResolver(given)
    first = resolver.model("tiny", ModelSource(build="tiny", seed=7))
    assert first.path.is_relative_to(given.cache)
    assert first.digest == model_digest(first.path)
    stamp = (first.path / "model.onnx").stat().st_mtime_ns
    assert LocalResolver(given).model("again", ModelSource(build="tiny", seed=7)) == first
    assert (first.path / "model.onnx").stat().st_mtime_ns == stamp
    assert resolver.model("other", ModelSource(build="tiny", seed=8)).digest != first.digest
    assert resolver.model("path", ModelSource(path=first.path)).digest == first.digest
    assert resolver.prompt_ids(first, "ab") != resolver.prompt_ids(first, "ba")


def test_a_cache_that_will_not_do_is_not_answered_with_an_option_that_is_not_there(given: Settings) -> None:
    wanted = ModelSource(build="tiny", seed=7)
    folder = built_folder(given, wanted)
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(BadRequest, match="no zoo model") as caught:
        LocalResolver(given).model("m", wanted)
    assert caught.value.remedy == "delete that folder first, or set XDG_CACHE_HOME to another folder"
    (folder / "notes.txt").unlink()
    assert LocalResolver(given).model("m", wanted).path == folder


def test_a_model_folder_that_is_absent_or_empty_is_refused(given: Settings, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no folder"):
        LocalResolver(given).model("m", ModelSource(path=tmp_path / "gone"))
    with pytest.raises(ModelFilesError):
        LocalResolver(given).model("m", ModelSource(path=tmp_path))
    with pytest.raises(SpecError, match=r"no model named 'nope'.*tiny"):
        LocalResolver(given).model("m", ModelSource(build="nope"))


def test_a_model_folder_changed_after_it_was_built_is_refused_before_anything_runs(
    given: Settings, tmp_path: Path
) -> None:
    """A child says the digest that was recorded at build: each run of it would be refused, one after another."""
    folder = tmp_path / "tiny"
    build("tiny", folder, cache_dir=tmp_path / "fetched")
    assert LocalResolver(given).model("m", ModelSource(path=folder)).digest == recorded_digest(folder)
    with (folder / "model.onnx.data").open("r+b") as data:
        first = data.read(1)
        data.seek(0)
        data.write(bytes([first[0] ^ 1]))
    with pytest.raises(SpecError, match=r"model m: the files of .* are .{12}, its zoo.json says .*models check"):
        LocalResolver(given).model("m", ModelSource(path=folder))


def test_a_checkout_is_copied_aside_so_that_edits_cannot_reach_a_run(given: Settings) -> None:
    root = given.cwd.parent
    engine_at(root)
    arm = LocalResolver(given).arm("base", ArmSource("checkout"))
    assert arm.python_path is not None
    assert arm.python_path.is_relative_to(given.trees)
    engine_at(root, "x = 2\n")
    assert tree_digest(arm.python_path) == arm.tree_digest
    assert LocalResolver(given).arm("base", ArmSource("checkout")).tree_digest != arm.tree_digest


def test_a_checkout_names_its_commit_and_says_when_it_is_dirty(given: Settings) -> None:
    root = given.cwd.parent
    engine_at(root)
    git(root, "init", "-q")
    git(root, "add", "engine")
    git(root, "commit", "-q", "-m", "one")
    head = git(root, "rev-parse", "HEAD")
    resolver = LocalResolver(given)
    assert resolver.arm("base", ArmSource("checkout")).commit == head
    engine_at(root, "x = 2\n")
    assert resolver.arm("base", ArmSource("checkout")).commit == f"{head}-dirty"
    by_ref = resolver.arm("base", ArmSource("git", "HEAD"))
    assert by_ref.commit == head
    assert by_ref.python_path is not None
    assert (by_ref.python_path / "engine" / "__init__.py").read_text() == "x = 1\n"


def test_the_installed_arm_is_this_very_package(given: Settings) -> None:
    arm = LocalResolver(given).arm("base", ArmSource("installed"))
    assert (arm.python_path, arm.tree_digest) == (None, tree_digest(own_root()))


def test_a_dry_look_builds_nothing_but_still_refuses_what_is_wrong(given: Settings) -> None:
    dry = DryResolver(LocalResolver(given), [])
    model = dry.model("tiny", ModelSource(build="tiny", seed=7))
    assert (model.digest, dry.absent) == ("", ["tiny (tiny)"])
    assert not model.path.exists()
    assert dry.prompt_ids(model, "text") == (0,)
    with pytest.raises(SpecError, match="no model named"):
        dry.model("m", ModelSource(build="nope"))
    with pytest.raises(SpecError, match="no checkout"):
        dry.arm("base", ArmSource("checkout"))


def test_a_store_is_a_url_or_a_file() -> None:
    here = Path("/here")
    assert store_url(None, here) == "sqlite:////here/.assay/store.db"
    assert store_url("my.db", here) == "sqlite:////here/my.db"
    assert store_url("/abs/my.db", here) == "sqlite:////abs/my.db"
    assert store_url("postgresql://h/d", here) == "postgresql://h/d"
