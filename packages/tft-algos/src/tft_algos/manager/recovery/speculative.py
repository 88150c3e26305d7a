"""Snapshots of the state for a newcomer, taken before the plan names the newcomer.

A replica that heals requests a quorum while the others compute. The others hear of this request, and take their state
at their next step boundary, while their own quorum request runs. The plan then names the state, so it is fetched during
the forward pass and not after the reductions. If the plan needs another state, or none, the snapshot is discarded.

A state before the forward pass equals the state after it only if the forward pass does not change it. Running
statistics, for example, do change. So the state is compared before and after one forward pass. This check runs some
steps after this replica started, or gave or took a state. Until then the state is taken after the reductions, and
permanently so if the forward pass changes something. The check is repeated whenever a state was given early.

After the loss of a member, a replacement may come. The first healing is the most expensive, because the copy needs
newly allocated memory. So this memory is prepared in the steps before.

Law of this file: when a state is taken early, and what happens to it. The Manager reports the position in its step.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, final

import torch

from tft_algos.errors import UserStateError
from tft_algos.manager.recovery.divergence import as_octets, as_tensor, leaves, local_part, memory_of
from tft_algos.manager.recovery.healing import state_key, takers
from tft_ckpt import CheckpointTransport, StagedCheckpoint
from tft_coord.core.types import Plan, QuorumKey

# After a healing all replicas are busy. A check that is a little later delays none of them twice.
LOOK_AFTER_ATTEMPTS: Final = 8
# A tensor up to LOOKED_AT_BYTES is checked as a whole, because a forward pass keeps only small state of its batches. A
# longer tensor is checked by its first BEGINNING_BYTES, and by torch's count of its changes.
LOOKED_AT_BYTES: Final = 64 << 10
BEGINNING_BYTES: Final = 4 << 10
ROOM_BYTES: Final = 64  # maximum padding of a transport between two tensors

Log = Callable[..., None]
State = Mapping[str, Any]


@final
class SpeculativeSnapshot:
    """One Manager's snapshots for newcomers.

    Args:
        take: returns the user's state. The training thread calls it. Raises: UserStateError.
        transport: offers the snapshot.
        timeout: for the copy.
        log: the Manager's log function: level, message, arguments.
    """

    def __init__(
        self, *, take: Callable[[], State], transport: CheckpointTransport[Any], timeout: timedelta, log: Log
    ) -> None:
        self._take = take
        self._transport = transport
        self._timeout = timeout
        self._log = log
        self._lock = threading.Lock()  # the copy and the plan arrive on two threads
        self._newcomer = ""
        self._num_pieces = 0
        self._is_stable: bool | None = None  # the forward pass does not change the state; None: not checked yet
        self._moved_at = 0  # the last attempt in which a state was given or taken
        self._state_bytes = 0  # approximate size at the last check
        self._member_lost = False
        self._digests: dict[str, bytes] | None = None  # the digests at this step's boundary
        self._staged: StagedCheckpoint | None = None
        self._reference: tuple[int, int] | None = None  # step and lineage of the snapshot in this step
        self._plan: Plan | None = None
        self._offered: QuorumKey | None = None

    # --- events, in the order of a step -------------------------------------------------------------------------------

    def newcomer_asked(self, replica_id: str) -> None:
        """Record that a newcomer that will heal requests a quorum. Any thread may call this."""
        self._newcomer = replica_id

    def lost(self) -> None:
        """Record that a member of the quorum was lost. Any thread may call this."""
        self._member_lost = True

    def step_begins(self, attempt: int, step: int, lineage: int | None, num_pieces: int, *, asks: bool = True) -> bool:
        """Begin a step, before the quorum is requested. The training thread calls this.

        Args:
            attempt: the number of start_quorum calls.
            step, lineage: of this replica's state. None: the lineage is unknown, or the state can't be read.
            num_pieces: number of parts of the user's state. If it changes, the state is checked again.
            asks: a quorum is requested. In a standing quorum, no replica joins before the next request.
        Returns: whether to call `take` during the request.
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
            self._record_digests()
        if self._member_lost and self._state_bytes:
            self._member_lost = False
            self._transport.prepare_to_send(self._state_bytes)
        # The state offered in the last step may still be in transfer, and needs its memory.
        if not newcomer or not self._is_stable or since == 1:
            return False
        self._reference = step, lineage
        return True

    def take(self, own: Mapping[str, Any]) -> None:
        """Copy the state, and offer it if the plan has arrived.

        The training thread calls this during the quorum request.

        Args:
            own: the Manager's part of the state.
        """
        staged: StagedCheckpoint | None = None
        state: State = {}
        try:
            state = self._take()
            staged = self._transport.stage_checkpoint({"user": state, "tft": own}, self._timeout)
        except Exception as error:
            # This snapshot is optional. A replica that heals is served after the reductions, and is refused then if
            # needed.
            self._log(logging.INFO, "took no snapshot before the reductions: %s", error)
        with self._lock:
            self._staged = staged
            plan = self._plan
            if staged is None:
                self._reference = None
        if plan is not None:
            self._settle(plan)
        if staged is not None:
            self._record_digests(state)  # only now, because the replica that heals waits for the offer

    def plan_arrived(self, plan: Plan) -> None:
        """Record the plan. The quorum thread calls this."""
        with self._lock:
            if self._reference is None:
                return
            self._plan = plan
            if self._staged is None:
                return  # the copy is not complete yet
        self._settle(plan)

    def _settle(self, plan: Plan) -> None:
        """Offer or discard the snapshot. Runs on the thread that completes the pair of snapshot and plan."""
        with self._lock:
            staged, self._staged = self._staged, None
            reference, self._reference = self._reference, None
        if staged is None:
            return
        if not plan.serve or reference != (plan.step, plan.lineage):
            self._log(logging.INFO, "discarded an unused snapshot of step %d", plan.step)
            staged.drop()
            return
        try:
            staged.offer(list(plan.recover_dst_replica_ranks), key=state_key(plan))
        except Exception as error:
            self._log(logging.INFO, "could not offer the snapshot that was taken before the reductions: %s", error)
            return
        self._offered = plan.key
        self._log(
            logging.INFO,
            "serving step %d %s, taken at the step boundary",
            plan.step,
            takers(plan),
        )

    def serves(self, plan: Plan) -> bool:
        """Return whether the state of the plan is offered already. Call this after the quorum has arrived."""
        return self._offered == plan.key

    def reductions_ended(self, *, readable: bool) -> None:
        """Check whether the forward pass has changed the state. The training thread calls this before the vote.

        Args:
            readable: the user's state is complete.
        """
        before, self._digests = self._digests, None
        if before is None or not readable:
            return
        try:
            after = leaf_digests(self._take())
        except UserStateError as error:
            self._is_stable = False
            self._log(logging.INFO, "taking snapshots after the reductions from now on: %s", error)
            return
        changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
        if changed and self._offered is not None and self._is_stable:
            self._log(
                logging.WARNING,
                "%s changed during the step, after a joining replica had received it; taking snapshots after the "
                "reductions from now on",
                changed[0],
            )
        elif changed:
            self._log(
                logging.INFO,
                "taking snapshots after the reductions, because %s changes during the forward pass",
                changed[0],
            )
        self._is_stable = not changed

    def step_ended(self, attempt: int, plan: Plan) -> None:
        """Record a verdict. A replica that gave or took a state in that step checks its own state some steps later."""
        if plan.heal or plan.serve:
            self._moved_at = attempt

    def drop(self) -> None:
        """Discard what is left of an attempt. Its quorum request and its copy have ended."""
        with self._lock:
            staged, self._staged = self._staged, None
            self._reference = self._plan = self._offered = self._digests = None
        if staged is not None:
            staged.drop()

    def _record_digests(self, state: State | None = None) -> None:
        """Take digests before the forward pass. `state`: the current state. None: take it here."""
        try:
            state = self._take() if state is None else state
            self._digests = leaf_digests(state)
            self._state_bytes = bytes_of(state)
        except UserStateError as error:
            self._is_stable = False
            self._log(logging.INFO, "no state is taken early: %s", error)


def bytes_of(state: State) -> int:
    """Return the bytes of a state's tensors on this rank, with a little padding for each."""
    found = ((path, as_tensor(leaf)) for path, leaf in leaves(state))
    parts = (local_part(leaf, path) for path, leaf in found if isinstance(leaf, torch.Tensor))
    return sum(part.numel() * part.element_size() + ROOM_BYTES for part in parts)


def leaf_digests(state: State) -> dict[str, bytes]:
    """Return a digest for each leaf of a state, by path, to detect changes by a forward pass.

    Args:
        state: mappings, lists and tuples of tensors and plain data.
    Returns: equal digests for unchanged leaves. For a tensor longer than 64 KiB, a change is detected if torch counts
        it, or if it is at the beginning.
    Raises: UserStateError: a tensor has no plain memory.
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
        # Torch does not count changes of an array, so it is checked as a whole.
        part = as_tensor(leaf)
        total.update(f"{part.dtype} {tuple(part.shape)}\0".encode())
        total.update(memory_of(as_octets(part)))
    else:
        total.update(f"{type(leaf).__qualname__} {leaf!r}".encode())
    return total.digest()
