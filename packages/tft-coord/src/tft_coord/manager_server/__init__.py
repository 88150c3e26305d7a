"""A replica group's agent to the lighthouse: `ManagerServer`.

Law of this folder: `config` is what it is told, `shell` the server on a loop, `link` its stream to the lighthouse,
`child` the process that it runs in, `server` the object that the trainer holds.
"""

from tft_coord.manager_server.config import ManagerServerConfig
from tft_coord.manager_server.server import ManagerServer

__all__ = ["ManagerServer", "ManagerServerConfig"]
