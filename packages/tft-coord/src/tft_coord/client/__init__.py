"""What a trainer talks with: `ManagerClient` to its manager server, `LighthouseClient` to a lighthouse.

Law of this folder: blocking calls with deadlines for callers on any thread. `caller` is one such call and its second
attempts, `rank_session` the stream that shows that the trainer lives, `manager` and `lighthouse` the two clients.
"""

from tft_coord.client.lighthouse import LighthouseClient
from tft_coord.client.manager import ManagerClient, Unchanged

__all__ = ["LighthouseClient", "ManagerClient", "Unchanged"]
