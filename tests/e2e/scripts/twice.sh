#!/bin/sh
# A job that trains twice, one python after the other: two incarnations of one run, 30 and 20 steps;
# the second one is a package, `python -m pkgtrain`.
# PYTHON names the interpreter. The exit code is the second one's, or the first failure's.
set -e
here=$(dirname "$0")
"${PYTHON:-python}" "$here/plain_loop.py" --steps 30
cd "$here"
"${PYTHON:-python}" -m pkgtrain
