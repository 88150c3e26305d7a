"""The settings of the command: their sources and precedence, their faults, and what is printed of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trustme

from tft_coord import ConfigError, Timeouts
from tft_coord.core.config import JOBS_MOST, QUORUM_MOST, Limits
from tft_coord.core.stragglers import StragglerAction, StragglerPolicy
from tft_coord.core.types import Refusal
from tft_coord.transport.settings import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from tft_coord.variables import KNOWN_VARIABLES
from tft_lighthouse import config_file, defaults, settings
from tft_lighthouse.settings import BY_NAME, SETTINGS, Kind, Settings, resolve

COMMAND = [sys.executable, "-m", "tft_lighthouse"]
SECRET = "s3cret-of-the-job"
ALL = """
bind = "[::1]:1000"
http_bind = "0"
cluster_id = "ours"
token_file = "secret"
job_tokens = "jobs"
tls_cert = "node.pem"
tls_key = "node-key.pem"
tls_ca = "ca.pem"
tls_client_auth = true
insecure = true
min_replicas = 3
join_timeout_ms = 1
heartbeat_timeout_ms = 1_000
quorum_tick_ms = 10
stragglers = "shrink"
straggler_ratio = 3
on_lost_state = "wait"
lost_state_timeout_ms = 0
max_jobs = 7
max_replicas = 8
max_streams = 9
max_message_bytes = 65536
etcd = "https://10.0.0.1:2379"
etcd_prefix = "/ours"
etcd_ttl_s = 3
etcd_ca = "ca.pem"
etcd_cert = "node.pem"
etcd_key = "node-key.pem"
log_format = "json"
log_level = "error"

[jobs.llama]
min_replicas = 4
max_replicas = 5

