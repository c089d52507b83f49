"""The bus of one machine: an SQLite file, groups of readers, and bells that wake them."""
