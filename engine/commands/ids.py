"""Token ids as they are given on a command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.errors import BadRequest
from engine.tokens import Tokens

_IDS = "token ids are whole numbers from 0"


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Options that give a prompt: text or ids."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="prompt text, through the model's tokenizer")
    prompt.add_argument("--prompt-ids", help='prompt as token ids: "504 3575 282"')


def add_forced(parser: argparse.ArgumentParser) -> None:
    """The option that gives what follows the prompt."""
    parser.add_argument("--forced-ids", default="", help="ids that follow the prompt, each fed alone")


def prompt_of(arguments: argparse.Namespace) -> list[int]:
    """The prompt as ids. Raises BadRequest where there is none or it holds something else."""
    if arguments.prompt is not None:
        if not arguments.prompt:
            raise BadRequest("the prompt is empty", "give some text")
        return Tokens(Path(arguments.model)).encode(arguments.prompt)
    if arguments.prompt_ids is None:
        raise BadRequest("no prompt", "give --prompt TEXT or --prompt-ids IDS")
    return parse_ids(arguments.prompt_ids, "prompt")


def forced_of(arguments: argparse.Namespace) -> list[int]:
    """The forced ids, perhaps none. Raises BadRequest for what is no id."""
    return parse_ids(arguments.forced_ids, "forced")


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
