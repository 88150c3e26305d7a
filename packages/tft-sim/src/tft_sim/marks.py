"""Coverage marks: names of code paths that a test exists to reach.

A random test that never reaches its case passes for ever. So the simulator counts the cases that it reaches, and a test
asks for each name.

Law of this file: counting, and the marks of the protocol's scenarios.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

# The marks that random seeds hit in each scenario of docs/protocol/appendix.md, by its number there. If a mark is never
# hit in a thousand seeds, its scenario is not simulated. A new scenario in the simulator needs its marks here.
SCENARIO_MARKS: Mapping[int, tuple[str, ...]] = {
    1: ("a snapshot of another step was refused",),
    2: (
        "a vote was said again",
        "a deadline sealed a vote",
        "an open vote was taken for a no",
        "a trainer ended itself: vote: manager_died",
    ),
    3: (
        "a lighthouse without memory asked for a quorum",
        "waited: has just started",
        "waited: the members of quorum",
        "a replica loaded for a while",
    ),
    4: (
        "a stream was back within the grace",
        "came back after its loss: its stream disconnected",
        "came back after its loss: silent",
        "a beat came after a reported death",
        "a waiting member was lost",
        "a process was started twice",
        "refused: duplicate",
        "refused: stale",
        "a session was refused: duplicate",
        "a group that was lost came back elsewhere",
    ),
    5: ("a replica followed to a newer lighthouse", "refused: old_lighthouse"),
    6: ("a replica came with other settings", "request refused: differs", "a trainer ended itself: differs"),
    7: (
        "the same list got a new id",
        "new id: asks for a new process group",
        "new id: has a newer session",
        "a key was not used twice",
        "an answer was given again",
        "request refused: ahead",
        "a request was withdrawn",
    ),
    8: (
        "a notice overtook its quorum",
        "a broken quorum was not configured",
        "a notice came in: forward",
        "a notice came in: configure",
        "a notice came in: reduction",
        "a notice came in: heal",
        "a notice came in: staged",
        "a notice came in: commit",
        "a notice came in: between steps",
        "a notice came twice",
        "a notice came after the next quorum",
        "one that only waited to join was lost",
        "a hello was answered with a loss",
        "a hello was answered with a loss in a quorum that others have left",
        "one that lives broke its quorum",
    ),
    9: ("one group committed what another lost", "a lost step was committed again by others"),
    10: (
        "a healing took longer than join_timeout",
        "half of a group had fetched",
        "a rank of a group could not load",
        "a transfer lost its last source",
        "waited: is healing and receives data",
    ),
    11: (
        "a trainer hung in its forward",
        "a trainer hung in its optimizer",
        "lost: its trainer hangs",
        "came back after its loss: its trainer hangs",
        "a session that was held back was opened",
        "all were stuck in one reduction",
        "a first step took longer than slowest_step",
        "a trainer was late for longer than slowest_step",
    ),
    12: (
        "loaded states of one step met",
        "request refused: ahead",
        "a torn group was in a quorum",
        "a torn group healed",
    ),
    13: (
        "a sync was committed with others in flight",
        "a new id failed what was in flight",
        "a new id failed several syncs in flight",
        "a failed vote failed what was in flight",
        "a request failed with syncs in flight",
        "one healed with syncs in flight",
    ),
    14: (
        "the lighthouse was away for longer than heartbeat_timeout",
        "all were excused together",
        "a flapping link was judged by silence",
    ),
    15: (
        "a foreign lighthouse formed a quorum",
        "a foreign lighthouse counts from 1 again",
        "a key stood on a foreign lighthouse",
        "torchft's lighthouse keeps one that went away",
    ),
    16: (
        "a member of torchft's came",
        "a member of torchft's trained",
        "a member of torchft's was refused",
        "refused: other_kind",
        "a session was refused: other_kind",
    ),
    17: ("a manager server missed the stream of another rank", "a rank was told that its group is lost"),
    18: ("shrink_only left too few", "waited: a survivor of the last quorum"),
    19: ("a replica came with another world size", "request refused: differs"),
    20: (
        "a replica left",
        "a replica was drained",
        "a rank left because another one was told to",
        "a rank left without a quorum",
        "the last holder of the state stayed for another step",
        "one that has left was healed from",
    ),
    21: (
        "a member was not reached: group",
        "a member was not reached: store",
        "a member was not reached: state",
        "links: one way",
        "links: a star",
        "links: two pairs",
        "links: a dead store",
        "links: one that flaps",
        "links stayed bad",
        "new id: can't be reached",
        "waited: the report of",
        "waited: that reach one another",
        "a newcomer passed its trial",
        "a newcomer failed its trial",
    ),
}

# The marks of the standing quorum transcripts, by the numbers that they begin with.
STANDING_MARKS: Mapping[int, tuple[str, ...]] = {
    1: ("a round began without a request",),
    2: ("a standing rank was recalled", "new id: joined"),
    3: ("the word of some told the others to ask",),
    4: ("a recall came with the answer to a beat", "the newest quorum broke the one that was held"),
    5: ("the word of a round came to some members alone", "a lost step was committed again by others"),
    6: ("the word of a round was a no",),
    7: (
        "a rank asked where its quorum stood: it had changed",
        "a rank began a round with its group that it could not commit",
    ),
    8: ("a rank had its word, and another one of its group did not",),
    9: ("one word said that all ask and that one leaves",),
    10: ("a leaver let its last word pass",),
    11: ("a word said that the lease runs out", "a rank asked where its quorum stood: its lease was over"),
    12: ("waited: replicas of an earlier lighthouse",),
    13: ("some members of a standing quorum went on without the others",),
    14: ("an answer to an old beat came to a rank",),
    15: ("a standing round was late", "a standing quorum was broken for a late member"),
    16: ("a quorum with spares stood",),
    17: ("an older member made all ask in every step",),
    18: ("a sync began without a request, with others in flight",),
    19: ("a link lost the word of a round",),
    20: ("waited: may still train without this lighthouse", "a lease was judged by a slow clock"),
    21: ("a member of an earlier quorum was waited for",),
}


class Marks:
    """A counter of how often each named place was reached."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def hit(self, name: str) -> None:
        """Count a mark."""
        self._counts[name] += 1

    def add(self, other: Marks) -> None:
        """Add the counts of another counter."""
        self._counts.update(other._counts)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names that were never reached, in order."""
        return [name for name in names if not self._counts[name]]

    def __str__(self) -> str:
        return "\n".join(f"{count:8d}  {name}" for name, count in sorted(self._counts.items()))
