"""`tft demo`: replica groups that train on one machine. Two of them are killed, heal from a peer and catch up.

The schedule says which replicas are killed. The controller decides the next action from the events so far, and the
supervisor performs it on real processes. View, report and timeline show the events.

Law of this folder: settings, schedule, events, run_state, demo_controller and report are pure: events and the time
in, values out. Supervisor, process, link and replica are the shells. Only replica, model and data import torch, so that
the supervisor starts fast.
"""
