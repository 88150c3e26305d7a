"""On a lighthouse that does not know us: what travels in `data`, and what key an answer has."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tft_coord.compat.member_data import MAX_DATA_BYTES, RequestExtras, carried_by, pack_member, unpack_member
from tft_coord.compat.replica_group import (
    BEAT_INTERVAL_MS,
    CallQuorum,
    CancelCall,
    LeftOut,
    TellGroup,
    TorchftEffect,
    TorchftGroupCore,
)
from tft_coord.core import events
from tft_coord.core.types import MAX_UINT64, Member, Quorum, QuorumKey, Refusal
from tft_coord.errors import ProtocolError
from tft_coord.testing import stripped
from tft_coord.timeouts import Timeouts

TIMEOUTS = Timeouts()
EXTRAS = RequestExtras("job", 7, QuorumKey(5, 1), 3)


class Table:
    """Several groups, each with a core, and a lighthouse that gives one answer to all."""

    def __init__(self, *names: str, job: str = "job") -> None:
        self.cores: dict[str, TorchftGroupCore] = {}
        self.calls: dict[str, CallQuorum] = {}
        self.held: dict[str, QuorumKey | None] = {}
        self.said: list[str] = []
        self.refused: dict[str, events.RequestRefused] = {}
        self._words = itertools.count(1)
        self._requests = itertools.count(1)
        for name in names:
            self.join(name, job)

    def join(self, name: str, job: str = "job") -> None:
        """A manager server starts, a further one of that group perhaps; its ranks hold what they held."""
        self.cores[name] = TorchftGroupCore(
            job=job, replica_id=name, timeouts=TIMEOUTS, words=lambda: next(self._words)
        )
        self.held.setdefault(name, None)
        self.cores[name].opened()

    def ask(self, name: str, session: int = 1, **changes: object) -> None:
        member = replace(Member(name, address=f"{name}:1"), **changes)  # type: ignore[arg-type]
        (call,) = [
            each
            for each in self.cores[name].ask(next(self._requests), member, self.held[name], session, 0)
            if not isinstance(each, CancelCall)
        ]
        assert isinstance(call, CallQuorum)
        self.calls[name] = call

    def answer(self, lighthouse_id: int, *foreign: Member) -> dict[str, Quorum]:
        """The lighthouse gives all that have asked one answer; what each group hears of it."""
        members = sorted([*(call.member for call in self.calls.values()), *foreign], key=lambda each: each.replica_id)
        answer = Quorum(QuorumKey(lighthouse_id, 0), tuple(members), 99)
        heard: dict[str, Quorum] = {}
        for name, call in self.calls.items():
            for effect in self.cores[name].answered(call.call, answer):
                match effect:
                    case TellGroup(events.QuorumArrived(_, quorum)):
                        heard[name] = quorum
                        self.held[name] = quorum.key
                    case TellGroup(events.RequestRefused() as refused):
                        self.refused[name] = refused
                    case LeftOut(message):
                        self.said.append(message)
        self.calls.clear()
        return heard

    def next(self, lighthouse_id: int, *names: str, **changes: object) -> QuorumKey:
        """These ask and are answered; all hear the same."""
        for name in names:
            self.ask(name, **changes)  # type: ignore[arg-type]
        heard = self.answer(lighthouse_id)
        assert set(heard) == set(names)
        assert len(set(heard.values())) == 1
        return next(iter(heard.values())).key


# --- what travels in `data` ------------------------------------------------------------------------------------------


@given(
    data=st.one_of(
        st.just(""),
        st.text(max_size=30),
        st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5))).map(json.dumps),
        st.sampled_from(["{}", "[1]", '{"a":1}', '{ "a": 1 }', '{"tft": 1}', "null", "[" * 5000]),
    ),
    lineage=st.one_of(st.none(), st.integers(0, MAX_UINT64)),
    flags=st.lists(st.booleans(), min_size=7, max_size=7),
    held=st.one_of(st.none(), st.builds(QuorumKey, st.integers(0, 2**62), st.integers(0, MAX_UINT64))),
)
def test_what_a_member_says_comes_back_and_the_users_text_as_it_was(
    data: str, lineage: int | None, flags: list[bool], held: QuorumKey | None
) -> None:
    names = ("live", "torn", "needs_configure", "init_sync", "allow_heal", "use_async_quorum", "fixed_with_spares")
    member = Member(
        "a", session=9, step=4, lineage=lineage, min_replica_size=2, failed_heals=1, poor_sources=("b",), data=data
    )
    member = replace(member, **dict(zip(names, flags, strict=True)))  # type: ignore[arg-type]
    extras = RequestExtras("job", 7, held, 3)
    told = pack_member(member, extras)
    assert unpack_member(Member("a", step=4, data=told.data)) == (member, extras)


def test_a_field_of_a_type_that_is_not_checked_is_named() -> None:
    @dataclass(frozen=True)
    class WithShare(Member):
        share: float = 1.0

    with pytest.raises(TypeError, match=r"WithShare\.share is of type float, which JSON does not check"):
        carried_by(WithShare)


def test_the_users_own_stands_beside_ours() -> None:
    told = json.loads(pack_member(Member("a", data='{"zone": "b"}'), EXTRAS).data)
    assert told["zone"] == "b"
    assert set(told) == {"zone", "tft"}


def test_a_text_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ProtocolError, match="which is too long"):
        pack_member(Member("a", data="x" * (MAX_DATA_BYTES - 100)), EXTRAS)


@pytest.mark.parametrize("data", ["", "{}", "[]", "17", "{", '{"other": {}}'])
def test_torchfts_own_members_carry_nothing(data: str) -> None:
    assert unpack_member(Member("a", data=data)) is None


def test_members_on_such_a_lighthouse_have_no_lease() -> None:
    """It recalls nobody and answers no beat: all ask in every step, also one that is alone."""
    told = pack_member(Member("a", step=4, lineage=1, lease_ms=60_000), RequestExtras("job", 1, None, 2))
    assert "lease" not in told.data
    own = unpack_member(told)
    assert own is not None
    assert own[0].lease_ms is None
    assert Quorum(QuorumKey(1, 1), (own[0],)).lease_ms is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("word", -1),
        ("word", True),
        ("word", 2**64),
        ("held", [1]),
        ("held", [1, "2"]),
        ("held", [2**63 - 1, 1]),
        ("live", 1),
        ("failed_heals", 2**31),
        ("poor_sources", ["x"] * 17),
        ("poor_sources", ["x\ny"]),
        ("min_replica_size", 2**40),
        ("lineage", "x"),
        ("job", None),
        ("data", 3),
        ("data", "\ud800"),
        ("min_replica_size", 100_001),
        ("job", "j\nreplica x was lost"),
        ("job", "j" * 257),
    ],
)
def test_nonsense_in_it_is_refused_by_name(field: str, value: object) -> None:
    told = json.loads(pack_member(Member("replica-a"), EXTRAS).data)
    told["tft"][field] = value
    with pytest.raises(ProtocolError, match=r"replica-a|outside"):
        unpack_member(Member("replica-a", data=json.dumps(told)))


def test_a_field_that_an_older_version_leaves_out_has_its_default() -> None:
    told = json.loads(pack_member(Member("a", live=True, poor_sources=("b",), min_replica_size=2), EXTRAS).data)
    del told["tft"]["poor_sources"], told["tft"]["min_replica_size"]
    assert unpack_member(Member("a", data=json.dumps(told))) == (Member("a", live=True), EXTRAS)


@pytest.mark.parametrize("field", ["job", "word", "list", "seen"])
def test_what_makes_the_key_is_never_left_out(field: str) -> None:
    told = json.loads(pack_member(Member("replica-a"), EXTRAS).data)
    del told["tft"][field]
    with pytest.raises(ProtocolError, match=f"replica-a [a-z]+ {field} .None"):
        unpack_member(Member("replica-a", data=json.dumps(told)))


def test_a_text_that_grows_when_it_is_spelled_anew_is_refused() -> None:
    ours = json.loads(pack_member(Member("replica-a"), EXTRAS).data)
    said = json.dumps({"x": "é" * 30_000, **ours}, ensure_ascii=False)
    assert len(said.encode()) < MAX_DATA_BYTES
    with pytest.raises(ProtocolError, match="replica-a sent a data of"):
        unpack_member(Member("replica-a", data=said))


# --- keys ------------------------------------------------------------------------------------------------------------


def test_all_make_the_same_quorum_of_one_answer_and_a_steady_one_keeps_its_key() -> None:
    table = Table("a", "b")
    first = table.next(1, "a", "b")
    assert table.next(1, "a", "b", step=1) == first
    assert table.next(1, "a", "b", step=2) == first


def test_what_is_not_on_their_wire_reaches_the_group_core() -> None:
    table = Table("a")
    table.ask("a", lineage=5, live=True, torn=True, data='{"zone": 1}', session=77)
    member = table.answer(1)["a"].members[0]
    assert (member.lineage, member.live, member.torn, member.session) == (5, True, True, 77)
    assert member.data == '{"zone": 1}'


def test_another_id_or_list_is_another_key_and_ids_rise() -> None:
    table = Table("a", "b", "c")
    first = table.next(1, "a", "b")
    second = table.next(2, "a", "b", "c")
    third = table.next(2, "a", "b")  # the same id, by whatever fault
    assert first < second < third
    assert len({first.nonce, second.nonce, third.nonce}) == 3


def test_a_lighthouse_that_counts_from_1_again_gives_no_key_twice() -> None:
    table = Table("a", "b")
    table.next(1, "a", "b")
    before = table.next(7, "a", "b", commit_failures=1)
    # It was started anew; the ids it gives have been given before, to other members of the same names.
    after = table.next(1, "a", "b")
    assert after.quorum_id == before.quorum_id + 1
    # And again, to the very id that is held now.
    assert table.next(after.quorum_id, "a", "b") != after


@pytest.mark.parametrize("why", [{"needs_configure": True}, {"commit_failures": 1}])
def test_a_process_group_that_is_no_use_is_another_key_though_the_id_stands(why: dict[str, object]) -> None:
    table = Table("a", "b")
    first = table.next(1, "a", "b")
    table.ask("a", **why)  # type: ignore[arg-type]
    table.ask("b")
    heard = table.answer(1)
    assert heard["a"].key == heard["b"].key != first


def test_one_that_holds_another_key_makes_all_configure_anew() -> None:
    table = Table("a", "b")
    first = table.next(1, "a", "b")
    table.held["b"] = QuorumKey(1, 5)  # an answer that reached it alone
    second = table.next(1, "a", "b")
    assert second > first


def test_a_new_manager_server_of_a_group_that_lives_is_another_list() -> None:
    """It has no memory of the list, and its ranks hold the key still."""
    table = Table("a", "b")
    first = table.next(1, "a", "b")
    table.join("b")
    table.ask("a")
    table.ask("b", session=2)
    heard = table.answer(1)
    assert heard["a"] == heard["b"]
    assert heard["a"].key.quorum_id == first.quorum_id + 1


def test_an_answer_that_some_have_never_seen_makes_all_configure_anew() -> None:
    """That lighthouse made a quorum of one that asks and of one that had gone, and the latter comes back."""
    table = Table("a", "b")
    first = table.next(1, "a", "b")
    table.ask("a", step=1)
    table.ask("b")
    gone = table.calls.pop("b").member
    table.cores["b"].withdraw(4)
    assert table.answer(1, gone)["a"].key == first
    table.ask("a", step=2)
    table.ask("b", step=1)
    heard = table.answer(1)
    assert heard["a"].key == heard["b"].key != first


def test_an_answer_to_an_older_request_is_asked_anew() -> None:
    table = Table("a", "b")
    table.ask("a")
    stale = table.calls["a"].member
    table.ask("a", step=1)
    (again,) = table.cores["a"].answered(table.calls["a"].call, Quorum(QuorumKey(1, 0), (stale,)))
    assert isinstance(again, CallQuorum)
    assert again.call != table.calls["a"].call
    assert again.member == table.calls["a"].member


# --- strangers -------------------------------------------------------------------------------------------------------


def test_torchfts_members_were_here_first_and_ours_are_refused_by_name() -> None:
    table = Table("a")
    table.ask("a")
    assert table.answer(1, Member("torch:1")) == {}
    refused = table.refused["a"]
    assert refused.code == Refusal.OTHER_KIND.value
    assert "torch:1 (torchft)" in refused.message


def test_torchfts_members_that_come_later_are_left_out_and_named_once() -> None:
    table = Table("a", "b")
    first = table.next(1, "a", "b")
    for step in (1, 2):
        table.ask("a", step=step)
        table.ask("b", step=step)
        heard = table.answer(2, Member("torch:1"))
        assert heard["a"].replica_ids == ("a", "b")
        assert heard["a"].key == heard["b"].key != first
    assert len(table.said) == 2  # each group, once
    assert "torch:1" in table.said[0]


def test_a_replica_of_another_job_is_a_stranger_as_well() -> None:
    table = Table("a")
    table.join("b", job="other")
    table.ask("a")
    table.ask("b")
    table.answer(1)
    assert "b (job other)" in table.refused["a"].message
    assert "a (job job)" in table.refused["b"].message


def test_a_state_from_outside_that_is_ahead_of_every_live_one_is_refused() -> None:
    table = Table("a", "b")
    table.ask("a", step=10, live=True)
    table.ask("b", step=1_000)
    heard = table.answer(1)
    assert heard["a"].replica_ids == ("a",)
    assert (table.refused["b"].code, "step 1000" in table.refused["b"].message) == (Refusal.AHEAD.value, True)


# --- requests and beats ----------------------------------------------------------------------------------------------


def test_who_has_not_asked_does_not_beat() -> None:
    core = Table("a").cores["a"]
    assert not core.tick(1_000)
    core.ask(1, Member("a"), None, 1, 2_000)
    assert core.tick(2_000)
    assert not core.tick(2_000 + BEAT_INTERVAL_MS - 1)
    assert core.tick(2_000 + BEAT_INTERVAL_MS)
    core.ended()
    assert not core.tick(9_000)


def test_an_open_request_is_asked_again_on_the_next_connection_and_a_withdrawn_one_is_not() -> None:
    table = Table("a")
    core = table.cores["a"]
    table.ask("a")
    core.closed()
    (again,) = core.opened()
    assert isinstance(again, CallQuorum)
    assert core.withdraw(2) == []
    assert core.withdraw(1) == [CancelCall(again.call)]
    core.closed()
    assert core.opened() == []


def test_an_answer_to_a_call_that_was_given_up_is_not_believed() -> None:
    table = Table("a")
    table.ask("a")
    call = table.calls["a"]
    table.cores["a"].withdraw(1)
    assert table.cores["a"].answered(call.call, Quorum(QuorumKey(1, 0), (call.member,))) == []


# --- anything, in any order ------------------------------------------------------------------------------------------

STRANGER = Member("stranger")
FAULTS = (
    "went away",
    "asks anew",
    "lost the answer",
    "its ranks gave up",
    "all ranks gave up",
    "has loaded a state from outside",
    "an older request comes last",
    "another lighthouse",
    "another lighthouse, and it had failed",
    "it had failed",
    "it can't use its group",
    "stranger",
)
FAILED, UNUSABLE = {"commit_failures": 1}, {"needs_configure": True}
REASONS_OF: dict[str, dict[str, int]] = {
    "another lighthouse, and it had failed": FAILED,
    "it had failed": FAILED,
    "it can't use its group": UNUSABLE,
}
REASONS: tuple[dict[str, int], ...] = ({}, {}, {}, FAILED, UNUSABLE)


@dataclass
class Group:
    """One replica group, its ranks, and what was told to it."""

    name: str
    core: TorchftGroupCore
    session: int = 1
    open: bool = True
    held: QuorumKey | None = None  # by its ranks
    asked: tuple[int, Member] | None = None  # its open request
    call: int = 0  # the call that stands for it
    given: int = 0  # number of the last answer that it understood
    highest_id: int = 0  # that its ranks have ever held


@dataclass
class Call:
    """On its way to the lighthouse, or waiting there."""

    name: str
    number: int
    core: TorchftGroupCore
    member: Member
    held: QuorumKey | None
    given: int


@dataclass
class Given:
    """One answer of the lighthouse, and what became of it."""

    number: int
    quorum: Quorum
    calls: dict[str, Call]
    told: set[Quorum] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


class ForeignJob(RuleBasedStateMachine):
    """Several groups, and a lighthouse that forms of what it was told whatever it likes.

    As torchft's it keeps those who went away, hears of old calls late, raises its id only when the list is another one
    or commits failed, and counts from 1 when it is started anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.groups: dict[str, Group] = {}
        self.coming: list[Call] = []  # requests on their way
        self.going: list[tuple[Call, Given]] = []  # answers on their way
        self.lists: dict[QuorumKey, tuple[object, ...]] = {}
        self.born: dict[QuorumKey, int] = {}  # by which answer a key came into the world
        self.start_lighthouse()
        for name in "abc":
            self.groups[name] = Group(name, self.new_core(name))

    def new_core(self, name: str) -> TorchftGroupCore:
        core = TorchftGroupCore(job="job", replica_id=name, timeouts=TIMEOUTS, words=lambda: next(self.numbers))
        assert core.opened() == []
        return core

    def start_lighthouse(self) -> None:
        self.last_id = 0
        self.previous: tuple[str, ...] = ()
        self.waiting: dict[str, Call] = {}  # the last that was heard of each
        self.callers: list[Call] = []

    # --- what a core says -----------------------------------------------------------------------------------------

    def heard(self, group: Group, effects: list[TorchftEffect], of: Given | None = None) -> None:
        for effect in effects:
            match effect:
                case CallQuorum(number, member):
                    assert group.asked is not None, "it calls, and nobody asks"
                    assert group.open
                    assert number > group.call, "a number is used twice"
                    group.call = number
                    self.coming.append(Call(group.name, number, group.core, member, group.held, group.given))
                case CancelCall(number):
                    assert number == group.call
                case TellGroup(event):
                    assert of is not None, "it makes up an answer"
                    assert group.asked is not None
                    assert event.request == group.asked[0], "it answers what was not asked"
                    if isinstance(event, events.QuorumArrived):
                        self.told(group, event.quorum, of)
                    else:
                        of.refused.add(group.name)
                    group.asked = None

    def told(self, group: Group, quorum: Quorum, of: Given) -> None:
        assert group.asked is not None
        assert quorum.member(group.name) == group.asked[1], "it is told of itself what it does not say any more"
        of.told.add(quorum)
        assert len(of.told) == 1, "two make different quorums of one answer"
        assert not of.refused & set(quorum.replica_ids), "who is refused is a member for others"
        assert STRANGER not in of.quorum.members or any(call.held is not None for call in of.calls.values())
        ours = [each.replica_id for each in of.quorum.members if each.replica_id != STRANGER.replica_id]
        live = [each.step for each in self.said(of) if each.live]
        ahead = {each.replica_id for each in self.said(of) if live and not each.live and each.step > max(live)}
        assert quorum.replica_ids == tuple(name for name in ours if name not in ahead)
        key, members = quorum.key, tuple(member.identity for member in quorum.members)
        assert self.lists.setdefault(key, members) == members, "one key for two lists"
        if self.born.setdefault(key, of.number) != of.number:
            calls = [of.calls[name] for name in quorum.replica_ids]
            assert {call.held for call in calls} == {key}, "a key is given again, and some do not hold it"
            assert len({call.given for call in calls}) == 1, "some go on by an answer that others have never seen"
            assert not any(each.needs_configure or each.commit_failures for each in quorum.members)
        group.given = of.number
        if key != group.held:
            assert key.quorum_id > group.highest_id, "the ids of those who hold it do not rise"

    def said(self, of: Given) -> list[Member]:
        told = [unpack_member(each) for each in of.quorum.members]
        return [each[0] for each in told if each is not None]

    # --- the groups -----------------------------------------------------------------------------------------------

    @rule(
        place=st.sampled_from("abc"),
        step=st.integers(0, 2),
        live=st.booleans(),
        why=st.sampled_from(REASONS),
    )
    def asks(self, place: str, step: int, live: bool, why: dict[str, int]) -> None:
        group = self.groups[place]
        number = next(self.numbers)
        member = Member(group.name, address=f"{group.name}:1", step=step, live=live)
        if why:
            member = replace(member, **why)  # type: ignore[arg-type]
        orders = group.core.ask(number, member, group.held, group.session, 0)
        group.asked = number, replace(member, session=group.session)
        self.heard(group, orders)
        assert not group.open or self.coming[-1].name == group.name

    @rule(place=st.sampled_from("abc"))
    def withdraws(self, place: str) -> None:
        group = self.groups[place]
        if group.asked is not None:
            self.heard(group, group.core.withdraw(group.asked[0]))
            group.asked = None

    @rule(place=st.sampled_from("abc"))
    def connection_blinks(self, place: str) -> None:
        """What was on its way on the old one may reach the lighthouse still; its answer reaches nobody."""
        group = self.groups[place]
        group.core.closed()
        before = group.call
        self.heard(group, group.core.opened())
        assert (group.call > before) is (group.asked is not None), "what is open is asked again"

    @rule(place=st.sampled_from("abc"), dies=st.booleans())
    def starts_anew(self, place: str, dies: bool) -> None:
        """Its manager server, or all of it, with a replica id of its own."""
        group = self.groups[place]
        name = f"{place}{next(self.numbers)}" if dies else group.name
        held, highest = (None, 0) if dies else (group.held, group.highest_id)
        session = group.session + 1
        self.groups[place] = Group(name, self.new_core(name), session, held=held, highest_id=highest)

    @initialize(first=st.sampled_from(["", "", "stranger"]))
    def has_begun(self, first: str) -> None:
        self.meets(first, "")

    @rule(faults=st.lists(st.tuples(st.sampled_from(["", *FAULTS]), st.sampled_from(["", "", "", "c"])), max_size=4))
    def several_meet(self, faults: list[tuple[str, str]]) -> None:
        """Quorum after quorum: what one fault leaves behind is seen in the next ones."""
        for fault, without in faults:
            self.meets(fault, without)
            self.meets("", without)

    def meets(self, fault: str, without: str) -> None:
        """One quorum, with a fault at most, which is b's where it is one's."""
        if fault.startswith("another lighthouse"):
            self.lighthouse_starts_anew()
        for place in "abc":
            if place not in without:
                ahead = place == "b" and fault == "has loaded a state from outside"
                self.asks(place, 5 if ahead else 1, not ahead, REASONS_OF.get(fault, {}) if place == "b" else {})
        if fault == "an older request comes last":
            self.asks("b", 2, live=True, why={})
            self.coming.reverse()
        self.all_arrive()
        if fault == "went away":
            self.withdraws("b")
        if fault == "asks anew":
            self.asks("b", 2, live=True, why={})
        self.form(set(self.waiting), stranger=fault == "stranger", at_once=False)
        if fault == "lost the answer":
            self.connection_blinks("b")
        missed = {"its ranks gave up": "b", "all ranks gave up": "abc"}.get(fault, "")
        while self.going:
            call, given = self.going.pop(0)
            self.reaches(call, given, took=call.name[0] not in missed)

    # --- the lighthouse -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def one_arrives(self, data: st.DataObject) -> None:
        self.arrives(self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1))))

    @rule()
    def all_arrive(self) -> None:
        coming, self.coming = self.coming, []
        for call in coming:
            self.arrives(call)

    def arrives(self, call: Call) -> None:
        self.waiting[call.name] = replace(call, member=stripped(call.member))
        self.callers.append(call)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), stranger=st.sampled_from([False, False, False, True]), at_once=st.booleans())
    def forms(self, data: st.DataObject, stranger: bool, at_once: bool) -> None:
        names = data.draw(
            st.one_of(st.just(set(self.waiting)), st.sets(st.sampled_from(sorted(self.waiting)), min_size=1))
        )
        self.form(names, stranger=stranger, at_once=at_once)

    def form(self, names: set[str], *, stranger: bool, at_once: bool) -> Given:
        calls = {name: self.waiting.pop(name) for name in sorted(names)}
        members = [call.member for call in calls.values()] + [STRANGER] * stranger
        ids = tuple(member.replica_id for member in members)
        if ids != self.previous or any(member.commit_failures for member in members):
            self.last_id += 1
        self.previous = ids
        given = Given(next(self.numbers), Quorum(QuorumKey(self.last_id, 0), tuple(members)), calls)
        self.going += [(call, given) for call in self.callers if call.name in names]
        self.callers = [call for call in self.callers if call.name not in names]
        if at_once:
            while self.going:
                self.reaches(*self.going.pop(0), took=True)
        return given

    @rule()
    def lighthouse_starts_anew(self) -> None:
        """Requests and answers are gone with it; every connection breaks."""
        self.start_lighthouse()
        self.coming.clear()
        self.going.clear()
        for place in "abc":
            self.connection_blinks(place)

    # --- answers --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.going)
    @rule(data=st.data(), took=st.booleans())
    def one_is_answered(self, data: st.DataObject, took: bool) -> None:
        self.reaches(*self.going.pop(data.draw(st.integers(0, len(self.going) - 1))), took=took)

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def one_answer_is_lost(self, data: st.DataObject) -> None:
        """As connections lose them: with all that is open there."""
        call, _ = self.going.pop(data.draw(st.integers(0, len(self.going) - 1)))
        for place, group in self.groups.items():
            if group.core is call.core:
                self.connection_blinks(place)

    def reaches(self, call: Call, given: Given, *, took: bool) -> None:
        """Its ranks may have given up while the answer was on its way to them."""
        for group in self.groups.values():
            if group.core is call.core:
                stands = group.asked is not None and group.call == call.number
                before = group.given
                orders = call.core.answered(call.number, given.quorum)
                assert orders or not stands, "an answer is not heard"
                assert stands or not orders, "an answer to a call that was given up is believed"
                self.heard(group, orders, given)
                if group.given != before and took:
                    (quorum,) = given.told
                    group.held = quorum.key
                    group.highest_id = max(group.highest_id, quorum.key.quorum_id)

    def teardown(self) -> None:
        """In calm all find together, and stay: from the second answer on nothing is made anew."""
        self.coming.clear()
        self.waiting.clear()
        self.callers.clear()
        self.going.clear()
        keys = []
        for _ in range(3):
            for place in self.groups:
                self.asks(place, 1, True, {})
            self.all_arrive()
            given = self.form({group.name for group in self.groups.values()}, stranger=False, at_once=True)
            assert {group.given for group in self.groups.values()} == {given.number}
            keys.append(next(iter(given.told)).key)
        assert keys[1] == keys[2]


TestForeignJob = ForeignJob.TestCase
TestForeignJob.settings = settings(
    max_examples=140, stateful_step_count=12, deadline=None, derandomize=True, database=None
)
