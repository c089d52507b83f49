"""AWS EventBridge: an event bus that gets each issue as an event."""
