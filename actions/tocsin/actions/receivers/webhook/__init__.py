"""Webhooks: the issue as a signed CloudEvent, posted to a URL."""
