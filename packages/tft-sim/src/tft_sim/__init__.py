"""Simulate a whole cluster in virtual time: the real cores, a network in memory, random faults, and invariants.

The modules are independent:

- `clock`: virtual time and a queue with a stable order.
- `process`, `network`: processes that stop, die and vanish, and streams and calls that are late, lost and cut.
- `cluster`: the real cores of a lighthouse and of replica groups on that network.
- `trainer`: a shell of the real step core. `loops`, `syncs`: the user's training loop. `recovery`, `group`: the
  transfer of states and gradients, without tensors.
- `invariants`: the checks on everything that happens (design.md section 10).
- `simulator`: a cluster under random faults from one seed. `python -m tft_sim --seeds 1000` runs it.
- `scenario`: a cluster under a script, reported as a transcript.
- `explore`: every order of a few events on a core alone. `worlds`: the surroundings of the core there.
- `elections`: several lighthouses that elect a leader in a store, under random faults from one seed.
- `many`: many seeds on all cores, and the story of one.
- `marks`: the cases that were reached.

Law of this package: the standard library, and the parts of tft_coord that do no I/O. No real clock, thread or socket.
Only `many` and `explore` start processes.
"""

from tft_sim.clock import EventBudgetError, VirtualClock
from tft_sim.cluster import Cluster
from tft_sim.config import Chance, ClusterConfig
from tft_sim.explore import ExplorationError, explore
from tft_sim.invariants import InvariantError, Invariants
from tft_sim.many import run_many, story
from tft_sim.marks import SCENARIO_MARKS, STANDING_MARKS, Marks
from tft_sim.network import Fate, Network, Rule, Stream
from tft_sim.process import Process, State
from tft_sim.scenario import Scenario, ScenarioError, play
from tft_sim.simulator import Report, SimulationConfig, SimulationError, simulate
from tft_sim.worlds import GroupWorld, LighthouseWorld

__version__ = "0.1.0"

__all__ = [
    "SCENARIO_MARKS",
    "STANDING_MARKS",
    "Chance",
    "Cluster",
    "ClusterConfig",
    "EventBudgetError",
    "ExplorationError",
    "Fate",
    "GroupWorld",
    "InvariantError",
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
    "SimulationError",
    "State",
    "Stream",
    "VirtualClock",
    "explore",
    "play",
    "run_many",
    "simulate",
    "story",
]