[jobs."a job of one's own"]
min_replicas = 2
"""


def run(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=cwd,
        env={**os.environ, "TFT_LIGHTHOUSE_HTTP_BIND": "", **environment},
    )


def resolved(file: Mapping[str, Any] = {}, environment: Mapping[str, str] = {}, **flags: str) -> Settings:
    return resolve(flags, environment, file, "l.toml" if file else None)


def fault(file: Mapping[str, Any] = {}, environment: Mapping[str, str] = {}, **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(file, environment, **flags)
    return str(caught.value)


def test_a_flag_beats_a_variable_which_beats_the_file_which_beats_the_default() -> None:
    file, environment = {"min_replicas": 2, "max_jobs": 2, "max_streams": 2}, {}
    environment = {"TFT_LIGHTHOUSE_MIN_REPLICAS": "3", "TFT_LIGHTHOUSE_MAX_JOBS": "3"}
    found = resolved(file, environment, min_replicas="4")
    assert [found[name] for name in ("min_replicas", "max_jobs", "max_streams", "max_replicas")] == [4, 3, 2, 20_000]
    assert [found.values[name].source for name in ("min_replicas", "max_jobs", "max_streams", "max_replicas")] == [
        "--min_replicas",
        "TFT_LIGHTHOUSE_MAX_JOBS",
        "l.toml",
        "default",
    ]


@pytest.mark.parametrize("name", BY_NAME)
def test_each_setting_has_a_flag_a_variable_and_a_key(name: str) -> None:
    setting = BY_NAME[name]
    value, text = {
        Kind.NUMBER: (max(2, int(setting.least)), str(max(2, int(setting.least)))),
        Kind.RATIO: (1.5, "1.5"),
        Kind.TEXT: ("some", "some"),
        Kind.CHOICE: (setting.choices[-1] if setting.choices else "", setting.choices[-1] if setting.choices else ""),
        Kind.SWITCH: (True, "1"),
    }[setting.kind]
    for found in (resolved({name: value}), resolved({}, {setting.environment: text}), resolved(**{name: text})):
        assert found[name] == value
    assert resolved({}, {setting.environment: ""})[name] == setting.default


def test_the_defaults_and_ranges_are_those_of_the_parts() -> None:
    timeouts, limits, policy = Timeouts(), Limits(), StragglerPolicy()
    for name in ("join_timeout_ms", "heartbeat_timeout_ms", "quorum_tick_ms"):
        assert BY_NAME[name].default == getattr(timeouts, name)
    for name in ("max_jobs", "max_replicas", "max_streams"):
        assert BY_NAME[name].default == getattr(limits, name)
        Limits(**{name: int(BY_NAME[name].most)})
        with pytest.raises(ConfigError):
            Limits(**{name: int(BY_NAME[name].most) + 1})
    assert (BY_NAME["straggler_ratio"].default, BY_NAME["stragglers"].default) == (policy.ratio, policy.action.value)
    assert set(BY_NAME["stragglers"].choices) == {each.value for each in StragglerAction}
    assert (defaults.QUORUM_MOST, defaults.JOBS_MOST) == (QUORUM_MOST, JOBS_MOST)
    assert (defaults.MAX_MESSAGE_BYTES, defaults.MESSAGE_BYTES_MOST) == (MAX_REQUEST_BYTES, MAX_MESSAGE_BYTES)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ({"min_replica": 1}, "l.toml: unknown key 'min_replica'; did you mean min_replicas?"),
        ({"min-replicas": 1}, "l.toml: unknown key 'min-replicas'; did you mean min_replicas?"),
        ({"x": 1}, "l.toml: unknown key 'x'; the keys are bind, cluster_id, "),
        ({"min_replicas": "four"}, "l.toml: min_replicas is 'four'; give a whole number, 1 to 100000"),
        ({"min_replicas": True}, "l.toml: min_replicas is true; give a whole number, 1 to 100000"),
        ({"min_replicas": 2.0}, "l.toml: min_replicas is 2.0; give a whole number"),
        ({"min_replicas": 0}, "l.toml: min_replicas is 0; give 1 to 100000"),
        ({"min_replicas": 10**5_000}, "l.toml: min_replicas is a number of more than 64 digits; give 1 to 100000"),
        ({"heartbeat_timeout_ms": 1}, "l.toml: heartbeat_timeout_ms is 1; give 2 to 604800000 milliseconds (a week)"),
        ({"straggler_ratio": float("nan")}, "l.toml: straggler_ratio is nan; give 1.1 to 1000"),
        ({"straggler_ratio": float("inf")}, "l.toml: straggler_ratio is inf; give 1.1 to 1000"),
        ({"straggler_ratio": []}, "l.toml: straggler_ratio is []; give a number, 1.1 to 1000"),
        ({"stragglers": "ignore"}, "l.toml: stragglers is 'ignore'; give warn, leave-out, shrink or off"),
        ({"insecure": 1}, "l.toml: insecure is 1; give true or false"),
        ({"insecure": "yes"}, "l.toml: insecure is 'yes'; give true or false"),
        ({"http_bind": 8080}, "l.toml: http_bind is 8080; give text in quotes"),
        ({"cluster_id": "a\nb"}, "l.toml: cluster_id is 'a\\nb'; give printable characters only"),
        ({"bind": "x" * 1_000}, ""),
        ({"max_message_bytes": 1}, "l.toml: max_message_bytes is 1; give 65536 to 67108864 bytes"),
        ({"jobs": 3}, "l.toml: jobs is 3; give tables, such as [jobs.NAME]"),
        ({"jobs": {"a": 3}}, "l.toml: jobs.a is 3; give a table with min_replicas or max_replicas"),
        ({"jobs": {"a": {"bind": 3}}}, "l.toml: unknown key 'jobs.a.bind'; the keys are max_replicas, min_replicas"),
        ({"jobs": {"a": {"min_replica": 3}}}, "unknown key 'jobs.a.min_replica'; did you mean jobs.a.min_replicas?"),
        ({"jobs": {"a": {"min_replicas": 0}}}, "l.toml: jobs.a.min_replicas is 0; give 1 to 100000"),
        ({"jobs": {"": {}}}, "l.toml: the name of a job in jobs is ''; give 1 to 256 printable bytes"),
        ({"jobs": {"a\n": {}}}, "the name of a job in jobs is 'a\\n'; give 1 to 256 printable bytes"),
    ],
)
def test_a_fault_of_the_file_names_file_key_value_and_what_is_allowed(file: dict[str, Any], says: str) -> None:
    if not says:
        assert resolved(file)["bind"] == "x" * 1_000  # the address is checked with the others
        return
    found = fault(file)
    assert says in found
    assert found.startswith("l.toml: ")
    assert "\n" not in found
    assert len(found) < 500


@pytest.mark.parametrize("key", ["token", "secret"])
def test_a_secret_in_the_file_is_refused_and_not_repeated(key: str) -> None:
    found = fault({key: SECRET})
    assert found == f"l.toml: {key} is no key; put the secret into a file, and name it by token_file"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            {"TFT_LIGHTHOUSE_MIN_REPLICA": "1"},
            "unknown variable 'TFT_LIGHTHOUSE_MIN_REPLICA' in the environment; "
            "did you mean TFT_LIGHTHOUSE_MIN_REPLICAS?",
        ),
        ({"TFT_TOKENFILE": "s"}, "unknown variable 'TFT_TOKENFILE' in the environment; did you mean TFT_TOKEN_FILE?"),
        ({"TFT_TOKEN_FLE": "s"}, "did you mean TFT_TOKEN_FILE?"),
        ({"TFT_INSECUR": "1"}, "did you mean TFT_INSECURE?"),
        ({"TFT_LIGHTHOUS_MIN_REPLICAS": "1"}, "did you mean TFT_LIGHTHOUSE_MIN_REPLICAS?"),
        ({"TFT_TLS_CRT": "c.pem"}, "did you mean TFT_TLS_CERT?"),
        ({"TFT_LIGHTHOUSE_TOKEN": SECRET}, "did you mean TFT_TOKEN?"),
        ({"TFT_LIGHTHOUSE_JOBS": "a"}, "only a file (--config) sets the settings of single jobs"),
        ({"TFT_LIGHTHOUSE_MIN_REPLICAS": "1.5"}, "TFT_LIGHTHOUSE_MIN_REPLICAS: min_replicas is '1.5'; give a whole"),
        ({"TFT_LIGHTHOUSE_MAX_JOBS": "-1"}, "TFT_LIGHTHOUSE_MAX_JOBS: max_jobs is -1; give 1 to 100000"),
        ({"TFT_LIGHTHOUSE_MAX_JOBS": "٣"}, "TFT_LIGHTHOUSE_MAX_JOBS: max_jobs is '٣'; give a whole number"),
        ({"TFT_LIGHTHOUSE_MAX_JOBS": "1_0"}, "TFT_LIGHTHOUSE_MAX_JOBS: max_jobs is '1_0'; give a whole number"),
        ({"TFT_LIGHTHOUSE_MAX_JOBS": "9" * 5_000}, "TFT_LIGHTHOUSE_MAX_JOBS: max_jobs is '9999"),
        ({"TFT_LIGHTHOUSE_STRAGGLER_RATIO": "x"}, "straggler_ratio is 'x'; give a number, 1.1 to 1000"),
        ({"TFT_INSECURE": "yes"}, "TFT_INSECURE: insecure is 'yes'; give 0 or 1"),
    ],
)
def test_a_fault_of_a_variable_names_the_variable(environment: dict[str, str], says: str) -> None:
    found = fault({}, environment)
    assert says in found
    assert len(found) < 500


def test_what_kubernetes_says_of_a_service_of_that_name_is_no_fault() -> None:
    environment = {
        "TFT_LIGHTHOUSE": "http://lighthouse:29510",  # for trainers
        "TFT_JOB_ID": "llama",
        "TFT_MY_DATASET": "/data",  # the user's own
        "TFT_TRAINER_SERVICE_HOST": "10.0.0.1",
        "TFT_LIGHTHOUSE_SERVICE_HOST": "10.0.0.1",
        "TFT_LIGHTHOUSE_SERVICE_PORT": "29510",
        "TFT_LIGHTHOUSE_SERVICE_PORT_GRPC": "29510",
        "TFT_LIGHTHOUSE_PORT": "tcp://10.0.0.1:29510",
        "TFT_LIGHTHOUSE_PORT_29510_TCP": "tcp://10.0.0.1:29510",
        "TFT_LIGHTHOUSE_PORT_29510_TCP_ADDR": "10.0.0.1",
    }
    assert resolved({}, environment).values == resolved().values


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"min_replicas = \n", "this is no TOML: Invalid value (at line 1, column 16)"),
        (b"a = 1\na = 2\n", "this is no TOML: Cannot overwrite a value (at line 2, column 6)"),
        (b"a = '\xff'", "byte 5 is no UTF-8; save the file as UTF-8"),
        (b"a = " + b"[" * 200_000, "its values are nested too deeply"),
        (b"a = " + b"9" * 5_000, "this is no TOML: Exceeds the limit"),
        (b"#" * (config_file.MAX_BYTES + 1), "the file has more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_toml_is_one_sentence(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "l.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config_file.read(str(file))
    assert str(caught.value).startswith(f"{file}: {says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/no/such/file", "/no/such/file can't be read: No such file or directory; correct --config"),
        ("/dev/zero", "/dev/zero: this is no regular file"),
        ("/dev", "/dev can't be read: Is a directory"),
        ("a\nb", r"--config is 'a\nb'; give the path of a TOML file"),
        ("a\0b", r"--config is 'a\x00b'; give the path of a TOML file"),
    ],
)
def test_a_path_that_names_no_file_of_settings(path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_file.read(path)
    assert str(caught.value).startswith(says)


def test_a_pipe_without_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        config_file.read(str(tmp_path / "pipe"))


def test_what_is_printed_is_the_same_settings_again_with_sources_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "jobs").write_text(f"llama = {SECRET}-too\n")
    write_certificates(tmp_path)
    (tmp_path / "l.toml").write_text(ALL)
    words = ("--config", "l.toml", "--print-config", "--min_replicas", "6")
    done = run(*words, cwd=tmp_path, TFT_LIGHTHOUSE_MAX_JOBS="12")
    assert (done.returncode, done.stderr) == (0, "")
    assert SECRET not in done.stdout
    assert "# shared secret: set by token_file in l.toml\n" in done.stdout
    assert "min_replicas = 6  # --min_replicas\n" in done.stdout
    assert "max_jobs = 12  # TFT_LIGHTHOUSE_MAX_JOBS\n" in done.stdout
    assert '\n[jobs."a job of one\'s own"]\nmin_replicas = 2  # l.toml\n' in done.stdout
    (tmp_path / "again.toml").write_text(done.stdout)
    again = resolve({}, {}, config_file.read(str(tmp_path / "again.toml")), "again.toml")
    first = resolve({"min_replicas": "6", "max_jobs": "12"}, {}, config_file.read(str(tmp_path / "l.toml")), "l.toml")
    assert {name: each.value for name, each in again.values.items()} == {
        name: each.value for name, each in first.values.items()
    }
    assert again.jobs.keys() == first.jobs.keys() == {"llama", "a job of one's own"}


def write_certificates(folder: Path) -> None:
    """Write the files that the example names."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(folder / "node-key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "node.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")


