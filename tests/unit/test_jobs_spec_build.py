"""`build:` of an arm in a sweep file: what is read and planned, and what is refused, with its line and a remedy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.model import BuildFailure, BuildPlan, Manifest
from jobs.provenance import ArmSource, ModelSource, ResolvedArm, ResolvedModel
from jobs.spec import load, plan
from jobs.spec.form import BuildForm

SOUND = """\
sweep: sound
models: {toy: {build: tiny}}
prompts: {short: {ids: [1, 2]}}
run: {tokens: 4}
arms:
  base: {source: "git:main"}
  null: {like: base}
  head:
    source: checkout
    build: {command: "make -C native", outputs: [native/x.so], timeout_s: 600}
"""
ASKED = BuildPlan(command="make -C native", outputs=("native/x.so",), timeout_s=600)
WRITTEN = '{command: "make -C native", outputs: [native/x.so], timeout_s: 600}'


@dataclass
class FakeResolver:
    """Answers without files or git, and notes the arms that it was asked for."""

    asked: dict[str, ArmSource] = field(default_factory=dict)
    failure: BuildFailure | None = None

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        return ResolvedModel(Path("/models"), "digest")

    def prompt_ids(self, model: ResolvedModel, text: str) -> tuple[int, ...]:
        raise AssertionError(text)

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        self.asked[name] = source
        if source.build is not None and self.failure is not None:
            return ResolvedArm(None, "", failure=self.failure)
        return ResolvedArm(Path("/trees"), "tree")


def planned(folder: Path, text: str, resolver: FakeResolver | None = None) -> Manifest:
    path = folder / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    return plan(load(path), resolver or FakeResolver())


def test_a_build_is_handed_to_the_resolver_and_carried_in_the_manifest(tmp_path: Path) -> None:
    resolver = FakeResolver()
    manifest = planned(tmp_path, SOUND, resolver)
    assert resolver.asked["head"] == ArmSource("checkout", build=ASKED)
    assert resolver.asked["base"] == ArmSource("git", "main")
    assert [arm.build for arm in manifest.arms] == [None, None, ASKED]
    assert Manifest.model_validate_json(manifest.canonical()) == manifest
    assert planned(tmp_path, SOUND.replace("600", "60")).digest() != manifest.digest()


def test_a_build_is_taken_over_unless_it_is_written_away(tmp_path: Path) -> None:
    more = "  calm: {like: head, role: variant}\n  bare: {like: head, role: variant, build: null}\n"
    assert [arm.build for arm in planned(tmp_path, SOUND + more).arms] == [None, None, ASKED, ASKED, None]


def test_a_null_arm_is_built_as_base_is(tmp_path: Path) -> None:
    text = SOUND.replace('{source: "git:main"}', f'{{source: "git:main", build: {WRITTEN}}}')
    assert [arm.build for arm in planned(tmp_path, text).arms] == [ASKED] * 3


def test_a_build_that_failed_stands_in_the_manifest(tmp_path: Path) -> None:
    failure = BuildFailure(reason="exit 2: no rule", log_tail="no rule")
    manifest = planned(tmp_path, SOUND, FakeResolver(failure=failure))
    assert [arm.unbuilt for arm in manifest.arms] == ["", "", "build failed: exit 2: no rule"]
    head = manifest.arms[-1]
    assert (head.python_path, head.tree_digest) == (None, "")
    assert head.build == ASKED.model_copy(update={"failure": failure})
    assert Manifest.model_validate_json(manifest.canonical()) == manifest


def test_defaults_of_the_file_are_the_documents_defaults() -> None:
    form = BuildForm(command="make", outputs=("x",))
    assert BuildPlan(**form.model_dump()) == BuildPlan(command="make", outputs=("x",))


# what replaces the build of head, what the message must say, and the remedy
REFUSED = {
    "no command": ("{outputs: [x]}", "arms.head.build lacks the key 'command'", "add it"),
    "an empty command": ('{command: "", outputs: [x]}', "arms.head.build.command is empty", "at least one"),
    "a blank command": ('{command: " ", outputs: [x]}', "the build command is empty", "shell command"),
    "no outputs": ("{command: a}", "arms.head.build lacks the key 'outputs'", "add it"),
    "an empty list": ("{command: a, outputs: []}", "arms.head.build.outputs is empty", "at least one"),
    "an absolute output": ("{command: a, outputs: [b, /x]}", "'/x' is not inside the arm's tree", "below its root"),
    "an escaping output": ("{command: a, outputs: [b/../../x]}", "is not inside the arm's tree", "below its root"),
    "the whole tree": ("{command: a, outputs: [.]}", "the output '.' names no file", "below the tree's root"),
    "an output twice": ("{command: a, outputs: [x, ./x]}", "the output './x' stands twice", "remove one"),
    "no time": ("{command: a, outputs: [x], timeout_s: 0}", "build.timeout_s is 0", "more than 0"),
    "less than no time": ("{command: a, outputs: [x], timeout_s: -1}", "build.timeout_s is -1", "more than 0"),
    "an unknown key": ("{comand: a, outputs: [x]}", "unknown key 'comand' in arms.head.build", "'command'"),
    "one output as text": ("{command: a, outputs: x}", "outputs: expected a list, got the text 'x'", ""),
    "only a command": ("make", "arms.head.build: expected a mapping", ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_gives_one_line_with_place_and_remedy(tmp_path: Path, case: str) -> None:
    written, message, remedy = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, SOUND.replace(WRITTEN, written))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/sweep.yaml:10: "), text
    assert message in text
    assert remedy in caught.value.remedy
    assert "\n" not in text


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("source: checkout", "source: installed", 10),
        (SOUND[-5:], SOUND[-5:] + "  more: {like: head, source: installed}\n", 11),
    ],
    ids=["written", "taken over"],
)
def test_what_is_installed_cannot_be_built(tmp_path: Path, old: str, new: str, line: int) -> None:
    with pytest.raises(SpecError, match=rf"sweep\.yaml:{line}: arm '\w+' is installed: there is no tree to build"):
        planned(tmp_path, SOUND.replace(old, new))


def test_a_null_arm_with_a_build_of_its_own_is_not_base(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"sweep\.yaml:7: the null arm 'null' differs from base"):
        planned(tmp_path, SOUND.replace("{like: base}", f"{{like: base, build: {WRITTEN}}}"))
