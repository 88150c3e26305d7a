"""`tft demo`: replica groups that train on one machine, two of which are killed, heal from a peer and catch up.

Intuition: a play. The schedule is the script, the director decides from what has happened what is to happen next, the
supervisor does it to real processes, and view, report and timeline tell what they saw.

Law of this folder: settings, schedule, events, story, director and report are pure (events and the time in, values
out); supervisor, process, link and replica are the shells. Only replica, model and data import torch, so that the
supervisor starts at once.
"""
