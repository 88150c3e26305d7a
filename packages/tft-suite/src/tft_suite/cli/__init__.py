"""The `tft` command."""
