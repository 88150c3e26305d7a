"""Files of secrets: what is shown and accepted while they change, and what is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tft_coord import ConfigError, JobTokens, TokenFile
from tft_coord.security import ALL_JOBS, Gate, admits, call_metadata, opens_job
from tft_coord.tokens import LOOK_EVERY_S, MAX_LINES, OVERLAP_S


class Clock:
    """The time of a test."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write(path: Path, text: str) -> str:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)
    return str(path)


def test_the_first_line_is_shown_and_all_are_accepted(tmp_path: Path, clock: Clock) -> None:
    token = TokenFile(write(tmp_path / "f", "one\r\n\ntwo\n"), seconds=clock)
    assert token() == ("one", "two")
    assert call_metadata(token) == (("authorization", "Bearer one"),)
    for secret in ("one", "two"):
        assert admits(token, [("authorization", f"Bearer {secret}")])
    for shown in ("Bearer three", "one", "Bearer", ""):
        assert not admits(token, [("authorization", shown)])
    assert "one" not in repr(token)


def test_a_secret_that_has_left_the_file_is_accepted_for_a_while(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "f"
    token = TokenFile(write(path, "old"), seconds=clock)
    write(path, "new")
    assert token() == ("old",), "it is looked at once a second"
    clock.now_s += LOOK_EVERY_S
    assert token() == ("new", "old")
    clock.now_s += OVERLAP_S - 1
    assert admits(token, call_metadata("old"))
    clock.now_s += 1
    assert not admits(token, call_metadata("old"))
    assert admits(token, call_metadata("new"))


def test_an_unknown_secret_makes_a_server_look_at_once(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "f"
    token = TokenFile(write(path, "old"), seconds=clock)
    for secret in ("new", "newer", "newest"):
        write(path, secret)
        assert admits(token, call_metadata(secret)), "no time has passed since the last look"
    jobs = JobTokens(write(path, "mine = one\n"), seconds=clock)
    write(path, "mine = two\n")
    assert jobs.job_of(b"two") == "mine"


def test_wrong_secrets_at_a_slow_file_take_a_tenth_of_the_time(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "f"
    token = TokenFile(write(path, "old"), seconds=clock)
    parse, looks_at_s = token._watched._parse, []

    def slowly(text: str) -> Mapping[str, tuple[str, ...]]:
        looks_at_s.append(clock.now_s)
        clock.now_s += 0.005
        return parse(text)

    token._watched._parse = slowly
    for number in range(2_000):
        write(path, f"new-{number}")
        assert not admits(token, call_metadata("wrong"))
        clock.now_s += 0.001
    assert 35 <= len(looks_at_s) <= 45, "in 2 s, each 5 ms long"


@pytest.mark.parametrize("text", ["", "two words\n", "\n".join(map(str, range(MAX_LINES + 1)))])
def test_a_file_that_becomes_invalid_leaves_the_secrets_and_is_logged_once(
    text: str, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "f"
    token = TokenFile(write(path, "old-secret"), seconds=clock)
    write(path, text)
    for _ in range(3):
        clock.now_s += LOOK_EVERY_S
        assert token() == ("old-secret",)
    path.unlink()
    for _ in range(3):
        clock.now_s += LOOK_EVERY_S
        assert token() == ("old-secret",)
    assert len(caplog.records) == 2, caplog.text
    assert "old-secret" not in caplog.text
    write(path, "new-secret")
    clock.now_s += LOOK_EVERY_S
    assert token()[0] == "new-secret"


def test_a_forked_child_does_not_wait_for_its_parents_look(tmp_path: Path, clock: Clock) -> None:
    token = TokenFile(write(tmp_path / "f", "old"), seconds=clock)
    with token._watched._lock:  # as another thread holds it at the moment of the fork
        clock.now_s += LOOK_EVERY_S
        assert token() == ("old",)


JOBS = "# a comment\n\nmine = one\nmine = two\na job = with = three\n"


def test_a_jobs_secret_opens_that_job_alone(tmp_path: Path, clock: Clock) -> None:
    gate = Gate("main", JobTokens(write(tmp_path / "f", JOBS), seconds=clock))
    assert gate.opens(call_metadata("main")) == ALL_JOBS
    assert gate.opens(call_metadata("one")) == gate.opens(call_metadata("two")) == "mine"
    assert gate.opens(call_metadata("three")) == "a job = with"
    assert gate.opens(call_metadata("four")) is gate.opens([]) is None
    assert opens_job(ALL_JOBS, "x")
    assert opens_job("x", "x")
    assert not opens_job("x", "y")
    assert not opens_job(None, "")
    assert gate.secret_of("mine") == "one"
    assert gate.secret_of("other") == "main"


def test_the_secrets_of_jobs_change_and_leave(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "f"
    jobs = JobTokens(write(path, "mine = one\nother = three\n"), seconds=clock)
    write(path, "mine = new\n")
    clock.now_s += LOOK_EVERY_S
    assert jobs.job_of(b"new") == jobs.job_of(b"one") == "mine"
    assert jobs.job_of(b"three") is None, "a job that has left the file is refused at once"
    assert jobs.shown("mine") == "new"
    clock.now_s += OVERLAP_S
    assert jobs.job_of(b"one") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine: one", r"line 1 is no secret of a job; give `JOB = secret`"),
        ("\nmine=one", "line 2 is no secret"),
        (" = one", "line 1 is no secret"),
        ("a/b = one", "line 1 is no secret"),
        ("mine = a secret of words", "line 1, of job mine: the shared secret must be"),
        ("mine = one\nother = one", "jobs mine and other have the same secret"),
        ("mine = one\n" * (MAX_LINES + 1), "job mine has more than 8 secrets"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        JobTokens(write(tmp_path / "f", text))


def test_secrets_of_jobs_need_one_of_the_lighthouse(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it would serve everybody; set TFT_TOKEN or TFT_TOKEN_FILE as well"):
        Gate(None, JobTokens(write(tmp_path / "f", "mine = one")))


@pytest.mark.parametrize("make", [TokenFile, JobTokens])
def test_what_is_no_file_is_neither_waited_for_nor_read_whole(make: Callable[[str], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in (("/dev/zero", "not a regular file"), (str(tmp_path / "pipe"), "not a regular file")):
        with pytest.raises(ConfigError, match=says):
            make(path)
    with pytest.raises(ConfigError, match="can't be read"):
        make(str(tmp_path / "none"))


def test_a_file_of_jobs_that_becomes_empty_leaves_the_secrets_as_they_were(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jobs"
    jobs = JobTokens(write(path, "a = one\nb = two\n"), seconds=clock)
    write(path, "# nothing\n")
    clock.now_s += LOOK_EVERY_S
    assert jobs.job_of(b"one") == "a"
    assert "the file names no job" in caplog.text
    write(path, "a = one\n")
    clock.now_s += LOOK_EVERY_S
    with caplog.at_level(logging.INFO):
        assert jobs.job_of(b"two") is None
    assert "but none of the jobs that have left it: b" in caplog.text


def test_the_secret_of_the_lighthouse_is_no_job_s(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "jobs"
    jobs = JobTokens(write(path, "a = one\n"), seconds=clock)
    with pytest.raises(ConfigError, match="gives job a the secret of this lighthouse"):
        Gate("one", jobs)
    gate = Gate("all", jobs)
    write(path, "a = all\n")
    clock.now_s += LOOK_EVERY_S
    assert gate.opens([("authorization", "Bearer all")]) == ALL_JOBS, "no mistake disarms the operator"


def test_a_secret_that_others_may_read_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, mode in (("safe", 0o600), ("group", 0o640), ("all", 0o644)):
        (tmp_path / name).write_text("s3cret")
        (tmp_path / name).chmod(mode)
        TokenFile(str(tmp_path / name))
        TokenFile(str(tmp_path / name))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/group has a secret, and other users may read it (mode 640); chmod 600 the file",
        f"{tmp_path}/all has a secret, and other users may read it (mode 644); chmod 600 the file",
    ]


def test_a_folder_in_place_of_a_secret_is_named_by_its_path(tmp_path: Path) -> None:
    """The error named a number of a file descriptor."""
    with pytest.raises(ConfigError) as refused:
        TokenFile(str(tmp_path))
    assert str(refused.value) == f"{tmp_path}, which can't be read: Is a directory"
