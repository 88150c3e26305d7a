"""The problems in the facts, and their remedies.

A problem prevents a job from working, or from surviving what it should survive. A note is about something that works
and may surprise.

Law of this file: pure. Each finding is one sentence: what, where, its effect, its remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

from tft_coord import variables
from tft_suite.doctor.facts import Facts, LighthouseFacts

PACKAGES: Final = ("tft-coord", "tft-lighthouse", "tft-pg", "tft-ckpt", "tft-algos", "tft-suite")
INSTALL_TORCHFT: Final = ("tft-torchft", "torchft", "torchft-nightly")  # each installs the module torchft
INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
KNOWN_VARIABLES: Final = (
    *sorted(variables.KNOWN_VARIABLES),
    "TORCHFT_LIGHTHOUSE",
    "TORCHFT_TIMEOUT_SEC",
    "TORCHFT_QUORUM_TIMEOUT_SEC",
    "TORCHFT_CONNECT_TIMEOUT_SEC",
    "TORCHFT_QUORUM_RETRIES",
    "TORCHFT_MANAGER_PORT",
    "TORCHFT_WATCHDOG_TIMEOUT_SEC",
    "TORCHFT_USE_BUCKETIZATION",
)
_SIMILARITY_MIN: Final = 0.85
_TORCH_MIN: Final = (2, 11)
_CLOCKS_DIFFER_MS: Final = 60_000
_OTHERS_MAY_READ: Final = 0o044


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence. `is_problem`: a job would not work, or would not survive what it should survive."""

    sentence: str
    is_problem: bool = True


def findings(facts: Facts) -> list[Finding]:
    """Return all findings, problems first."""
    found = [*_of_versions(facts), *_of_settings(facts), *_of_network(facts), *_of_lighthouses(facts), *_of_time(facts)]
    return sorted(found, key=lambda finding: not finding.is_problem)


def _of_versions(facts: Facts) -> Iterator[Finding]:
    missing = [name for name in PACKAGES if not facts.versions.get(name)]
    if missing:
        yield Finding(f"{', '.join(missing)} is not installed; install tft-suite, or only the packages that you use")
    releases = {_release(facts.versions[name])[:2] for name in PACKAGES if facts.versions.get(name)}
    if len(releases) > 1:
        mixed = ", ".join(f"{name} {facts.versions[name]}" for name in PACKAGES if facts.versions.get(name))
        yield Finding(f"packages of different releases are installed ({mixed}); install one release of all of them")
    same_module = [f"{name} {facts.versions[name]}" for name in INSTALL_TORCHFT if facts.versions.get(name)]
    if len(same_module) > 1:
        yield Finding(
            f"{' and '.join(same_module)} are installed and have files of one module, torchft, so either of them is "
            "broken; uninstall all of them, and install the one that you want again"
        )
    torch = facts.versions.get("torch", "")
    if not torch:
        yield Finding("torch is not installed; install it for your accelerator")
    elif _release(torch)[:2] < _TORCH_MIN:
        yield Finding(f"torch {torch} is older than 2.11, the oldest that is tested; install a newer one")


def _of_settings(facts: Facts) -> Iterator[Finding]:
    if facts.setting_error:
        yield Finding(f"a Manager would refuse to start: {facts.setting_error}")
    for name in facts.environ:
        similar = difflib.get_close_matches(name, KNOWN_VARIABLES, n=1, cutoff=_SIMILARITY_MIN)
        if similar and name not in KNOWN_VARIABLES:
            yield Finding(f"{name} is set, but no program reads it; if you mean {similar[0]}, correct the name", False)
    if not facts.token_is_set:
        yield Finding(
            "no shared secret is set, so only this machine can join the job, or anyone who reaches a port "
            "(TFT_INSECURE=1); set TFT_TOKEN or TFT_TOKEN_FILE to the same secret, made with `openssl rand -hex 32`, "
            "on every process and on the lighthouse",
            is_problem=False,
        )
    if facts.token_file_mode is not None and facts.token_file_mode & _OTHERS_MAY_READ:
        yield Finding(
            f"TFT_TOKEN_FILE can be read by others (mode {facts.token_file_mode:o}); chmod 600 the file",
            is_problem=False,
        )


