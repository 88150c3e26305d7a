"""The life of a Manager outside its steps: beats, notifications, leaving, signals and the end of the process."""