def test_all_settings_are_in_the_example() -> None:
    assert set(settings.BY_NAME) == {line.partition(" = ")[0] for line in ALL.split("[jobs")[0].split("\n") if line}


def test_print_config_without_anything_shows_the_defaults() -> None:
    done = run("--print_config")
    assert done.returncode == 0
    assert "# file: none\n# shared secret: none\n" in done.stdout
    for setting in SETTINGS:
        assert f"\n{setting.name} = " in done.stdout or f"\n# {setting.name} is not set\n" in done.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("min_replicas = 0", "{file}: min_replicas is 0; give 1 to 100000"),
        ("quorum_tick_ms = 6_000", "quorum_tick_ms is set by {file}"),
        ("bind = 'here'", "bind is 'here'; give host:port, such as [::]:29510 (bind is set by {file})"),
        ("http_bind = '1.2.3.4:x'", "give host:port, such as [::]:29510 (http_bind is set by {file})"),
        ("etcd_ttl_s = 5", "etcd_ttl_s has no effect without etcd"),
        ("etcd = 'https://a:1'\netcd_ca = 'none'", "etcd_ca is '{folder}/none', which can't be read"),
        ("bind = '192.0.2.1:1'", "bind is '192.0.2.1:1' and no shared secret is set"),
        ("token_file = 'none'", "token_file in {file} names {folder}/none, which can't be read"),
        ("job_tokens = 'none'", "job_tokens names {folder}/none, which can't be read"),
        ("job_tokens='l.toml'", "job_tokens names {file}, which holds no valid secret: "),
        ("tls_cert = 'none'", "TLS is half configured: TFT_TLS_KEY, TFT_TLS_CA is not set"),
        ("tls_cert = 'a'\ntls_key = 'b'\ntls_ca = 'c'", "TLS can't read {folder}/a: No such file or directory"),
        ("tls_client_auth = true", "TLS is half configured"),
        ("[jobs.a]\nmin_replicas = 9\nmax_replicas = 8", "min_replicas of job a (9) exceeds max_replicas of job a (8)"),
        ("max_replicas = 3\nmin_replicas = 4", "min_replicas (4) exceeds max_replicas (3), so no quorum could form"),
    ],
)
@pytest.mark.parametrize("only_checks", [False, True])
def test_a_fault_ends_the_command_with_one_sentence_and_exit_code_2(
    content: str, says: str, only_checks: bool, tmp_path: Path
) -> None:
    file = tmp_path / "l.toml"
    file.write_text(content)
    done = run("--config", str(file), *(["--print-config"] if only_checks else []))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tft-lighthouse: ")
    assert done.stderr.count("\n") == 1
    assert says.format(file=file, folder=tmp_path) in done.stderr


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "l.toml").write_text("min_replicas = 5")
    done = run("--print-config", TFT_LIGHTHOUSE_CONFIG=str(tmp_path / "l.toml"))
    assert f"min_replicas = 5  # {tmp_path}/l.toml\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "environment", "source"),
    [
        (["--token_file", "{folder}/secret"], {"TFT_TOKEN": "another"}, "--token_file {folder}/secret"),
        ([], {"TFT_TOKEN": "another"}, "TFT_TOKEN"),
        ([], {"TFT_TOKEN_FILE": "{folder}/secret"}, "TFT_TOKEN_FILE"),
        ([], {}, "token_file in {folder}/l.toml"),
    ],
)
def test_a_secret_has_one_source_by_the_same_order(
    words: list[str], environment: dict[str, str], source: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "l.toml").write_text("token_file = 'secret'")
    words = ["--print-config", "--config", f"{tmp_path}/l.toml", *(word.format(folder=tmp_path) for word in words)]
    done = run(*words, **{name: text.format(folder=tmp_path) for name, text in environment.items()})
    assert f"# shared secret: set by {source.format(folder=tmp_path)}\n" in done.stdout


