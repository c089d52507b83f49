"""The rules that come with tocsin, by what they are about."""
