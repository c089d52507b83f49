"""A python job that never imports torch: it must run unchanged and quickly. Prints and ends."""

import sys

print("no torch here:", "torch" not in sys.modules, sum(n * n for n in range(1000)))
