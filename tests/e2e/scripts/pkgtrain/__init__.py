"""A package that trains when it is run: `python -m pkgtrain`, from the folder that holds it."""

STEPS = 20
