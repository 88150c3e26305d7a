"""The metrics of a trainer for Prometheus: what its time goes to, under the names of the lighthouse's metrics.

They are collected when somebody asks. Serving them, or pushing them to a gateway, is prometheus-client's part.

Law of this file: names, labels and values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, final

from tft_algos.errors import ConfigError
from tft_algos.manager.manager import Manager
from tft_algos.manager.status import ManagerStatus
from tft_coord.core.names import base_name
from tft_coord.core.stalls import Spent

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["export_metrics"]


class Registry(Protocol):
    """A `CollectorRegistry` of prometheus-client, which is imported when it is needed."""

    def register(self, collector: Any) -> None:
        """Collect from a collector too."""
        ...

    def unregister(self, collector: Any) -> None:
        """Collect from a collector no longer."""
        ...


def export_metrics(manager: Manager, registry: Registry | None = None) -> None:
    """Add the metrics of a Manager to a registry of prometheus-client, until the Manager's `shutdown`.

    Args:
        manager: of this process.
        registry: a `CollectorRegistry`. None: prometheus-client's own, which its `start_http_server` serves.
    Raises: ConfigError: prometheus-client is not installed, or the registry has the metrics of another Manager.
        ManagerClosedError: the Manager was shut down.
    """
    manager._life.check_open()
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise ConfigError("export_metrics needs prometheus-client; install tft-algos[metrics]") from error
    into: Registry = REGISTRY if registry is None else registry
    collector = _Collector(manager)
    try:
        into.register(collector)
    except ValueError as error:
        raise ConfigError(
            "the registry has these metrics already, of a Manager that was not shut down; give each Manager of a "
            f"process a registry of its own ({error})"
        ) from error

    def remove() -> None:
        with contextlib.suppress(KeyError):  # the user has removed it
            into.unregister(collector)

    manager._life.at_end(remove)


@final
class _Collector:
    """The metrics of one Manager, as prometheus-client's registries call them."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def collect(self) -> Iterable[Metric]:
        """Return all metric families."""
        return _families(self._manager.strategy.config.job, self._manager.status())

    def describe(self) -> Iterable[Metric]:
        """Return families with all names, which a registry must not have twice."""
        return self.collect()


def _families(job: str, status: ManagerStatus) -> Iterable[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, SummaryMetricFamily

    where = {
        "job": job,
        "replica": base_name(status.replica_id) or status.replica_id,
        "rank": str(status.group_rank),
    }
    names, values = list(where), list(where.values())

    def counter(name: str, text: str, *more: str) -> Any:
        return CounterMetricFamily(name, text, labels=[*names, *more])

    good = counter("tft_goodput_seconds", "Time in steps that committed.")
    good.add_metric(values, status.spent_s.get(Spent.COMMIT.value, 0.0))
    bad = counter("tft_badput_seconds", "All other time.", "cause")
    phases = SummaryMetricFamily(
        "tft_incident_phase_seconds", "The phases of incidents that have ended.", labels=[*names, "phase"]
    )
    for each in Spent:
        if each is not Spent.COMMIT:
            bad.add_metric([*values, each.value], status.spent_s.get(each.value, 0.0))
        if each is not Spent.START:
            phases.add_metric([*values, each.value], status.num_stalls, status.stalls_s.get(each.value, 0.0))
    steps = counter("tft_committed_steps", "Committed steps.")
    steps.add_metric(values, status.step)
    return good, bad, steps, phases
