"""What a request may ask for: parameters, each within bounds, and none that is unknown or given twice."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, get_args

from fastapi import Path, Query, Request
from fastapi.exceptions import RequestValidationError

from jobs.verdict import Outcome

PAGE_SIZE = 50
OUTCOMES = get_args(Outcome)
_PLAIN = r"^[^\x00-\x1f\x7f]*$"

SweepId = Annotated[str, Path(pattern=r"^[0-9A-Za-z_]{1,40}$", description="a sweep's id or a unique beginning of it")]
RunId = Annotated[str, Path(pattern=r"^[0-9A-Za-z_]{1,40}$", description="a run's id or a unique beginning of it")]
Number = Annotated[int, Query(ge=1, le=100_000, description="which page, from 1")]
Size = Annotated[int, Query(ge=1, le=100, description="rows on a page")]
Part = Annotated[str, Query(max_length=200, pattern=_PLAIN, description="a part of a name, in either case")]
CellName = Annotated[str, Query(min_length=1, max_length=4000, description="a cell's whole name")]
State = Annotated[str, Query(pattern="^(open|judged)?$", description="open or judged; empty: both")]
OfSweep = Annotated[
    str, Query(pattern=f"^({'|'.join(OUTCOMES)}|none)?$", description="a verdict's outcome, or none; empty: any")
]
OfCell = Annotated[str, Query(pattern=f"^({'|'.join(OUTCOMES)})?$", description="a cell's outcome; empty: any")]
Hold = Annotated[str, Query(pattern="^1?$", description="1: a page that does not renew itself")]
After = Annotated[int, Query(ge=0, le=2**63 - 1, description="the number of the last event that is known")]


def no_other(request: Request) -> None:
    """Refuse a parameter that the route does not have, or that is given twice: it would be passed over in silence."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    given = Counter(name for name, _ in request.query_params.multi_items())
    wrong = [f"there is no parameter {name!r}" for name in given if name not in known]
    wrong += [f"{name!r} is given {count} times" for name, count in given.items() if name in known and count > 1]
    if wrong:
        has = f"this address has {', '.join(sorted(known))}" if known else "this address has none"
        raise RequestValidationError([{"loc": ("query",), "msg": f"{'; '.join(wrong)}; {has}"}])
