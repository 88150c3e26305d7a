"""The settings of the election: what is refused, with which words, and what the environment gives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from tft_coord import ConfigError
from tft_coord.lighthouse import election
from tft_lighthouse import EtcdConfig
from tft_lighthouse.etcd import etcd_pb2 as pb
from tft_lighthouse.etcd.candidate import Candidate
from tft_lighthouse.etcd.client import MOST_FLOOR, EtcdClient, _floor_of, _leader_of
from tft_lighthouse.launch import _etcd
from tft_lighthouse.settings import resolve


def read(file: Mapping[str, str | int] = {}, /, *, path: str = "l.toml", **flags: str) -> EtcdConfig | None:
    return _etcd(resolve(flags, {}, file, path if file else None))


def test_without_endpoints_there_is_no_election() -> None:
    assert read() is None
    assert read(etcd_prefix="/tft/lighthouse", etcd_ttl_s="2") is None, "the defaults, as --print-config writes them"


def test_each_setting_reaches_the_election_from_the_file_and_from_flags() -> None:
    found = read({"etcd": "a:1, http://b:2", "etcd_prefix": "/x", "etcd_ttl_s": 3})
    assert found is not None
    assert (found.addresses, found.prefix, found.ttl_s) == (("a:1", "b:2"), "/x", 3)
    found = read({"etcd": "a:1", "etcd_prefix": "/x"}, etcd="c:3", etcd_prefix="/y", etcd_ttl_s="5")
    assert found is not None
    assert (found.addresses, found.prefix, found.ttl_s) == (("c:3",), "/y", 5)


def test_certificates_in_the_file_are_relative_to_its_folder() -> None:
    file = {"etcd": "https://a:1", "etcd_ca": "ca.pem", "etcd_cert": "cert.pem", "etcd_key": "/k/key.pem"}
    found = read(file, path="/etc/tft/l.toml", etcd_cert="here.pem")
    assert found is not None
    assert (found.ca, found.cert, found.key) == ("/etc/tft/ca.pem", "here.pem", "/k/key.pem")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"etcd_ttl_s": "5"}, "etcd_ttl_s has no effect without etcd; give etcd its endpoints, or leave"),
        ({"etcd_prefix": "/a"}, "etcd_prefix has no effect without etcd"),
        ({"etcd_key": "k"}, "etcd_key has no effect without etcd"),
        ({"etcd": "nowhere"}, "etcd endpoint 'nowhere' is no address; give host:port, such as 10.0.0.1:2379"),
        ({"etcd": "a:1,"}, "etcd endpoint '' is no address"),
        ({"etcd": ",".join(["a:1"] * 17)}, "etcd has 17 endpoints; give 1 to 16"),
        ({"etcd": "a:1,https://b:1"}, "give it to all or to none"),
        ({"etcd": "a:1", "etcd_prefix": "/"}, "etcd_prefix is '/'; give 1 to 256 bytes, printable"),
        ({"etcd": "a:1", "etcd_prefix": "/a\nb"}, "--etcd_prefix: etcd_prefix is"),
        ({"etcd": "a:1", "etcd_ttl_s": "1"}, "etcd_ttl_s is 1; give 2 to 60 seconds"),
        ({"etcd": "a:1", "etcd_ca": "ca"}, "etcd_ca has no effect without https:// endpoints"),
        ({"etcd": "https://a:1", "etcd_cert": "c"}, "set both etcd_cert and etcd_key, or neither"),
    ],
)
def test_a_wrong_setting_is_named(flags: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**flags)  # type: ignore[arg-type]  # the keys are names of settings
    assert sentence in str(caught.value)


def test_a_certificate_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    config = EtcdConfig(endpoints=("https://a:1",), ca=str(tmp_path / "ca.pem"))

    async def make() -> None:
        EtcdClient(config, "us:1", within_s=1)

    with pytest.raises(ConfigError, match=r"etcd_ca is .*ca.pem', which can't be read: No such file"):
        asyncio.run(make())


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[" * 60_000,
        b"[]",
        b"{}",
        b"7",
        b'{"address": 1, "started_ms": 1}',
        b'{"address": "a:1", "started_ms": true}',
        b'{"address": "a:1", "started_ms": -1}',
        b'{"address": "a:1", "started_ms": 9223372036854775808}',
        b'{"address": "a\\n:1", "started_ms": 1}',
        b'{"address": "' + b"a" * 600 + b'", "started_ms": 1}',
        b"\xff",
    ],
)
def test_a_key_of_another_program_is_named(value: bytes) -> None:
    with pytest.raises(ValueError, match="was not written by a lighthouse"):
        _leader_of(pb.KeyValue(key=b"/x/leader", value=value))


def test_what_a_lighthouse_wrote_is_read() -> None:
    found = pb.KeyValue(key=b"k", value=b'{"address": "a:1", "started_ms": 5, "more": []}', mod_revision=7, lease=9)
    assert _leader_of(found) == election.Leader("a:1", 9, 7, 5)
    assert _floor_of(floor(b"%d" % MOST_FLOOR)) == MOST_FLOOR


def floor(value: bytes) -> pb.KeyValue:
    return pb.KeyValue(key=b"/x/started_ms", value=value)


@pytest.mark.parametrize("value", [b"%d" % (MOST_FLOOR + 1), b"9223372036854775807", b"9" * 19])
def test_a_floor_without_ids_above_it_is_refused_before_it_is_counted_up(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"of its key '/x/started_ms' leaves no .* \(etcdctl del /x/started_ms\)"):
        _floor_of(floor(value))


def test_a_value_that_can_t_be_used_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    candidate = Candidate(EtcdConfig(endpoints=("a:1",)), began=lambda *_: None, ended=lambda: None)
    candidate._is_failure_logged, candidate._failing_since_s = True, 0.0
    for failure in ("1 is bad", "1 is bad", "2 is bad"):
        candidate._note(failure, is_reached=True)
    for failure in ("a:1: down", "b:1: down"):
        candidate._note(failure, is_reached=False)
    assert [record.getMessage() for record in caplog.records] == [
        "etcd's keys can't be used: 1 is bad",
        "etcd's keys can't be used: 2 is bad",
    ]


@pytest.mark.parametrize("value", [b"", b"-1", b"1.5", b"1" * 20, b"1" * 60_000, "\u0661".encode()])
def test_a_floor_of_another_program_is_named(value: bytes) -> None:
    with pytest.raises(ValueError, match="was not written by a lighthouse"):
        _floor_of(floor(value))
