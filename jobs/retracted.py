"""A verdict whose grounds were retracted: what it said is struck out and stays readable, and it proves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from jobs import wording
from jobs.outcomes import EXIT_WHEN_BLOCKING
from jobs.verdict import Finding, Retraction, StruckOut, Verdict


def struck(verdict: Verdict, why: Sequence[Retraction]) -> Verdict:
    """The verdict as it reads once something that it rests on is retracted; the same where nothing is.

    Cells that rest on it are struck out too; a retraction without a cell strikes all. The exit code is 3 whatever the
    verdict said: of what it said nothing is known any more.
    """
    if not why:
        return verdict
    code = EXIT_WHEN_BLOCKING["RETRACTED"]
    of_all = any(not one.cell for one in why)
    fallen = {one.cell for one in why}
    cells = tuple(
        cell.model_copy(update={"outcome": "RETRACTED", "exit_code": code}) if of_all or cell.cell in fallen else cell
        for cell in verdict.cells
    )
    remedy = wording.REMEDY["RETRACTED"]
    marks = tuple(
        Finding(
            outcome="RETRACTED", cell=one.cell, message=one.words, remedy=remedy, exit_code=code, gate="infrastructure"
        )
        for one in why
    )
    more = f" ({len(why) - 1} more retracted)" if len(why) > 1 else ""
    return verdict.model_copy(
        update={
            "outcome": "RETRACTED",
            "exit_code": code,
            "headline": f"{why[0].words}{more}. What this verdict said counts no more.",
            "next_step": remedy,
            "findings": (*marks, *verdict.findings),
            "cells": cells,
            "struck": StruckOut(
                outcome=verdict.outcome, exit_code=verdict.exit_code, headline=verdict.headline, why=tuple(why)
            ),
        }
    )