def _of_network(facts: Facts) -> Iterator[Finding]:
    if facts.hostname_is_loopback and not all(_is_local(each) for each in facts.lighthouses):
        yield Finding(
            f"other machines can't reach this one, because its name {facts.hostname!r} is a loopback address; give the "
            "Manager a hostname, or fix this machine's name in /etc/hosts"
        )
    route_interfaces = {
        name
        for each in facts.lighthouses
        for name, addresses in facts.interfaces.items()
        if each.local_address in addresses
    }
    for variable in INTERFACE_VARIABLES:
        value = facts.environ.get(variable, "").strip()
        # NCCL takes prefixes. A leading = means whole names, and a leading ^ means all other names.
        exact = variable == "GLOO_SOCKET_IFNAME" or value.startswith("=")
        if value.startswith("^"):
            continue
        named = [name for each in value.split(",") if (name := each.strip("= "))]
        for name in named:
            if not any(each == name or (not exact and each.startswith(name)) for each in facts.interfaces):
                yield Finding(
                    f"{variable} names {name!r}, but this machine has {', '.join(sorted(facts.interfaces)) or 'none'}; "
                    "name one of these, or unset it"
                )
        there = set(named) & set(facts.interfaces)
        if not exact or not route_interfaces or not there or route_interfaces & there:
            continue
        if all(_is_loopback(address) for name in there for address in facts.interfaces[name]):
            yield Finding(
                f"{variable} is {','.join(named)}, which no other machine can reach; set it to "
                f"{', '.join(sorted(route_interfaces))}, the route to the lighthouse, or unset it"
            )
        else:
            yield Finding(
                f"{variable} is {','.join(named)}, but the route to the lighthouse is "
                f"{', '.join(sorted(route_interfaces))}: replicas exchange gradients on one network and heartbeats on "
                "another; keep this only if the first network is faster",
                is_problem=False,
            )


def _of_lighthouses(facts: Facts) -> Iterator[Finding]:
    clusters = {each.description.cluster_id for each in facts.lighthouses if each.description is not None}
    if len(clusters) > 1:
        yield Finding(
            "the listed lighthouses belong to different clusters, so a replica stays with the first that it reaches; "
            "start them with the same --cluster_id"
        )
    for each in facts.lighthouses:
        if each.answers_anybody:
            yield Finding(
                f"a shared secret is set here, but the lighthouse at {each.address} has none, so anyone who reaches "
                "its port can join the job; start it with the same TFT_TOKEN or TFT_TOKEN_FILE, or unset both "
                "everywhere",
                is_problem=False,
            )
        if each.is_foreign:
            yield Finding(
                f"the lighthouse at {each.address} is torchft's, which detects a dead replica only by its heartbeat "
                "timeout; start tft-lighthouse there",
                is_problem=False,
            )
        elif each.trouble and not (each.is_standby and clusters):  # a standby beside a leader is as it should be
            yield Finding(each.trouble)  # the message of a trainer's start, which names the lighthouse
        for job in each.description.jobs if each.description is not None else ():
            for warning in job.warnings:
                yield Finding(f"job {job.name}: {warning}")
        if abs(each.clock_ahead_ms) >= _CLOCKS_DIFFER_MS:
            direction = "ahead of" if each.clock_ahead_ms > 0 else "behind"
            yield Finding(
                f"the clock of the lighthouse at {each.address} is {abs(each.clock_ahead_ms) / 1000:.0f} s {direction} "
                "this machine's, so times in logs don't match, and new quorum ids come from it; set both by NTP",
                is_problem=False,
            )


def _of_time(facts: Facts) -> Iterator[Finding]:
    if facts.timeouts is None:
        return
    descriptions = [each.description for each in facts.lighthouses if each.description is not None]
    # Only the reported timeouts of a lighthouse are judged, not assumed ones.
    reported = [facts.timeouts.merged_with(each.heartbeat_timeout_ms, each.join_timeout_ms) for each in descriptions]
    for warning in dict.fromkeys(
        warning for timeouts in reported or [facts.timeouts] for warning in timeouts.warnings()
    ):
        yield Finding(f"timeouts: {warning}", is_problem=False)


def _is_local(lighthouse: LighthouseFacts) -> bool:
    return _is_loopback(lighthouse.local_address)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
