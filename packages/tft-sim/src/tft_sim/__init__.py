"""Simulate a whole cluster in virtual time: the real cores, a network in memory, random faults, and invariants.

The parts stand on their own:

- `clock`: virtual time and a queue with a stable order.
- `process`, `network`: processes that stop, die and vanish; streams and calls that are late, lost and cut.
- `cluster`: the real cores of a lighthouse and of replica groups on that network.
- `trainer`: a shell of the real step core; `loops`, `syncs`: the user's training loop; `recovery`, `group`: how states
  and gradients cross, without tensors.
- `invariants`: what must hold (design.md section 10), checked on everything that happens.
- `simulator`: all of it under random faults from one seed; `python -m tft_sim --seeds 1000`.
- `scenario`: all of it under a script, told as a transcript.
- `explore`: every order of a few events on a core alone; `worlds`: what stands around the core there.
- `many`: many seeds on all cores, and the story of one.
- `marks`: which cases were reached.

Law of this package: standard library, and of tft_coord what does no I/O; no real clock, thread or socket; processes in
`many` and `explore` alone.
"""

from tft_sim.clock import EventBudgetExceeded, VirtualClock
from tft_sim.cluster import Chance, Cluster, ClusterConfig
from tft_sim.explore import ExplorationFailed, explore
from tft_sim.invariants import InvariantBroken, Invariants
from tft_sim.many import run_many, story
from tft_sim.marks import SCENARIO_MARKS, STANDING_MARKS, Marks
from tft_sim.network import Fate, Network, Rule, Stream
from tft_sim.process import Process, State
from tft_sim.scenario import Scenario, ScenarioError, play
from tft_sim.simulator import Report, SimulationConfig, SimulationFailed, simulate
from tft_sim.worlds import GroupWorld, LighthouseWorld

__version__ = "0.1.0"

__all__ = [
    "SCENARIO_MARKS",
    "STANDING_MARKS",
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
