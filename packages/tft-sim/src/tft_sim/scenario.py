"""Scenarios as transcripts: a command, four dashes, what happened.

A transcript is a test and a page of documentation at once. The commands drive a simulated cluster with real cores, in
virtual time, without randomness. The output shows which replicas formed a quorum and why, healed, and committed. After
an intended change of behaviour the transcripts are generated again, and the change appears as a text difference.

Law of this file: parse commands, call the cluster's verbs, report what happened.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tft_coord.core import effects
from tft_coord.core.stragglers import StragglerAction, StragglerPolicy
from tft_coord.core.types import Member, Quorum, QuorumKey, Via
from tft_sim.cluster import Cluster
from tft_sim.config import SHORT_TIMEOUTS, Chance, ClusterConfig, TrainerSettings
from tft_sim.lighthouse_process import JOB, LEFT_OUT_REASON, STUCK_REASON
from tft_sim.links import Link, both_ways
from tft_sim.manager_process import Replica
from tft_sim.network import Fate, Rule
from tft_sim.process import Process
from tft_sim.trainer import Trainer

SEPARATOR = "----"
UNTIL_TIMEOUT_MS = 120_000  # no `until` waits longer than this
LIGHTHOUSES = ("lighthouse", "lighthouse2")
STRAGGLER_POLICY = StragglerPolicy(patience_ms=2_000)  # beats come every 500 ms
ROUTINE_REPORTS = ("commits step", "stands unchanged", "offers step", "discards an unused snapshot")
MERGE_WITHIN_MS = 20  # equal reports of several members within this time become one line


@dataclass(frozen=True, slots=True)
class Block:
    """One command of a transcript, the comment before it, and its output."""

    comment: str
    command: str
    output: str


class ScenarioError(AssertionError):
    """A transcript command that does not exist or can't be performed. The message names it."""


def parse(text: str) -> list[Block]:
    """Parse a transcript: blocks of comment lines (`# …`), one command line, `----`, output up to an empty line."""
    blocks: list[Block] = []
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.split("\n")
        comment = [line for line in lines if line.startswith("#")]
        rest = lines[len(comment) :]
        if not rest:
            blocks.append(Block("\n".join(comment), "", ""))
            continue
        if SEPARATOR not in rest or rest.index(SEPARATOR) != 1:
            raise ScenarioError(f"a block needs one command and {SEPARATOR!r} below it, not {rest[:2]}")
        blocks.append(Block("\n".join(comment), rest[0], "\n".join(rest[2:])))
    return blocks


