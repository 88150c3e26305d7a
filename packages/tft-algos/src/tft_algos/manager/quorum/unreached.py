"""Peers that this rank could not reach: the reports to the lighthouse, and the log lines.

A member that reaches the lighthouse but not its peers would stop all of them at each quorum. Only a peer can detect
this. So a rank that could not reach another one reports this once, with its next request for a quorum. If it happens
again, it is reported again. A member that was only missing at a rendezvous may be late. It is reported only if that
happens twice in a row.

Law of this file: errors in, reports and sentences out. The lighthouse decides the effect of a report.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

from tft_coord.core.names import shorten
from tft_coord.core.step.errors import TrainingError
from tft_coord.core.types import UNREACHED_MOST, Plan, Unreached, Via
from tft_coord.errors import CoordinationError
from tft_pg.errors import ConfigError, ConfigureError, PeerDisconnectedError, ProcessGroupError, StoreUnreachableError

_NAMES_MOST: Final = 8  # in one sentence
_WHY_MOST: Final = 300  # characters
_CHECK: Final = (
    "check for a firewall, and check that the other replicas can reach each replica's interface and host name "
    "(GLOO_SOCKET_IFNAME, hostname=)"
)
_CHECK_STORE: Final = (
    f"check whether torchrun's agent, or the process that hosts the store, has ended; otherwise {_CHECK}"
)
_CHECK_OWN: Final = (
    "check whether torchrun's agent, or the process that hosts the store, still runs, and restart this replica group"
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a failed configure, with the names of replicas.

    Args:
        error: the error of the step. It names replicas where the process group named ranks.
        warning: a sentence to log at once, even if a later loss explains the failure. "": no replica is to blame yet,
            or the same was logged a moment ago.
    """

    error: Exception
    warning: str = ""


