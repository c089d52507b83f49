"""The user's own sitecustomize: prints a marker once per python that starts with it on its path."""

import sys

sys.__dict__["user_sitecustomize_marker"] = True
print("user sitecustomize marker", file=sys.stderr, flush=True)
