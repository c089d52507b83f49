"""Texts of the user's own: `{field}`, or a small part of Jinja, filled with an issue."""