def play(text: str) -> str:
    """Run a transcript's commands, and return the transcript with the real output.

    Raises: ScenarioError: a command is unknown. InvariantError: an event violates the protocol.
    """
    scenario = Scenario()
    parts = []
    for block in parse(text):
        lines = [block.comment] if block.comment else []
        if block.command:
            lines += [block.command, SEPARATOR, *scenario.do(block.command)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


class Scenario:
    """A cluster that performs commands and reports what happens."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._forget()
        self._commands: dict[str, Callable[[list[str]], Iterable[str] | None]] = {
            name.removeprefix("_do_").replace("_", "-"): getattr(self, name)
            for name in dir(self)
            if name.startswith("_do_")
        }

    def _forget(self) -> None:
        self._reports: list[tuple[int, str, list[str]]] = []
        self._awaited_text = ""
        self._quiet = False
        self._reporters: set[str] = set()
        self._quorum_numbers: dict[QuorumKey, int] = {}
        self._lineages: dict[int | None, str] = {None: "?"}
        self._weights: dict[str, str] = {}
        self._step_ms: dict[str, int] = {}
        self._chunk_ms: dict[str, int] = {}
        self._spreads_ms: list[int] = []
        self._rules: dict[str, list[Rule]] = {}
        self._refusals: set[str] = set()
        self._answers: set[tuple[str, tuple[QuorumKey, tuple[Member, ...]]]] = set()

    @property
    def cluster(self) -> Cluster:
        """Return the cluster. The first command creates it."""
        if self._cluster is None:
            raise ScenarioError("the first command of a transcript is `cluster`")
        return self._cluster

    def do(self, command: str) -> list[str]:
        """Run one command, and return the lines of its output."""
        words = shlex.split(command)
        run = self._commands.get(words[0])
        if run is None:
            raise ScenarioError(f"there is no command {words[0]!r}; there are {', '.join(sorted(self._commands))}")
        lines = [*(run(words[1:]) or ())]
        reports = self.reports()
        self._reports.clear()
        return [*reports, *lines] or ["ok"]

    def attend(self, cluster: Cluster) -> None:
        """Report from now on what happens in that cluster."""
        self._cluster = cluster
        cluster.on_effect = self._on_effect
        cluster.on_foreign_quorum = self._on_foreign_quorum
        cluster.on_note = self._on_note

    def reports(self) -> list[str]:
        """Return the reports since the last command, line by line."""
        return [self._line(at_ms, text, names) for at_ms, text, names in self._reports]

    # --- telling ----------------------------------------------------------------------------------------------------

    def _report(self, name: str, text: str) -> None:
        """Report an event. Equal reports of several members within a moment become one line."""
        now_ms = self.cluster.clock.now_ms
        if self._awaited_text and self._awaited_text in text:
            self._reporters.add(name)
        if self._quiet and any(words in text for words in ROUTINE_REPORTS):
            return
        for at_ms, known, names in reversed(self._reports):
            if now_ms - at_ms > MERGE_WITHIN_MS:
                break
            if known == text:
                if name not in names:
                    names.append(name)
                return
        self._reports.append((now_ms, text, [name]))

    @staticmethod
    def _line(at_ms: int, text: str, names: list[str]) -> str:
        who = " ".join(sorted(names))
        return f"{at_ms:6d}  {who}: {text}"

    def _on_note(self, name: str, text: str) -> None:
        life, rank = name.split("/")
        self._report(life if self.cluster.config.world_size == 1 else f"{life}/{rank}", text)

    def _on_effect(self, order: effects.LighthouseEffect) -> None:
        text = self._text_of(order)
        if text:
            self._report(self.cluster.deciding, text)

    def _text_of(self, order: effects.LighthouseEffect) -> str:
        """Return the report of an effect, or "" for none."""
        match order:
            case effects.PaceChanged():
                return order.news.sentence
            case effects.Warned():
                return f"warns: {order.sentence}"
            case effects.QuorumFormed():
                return f"quorum {self._quorum(order.quorum)}, because {order.reason}"
            case effects.ReplicaLost():
                return f"{order.replica_id} is lost: {order.reason}"
            case effects.ReplicaLeft():
                return f"{order.replica_id} has left: {order.reason}"
            case effects.JobEnded():
                return f"the job has ended at step {order.step}, finished by {' '.join(order.replica_ids)}"
            case effects.RefuseSession() | effects.RefuseRequest() if order.message not in self._refusals:
                self._refusals.add(order.message)  # a refused replica may try repeatedly
                return f"refuses: {order.message}"
            case effects.NotifyLoss() if order.notice.reason.startswith((STUCK_REASON, LEFT_OUT_REASON)):
                return str(order.notice).replace(str(order.notice.key), str(self._quorum_number(order.notice.key)))
            case effects.TryPeers():
                peers = " ".join(peer.replica_id for peer in order.peers)
                return f"asks {self._id_of(order.stream)} to try {peers}"
            case effects.AskForQuorum():
                return f"asks {self._id_of(order.stream)} who is in quorum {self._quorum_number(order.key)}"
            case effects.Release() if self._id_of(order.stream):
                return f"{self._id_of(order.stream)} may end, because no replica heals from it"
            case effects.AnswerUnchanged():
                return f"quorum {self._quorum_number(order.key)} stands unchanged"
            case effects.AnswerQuorum() if self._id_of(order.stream):
                return self._text_of_answer(self._id_of(order.stream), order.quorum)
        return ""

    def _id_of(self, stream: int) -> str:
        """Return the id of the replica whose manager server holds that stream, or "" if the stream is gone."""
        replica = self.cluster.replica_of_stream(stream)
        return replica.replica_id if replica is not None else ""

    def _on_foreign_quorum(self, answer: Quorum) -> None:
        members = " ".join(f"{member.replica_id}@{member.step}" for member in answer.members)
        self._report("lighthouse", f"torchft's: quorum id {answer.key.quorum_id} = {members}")

    def _text_of_answer(self, replica_id: str, quorum: Quorum) -> str:
        """Return the report of an answer that differs from the first one with this quorum."""
        content = quorum.key, quorum.members
        is_repeated = (replica_id, content) in self._answers
        known = {other for _, other in self._answers}
        self._answers.add((replica_id, content))
        if is_repeated:
            return f"gives {replica_id} quorum {self._quorum_number(quorum.key)} again"
        if content not in known and any(key == quorum.key for key, _ in known):
            return f"quorum {self._quorum(quorum)} stands, and is sent with other contents"
        return ""

    def _quorum_number(self, key: QuorumKey) -> int:
        return self._quorum_numbers.setdefault(key, len(self._quorum_numbers) + 1)

    def _quorum(self, quorum: Quorum) -> str:
        members = " ".join(f"{member.replica_id}@{member.step}" for member in quorum.members)
        return f"{self._quorum_number(quorum.key)} = {members}"

    # --- naming -----------------------------------------------------------------------------------------------------

    def _replica(self, name: str) -> Replica:
        try:
            return self.cluster.replicas[name]
        except KeyError:
            raise ScenarioError(f"there is no replica {name!r}") from None

    def _trainers(self, words: list[str]) -> list[Trainer]:
        """Return the trainers of these names: `a` is all ranks of a, `a/1` is one."""
        found: list[Trainer] = []
        for word in words:
            name, _, rank = word.partition("/")
            trainers = self._replica(name).trainers
            found += [trainers[int(rank)]] if rank else trainers
        return found

    def _processes(self, words: list[str]) -> list[Process]:
        found: list[Process] = []
        for word in words:
            name, _, part = word.partition("/")
            if word in LIGHTHOUSES:
                found.append(self.cluster.lighthouse_at(LIGHTHOUSES.index(word)))
            elif part == "manager":
                manager = self._replica(name).manager
                if manager is None:
                    raise ScenarioError(f"{name} has no manager server now")
                found.append(manager)
            elif part == "":
                found += self._replica(name).processes()
            else:
                found += self._trainers([word])
        return found

    # --- commands ---------------------------------------------------------------------------------------------------

    def _do_cluster(self, words: list[str]) -> None:
        """Create an empty cluster with a lighthouse.

        `cluster [world_size=1] [min_replicas=1] [step=0] [synchronous] [trials] [foreign] [standby] [strangers]`

        - `foreign`: the lighthouse is torchft's.
        - `standby`, `strangers`: a second lighthouse, `lighthouse2`, of the same cluster or of another.
        - `over-group`: states travel over the process groups.
        - `fragments=4 in_flight=2`: trainers synchronize now and then.
        - `stragglers=leave-out` (or `warn`, `shrink`): the lighthouse judges paces.
        - `quiet`: successful steps are not reported.
        - `trials`: newcomers try their peers first.
        - `without-probes`: manager servers are older versions without probes.
        - `together`: all ranks of a group run on its manager server's host.
        - `lost_state_ms=8000`: the lighthouse waits so long for a state whose holders fell silent.
        - `speaks`: trainers exchange a word at the end of each round.
        - `lease=60000`: trainers that speak go on in a standing quorum for so long. 0: they ask in every step.
        - `durable`: the lighthouse knows that there was an earlier one.
        - `slow-clocks`: the clocks of the trainers lose one percent.
        """
        numbers = dict(word.split("=", 1) for word in words if "=" in word)
        config = ClusterConfig(
            names=(),
            world_size=int(numbers.get("world_size", 1)),
            min_replicas=int(numbers.get("min_replicas", 1)),
            foreign="foreign" in words,
            trials="trials" in words,
            cluster_id="ours" if "standby" in words or "strangers" in words else "",
            standby="ours" if "standby" in words else "theirs" if "strangers" in words else "",
            delay_ms=(1, 1),
            stragglers=replace(STRAGGLER_POLICY, action=StragglerAction(numbers.get("stragglers", "off"))),
            probes="without-probes" not in words,
            ranks_together="together" in words,
            lost_state_ms=int(numbers.get("lost_state_ms", 0)),
            durable="durable" in words,
            slow_clocks="slow-clocks" in words,
            timeouts=replace(SHORT_TIMEOUTS, lease_ms=int(numbers.get("lease", 60_000))),
            trainers=TrainerSettings(
                speaks="speaks" in words,
                step=int(numbers.get("step", 0)),
                use_async_quorum="synchronous" not in words,
                num_fragments=int(numbers.get("fragments", 0)),
                most_in_flight=int(numbers.get("in_flight", 1)),
                heals_over_group="over-group" in words,
            ),
        )
        chance = Chance(
            nonces=itertools.count(1).__next__,
            step_ms=lambda name: self._step_ms.get(name, 200),
            spread_ms=lambda: self._spreads_ms.pop(0) if self._spreads_ms else 1,
            chunk_ms=lambda name: self._chunk_ms.get(name, 20),
        )
        self._forget()
        self._quiet = "quiet" in words
        self.attend(Cluster(config, chance))
        # The lighthouse's first grace is over before a replica comes.
        self.cluster.clock.run_until(1_000)

    def _do_start(self, words: list[str]) -> None:
        """Start new lives of replica groups, with their own settings.

            start a b [step=5000] [loading] [replaces] [world_size=2] [min_replica_size=2] [spares] [synchronous]
                [seeded] [silent]

        `seeded` means without init_sync. `silent` groups are older versions, which speak no word.
        """
        options = ("loading", "replaces", "spares", "synchronous", "seeded", "silent")
        numbers = {name: int(value) for name, _, value in (word.partition("=") for word in words) if value}
        settings = self.cluster.config.trainers
        settings = replace(
            settings,
            step=numbers.get("step", settings.step),
            min_replica_size=numbers.get("min_replica_size", settings.min_replica_size),
            fixed_with_spares="spares" in words or settings.fixed_with_spares,
            use_async_quorum="synchronous" not in words and settings.use_async_quorum,
            init_sync="seeded" not in words and settings.init_sync,
            speaks="silent" not in words and settings.speaks,
        )
        for word in [word for word in words if "=" not in word and word not in options]:
            before = self.cluster.replicas.get(word)
            replaces = before.replica_id if before is not None and "replaces" in words else ""
            self.cluster.start(
                word,
                settings=settings,
                replaces=replaces,
                loading="loading" in words,
                world_size=numbers.get("world_size", 0),
            )

    def _do_torchft(self, words: list[str]) -> None:
        """Start a torchft replica group on this lighthouse: `torchft t [step=7]`. `torchft t ends` kills it."""
        if "ends" in words:
            self.cluster.end_process(self.cluster.torchft[words[0]])
            return
        step = next((int(word.removeprefix("step=")) for word in words if word.startswith("step=")), 0)
        self.cluster.start_torchft(words[0], step=step)

    def _do_twin(self, words: list[str]) -> None:
        """Start another process under the replica id of a, elsewhere, and call it x: `twin a x`."""
        self.cluster.start(words[1], twin_of=words[0])

    def _do_ready(self, words: list[str]) -> None:
        """Let a loading replica begin to train: `ready c`."""
        for trainer in self._trainers(words):
            self.cluster.train(trainer)

    def _do_run(self, words: list[str]) -> None:
        """Let that many milliseconds pass: `run 500`."""
        self.cluster.clock.run_until(self.cluster.clock.now_ms + int(words[0]))

    def _do_until(self, words: list[str]) -> None:
        """Let time pass until each of these (or any process) reports these words: `until [a b] WORDS`."""
        num_names = next((i for i, word in enumerate(words) if word.split("/")[0] not in self.cluster.replicas), 0)
        names = {self._host_of(word) for word in words[:num_names]}
        wanted = " ".join(words[num_names:])
        self._awaited_text = wanted
        self._reporters.clear()

        def stop() -> bool:
            return names <= self._reporters if names else bool(self._reporters)

        if not self.cluster.clock.run_until(self.cluster.clock.now_ms + UNTIL_TIMEOUT_MS, stop):
            raise ScenarioError(f"nothing like {' '.join(words)!r} happened within {UNTIL_TIMEOUT_MS} ms")
        self._awaited_text = ""

    def _host_of(self, word: str) -> str:
        name, slash, rank = word.partition("/")
        return self._replica(name).host + slash + rank

    def _do_kill(self, words: list[str]) -> None:
        """Kill processes with kill -9: `kill a | a/1 | a/manager | lighthouse`."""
        for word in words:
            name, _, part = word.partition("/")
            if word in LIGHTHOUSES:
                self.cluster.end_process(self.cluster.lighthouse_at(LIGHTHOUSES.index(word)))
            elif part == "manager":
                self.cluster.kill_manager(self._replica(name))
            else:
                self.cluster.kill_trainer(self._replica(name), int(part or 0))

    def _do_vanish(self, words: list[str]) -> None:
        """Remove a replica's host, or that of one rank, without a message: `vanish a | a/1`."""
        for word in words:
            name, _, rank = word.partition("/")
            if rank:
                self.cluster.vanish_rank(self._replica(name), int(rank))
            else:
                self.cluster.vanish(self._replica(name))

    def _do_stop(self, words: list[str]) -> None:
        """Stop processes with SIGSTOP: `stop a | a/1 | a/manager | lighthouse`."""
        for process in self._processes(words):
            process.stop()

    def _do_hold_lock(self, words: list[str]) -> None:
        """Hold a rank's interpreter lock, so that it neither speaks nor hears, until `resume`: `hold-lock a/1`."""
        for trainer in self._trainers(words):
            trainer.hold_lock()

    def _do_resume(self, words: list[str]) -> None:
        """Resume processes with SIGCONT: `resume …`."""
        for process in self._processes(words):
            process.resume()

    def _do_revive(self, words: list[str]) -> None:
        """Start a lighthouse with an empty memory at the address of the dead one: `revive lighthouse`."""
        self.cluster.revive_lighthouse()

    def _do_break(self, words: list[str]) -> None:
        """Break a stream, which is dialed again: `break a | a/1`.

        `a` is the manager server's stream to the lighthouse. `a/1` is the rank's stream to its manager server.
        """
        for word in words:
            name, _, rank = word.partition("/")
            host = self._replica(name).host
            if rank:
                self.cluster.network.break_streams(f"{host}/{rank}", f"{host}/manager*")
            else:
                self.cluster.network.break_streams(f"{host}/manager*", "lighthouse*")

    def _do_flap(self, words: list[str]) -> None:
        """Break a stream to the lighthouse for 400 ms, every 2000 ms, 5 times, while time runs: `flap a 400 2000 5`."""
        pattern = f"{self._replica(words[0]).host}/manager*"
        for_ms, every_ms, times = (int(word) for word in words[1:])
        network, clock = self.cluster.network, self.cluster.clock

        def break_once() -> None:
            rule = network.add(Rule(pattern, "lighthouse", Fate.DROP))
            network.break_streams(pattern, "lighthouse")
            clock.after(for_ms, lambda: network.remove(rule))

        for number in range(times):
            clock.after(number * every_ms, break_once)

    def _do_beat(self, words: list[str]) -> None:
        """Send an extra beat of a manager server: `beat a`."""
        for word in words:
            manager = self._replica(word).manager
            if manager is None:
                raise ScenarioError(f"{word} has no manager server now")
            manager.beat()

    def _do_drop(self, words: list[str]) -> None:
        """Lose messages from one process to another, until `mend`: `drop FROM TO`."""
        self._rule(words, Fate.DROP)

    def _do_hold(self, words: list[str]) -> None:
        """Hold messages from one process to another, until `mend`: `hold FROM TO`."""
        self._rule(words, Fate.HOLD)

    def _do_cut(self, words: list[str]) -> None:
        """Cut that way as a cable is cut, until `mend`: `cut FROM TO`."""
        self._rule(words, Fate.PARTITION)

    def _do_cut_link(self, words: list[str]) -> None:
        """Cut the link between a and b, or all (`*`), until `mend-link …`.

        `cut-link a b [store|state|group|word] [one-way]`

        The default is the process group, in both directions. For a store, the replica that is named first loses the way
        to it. With `word` only words are lost, between these or between one rank of each, `a/1 b/1`.
        """
        if "word" in words:
            self.cluster.links.cut_word(*words[:2])
            return
        self.cluster.links.cut(self._links(words))

    def _do_mend_link(self, words: list[str]) -> None:
        """Mend a link that `cut-link` has cut: `mend-link a b …`."""
        if "word" in words:
            self.cluster.links.mend_word(*words[:2])
            return
        self.cluster.links.mend(self._links(words))

    def _links(self, words: list[str]) -> list[Link]:
        vias = [via for via in Via if via.value in words]
        via = vias[0] if vias else Via.GROUP
        names = sorted(self.cluster.replicas)
        sources, targets = (names if word == "*" else [self._replica(word).name] for word in words[:2])
        pairs = [(one, other) for one in sources for other in targets]
        if via is Via.GROUP and "one-way" not in words:
            return [link for one, other in pairs if one != other for link in both_ways(one, other)]
        return [(one, other, via) for one, other in pairs]

    def _do_late_calls(self, words: list[str]) -> None:
        """Delay single messages that way, but not streams, until `mend FROM TO`: `late-calls FROM TO 300`."""
        self._rule(words[:2], Fate.REORDER, int(words[2]))

    def _do_late_streams(self, words: list[str]) -> None:
        """Delay the messages of streams that way, but not calls, until `mend …`: `late-streams FROM TO 300`."""
        self._rule(words[:2], Fate.LAG, int(words[2]))

    def _do_mend(self, words: list[str]) -> None:
        """End `drop`, `hold`, `cut`, `late-calls` or `late-streams`: `mend FROM TO`."""
        for rule in self._rules.pop(" ".join(words), []):
            self.cluster.network.remove(rule)

    def _rule(self, words: list[str], fate: Fate, late_ms: int = 0) -> None:
        source, target = ("*" if word == "*" else self._processes([word])[0].name for word in words)
        rule = self.cluster.network.add(Rule(source, target, fate, late_ms, late_ms))
        self._rules.setdefault(" ".join(words), []).append(rule)

    def _do_slow(self, words: list[str]) -> None:
        """Set the duration of forward and backward from the next step on: `slow a 5000`. `slow a` ends it."""
        if len(words) > 1:
            self._step_ms[words[0]] = int(words[1])
        else:
            self._step_ms.pop(words[0], None)

    def _do_slow_transfer(self, words: list[str]) -> None:
        """Set the duration of each of the four chunks that a rank fetches: `slow-transfer a/1 1500`."""
        for trainer in self._trainers(words[:1]):
            self._chunk_ms[trainer.name] = int(words[1])

    def _do_silent_source(self, words: list[str]) -> None:
        """Let a state server accept connections and send nothing: `silent-source a`."""
        for trainer in self._trainers(words[:1]):
            trainer.recovery.is_silent_source = True

    def _do_late(self, words: list[str]) -> None:
        """Delay the next request, as an evaluation, a checkpoint or compiling does: `late a 5000`."""
        for trainer in self._trainers(words[:1]):
            trainer.late_ms = int(words[1])

    def _do_hang(self, words: list[str]) -> None:
        """Hang in the next forward, or in the optimizer, in a step that is not excused: `hang a | a/1 | a optimizer`.

        `wake a` ends it.
        """
        names = [word for word in words if word != "optimizer"]
        for trainer in self._trainers(names):
            trainer.will_hang = "optimizer" if len(names) < len(words) else "forward"

    def _do_wake(self, words: list[str]) -> None:
        """End `hang a`: `wake a`."""
        for trainer in self._trainers(words):
            trainer.wake()

    def _do_stick(self, words: list[str]) -> None:
        """Let no reduction of the newest quorum end any more: `stick`."""
        self.cluster.block_reductions()

    def _do_spread(self, words: list[str]) -> None:
        """Set the delays after which members learn that the next reductions are complete: `spread 1 1 500`, in ms."""
        self._spreads_ms = [int(word) for word in words]

    def _do_fail(self, words: list[str]) -> None:
        """Give a trainer an error of its own in the current step: `fail a`."""
        for trainer in self._trainers(words):
            trainer.fails_once = True

    def _do_tear(self, words: list[str]) -> None:
        """Let an optimizer raise after the next commit: `tear a/1`."""
        for trainer in self._trainers(words):
            trainer.tears_once = True

    def _do_set_clock(self, words: list[str]) -> None:
        """Set the wall clock, by that many milliseconds: `set-clock -600000`."""
        self.cluster.wall_offset_ms += int(words[0])

    def _do_abort(self, words: list[str]) -> None:
        """Abort a process group: `abort a`."""
        for trainer in self._trainers(words):
            trainer.leave_group()

    def _do_shrink_only(self, words: list[str]) -> None:
        """Set shrink_only from the next request on: `shrink-only a`. `shrink-only a off` ends it."""
        for trainer in self._trainers([word for word in words if word != "off"]):
            trainer.shrink_only = "off" not in words

    def _do_snapshot_late(self, words: list[str]) -> None:
        """Take snapshots after the optimizer has stepped, as a mistake: `snapshot-late a`."""
        for trainer in self._trainers(words):
            trainer.recovery.snapshots_late = True

    def _do_leave(self, words: list[str]) -> None:
        """Tell ranks to leave after the current step, as SIGTERM may: `leave a | a/1`."""
        for trainer in self._trainers(words):
            trainer.leave()

    def _do_finish(self, words: list[str]) -> None:
        """End the training loops of these replicas when they have committed that step: `finish a b step=4`."""
        (step,) = (int(word.removeprefix("step=")) for word in words if word.startswith("step="))
        for trainer in self._trainers([word for word in words if "=" not in word]):
            trainer.finishes_at = step

    def _do_drain(self, words: list[str]) -> None:
        """Ask the lighthouse to let a replica leave: `drain a`."""
        for word in words:
            self._replica(word)
            self.cluster.drain(word)

    def _do_give_up(self, words: list[str]) -> None:
        """Let a replica give up its next request after that many milliseconds: `give-up a 100`."""
        for trainer in self._trainers(words[:1]):
            trainer.gives_up_after_ms = int(words[1])

    def _do_load(self, words: list[str]) -> None:
        """Load a state by hand before the next request: `load a step=3`."""
        for trainer in self._trainers(words[:1]):
            trainer.loads_step = int(words[1].removeprefix("step="))

    def _do_state(self, words: list[str]) -> Iterable[str]:
        """Show the state of every rank: `state [a b]`. Equal letters are equal lineages, equal w-numbers equal
        weights."""
        names = words or sorted(self.cluster.replicas)
        for trainer in self._trainers(names):
            state = trainer.state_held
            lineage = self._lineages.setdefault(state.lineage, chr(ord("A") + len(self._lineages) - 1))
            weights = self._weights.setdefault(state.weights, f"w{len(self._weights) + 1}")
            phase = trainer.phase if trainer.alive else "dead"
            yield f"{trainer.name}: step {state.step}, lineage {lineage}, weights {weights}, {phase}"

    def _do_held(self, words: list[str]) -> Iterable[str]:
        """Show the id of the quorum that each group holds: `held [a b]`."""
        for name in words or sorted(self.cluster.replicas):
            manager = self._replica(name).manager
            quorum = manager.group.quorum if manager is not None else None
            yield f"{name}: holds {quorum.key.quorum_id if quorum is not None else 'none'}"

    def _do_heard(self, words: list[str]) -> Iterable[str]:
        """Show the number of messages of each type that the lighthouse has received since the last time: `heard`."""
        heard = self.cluster.our_lighthouse.num_heard
        yield ", ".join(f"{number} {kind}" for kind, number in sorted(heard.items())) or "nothing"
        heard.clear()

    def _do_waiting(self, words: list[str]) -> Iterable[str]:
        """Show what the lighthouse's next quorum waits for: `waiting`."""
        yield self.cluster.lighthouse.waiting_for(JOB)
