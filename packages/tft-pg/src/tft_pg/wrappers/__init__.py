"""Process groups that wrap or replace another group. Each adds one thing, in one file, and they compose."""
