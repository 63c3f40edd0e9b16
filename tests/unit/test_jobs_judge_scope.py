"""Where the claim of equal tokens ends: blocks of one cell on several cards and drivers, by the contract's scope."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.contract import IdentityContract
from jobs.judge import judge
from jobs.model import JudgeInput, RunFact
from jobs.verdict import Verdict

ALL = ("batch", "card", "driver")
NO_CARD = ("batch", "driver")
NO_DRIVER = ("batch", "card")


def two_places(
    documents: Any, scope: tuple[str, ...], *, other: frozenset[str] = frozenset(), **device: str
) -> Verdict:
    """Two blocks, the second of them elsewhere; `other` arms give another id there."""
    doc: JudgeInput = documents.sweep(cell={"blocks": 2}, identity=IdentityContract(scope=scope))

    def moved(run: RunFact) -> RunFact:
        assert run.record is not None and run.record.certificate is not None
        if run.block == 0:
            return run
        generations = run.record.generations
        if run.arm in other:
            ids = (*documents.IDS[:7], 1, *documents.IDS[8:])
            generations = tuple(g.model_copy(update={"ids": ids}) for g in generations)
        seen = run.record.certificate.model_copy(update={k: v for k, v in device.items() if k in ("uuid", "driver")})
        changes = {"device": {**run.record.device, **device}, "certificate": seen, "generations": generations}
        return run.model_copy(update={"record": run.record.model_copy(update=changes)})

    verdict = judge(documents.replace_runs(doc, moved))
    assert isinstance(verdict, Verdict)
    return verdict


def pairs(verdict: Verdict) -> list[str]:
    return [row.klass for row in verdict.cells[0].identity if row.what == "pair"]


EVERYONE = frozenset({"base", "head", "null"})


@pytest.mark.parametrize(("scope", "rows"), [(ALL, 2), (NO_CARD, 1), (("batch",), 1)])
def test_equal_tokens_on_two_cards_are_one_claim_or_two(documents: Any, scope: tuple[str, ...], rows: int) -> None:
    verdict = two_places(documents, scope, uuid="SIM-1")
    assert pairs(verdict) == ["IDENTICAL"] * rows
    assert verdict.exit_code == 0


def test_other_tokens_on_another_card_are_out_of_a_scope_of_one_card(documents: Any) -> None:
    verdict = two_places(documents, ALL, other=EVERYONE, uuid="SIM-1")
    assert pairs(verdict) == ["IDENTICAL", "IDENTICAL"]
    assert verdict.exit_code == 0


def test_other_tokens_on_another_card_break_a_claim_over_cards(documents: Any) -> None:
    verdict = two_places(documents, NO_CARD, other=EVERYONE, uuid="SIM-1")
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 1)
    assert pairs(verdict) == ["NONDETERMINISTIC"]
    assert {f.arm: f.exit_code for f in verdict.findings if f.outcome == "NONDETERMINISTIC"} == {
        "base": 3,
        "null": 3,
        "head": 1,
    }
    assert "(on SIM-0, driver sim 1 and on SIM-1, driver sim 1)" in verdict.findings[0].message


def test_head_alone_that_differs_on_another_card_is_found_in_either_scope(documents: Any) -> None:
    assert two_places(documents, ALL, other=frozenset({"head"}), uuid="SIM-1").outcome == "VIOLATION"
    over = two_places(documents, NO_CARD, other=frozenset({"head"}), uuid="SIM-1")
    assert (over.outcome, over.exit_code) == ("NONDETERMINISTIC", 1)


@pytest.mark.parametrize(("scope", "klass", "code"), [(ALL, "NOT_COMPARABLE", 3), (NO_DRIVER, "IDENTICAL", 0)])
def test_blocks_on_two_drivers_are_compared_where_the_scope_leaves_it_out(
    documents: Any, scope: tuple[str, ...], klass: str, code: int
) -> None:
    verdict = two_places(documents, scope, driver="sim 2")
    assert (set(pairs(verdict)), verdict.exit_code) == ({klass}, code)


def test_other_tokens_on_another_driver_break_a_claim_over_drivers(documents: Any) -> None:
    verdict = two_places(documents, NO_DRIVER, other=EVERYONE, driver="sim 2")
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 1)
    assert "driver sim 1 and on SIM-0, driver sim 2)" in verdict.findings[0].message


@pytest.mark.parametrize(
    ("device", "words"),
    [({"driver": "sim 2"}, "block 0 ran on 2 drivers: sim 1, sim 2"), ({"uuid": "SIM-1"}, "block 0 ran on 2 cards")],
)
def test_a_block_keeps_to_one_card_and_driver_whatever_the_scope(
    documents: Any, device: dict[str, str], words: str
) -> None:
    head = documents.stable_arm(device=device)
    verdict = judge(documents.sweep(head=head, identity=IdentityContract(scope=("batch",))))
    assert isinstance(verdict, Verdict)
    assert verdict.outcome in ("NOT_COMPARABLE", "INFRASTRUCTURE")
    assert any(words in finding.message for finding in verdict.findings)
