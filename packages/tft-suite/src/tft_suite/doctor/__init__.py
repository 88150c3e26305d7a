"""`tft doctor`: checks what a job needs of this machine, before the job starts.

- `facts`: the facts that were found, as plain values. `survey` gathers them.
- `findings`: the problems in them, their effects and their remedies. This is pure.
- `report`: both as text.

Law of this folder: it changes nothing, starts nothing and joins no job.
"""
