"""The user's own `schemas`: the shape of a sample."""

FEATURES = 4
