"""Who may see and who may change what over HTTP."""

from __future__ import annotations

import base64

import pytest

from tft_coord.lighthouse import Gate
from tft_lighthouse.http.access import Access, Kind, Visitor

SECRET = "s3cret"


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


def status(
    access: Access, kind: Kind, address: str = "127.0.0.1", host: str = "localhost:29511", **facts: object
) -> int:
    visitor = Visitor(address=address, host=host, **facts)  # type: ignore[arg-type]
    denial = access.denial(visitor, kind)
    return denial.status if denial is not None else 200


WITH_SECRET = Access(Gate(SECRET), names=(), insecure=False)
FOR_THIS_MACHINE = Access(Gate(None), names=("trainer-7",), insecure=False)
INSECURE = Access(Gate(None), names=("trainer-7",), insecure=True)


@pytest.mark.parametrize("access", [WITH_SECRET, FOR_THIS_MACHINE, INSECURE])
def test_everybody_may_ask_for_health(access: Access) -> None:
    assert status(access, Kind.HEALTH, "192.0.2.1", "probe.example") == 200


@pytest.mark.parametrize(
    ("authorization", "reads", "changes"),
    [
        ("", 401, 401),
        ("Bearer", 401, 401),
        ("Bearer wrong", 401, 401),
        (f"Bearer {SECRET}", 200, 200),
        (f"bearer {SECRET}", 401, 401),
        (basic("wrong"), 401, 401),
        (basic(SECRET), 200, 401),
        ("Basic ****", 401, 401),
        ("Basic " + base64.b64encode(b"\xff\xfe").decode(), 401, 401),
        ("Basic " + base64.b64encode(SECRET.encode()).decode(), 401, 401),
    ],
)
def test_with_a_secret_it_must_be_shown(authorization: str, reads: int, changes: int) -> None:
    for address, host in (("127.0.0.1", "localhost:1"), ("192.0.2.1", "lighthouse.example:1")):
        assert status(WITH_SECRET, Kind.READ, address, host, authorization=authorization) == reads
        assert status(WITH_SECRET, Kind.CHANGE, address, host, authorization=authorization) == changes


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost:29511", True),
        ("127.0.0.1:29511", True),
        ("[::1]:29511", True),
        ("10.1.2.3", True),
        ("Trainer-7:29511", True),
        ("trainer-7", True),
        ("", False),
        ("evil.example:29511", False),
        ("localhost.evil.example", False),
        ("[::1].evil.example", False),
        ("localhost:abc", False),
        ("127.0.0.1.evil.example", False),
        ("[evil", False),
    ],
)
def test_without_a_secret_a_page_that_takes_this_machine_s_address_is_denied(host: str, is_own: bool) -> None:
    assert (status(FOR_THIS_MACHINE, Kind.READ, host=host) == 200) == is_own
    assert (status(INSECURE, Kind.CHANGE, host=host) == 200) == is_own
    assert status(INSECURE, Kind.READ, "192.0.2.1", host=host) == 200, "an operator may reach it by any name"


@pytest.mark.parametrize(
    ("address", "facts", "expected"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("::ffff:127.0.0.1", {}, 200),
        ("192.0.2.1", {}, 403),
        ("::ffff:192.0.2.1", {}, 403),
        ("", {}, 403),
        ("127.0.0.1", {"is_forwarded": True}, 403),
    ],
)
def test_without_a_secret_only_this_machine_may_change_anything(
    address: str, facts: dict[str, bool], expected: int
) -> None:
    assert status(INSECURE, Kind.CHANGE, address, **facts) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, 200),
        ("http://localhost:29511", 200),
        ("http://LOCALHOST:29511", 200),
        ("http://localhost:8888", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
def test_the_page_of_another_server_may_change_nothing(origin: str | None, expected: int) -> None:
    assert status(FOR_THIS_MACHINE, Kind.CHANGE, origin=origin) == expected
    shown = {"origin": origin, "authorization": f"Bearer {SECRET}"}
    assert status(WITH_SECRET, Kind.CHANGE, **shown) == expected


def test_the_secret_stands_in_no_text() -> None:
    visitor = Visitor(address="192.0.2.1", host="h", authorization=f"Bearer {SECRET}")
    assert SECRET not in repr(visitor)
    assert SECRET not in repr(WITH_SECRET.denial(visitor, Kind.CHANGE))
