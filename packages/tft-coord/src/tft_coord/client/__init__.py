"""What a trainer talks with: `ManagerClient` to its manager server, `LighthouseClient` to a lighthouse.

Law of this folder: blocking calls with deadlines for callers on any thread. `caller` is one such call and its second
attempts, `rank_session` the stream that shows that the trainer lives, `manager` and `lighthouse` the two clients.
"""
