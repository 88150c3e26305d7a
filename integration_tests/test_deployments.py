"""The files of the examples for Kubernetes, systemd and containers: their fields, and the commands that they start.

No cluster runs here. The manifests were held against the schemas of Kubernetes 1.34 and of JobSet's own CRD by hand.
This file knows the fields that they use, so that a wrong one fails without those schemas.
"""

from __future__ import annotations

import configparser
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from integration_tests.conftest import ROOT
from tft_lighthouse import defaults
from tft_lighthouse.cli import _parser
from tft_suite.cli.main import exit_code_of
from tft_suite.launch import run
from tft_suite.launch.exit_codes import NEVER
from tft_suite.launch.settings import LaunchSettings

EXAMPLES: Final = ROOT / "examples"
UNITS: Final = sorted((EXAMPLES / "systemd").glob("*.service"))
DOCKERFILE: Final = EXAMPLES / "container" / "Dockerfile"
# What JobSet v1alpha2 and batch/v1 have, of what a job of ours may need.
JOBSET_SPEC: Final = {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend"}
FAILURE_POLICY: Final = {"maxRestarts", "restartStrategy", "rules"}
ACTIONS: Final = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob"}
REASONS: Final = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"}
REASONS_OF_JOBS: Final = REASONS | {"PodFailurePolicy"}
RULE_NAME: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
JOB_SPEC: Final = {"parallelism", "completions", "backoffLimit", "podFailurePolicy", "template", "completionMode"}
POD_SPEC: Final = {
    "restartPolicy",
    "terminationGracePeriodSeconds",
    "automountServiceAccountToken",
    "securityContext",
    "containers",
    "volumes",
}
CONTAINER: Final = {
    "name",
    "image",
    "command",
    "args",
    "env",
    "ports",
    "livenessProbe",
    "readinessProbe",
    "resources",
    "securityContext",
    "volumeMounts",
}


def documents(name: str) -> list[dict[str, Any]]:
    yaml: Any = importlib.import_module("yaml")  # ships no types
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text(encoding="utf-8")))


def checked_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """Check a pod's fields, and return its container."""
    assert set(pod) <= POD_SPEC
    (container,) = pod["containers"]
    assert set(container) <= CONTAINER
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    variables = {each["name"]: each.get("value", "") for each in container["env"]}
    assert variables["TFT_TOKEN_FILE"].startswith(container["volumeMounts"][0]["mountPath"])
    return dict(container)


