"""The state for a newcomer, taken before its name is known.

Who heals asks for a quorum while the others compute. They are told that somebody asks, and take their state at their
next step boundary, while the quorum is being asked for. The plan then says under which name it is wanted, so that it is
fetched during the forward pass and not after the reductions. Where the plan wants another state, or none, it was taken
in vain, and is dropped.

A state that is taken before the forward pass is the one that is taken after it only if the forward leaves it alone, and
running statistics, say, do not stay as they are. So the state is looked at before and after a forward pass once, some
steps after this replica began, or has given or taken a state; until then, and for ever where the forward changes
something, it is taken after the reductions. The look is taken again whenever a state was given early.

Where a member was lost, one may come in its place, whose healing is dearest the first time: the copy then has to be
made in memory that was never used. So that is got ready in the steps before.

Law of this file: when a state is taken early, and what becomes of it. The Manager says where in its step it is.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, final

import torch

from tft_algos.errors import StateUnavailable
from tft_algos.manager.divergence import as_octets, as_tensor, leaves, local_part, memory_of
from tft_algos.manager.healing import state_key, takers
from tft_ckpt import CheckpointTransport, StagedCheckpoint
from tft_coord.core.types import Plan, QuorumKey

# After a healing everybody has enough to do; a look that comes a little later delays nobody twice.
LOOK_AFTER_ATTEMPTS: Final = 8
# A tensor up to so long is looked at as a whole: what a forward pass keeps of its batches is small. Of a longer one so
# much of the beginning is, and torch's own count of its changes.
LOOKED_AT_BYTES: Final = 64 << 10
BEGINNING_BYTES: Final = 4 << 10
ROOM_BYTES: Final = 64  # what a transport may leave between two tensors

Log = Callable[..., None]
State = Mapping[str, Any]


@final
class EarlyState:
    """One Manager's states for newcomers.

    Args:
        take: gives the user's state; called on the training thread. Raises: StateUnavailable.
        transport: offers it.
        timeout: for the copy.
        log: of the Manager: level, message, arguments.
    """

    def __init__(
        self, *, take: Callable[[], State], transport: CheckpointTransport[Any], timeout: timedelta, log: Log
    ) -> None:
        self._take = take
        self._transport = transport
        self._timeout = timeout
        self._log = log
        self._lock = threading.Lock()  # the copy and the plan come on two threads
        self._newcomer = ""
        self._num_pieces = 0
        self._is_stable: bool | None = None  # whether the forward leaves the state alone; None: not looked yet
        self._moved_at = 0  # the attempt in which a state was given or taken last
        self._state_bytes = 0  # as it was when it was looked at last, about
        self._member_lost = False
        self._look: dict[str, bytes] | None = None  # of this step's boundary
        self._staged: StagedCheckpoint | None = None
        self._reference: tuple[int, int] | None = None  # step and lineage of what is taken in this step
        self._plan: Plan | None = None
        self._offered: QuorumKey | None = None

    # --- what happens, in the order of a step -------------------------------------------------------------------------

    def heard(self, replica_id: str) -> None:
        """Somebody asks who will heal; from any thread."""
        self._newcomer = replica_id

    def lost(self) -> None:
        """Record that a member of the quorum was lost. Any thread may call this."""
        self._member_lost = True

    def step_begins(self, attempt: int, step: int, lineage: int | None, num_pieces: int, *, asks: bool = True) -> bool:
        """On the training thread, before the quorum is asked for.

        Args:
            attempt: counts the calls of start_quorum.
            step, lineage: of this replica's state; None: unknown, or it can't be read.
            num_pieces: of which the user's state is made; when there are more, they are looked at anew.
            asks: a quorum is asked for. In one that stands nobody joins before the next request.
        Returns: whether `take` is to be called while it is.
        """
        self.drop()
        newcomer = ""
        if asks:
            newcomer, self._newcomer = self._newcomer, ""
        if num_pieces != self._num_pieces:
            self._num_pieces, self._is_stable = num_pieces, None
        if lineage is None or not self._transport.stages:
            return False
        since = attempt - self._moved_at
        if self._is_stable is None and since >= LOOK_AFTER_ATTEMPTS:
            self._look_before()
        if self._member_lost and self._state_bytes:
            self._member_lost = False
            self._transport.prepare_to_send(self._state_bytes)
        # What was offered in the step before may still be on its way, and needs its memory.
        if not newcomer or not self._is_stable or since == 1:
            return False
        self._reference = step, lineage
        return True

    def take(self, own: Mapping[str, Any]) -> None:
        """On the training thread, while the quorum is asked for: copy the state, and offer it if the plan is here.

        Args:
            own: the Manager's part of it.
        """
        staged: StagedCheckpoint | None = None
        state: State = {}
        try:
            state = self._take()
            staged = self._transport.stage_checkpoint({"user": state, "tft": own}, self._timeout)
        except Exception as error:
            # It was a favour: whoever heals is served after the reductions, and told then if that can't be.
            self._log(logging.INFO, "no state was taken early: %s", error)
        with self._lock:
            self._staged = staged
            plan = self._plan
            if staged is None:
                self._reference = None
        if plan is not None:
            self._settle(plan)
        if staged is not None:
            self._look_before(state)  # not sooner: who heals waits for what is offered

    def plan_arrived(self, plan: Plan) -> None:
        """On the quorum thread."""
        with self._lock:
            if self._reference is None:
                return
            self._plan = plan
            if self._staged is None:
                return  # it is still being copied
        self._settle(plan)

    def _settle(self, plan: Plan) -> None:
        """Both are here, on one thread or the other: offer what was taken, or drop it."""
        with self._lock:
            staged, self._staged = self._staged, None
            reference, self._reference = self._reference, None
        if staged is None:
            return
        if not plan.serve or reference != (plan.step, plan.lineage):
            self._log(logging.INFO, "the state of step %d was taken for a newcomer in vain", plan.step)
            staged.drop()
            return
        try:
            staged.offer(list(plan.recover_dst_replica_ranks), key=state_key(plan))
        except Exception as error:
            self._log(logging.INFO, "no state was offered early: %s", error)
            return
        self._offered = plan.key
        self._log(
            logging.INFO,
            "serving step %d %s, taken at the step boundary",
            plan.step,
            takers(plan),
        )

    def serves(self, plan: Plan) -> bool:
        """Whether the plan's reference is on offer already; when the quorum has been waited for."""
        return self._offered == plan.key

    def reductions_ended(self, *, readable: bool) -> None:
        """On the training thread, before the vote: has the forward pass changed what was looked at?

        Args:
            readable: the user's state is whole.
        """
        before, self._look = self._look, None
        if before is None or not readable:
            return
        try:
            after = look_at(self._take())
        except StateUnavailable as error:
            self._is_stable = False
            self._log(logging.INFO, "no state is taken early: %s", error)
            return
        changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
        if changed and self._offered is not None and self._is_stable:
            self._log(
                logging.WARNING,
                "%s has changed during the step, and a newcomer was given it as it was before; from now on states are "
                "taken after the reductions",
                changed[0],
            )
        elif changed:
            self._log(logging.INFO, "%s changes in a step, so no state is taken before the reductions", changed[0])
        self._is_stable = not changed

    def step_ended(self, attempt: int, plan: Plan) -> None:
        """There is a verdict. Who gave or took a state in that step looks at its own a little later."""
        if plan.heal or plan.serve:
            self._moved_at = attempt

    def drop(self) -> None:
        """End what an attempt has left: its quorum, and the copy, are over."""
        with self._lock:
            staged, self._staged = self._staged, None
            self._reference = self._plan = self._offered = self._look = None
        if staged is not None:
            staged.drop()

    def _look_before(self, state: State | None = None) -> None:
        """Before the forward pass. `state`: as it is now; None: it is taken for this."""
        try:
            state = self._take() if state is None else state
            self._look = look_at(state)
            self._state_bytes = bytes_of(state)
        except StateUnavailable as error:
            self._is_stable = False
            self._log(logging.INFO, "no state is taken early: %s", error)


