"""Every command that README, CONTRIBUTING, docs/ and examples/ show is run: blocks fenced as ```sh, in a copy of all.

One copy serves all blocks of a file in their order, so a later one may use what an earlier one left. A command whose
exit code is not 0 says so in a trailing comment, `# exit 1`. `make` targets are looked up in the Makefile and not run,
since the tests themselves are one. What is only to be read is fenced as ```text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("**/*.md"))]

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[^\s`]*)[^`]*$")
EXPECTED_EXIT = re.compile(r"\s+# exit (\d+)$")
SHELLS_THAT_WOULD_ESCAPE = {"bash", "shell", "console", "zsh", "shell-session", "sh-session"}
SECONDS_A_COMMAND = 240


@dataclass(frozen=True, slots=True)
class Command:
    line: int
    text: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Block:
    line: int
    language: str
    lines: tuple[str, ...]


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks of a Markdown text, with the line each begins on.

    Raises:
        ValueError: a fence that is never closed.
    """
    found: list[Block] = []
    opening: re.Match[str] | None = None
    start, body = 0, list[str]()
    for number, line in enumerate(markdown.splitlines(), start=1):
        if opening is None:
            opening = FENCE.match(line)
            start, body = number, []
        elif line.strip().startswith(opening["ticks"]) and not line.strip().strip(opening["ticks"][0]):
            found.append(Block(start, opening["language"], tuple(body)))
            opening = None
        else:
            body.append(line.removeprefix(opening["indent"]))
    if opening is not None:
        raise ValueError(f"the fence on line {start} is never closed")
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a block: continued lines joined, comment lines left out, the expected exit code taken off."""
    found: list[Command] = []
    pending, first = "", 0
    for number, line in enumerate(block.lines, start=block.line + 1):
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        first = first if pending else number
        pending += line
        if line.endswith("\\"):
            pending = pending[:-1]
            continue
        expected = EXPECTED_EXIT.search(pending)
        text = EXPECTED_EXIT.sub("", pending)
        found.append(Command(first, text.strip(), int(expected[1]) if expected else 0))
        pending = ""
    assert not pending, f"line {first}: the last command of the block is continued into nothing"
    return found


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


def copy_checkout(checkout: Path, to: Path) -> None:
    """A clone, so that git refs resolve, with the working tree as it stands laid over it."""
    subprocess.run(["git", "clone", "--quiet", str(checkout), str(to)], check=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (checkout / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, to / name)


def environment(scratch: Path) -> dict[str, str]:
    """This environment's programs and packages, and stores and settings that nobody else reads.

    The copy gives files and arms; the packages stay the installed ones, as for a newcomer who typed `make sweep`.
    """
    folders = {f"XDG_{kind}_HOME": str(scratch / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = ("PYTEST_", "ASSAY_", "RAY_", "PYTHONPATH")
    outer = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return outer | folders | {"PATH": path, "NO_COLOR": "1", "COLUMNS": "120"}


def run_documented(command: Command, copy: Path, env: dict[str, str]) -> str | None:
    """Run one command in the copy; returns what was wrong, or None."""
    words = command.text.split()
    if words[0] == "make":
        missing = {word for word in words[1:] if "=" not in word} - make_targets((copy / "Makefile").read_text())
        return f"no such make target: {', '.join(sorted(missing))}" if missing else None
    if words[0] in {"cd", "export"}:
        return f"`{words[0]}` would not reach the next command: each runs by itself"
    script = ["bash", "-euo", "pipefail", "-c", command.text]
    try:
        done = subprocess.run(
            script, cwd=copy, env=env, stdin=subprocess.DEVNULL, timeout=SECONDS_A_COMMAND, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"still running after {SECONDS_A_COMMAND} s"
    if done.returncode == command.exit_code:
        return None
    return f"exit {done.returncode}, documented as {command.exit_code}:\n{done.stdout[-4000:]}"


def failures(document: Path, copy: Path, env: dict[str, str]) -> list[str]:
    found = []
    for block in blocks(document.read_text(encoding="utf-8")):
        for command in commands(block) if block.language == "sh" else ():
            if wrong := run_documented(command, copy, env):
                found.append(f"{document.name}:{command.line}: {command.text}\n{wrong}")
    return found


def test_the_readme_shows_the_two_commands() -> None:
    readme = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    shown = [command.text for block in readme if block.language == "sh" for command in commands(block)]
    assert {"make sweep", "make test"} <= set(shown)


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix().removeprefix("docs/")
)
def test_no_command_hides_in_another_fence(document: Path) -> None:
    hiding = [block.line for block in blocks(document.read_text("utf-8")) if block.language in SHELLS_THAT_WOULD_ESCAPE]
    assert hiding == [], "fence commands as ```sh, which is run, or ```text, which is read"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix().removeprefix("docs/")
)
def test_documented_commands_run(document: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    copy_checkout(ROOT, copy)
    assert failures(document, copy, environment(tmp_path)) == []


def test_commands_are_extracted_as_written() -> None:
    markdown = "\n".join(
        [
            "```text",
            "not run",
            "```",
            "1. a list",
            "   ~~~~sh",
            "   # a comment",
            "   assay run \\",
            "     x.yaml  # exit 1",
            "",
            "   true",
            "   ~~~~",
        ]
    )
    text, shell = blocks(markdown)
    assert (text.language, shell.language) == ("text", "sh")
    assert commands(shell) == [Command(7, "assay run   x.yaml", 1), Command(10, "true", 0)]


def test_an_open_fence_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2"):
        blocks("text\n```sh\nassay run\n")


@pytest.mark.parametrize(
    ("text", "exit_code", "said"),
    [
        ("exit 1", 0, "exit 1, documented as 0"),
        ("exit 1", 1, None),
        ("false | true", 0, "exit 1"),
        ("make test", 0, None),
        ("make WORKERS=1 nothing-of-the-kind", 0, "no such make target"),
        ("cd docs", 0, "would not reach"),
    ],
)
def test_a_documented_command_that_fails_is_seen(tmp_path: Path, text: str, exit_code: int, said: str | None) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    wrong = run_documented(Command(1, text, exit_code), tmp_path, environment(tmp_path))
    assert (wrong is None) if said is None else (said in str(wrong))
