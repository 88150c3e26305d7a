"""The `tft trace` command: flight records of many ranks, and what they show together."""
