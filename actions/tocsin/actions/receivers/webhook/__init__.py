"""Webhooks: the issue, signed if wanted, posted to a URL."""
