"""Settings: what is said, what the environment says, what clashes."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

from tft_algos.errors import ConfigError, UnknownSettingError
from tft_algos.manager.config import ManagerConfig, ResolvedConfig, WorldSizeMode, config_of, from_environment
from tft_algos.manager.quorum.group_store import own_host
from tft_algos.manager.settings import ManagerSettings
from tft_algos.testing import MemoryTransport
from tft_ckpt import HTTPTransport
from tft_coord.timeouts import Timeouts

LIGHTHOUSE = {"TFT_LIGHTHOUSE": "localhost:1", "TFT_TOKEN": "secret"}


def resolve(environ: dict[str, str] | None = None, **settings: object) -> ResolvedConfig:
    environ = LIGHTHOUSE if environ is None else environ
    return from_environment(config_of(None, settings), environ, own_host=lambda: "here")


def test_plain_python_needs_a_lighthouse_and_nothing_else() -> None:
    config = resolve()
    assert (config.rank, config.world_size, config.store_addr, config.hostname) == (0, 1, None, "here")
    assert (config.min_replica_size, config.job, config.quorum_retries) == (1, "default", 0)


def test_torchruns_environment_is_enough() -> None:
    environ = {
        **LIGHTHOUSE,
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }
    config = resolve(environ)
    assert (config.rank, config.world_size, config.store_addr, config.store_port) == (1, 2, "host", 29400)
    assert (config.group_scope, config.run_scope) == ("tft/default/run", "tft/default/run/3")


@pytest.mark.parametrize("name", ["TFT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"])
def test_either_name_of_the_lighthouse_will_do(name: str) -> None:
    assert resolve({name: "http://there:2", "TFT_INSECURE": "1"}).lighthouse_addr == "http://there:2"


def test_without_a_secret_a_job_is_of_this_machine() -> None:
    assert resolve({"TFT_LIGHTHOUSE": "localhost:1"}).hostname == "localhost"
    for environ in ({"TFT_TOKEN": "secret"}, {"TFT_INSECURE": "1"}):
        assert resolve({"TFT_LIGHTHOUSE": "there:1", **environ}).hostname == "here"
    assert resolve({"TFT_LIGHTHOUSE": "there:1"}, insecure=True).insecure
    for environ, settings, says in (
        ({"TFT_LIGHTHOUSE": "there:1"}, {}, "the lighthouse's host .* is 'there' and no shared secret is set"),
        ({"TFT_LIGHTHOUSE": "localhost:1,10.0.0.1:1"}, {}, "is '10.0.0.1' and no shared"),
        ({"TFT_LIGHTHOUSE": "localhost:1"}, {"hostname": "node-1"}, "hostname is 'node-1' and no shared secret"),
        ({"TFT_LIGHTHOUSE": "there:1", "TFT_INSECURE": "1"}, {"insecure": False}, "openssl rand -hex 32"),
        ({"TFT_LIGHTHOUSE": "there:1", "TFT_INSECURE": "yes"}, {}, "TFT_INSECURE is 'yes'; give 0 or 1"),
        ({"TFT_LIGHTHOUSE": "there:1"}, {"insecure": 1}, "insecure is 1; give True or False"),
    ):
        with pytest.raises(ConfigError, match=says):
            resolve(environ, **settings)


def test_an_argument_beats_the_environment() -> None:
    environ = {
        **LIGHTHOUSE,
        "TORCHFT_TIMEOUT_SEC": "5",
        "TORCHFT_MANAGER_PORT": "7",
        "TORCHFT_QUORUM_RETRIES": "3",
        "TFT_JOB_ID": "theirs",
        "RANK": "0",
    }
    config = resolve(environ, timeout=timedelta(seconds=2), port=8, quorum_retries=0, job="mine", lighthouse_addr="a:1")
    assert (config.timeout, config.port, config.quorum_retries) == (timedelta(seconds=2), 8, 0)
    assert (config.job, config.lighthouse_addr) == ("mine", "a:1")


def test_time_out_variables_take_fractions_and_reach_all_that_they_name() -> None:
    """The fault of torchft: "1.5" is refused, and each variable reaches only some of its users."""
    environ = {
        **LIGHTHOUSE,
        "TORCHFT_TIMEOUT_SEC": "1.5",
        "TORCHFT_QUORUM_TIMEOUT_SEC": "2.5",
        "TORCHFT_CONNECT_TIMEOUT_SEC": "0.5",
        "TFT_SLOWEST_STEP_SEC": "90",
    }
    config = resolve(environ)
    assert config.timeouts == Timeouts(
        timeout_ms=1_500, quorum_timeout_ms=2_500, connect_timeout_ms=500, slowest_step_ms=90_000
    )
    assert resolve({**LIGHTHOUSE, "TFT_SLOWEST_STEP_SEC": "0"}).timeouts.slowest_step_ms == 0
    assert resolve({**LIGHTHOUSE, "TFT_HEARTBEAT_TIMEOUT_SEC": "2"}).timeouts.heartbeat_timeout_ms == 2_000
    assert resolve(LIGHTHOUSE, slowest_step=timedelta()).timeouts.slowest_step_ms == 0
    assert config.timeout_is_explicit
    assert not resolve().timeout_is_explicit


def test_the_divergence_check_of_an_unedited_script_is_set_by_a_variable() -> None:
    environ = {**LIGHTHOUSE, "TFT_CHECK_STATE_EVERY": "50"}
    assert [resolve().check_state_every, resolve(environ).check_state_every] == [0, 50]
    assert resolve(environ, check_state_every=0).check_state_every == 0
    with pytest.raises(ConfigError, match="TFT_CHECK_STATE_EVERY is 'often'; give a whole number, 0 to "):
        resolve({**LIGHTHOUSE, "TFT_CHECK_STATE_EVERY": "often"})


def test_timeouts_in_one_value_beat_the_environment_and_give_way_to_single_ones() -> None:
    config = resolve(
        {**LIGHTHOUSE, "TORCHFT_TIMEOUT_SEC": "5"},
        timeouts=Timeouts(timeout_ms=7_000, connect_timeout_ms=8_000),
        connect_timeout=timedelta(seconds=9),
    )
    assert (config.timeouts.timeout_ms, config.timeouts.connect_timeout_ms) == (7_000, 9_000)


def test_an_unknown_setting_names_the_nearest_one() -> None:
    with pytest.raises(UnknownSettingError, match="the nearest is 'min_replica_size'") as raised:
        config_of(None, {"min_replicas_size": 2})
    assert isinstance(raised.value, TypeError)
    assert raised.value.nearest == "min_replica_size"


def test_the_settings_by_keyword_are_those_of_the_config() -> None:
    of_config = get_type_hints(ManagerConfig)
    del of_config["min_replica_size"]  # an argument of its own
    assert get_type_hints(ManagerSettings) == of_config
    assert ManagerSettings.__required_keys__ == frozenset()


def test_single_settings_lie_over_a_config() -> None:
    config = config_of(ManagerConfig(min_replica_size=2, job="a"), {"job": "b"})
    assert (config.min_replica_size, config.job) == (2, "b")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"min_replica_size": 0}, "min_replica_size is 0; give a whole number, at least 1"),
        ({"timeout": 3}, "timeout is 3; give a timedelta"),
        ({"heal_timeout": timedelta(0)}, "heal_timeout is .*; give a timedelta"),
        ({"heartbeat_timeout": timedelta(0)}, "heartbeat_timeout is .*; give a timedelta"),
        ({"slowest_step": timedelta(seconds=-1)}, "slowest_step is .*; give a timedelta"),
        ({"slowest_step": 600}, "slowest_step is 600; give a timedelta"),
        ({"use_async_quorum": 1}, "use_async_quorum is 1; give True or False"),
        ({"timeouts": 3}, "timeouts is a int; give a tft_coord.Timeouts"),
        ({"checkpoint_transport": 3}, "checkpoint_transport is a int; give an object that has send_checkpoint and"),
        ({"checkpoint_transport": HTTPTransport}, "checkpoint_transport is the class HTTPTransport; give an object"),
        ({"world_size_mode": "DYNAMIC"}, "give a WorldSizeMode"),
        ({"rank": 2, "world_size": 2}, "a rank is below the world size"),
        ({"rank": -1}, "rank is -1"),
        ({"port": 70_000}, "a port is 0 to 65535"),
        ({"max_retries": True}, "max_retries is True"),
        ({"replica_id": 3}, "replica_id is a int; give a string"),
        ({"hostname": "x y"}, "hostname is 'x y'; give a host's name or address without a port"),
        ({"hostname": "node-1:29510"}, "hostname is 'node-1:29510'"),
        ({"job": "a/b"}, "without a slash"),
        ({"token": "with space"}, "shared secret"),
    ],
)
def test_a_wrong_setting_gets_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        resolve(LIGHTHOUSE, **settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({}, "set TFT_LIGHTHOUSE .or torchft's TORCHFT_LIGHTHOUSE. to it"),
        ({**LIGHTHOUSE, "WORLD_SIZE": "2"}, "RANK is not set"),
        ({**LIGHTHOUSE, "WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
        ({**LIGHTHOUSE, "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (
            {**LIGHTHOUSE, "WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "below the world size",
        ),
        ({**LIGHTHOUSE, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; give a whole number"),
        ({**LIGHTHOUSE, "TORCHFT_TIMEOUT_SEC": "soon"}, "TORCHFT_TIMEOUT_SEC is 'soon'; give seconds"),
        ({**LIGHTHOUSE, "TORCHFT_CONNECT_TIMEOUT_SEC": "nan"}, "TORCHFT_CONNECT_TIMEOUT_SEC is 'nan'"),
        ({**LIGHTHOUSE, "TFT_HEARTBEAT_TIMEOUT_SEC": "0"}, "TFT_HEARTBEAT_TIMEOUT_SEC is '0'; give seconds"),
        ({**LIGHTHOUSE, "TFT_SLOWEST_STEP_SEC": "-1"}, "TFT_SLOWEST_STEP_SEC is '-1'; give seconds"),
        ({**LIGHTHOUSE, "TFT_SLOWEST_STEP_SEC": "0.0004"}, "for example 60 or 1.5, or 0 for any time"),
        ({**LIGHTHOUSE, "TFT_SLOWEST_STEP_SEC": "never"}, "TFT_SLOWEST_STEP_SEC is 'never'; give seconds"),
        ({**LIGHTHOUSE, "TFT_JOB_ID": "a/b"}, "TFT_JOB_ID is 'a/b'"),
        ({**LIGHTHOUSE, "TFT_JOB_ID": " "}, "TFT_JOB_ID is ' '"),
        ({**LIGHTHOUSE, "TFT_TOKEN": "a", "TFT_TOKEN_FILE": "b"}, "both set"),
    ],
)
def test_a_wrong_or_missing_variable_gets_one_sentence_that_names_it(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(environ)


def test_a_secret_is_not_printed() -> None:
    assert "hidden" not in repr(ManagerConfig(token="hidden"))
    assert "hidden" not in repr(resolve({**LIGHTHOUSE, "TFT_TOKEN": "hidden"}))


def test_the_world_size_modes_have_torchfts_values() -> None:
    assert (WorldSizeMode.DYNAMIC.value, WorldSizeMode.FIXED_WITH_SPARES.value) == (0, 1)


def test_certificates_are_of_all_connections_of_a_manager() -> None:
    half = {**LIGHTHOUSE, "TFT_TLS_CERT": "cert.pem"}
    with pytest.raises(ConfigError, match="TFT_TLS_KEY, TFT_TLS_CA is not set"):
        resolve(half)
    with pytest.raises(ConfigError, match="TFT_TLS_KEY, TFT_TLS_CA is not set"):
        resolve(half, checkpoint_transport=MemoryTransport())
    with pytest.raises(ConfigError, match="asks for TLS, and this process has no certificates; set TFT_TLS_CERT"):
        resolve({"TFT_LIGHTHOUSE": "https://localhost:1"})
    assert resolve(LIGHTHOUSE).tls is None


@pytest.mark.parametrize(
    ("reached", "host"),
    [
        ((socket.AF_INET, socket.AF_INET6), "198.51.100.7"),
        ((socket.AF_INET6,), "2001:db8::7"),
        ((), "localhost"),
    ],
    ids=["both", "IPv6 alone", "no network"],
)
def test_where_the_machines_name_is_loopback_the_address_that_goes_out_is_given(
    monkeypatch: pytest.MonkeyPatch, reached: tuple[socket.AddressFamily, ...], host: str
) -> None:
    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            if self.family not in reached:
                raise OSError("the network is unreachable")

        def getsockname(self) -> Any:
            return ("198.51.100.7" if self.family == socket.AF_INET else "2001:db8::7", 9)

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", Probe)
    assert own_host() == host
