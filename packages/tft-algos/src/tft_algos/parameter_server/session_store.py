"""The store at which the two sides of each session meet, and the removal of a session's keys.

Each session has a prefix of its own, which contains its random id. A client that gives up late may write keys after the
session has ended, and everybody who reaches the port may write others. So each removal looks at all keys, and removes
those that belong to no open session, up to a number. Above another number of keys, the server opens no session.

Law of this file: one store that this process hosts, and the keys in it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Final, final

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from tft_algos.errors import ConfigError
from tft_pg import format_store_addr
from tft_pg.forks import Inheritance, let_go_in_child

__all__ = ["SessionStore"]

_PREFIX: Final = "tft/session"
_KEYS_MAX: Final = 10_000
_KEYS_OF_SESSION_MAX: Final = 100  # more than a group of two uses
_REMOVED_MAX: Final = 5000  # in one removal, which takes less than a second
_TIMEOUT: Final = timedelta(seconds=30)  # of this process's own requests to the store


@final
class SessionStore:
    """A store that this process hosts, until `close`.

    Args:
        listener: bound and listening; belongs to the store from now on.
        host: the name or address by which clients reach this machine.
        sessions_max: the number of sessions at one time.

    Raises: ConfigError: this process can't connect to its own store.
    """

    def __init__(self, listener: socket.socket, host: str, *, sessions_max: int) -> None:
        own, port = listener.getsockname()[:2]
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(own, own)
        try:
            self._store: TCPStore | None = TCPStore(
                own,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_TIMEOUT,
                master_listen_fd=listener.detach(),  # torch owns the socket from now on
            )
        except DistNetworkError as error:
            raise ConfigError(
                f"this process can't reach the store that it hosts at {own}:{port} "
                f"({str(error).partition(chr(10))[0]}); check what blocks connections from this host to its own "
                "addresses, or choose another bind"
            ) from error
        self._host = host
        self._port = int(port)
        self._keys_max = _KEYS_MAX + _KEYS_OF_SESSION_MAX * sessions_max
        let_go_in_child(self)

    def address_of(self, session_id: str) -> str:
        """Return `host:port/prefix` of a session."""
        return format_store_addr(self._host, self._port, f"{_PREFIX}/{session_id}")

    @property
    def port(self) -> int:
        """Return the store's port."""
        return self._port

    def too_full(self) -> str:
        """Return why no session can be opened, or "". Raises: RuntimeError: the store does not answer."""
        store = self._store
        number = 0 if store is None else store.num_keys()
        if number <= self._keys_max:
            return ""
        return (
            f"the store at port {self._port} has {number} keys, more than {self._keys_max}, which sessions did not "
            "write; close the port to strangers, and ask again: each request removes keys"
        )

    def remove_keys(self, is_open: Callable[[str], bool]) -> None:
        """Remove keys of no open session, at most `_REMOVED_MAX`. The next call goes on.

        Args:
            is_open: returns whether the session of that id is open. A session must be open before its client learns the
                id.

        Raises: RuntimeError: the store does not answer.
        """
        store = self._store
        if store is None:
            return
        for key in islice((each for each in store.list_keys() if not _is_used(each, is_open)), _REMOVED_MAX):
            store.delete_key(key)

    def close(self) -> None:
        """Close the store's port and its connections. All keys are gone then."""
        self._store = None

    def forked(self) -> Inheritance:
        """Hand over the store in a forked child. Its port and its connections belong to the parent."""
        store, self._store = self._store, None
        # The destructor of a store waits for its thread, which the child does not have.
        return Inheritance() if store is None else Inheritance(ports=[self._port], kept=[store])


def _is_used(key: str, is_open: Callable[[str], bool]) -> bool:
    before, _, rest = key.lstrip("/").partition(f"{_PREFIX}/")
    return not before and is_open(rest.partition("/")[0])
