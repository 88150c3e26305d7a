"""A replica group's agent at the lighthouse: `ManagerServer`.

Law of this folder: `config` has the settings, `shell` the server on a loop, `link` its stream to the lighthouse,
`child` its process, `server` the trainer's object.
"""

from tft_coord.manager_server.config import ManagerServerConfig
from tft_coord.manager_server.server import ManagerServer

__all__ = ["ManagerServer", "ManagerServerConfig"]
