"""The ledger: what became of each delivery, and when its next attempt is due. Pure."""
