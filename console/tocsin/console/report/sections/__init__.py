"""The sections of a report, one module each: numbers of a run in, a `Section` out. Pure, but that
the numbers are read when they are asked for.
"""
