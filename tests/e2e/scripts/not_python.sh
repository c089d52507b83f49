#!/bin/sh
# A job without any python: reads its stdin if there is some, prints, and leaves with code 4.
echo "not python: $*"
exit 4
