"""The registered state: its checks, its exchange with replicas that heal, and the comparison of replicas."""
