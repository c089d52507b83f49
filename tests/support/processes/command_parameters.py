"""What Typer reads of the functions behind commands, kept: each call of one reads them all anew.

It is 30 ms of processor time of some 40 that a command takes before it begins.
"""

from __future__ import annotations

import functools
import sys

import typer.main

_NAME = "get_params_from_function"


def keep_parameters() -> None:
    """From now on in this process, and its forks."""
    read = vars(typer.main).get(_NAME)  # not in each version
    if read is not None and not hasattr(read, "cache_info"):
        setattr(typer.main, _NAME, functools.cache(read))


def read_all_parameters() -> None:
    """Those of all commands of tocsin, for forks of this process."""
    from tocsin.console import __main__

    keep_parameters()
    typer.main.get_command(__main__.app)
    # It is run as a program in the forks, which warns of a module that is there already.
    del sys.modules[__main__.__name__]
