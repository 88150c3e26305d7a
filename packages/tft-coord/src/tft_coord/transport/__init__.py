"""The common parts of the shells: the process's loop, grpc's settings, one writer for each stream.

Law of this folder: the transport of messages, never their content or a decision.
"""