def bytes_of(state: State) -> int:
    """How many bytes the tensors of a state are that are on this rank, each with a little room beside it."""
    found = ((path, as_tensor(leaf)) for path, leaf in leaves(state))
    parts = (local_part(leaf, path) for path, leaf in found if isinstance(leaf, torch.Tensor))
    return sum(part.numel() * part.element_size() + ROOM_BYTES for part in parts)


def look_at(state: State) -> dict[str, bytes]:
    """Return a digest for each leaf of a state, by path, to detect changes by a forward pass.

    Args:
        state: mappings, lists and tuples of tensors and plain data.
    Returns: equal digests for unchanged leaves. For a tensor longer than 64 KiB, a change is detected if torch counts
        it, or if it is at the beginning.
    Raises: StateUnavailable: a tensor has no plain memory.
    """
    return {path: _digest(leaf, path) for path, leaf in leaves(state)}


def _digest(leaf: Any, path: str) -> bytes:
    total = hashlib.blake2b(digest_size=16)
    if isinstance(leaf, torch.Tensor):
        part = local_part(leaf, path)
        total.update(f"{part.dtype} {tuple(part.shape)} {part._version}\0".encode())
        if part.numel():
            is_long = part.numel() * part.element_size() > LOOKED_AT_BYTES
            most_bytes = BEGINNING_BYTES if is_long else LOOKED_AT_BYTES
            head = part.reshape(-1)[: most_bytes // part.element_size()] if part.is_contiguous() else part
            total.update(memory_of(as_octets(head)[:most_bytes].cpu()))
    elif as_tensor(leaf) is not leaf:
        # Torch does not know of the changes of an array, so it is looked at as a whole.
        part = as_tensor(leaf)
        total.update(f"{part.dtype} {tuple(part.shape)}\0".encode())
        total.update(memory_of(as_octets(part)))
    else:
        total.update(f"{type(leaf).__qualname__} {leaf!r}".encode())
    return total.digest()
