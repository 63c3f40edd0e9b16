"""Token ids as they are given on a command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.errors import BadRequest
from engine.tokens import Tokens

_IDS = "token ids are whole numbers from 0"
_NONE = "give --prompt TEXT or --prompt-ids IDS"


def add_prompt(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Options that give a prompt, text or ids; `several` times for a batch."""
    prompt = parser.add_mutually_exclusive_group()
    action, again = ("append", "; again for each further sequence of a batch") if several else ("store", "")
    prompt.add_argument("--prompt", action=action, help=f"prompt text, through the model's tokenizer{again}")
    prompt.add_argument("--prompt-ids", action=action, help=f'prompt as token ids: "504 3575 282"{again}')


def add_forced(parser: argparse.ArgumentParser) -> None:
    """The option that gives what follows the prompt."""
    parser.add_argument("--forced-ids", default="", help="ids that follow the prompt, each fed alone")


def prompt_of(arguments: argparse.Namespace) -> list[int]:
    """The prompt as ids. Raises BadRequest where there is none or it holds something else."""
    if arguments.prompt is not None:
        return _encoded(arguments.model, arguments.prompt)
    if arguments.prompt_ids is None:
        raise BadRequest("no prompt", _NONE)
    return parse_ids(arguments.prompt_ids, "prompt")


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """All prompts as ids, where several may be given. Raises BadRequest as `prompt_of` does."""
    if arguments.prompt is not None:
        return [_encoded(arguments.model, text) for text in arguments.prompt]
    if arguments.prompt_ids is None:
        raise BadRequest("no prompt", _NONE)
    return [parse_ids(text, "prompt") for text in arguments.prompt_ids]


def forced_of(arguments: argparse.Namespace) -> list[int]:
    """The forced ids, perhaps none. Raises BadRequest for what is no id."""
    return parse_ids(arguments.forced_ids, "forced")


def _encoded(model: str, text: str) -> list[int]:
    if not text:
        raise BadRequest("the prompt is empty", "give some text")
    return Tokens(Path(model)).encode(text)


def parse_ids(text: str, what: str) -> list[int]:
    """Whole numbers apart by blanks or commas. Raises BadRequest naming the first that is none."""
    made: list[int] = []
    for word in text.replace(",", " ").split():
        try:
            number = int(word)
        except ValueError as error:
            raise BadRequest(f"{what} id {word!r} is not a whole number", _IDS) from error
        if number < 0:
            raise BadRequest(f"{what} id {number} is not a token id", _IDS)
        made.append(number)
    return made
