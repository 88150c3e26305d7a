"""`tft doctor`: looks at what a job needs of this machine before the job does.

- `facts`: what was found, as plain values; `survey` gathers them.
- `findings`: what of it is wrong, what each does and how it is mended; pure.
- `report`: both as text.

Law of this folder: it changes nothing, starts nothing and joins no job.
"""
