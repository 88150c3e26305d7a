"""The merge of the requests of a group's ranks into the fields of their group's member.

Law of this file: a function of the requests; the rules stand with the fields of `RankRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any, Final

from tft_coord.core.types import MERGE, POOR_SOURCES_MOST, Member, Merge, RankRequest


def _lowest(values: Sequence[int | None]) -> int | None:
    return None if None in values else min(value for value in values if value is not None)


def _union(values: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for names in values for name in names}))[:POOR_SOURCES_MOST]


_FUNCTIONS: Final[dict[Merge, Callable[[Sequence[Any]], Any]]] = {
    Merge.FIRST: itemgetter(0),
    Merge.ANY: any,
    Merge.ALL: all,
    Merge.HIGHEST: max,
    Merge.LOWEST: _lowest,
    Merge.UNION: _union,
}


def rules_of(request: type[Any], member: type[Any]) -> dict[str, Callable[[Sequence[Any]], Any]]:
    """Return the function of each field that is merged by its rule. Raises: TypeError: a field has no rule."""
    of_member = {field.name for field in fields(member)}
    found = {}
    for field in fields(request):
        if field.name not in of_member:
            continue
        rule = field.metadata.get(MERGE)
        if rule is None:
            raise TypeError(
                f"{request.__name__}.{field.name} has no rule, and {member.__name__} has it too; give it a Merge"
            )
        if rule is not Merge.BY_HAND:
            found[field.name] = _FUNCTIONS[rule]
    return found


_RULES: Final = rules_of(RankRequest, Member)
_read: Final = attrgetter(*_RULES)


def merged(requests: Sequence[RankRequest]) -> dict[str, Any]:
    """Return the fields of the group's member that have a rule, by name.

    Args:
        requests: of all ranks, by rank; at least one.
    """
    columns = zip(*map(_read, requests), strict=True)
    return {name: rule(column) for (name, rule), column in zip(_RULES.items(), columns, strict=True)}
