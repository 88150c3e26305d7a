"""Which process groups a Manager takes, and through which adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from tft_algos import ConfigError, Manager
from tft_algos.manager.adoption import adopted
from tft_pg import ProcessGroupGloo, ReconfigurableProcessGroup, UnsupportedOperationError
from tft_pg.testing import reconfigurable_gloo


def test_a_torch_group_that_reconfigures_is_adapted_and_ours_is_not() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group: Any = adopted(reconfigurable_gloo(store.port))
    assert isinstance(group, ReconfigurableProcessGroup)
    assert adopted(group) is group
    own = ProcessGroupGloo()
    assert adopted(own) is own
    group.shutdown()


def test_a_torch_group_that_does_not_reconfigure_is_refused_with_what_to_use_instead() -> None:
    group = dist.ProcessGroup(HashStore(), 0, 1)
    with pytest.raises(ConfigError, match=r"pg is a ProcessGroup; give .*ProcessGroupGloo\(\), .*enable_reconfigure"):
        Manager(group, min_replica_size=1)


def test_a_torch_group_for_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedOperationError, match="cuda; use ProcessGroupNCCL"):
        adopted(_OnDevice(0, 1))  # type: ignore[call-arg]


class _OnDevice(dist.ProcessGroup):
    supports_reconfigure = True

    def reconfigure(self, opts: Any) -> dist.Work:
        raise AssertionError("it is refused before")

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]
