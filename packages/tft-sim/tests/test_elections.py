"""Several lighthouses elect a leader under faults: never two that answer, never an id twice; and what that rests on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tft_coord.core.election import Answer, Call, Campaign, Decision, ElectionCore, Looked, Renewed
from tft_sim.elections import TTL_MS, Election, ElectionReport
from tft_sim.invariants import InvariantError

FAULTS_MS = 120_000
SEEDS = 24


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_two_lighthouses_answer_whatever_strikes(seed: int) -> None:
    report = Election(seed).run(FAULTS_MS)
    assert report.num_answers > 0


def test_the_faults_strike() -> None:
    found: Counter[str] = Counter()
    for seed in range(20):
        report = Election(seed).run(FAULTS_MS)
        found["leaders"] += len(report.leaders)
        found["ended"] += report.num_ended
        found["late"] += report.num_late
        found["false renewals"] += report.num_false_renewals
    assert min(found.values()) > 20, found


def test_a_run_is_the_same_every_time() -> None:
    first, second = (Election(3).run(FAULTS_MS) for _ in range(2))
    assert isinstance(first, ElectionReport)
    assert (first.leaders, first.num_answers) == (second.leaders, second.num_answers)


# --- mistakes, each of which the faults must find ---------------------------------------------------------------------


class CountsFromTheAnswer(ElectionCore):
    def answered(self, call: Call, answer: Answer, sent_ms: int, now_ms: int) -> list[Decision]:
        return super().answered(call, answer, now_ms, now_ms)


class TrustsEachRenewal(ElectionCore):
    def answered(self, call: Call, answer: Answer, sent_ms: int, now_ms: int) -> list[Decision]:
        if isinstance(answer, Looked):
            answer = Looked(answer.leader, answer.floor, 1)
        if isinstance(answer, Renewed):
            answer = Renewed(answer.ttl_ms, 1)
        return super().answered(call, answer, sent_ms, now_ms)


class KnowsNoEnd(ElectionCore):
    def leads(self, now_ms: int) -> bool:
        return self._term is not None


class TrustsItsClock(ElectionCore):
    def call(self, now_ms: int, wall_ms: int) -> Call | None:
        call = super().call(now_ms, wall_ms)
        return replace(call, started_ms=wall_ms) if isinstance(call, Campaign) else call


@pytest.mark.parametrize(
    ("mutant", "invariant"),
    [(CountsFromTheAnswer, "P2"), (TrustsEachRenewal, "P2"), (KnowsNoEnd, "P2"), (TrustsItsClock, "I1")],
)
def test_the_faults_find_a_core_that(mutant: type[ElectionCore], invariant: str) -> None:
    found = (failure_of(seed, mutant) for seed in range(3 * SEEDS))
    assert next((each for each in found if each is not None), None) == invariant


def failure_of(seed: int, mutant: type[ElectionCore]) -> str | None:
    try:
        Election(seed, make=lambda: mutant(ttl_ms=TTL_MS)).run(FAULTS_MS)
    except InvariantError as error:
        return error.invariant
    return None
