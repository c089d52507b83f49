"""From an issue to what is done about it: routing, ledger, delivery, stop."""
