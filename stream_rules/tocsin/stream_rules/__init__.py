"""Rules over a run's telemetry: the rule API, the catalogue, the engine, and its worker's service.

The engine and the rules are pure: records and times go in, issues come out; they do no I/O, look at
no clock and throw no dice, so that a replay finds what the live run found.
"""
