"""The user's own sitecustomize: prints a marker once per python that starts with it on its path."""

import os
import sys

sys.__dict__["user_sitecustomize_marker"] = True
print("user sitecustomize marker", file=sys.stderr, flush=True)

# That of the tests, which has trainings start in half the processor time.
if startup := os.environ.get("STARTUP_OF_TESTS"):
    with open(startup) as file:
        exec(compile(file.read(), startup, "exec"), {"__name__": "startup", "__file__": startup})
