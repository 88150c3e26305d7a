"""Several lighthouses of one job, of which one leads: the election on etcd.

Law of this folder: etcd's calls, and when to make them. The rules of the election are in tft-coord's core.
"""