@final
class UnreachedPeers:
    """The unsent reports of one rank. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsent: dict[tuple[str, Via], Unreached] = {}
        self._absent: frozenset[str] = frozenset()  # replicas missing at the last rendezvous
        self._blamed: frozenset[tuple[str, Via]] = frozenset()  # reported by the last configure
        self._repeats = 0  # in a row
        self._own_failures = 0  # in a row, in which no peer was involved
        self._sentence = ""  # of the last configure, if it failed

    @property
    def has_unsent(self) -> bool:
        """Return whether a report for the lighthouse exists, so that the next quorum should be requested at once."""
        return bool(self._unsent)

    @property
    def last(self) -> str:
        """Return why the last configure failed, as a clause; "" if it did not, or no replica was to blame."""
        return self._sentence

    def take(self) -> tuple[Unreached, ...]:
        """Return the reports for the request that is made now. Each report is returned once."""
        if not self._unsent:
            return ()
        with self._lock:
            reports, self._unsent = self._unsent, {}
        return tuple(reports.values())[:UNREACHED_MOST]

    def group_configured(self) -> None:
        """Record that the process group was built, so every member was reached."""
        if self._blamed or self._absent or self._sentence or self._own_failures:
            with self._lock:
                self._own_failures = 0
                self._absent, self._blamed, self._repeats, self._sentence = frozenset(), frozenset(), 0, ""

    def configure_failed(self, plan: Plan, error: Exception, *, broken: bool = False) -> Diagnosis:
        """Record that the process group could not be built for a plan. Return a diagnosis.

        Args:
            plan: of the quorum.
            error: raised by `configure`.
            broken: the quorum was broken meanwhile, which ends a `configure` too.
        """
        own = self._own_failure(plan, error, broken=broken)
        if own is not None:
            return own
        if not isinstance(error, ConfigureError):
            return Diagnosis(error)
        with self._lock:
            if isinstance(error, StoreUnreachableError):
                reports, clauses = self._of_store(plan, error)
            else:
                reports, clauses = self._of_ranks(plan, error)
            self._keep(reports)
            self._sentence = "; ".join(clauses)
            blamed = frozenset((each.replica_id, each.via) for each in reports)
            self._repeats = self._repeats + 1 if blamed == self._blamed else 1
            self._blamed = blamed
            repeats = self._repeats
        if not clauses:
            return Diagnosis(error)
        of_own = any(each.replica_id == plan.replica_id for each in reports)
        sentence = (
            f"could not build the process group of quorum {plan.key}: {'; '.join(clauses)}; "
            f"{_CHECK_OWN if of_own else _CHECK_STORE if isinstance(error, StoreUnreachableError) else _CHECK}"
        )
        named = copy.copy(error)
        named.args = (sentence,)
        named.__cause__ = error
        is_due = bool(reports) and _is_logged(repeats)
        times = f" ({repeats} times in a row)" if repeats > 1 else ""
        return Diagnosis(named, f"{sentence}{times}" if is_due else "")

    def _own_failure(self, plan: Plan, error: Exception, *, broken: bool) -> Diagnosis | None:
        """Report this replica itself if it can't build a group with any peers. Return None if it may.

        Its peers can't report it: its next request ends their rendezvous before they miss it. A group of another kind
        may say by any error that a peer is gone, so its error counts only if it repeats.
        """
        certain = isinstance(error, ConfigError) or (isinstance(error, ConfigureError) and error.is_own)
        with self._lock:
            if broken or not (certain or not isinstance(error, ProcessGroupError | CoordinationError | TrainingError)):
                self._own_failures = 0
                return None
            self._own_failures += 1
            number = self._own_failures
            if certain or number > 1:
                self._keep([Unreached(plan.replica_id, Via.GROUP, _plain(str(error)))])
        sentence = f"this replica can't build a process group of its own ({number} times in a row): {error}"
        return Diagnosis(error, sentence if _is_logged(number) and (certain or number > 1) else "")

    def step_failed(self, plan: Plan | None, errors: Iterable[Exception]) -> str:
        """Record the unreached peers of a failed step. The process group of that step had been built.

        Returns: a sentence for the log. "": no peer is to blame.
        """
        found: dict[str, str] = {}
        for error in errors:
            if plan is not None and isinstance(error, PeerDisconnectedError):
                found |= {
                    plan.replica_ids[rank]: why for rank, why in error.unreached.items() if rank < len(plan.replica_ids)
                }
        if not found:
            return ""
        with self._lock:
            self._keep(Unreached(name, Via.GROUP, _plain(why)) for name, why in found.items())
        sentence = "; ".join(f"lost the connection to replica {name} at {why}" for name, why in sorted(found.items()))
        return f"{sentence}; {_CHECK}"

    def sources_failed(self, found: Mapping[str, str]) -> None:
        """Record the sources of live state that did not answer.

        `found`: the reason for each replica id, in a few words.
        """
        with self._lock:
            self._keep(Unreached(name, Via.STATE, _plain(why)) for name, why in found.items())

    def _keep(self, reports: Iterable[Unreached]) -> None:
        for each in reports:
            self._unsent[each.replica_id, each.via] = each

    def _of_store(self, plan: Plan, error: StoreUnreachableError) -> tuple[list[Unreached], list[str]]:
        owner = plan.store_replica_id
        whose = "its own rendezvous store" if owner == plan.replica_id else f"the rendezvous store of replica {owner}"
        clause = (
            f"{whose if owner else 'the rendezvous store'} at {error.host}:{error.port} could not be reached "
            f"({error.why})"
        )
        return [Unreached(owner, Via.STORE, _plain(f"{error.host}:{error.port}: {error.why}"))] if owner else [], [
            clause
        ]

    def _of_ranks(self, plan: Plan, error: ConfigureError) -> tuple[list[Unreached], list[str]]:
        ids = plan.replica_ids
        unreached = {ids[rank]: why for rank, why in sorted(error.unreached.items()) if 0 <= rank < len(ids)}
        missing = frozenset(ids[rank] for rank in error.missing_ranks if 0 <= rank < len(ids))
        again, self._absent = missing & self._absent, missing
        reports = [Unreached(name, Via.GROUP, _plain(why)) for name, why in unreached.items()]
        reports += [
            Unreached(name, Via.GROUP, "did not join the rendezvous of two quorums in a row") for name in sorted(again)
        ]
        clauses = [
            f"replica {name} could not be reached at {why}" for name, why in list(unreached.items())[:_NAMES_MOST]
        ]
        if len(unreached) > _NAMES_MOST:
            clauses.append(f"{len(unreached) - _NAMES_MOST} more replicas could not be reached")
        if missing:
            clauses.append(f"{_replicas(missing)} did not join its rendezvous")
        return reports, clauses


def _is_logged(number: int) -> bool:
    """Return whether a failure is logged: the 1st, 2nd, 4th ... of one kind in a row."""
    return number & (number - 1) == 0


def _replicas(names: frozenset[str]) -> str:
    shown = ", ".join(shorten(name) for name in sorted(names)[:_NAMES_MOST])
    more = f" and {len(names) - _NAMES_MOST} more" if len(names) > _NAMES_MOST else ""
    return f"replica{'s' if len(names) > 1 else ''} {shown}{more}"


def _plain(why: str) -> str:
    """Return a reason in the form that the wire takes: one line, short."""
    return "".join(character if character.isprintable() else " " for character in why)[:_WHY_MOST]
