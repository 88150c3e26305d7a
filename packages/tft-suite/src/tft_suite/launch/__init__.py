"""`tft launch` and `tft chaos`: start the replica groups of a job, restart them, and break them on purpose."""
