"""Which interface a process listens on, and which address it gives to others."""

from __future__ import annotations

import ipaddress
import socket
import sys
from pathlib import Path

import pytest

from tft_ckpt import ConfigError
from tft_ckpt.transfer import address
from tft_ckpt.transfer.address import advertised_url, interface_address, listen, parse_url

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces' addresses are found on Linux only")


def test_an_interface_is_listened_on_and_advertised() -> None:
    with listen(None, 0, "lo") as listener:
        host, port = parse_url(advertised_url(listener, None, "https"))
        assert host == "127.0.0.1"
        with socket.create_connection((host, port), 20):
            pass
        assert listener.getsockname()[0] == "127.0.0.1", "and on no other one"


def test_the_advertised_address_may_be_another_than_the_interface() -> None:
    with listen(None, 0, "lo") as listener:
        assert advertised_url(listener, "node7:99", "https") == "https://node7:99"


def test_every_interface_has_an_address_of_this_host_or_says_that_it_has_none() -> None:
    addressed = [name for _, name in socket.if_nameindex() if address._ipv4_of(name) or address._ipv6_of(name)]
    assert "lo" in addressed
    for _, name in socket.if_nameindex():
        if name in addressed:
            assert not ipaddress.ip_address(interface_address(name)).is_unspecified
            listen(None, 0, name).close()
        else:
            with pytest.raises(ConfigError, match=f"interface {name} has no address"):
                interface_address(name)


def test_an_interface_with_ipv6_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     lo\n"
        "fd000000000000000000000000000099 04 40 00 82     other\n"
        "fd000000000000000000000000000002 04 40 00 82     lo\n"
    )
    monkeypatch.setattr(address, "_ipv4_of", lambda name: None)
    monkeypatch.setattr(address, "_IPV6_LIST", table)
    assert interface_address("lo") == "fd00::2"
    table.write_text("fe8000000000000000fc00fffe000001 04 40 20 80     lo\n")
    with pytest.raises(ConfigError, match="interface lo has no address"):
        interface_address("lo")
    monkeypatch.setattr(address, "_IPV6_LIST", tmp_path / "none")
    with pytest.raises(ConfigError, match="interface lo has no address"):
        interface_address("lo")


def test_what_is_no_interface_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere', which this host does not have; give one of .*lo"):
        listen(None, 0, "nowhere")
    with pytest.raises(ConfigError, match="give one of them"):
        listen("127.0.0.1", 0, "lo")
