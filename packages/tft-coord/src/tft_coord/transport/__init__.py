"""What the shells of this family share: the process's loop, grpc's settings, one writer a stream.

Law of this folder: how to talk, never what to say or decide.
"""
