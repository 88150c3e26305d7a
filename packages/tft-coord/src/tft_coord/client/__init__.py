"""The clients of a trainer: `ManagerClient` calls its manager server, `LighthouseClient` calls a lighthouse.

Law of this folder: blocking calls with deadlines, for callers on any thread. `caller` makes one such call and retries
it. `rank_session` holds the stream that shows that the trainer lives. `manager` and `lighthouse` are the two clients.
"""
