"""The settings of the election: what is refused, with which words, and what the environment gives."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from tft_coord import ConfigError
from tft_coord.lighthouse import election
from tft_lighthouse import EtcdConfig
from tft_lighthouse.etcd import etcd_pb2 as pb
from tft_lighthouse.etcd import flags
from tft_lighthouse.etcd.client import EtcdClient, _floor_of, _leader_of
from tft_lighthouse.etcd.settings import read_flags


def read(*words: str, **environment: str) -> EtcdConfig | None:
    parser = argparse.ArgumentParser()
    flags.add(parser)
    return read_flags(parser.parse_args(words), environment)


def test_without_endpoints_there_is_no_election() -> None:
    assert read() is None
    assert read(TFT_LIGHTHOUSE_ETCD_PREFIX="/a") is None, "a variable for all hosts may stand beside no endpoints"


def test_flags_beat_the_environment() -> None:
    variables = {"TFT_LIGHTHOUSE_ETCD": "a:1, http://b:2", "TFT_LIGHTHOUSE_ETCD_PREFIX": "/x"}
    found = read(**variables)
    assert found is not None
    assert (found.addresses, found.prefix, found.ttl_s) == (("a:1", "b:2"), "/x", 2)
    found = read("--etcd=c:3", "--etcd-prefix=/y", "--etcd-ttl-s=5", **variables)
    assert found is not None
    assert (found.addresses, found.prefix, found.ttl_s) == (("c:3",), "/y", 5)


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (("--etcd_ttl_s=5",), {}, "have no effect without --etcd"),
        (("--etcd_prefix=/a",), {}, "have no effect without --etcd"),
        (("--etcd=nowhere",), {}, "etcd endpoint 'nowhere' is no address; give host:port, such as 10.0.0.1:2379"),
        (("--etcd=a:1,",), {}, "etcd endpoint '' is no address"),
        (("--etcd=" + ",".join(["a:1"] * 17),), {}, "etcd has 17 endpoints; give 1 to 16"),
        (("--etcd=a:1,https://b:1",), {}, "give it to all or to none"),
        (("--etcd=a:1", "--etcd_prefix=/"), {}, "the etcd prefix is '/'; give 1 to 256 bytes, printable"),
        (("--etcd=a:1", "--etcd_prefix=/a\nb"), {}, "the etcd prefix is"),
        (("--etcd=a:1", "--etcd_ttl_s=1"), {}, "etcd_ttl_s is 1; give 2 to 60 seconds"),
        (("--etcd=a:1",), {"TFT_LIGHTHOUSE_ETCD_CA": "ca"}, "no effect without https:// endpoints"),
        (("--etcd=https://a:1",), {"TFT_LIGHTHOUSE_ETCD_CERT": "c"}, "a certificate for etcd needs its key"),
    ],
)
def test_a_wrong_setting_is_named(words: tuple[str, ...], environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", "\\(")):
        read(*words, **environment)


def test_a_certificate_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    config = EtcdConfig(endpoints=("https://a:1",), ca=str(tmp_path / "ca.pem"))

    async def make() -> None:
        EtcdClient(config, "us:1", within_s=1)

    with pytest.raises(ConfigError, match=r"TFT_LIGHTHOUSE_ETCD_CA is .*ca.pem', which can't be read: No such file"):
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
    assert _floor_of(b"9223372036854775807") == 2**63 - 1


@pytest.mark.parametrize("value", [b"", b"-1", b"1.5", b"9223372036854775808", b"1" * 60_000, "\u0661".encode()])
def test_a_floor_of_another_program_is_named(value: bytes) -> None:
    with pytest.raises(ValueError, match="was not written by a lighthouse"):
        _floor_of(value)