PAGES = Path(__file__).parents[3]
PAGE = (PAGES / "docs/run-a-lighthouse.md").read_text(encoding="utf-8")


def test_the_tables_of_the_pages_are_those_of_the_command() -> None:
    script = PAGES / "scripts/settings_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_list_of_all_variables_has_those_of_the_command() -> None:
    ours = {settings.CONFIG_VARIABLE, *(setting.environment for setting in SETTINGS)}
    assert {name for name in KNOWN_VARIABLES if name.startswith("TFT_LIGHTHOUSE_")} <= ours <= KNOWN_VARIABLES


def test_the_file_on_the_page_is_valid() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
    found = resolve({}, {}, config_file.tomllib.loads(text), "l.toml")
    assert found.jobs["llama-70b"]["min_replicas"].value == 4
    assert found.jobs.keys() == {"llama-70b", "ablation 7"}


def test_the_messages_on_the_page_are_those_of_the_command() -> None:
    path = "/etc/tft/lighthouse.toml"
    for file in ({"min_replica": 1}, {"jobs": {"llama-70b": {"min_replicas": 0}}}):
        with pytest.raises(ConfigError) as caught:
            resolve({}, {}, file, path)
        assert f"\ntft-lighthouse: {caught.value}\n" in PAGE


def test_every_refusal_and_no_other_is_on_the_page() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| [a-z]", PAGE.partition("### Refusals")[2].partition("## ")[0], re.M)
    assert set(re.findall(r"\w+", " ".join(rows))) == {each.value for each in Refusal}


def test_a_secret_in_both_variables_is_refused() -> None:
    done = run("--print-config", TFT_TOKEN="a", TFT_TOKEN_FILE="/b")
    assert (done.returncode, done.stderr) == (
        2,
        "tft-lighthouse: TFT_TOKEN and TFT_TOKEN_FILE are both set; unset one of them\n",
    )
