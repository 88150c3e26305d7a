"""Test your own strategy without a cluster: virtual time, a network in memory, and a simulator with seeds.

Public. The pieces stand on their own:

- `clock`: virtual time and a queue with a stable order.
- `process`, `network`: processes that stop, die and vanish; streams and calls that are late, lost and cut.
- `cluster`: the real cores of a lighthouse and of replica groups on that network; `trainer`: a model of a step.
- `invariants`: what must hold (design.md section 10), checked on everything that happens.
- `simulator`: all of it under random faults from one seed; `python -m tft_coord.testing --seeds 1000`.
- `scenario`: all of it under a script, told as a transcript.
- `explore`: every order of a few events on a core alone; `worlds`: what stands around the core there; `snapshots`: a
  world as a value and as a copy.
- `many`: many seeds on all cores, and the story of one.
- `marks`: which cases were reached.

Law of this folder: standard library and tft_coord's core only; no real clock, thread or socket; processes in `many`
and `explore` alone.
"""

from tft_coord.testing.clock import EventBudgetExceeded, VirtualClock
from tft_coord.testing.cluster import Chance, Cluster, ClusterConfig
from tft_coord.testing.explore import ExplorationFailed, explore
from tft_coord.testing.invariants import InvariantBroken, Invariants
from tft_coord.testing.many import run_many, story
from tft_coord.testing.marks import SCENARIO_MARKS, Marks
from tft_coord.testing.network import Fate, Network, Rule, Stream
from tft_coord.testing.process import Process, State
from tft_coord.testing.scenario import Scenario, ScenarioError, play
from tft_coord.testing.simulator import Report, SimulationConfig, SimulationFailed, simulate
from tft_coord.testing.worlds import GroupWorld, LighthouseWorld

__all__ = [
    "SCENARIO_MARKS",
    "Chance",
    "Cluster",
    "ClusterConfig",
    "EventBudgetExceeded",
    "ExplorationFailed",
    "Fate",
    "GroupWorld",
    "InvariantBroken",
    "Invariants",
    "LighthouseWorld",
    "Marks",
    "Network",
    "Process",
    "Report",
    "Rule",
    "Scenario",
    "ScenarioError",
    "SimulationConfig",
    "SimulationFailed",
    "State",
    "Stream",
    "VirtualClock",
    "explore",
    "play",
    "run_many",
    "simulate",
    "story",
]