def launch_settings(words: list[str], script: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchSettings:
    """Return what `tft launch` makes of its words. The script of the words is replaced by one that exists."""
    taken: list[LaunchSettings] = []

    def take(settings: LaunchSettings, environ: Mapping[str, str]) -> int:
        taken.append(settings)
        return 0

    monkeypatch.setattr(run, "run_launch", take)
    script.touch()
    given = [str(script) if word.endswith(".py") else word for word in words]
    assert exit_code_of(["launch", *given]) == 0
    (settings,) = taken
    return settings


def test_the_job_set_restarts_one_group_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job_set,) = documents("jobset.yaml")
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = job_set["spec"]
    assert set(spec) <= JOBSET_SPEC
    assert set(spec["failurePolicy"]) <= FAILURE_POLICY
    rules = spec["failurePolicy"]["rules"]
    for rule in rules:
        assert set(rule) <= {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"}
        assert RULE_NAME.fullmatch(rule["name"])
        assert rule["action"] in ACTIONS
        assert set(rule["onJobFailureReasons"]) <= REASONS_OF_JOBS
    by_reason = {reason: rule["action"] for rule in rules for reason in rule["onJobFailureReasons"]}
    assert by_reason == {"BackoffLimitExceeded": "RestartJob", "PodFailurePolicy": "FailJobSet"}
    (replicated,) = spec["replicatedJobs"]
    assert set(replicated) <= {"name", "replicas", "template"}
    job = replicated["template"]["spec"]
    assert set(job) <= JOB_SPEC
    assert job["backoffLimit"] == 0
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert NEVER in rule["onExitCodes"]["values"]
    pod = job["template"]["spec"]
    container = checked_pod(pod)
    assert pod["restartPolicy"] == "Never"  # a pod failure policy asks for it
    assert rule["onExitCodes"]["containerName"] == container["name"]
    (index,) = (each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"] if each["name"] == "REPLICA")
    assert index == "metadata.labels['jobset.sigs.k8s.io/job-index']"
    assert container["command"] == ["tft", "launch"]
    words = [word.replace("$(REPLICA)", "3") for word in container["args"]]
    settings = launch_settings(words, tmp_path / "train.py", monkeypatch)
    assert (settings.replicas, settings.first, settings.num_groups) == (1, 3, replicated["replicas"])
    assert settings.restarts.grace_s < pod["terminationGracePeriodSeconds"]


def test_the_lighthouse_has_probes_and_a_policy_for_its_ports() -> None:
    found = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in documents("lighthouse.yaml")}
    deployment = found["Deployment", "tft-lighthouse"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    labels = deployment["template"]["metadata"]["labels"]
    container = checked_pod(deployment["template"]["spec"])
    assert container["command"] == ["tft-lighthouse"]
    settings = _parser().parse_args(container["args"])
    port = int(settings.bind.rpartition(":")[2])
    assert settings.bind == defaults.BIND
    assert {each["name"]: each["containerPort"] for each in container["ports"]} == {"grpc": port, "http": port + 1}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert deployment["selector"]["matchLabels"] == labels
    service = found["Service", "tft-lighthouse"]
    assert service["selector"] == labels
    assert {each["name"]: each["port"] for each in service["ports"]} == {"grpc": port, "http": port + 1}
    (job_set,) = documents("jobset.yaml")
    template = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    replica_labels = template["metadata"]["labels"]
    (variables,) = ({each["name"]: each.get("value") for each in it["env"]} for it in template["spec"]["containers"])
    assert variables["TFT_LIGHTHOUSE"] == f"http://tft-lighthouse:{port}"
    policy = found["NetworkPolicy", "tft-lighthouse"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": replica_labels}}]
    assert [each["port"] for each in policy["ingress"][0]["ports"]] == ["grpc", "http"]
    among = found["NetworkPolicy", "tft-replica"]
    assert among["podSelector"]["matchLabels"] == replica_labels
    assert {str(each["podSelector"]["matchLabels"]) for each in among["ingress"][0]["from"]} == {
        str(replica_labels),
        str(labels),
    }


def sections(unit: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read(unit, encoding="utf-8")
    return parser


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_is_there(unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = sections(unit)["Service"]
    command, *words = shlex.split(service["ExecStart"].replace("${TOTAL}", "8").replace("%i", "4"))
    if Path(command).name == "tft-lighthouse":
        assert _parser().parse_args(words).bind == defaults.BIND
        assert service["RestartPreventExitStatus"] == "2"
    else:
        assert (Path(command).name, words[0]) == ("tft", "launch")
        settings = launch_settings(words[1:], tmp_path / "train.py", monkeypatch)
        assert (settings.first, settings.replicas, settings.num_groups) == (4, 4, 8)
        assert service["RestartPreventExitStatus"].split() == ["2", str(NEVER)]
        assert settings.restarts.grace_s < float(service["TimeoutStopSec"])
    assert service["Environment"] == "TFT_TOKEN_FILE=%d/token"
    assert service["LoadCredential"].startswith("token:")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:  # then its sections at least are those that systemd reads
        assert set(sections(unit).sections()) == {"Unit", "Service", "Install"}
        return
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"/srv/tft/env/bin/\S+", "/bin/true", unit.read_text(encoding="utf-8")), encoding="utf-8")
    done = subprocess.run([verify, "verify", str(copy)], capture_output=True, text=True, timeout=50, check=False)
    ours = [line for line in done.stderr.splitlines() if unit.stem.rstrip("@") in line]
    assert done.returncode == 0, done.stderr
    assert not ours


def instructions() -> Iterator[tuple[str, str]]:
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def test_the_image_copies_and_installs_what_is_there() -> None:
    found = list(instructions())
    assert {name for name, _ in found} <= {"FROM", "RUN", "ENV", "ARG", "COPY", "USER", "WORKDIR", "CMD"}
    for name, rest in found:
        if name == "COPY" and not rest.startswith("--from="):
            assert (ROOT / rest.split()[0]).exists(), rest
    installs = " ".join(rest for name, rest in found if name == "RUN" and "pip install" in rest)
    packages = re.findall(r"/src/packages/(\S+)", installs)
    assert all((ROOT / "packages" / each / "pyproject.toml").is_file() for each in packages)
    suite = (ROOT / "packages" / "tft-suite" / "pyproject.toml").read_text(encoding="utf-8")
    needed = set(re.findall(r'^    "(tft-\w+)>=', suite, re.MULTILINE)) | {"tft-suite"}
    assert set(packages) == needed
    tested = re.search(r"torch>=2.11,<2.16", installs)
    assert tested is not None
    assert [rest for name, rest in found if name == "USER"] == ["10001"]  # as the manifests run it


def test_the_commands_of_the_image_are_there() -> None:
    (command,) = (rest for name, rest in instructions() if name == "CMD")
    assert command == '["tft", "--help"]'
    for module in ("tft_suite.cli.main", "tft_lighthouse.cli"):
        program = f"import sys; sys.argv[0] = 'x'; from {module} import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=50, check=False
        )
        assert done.returncode == 0, done.stderr
