"""Process groups that stand before another one, or for one: each adds one thing, in one file, and they compose."""
