"""From an issue to final deliveries: routing, the ledger, retries and stops. Knows no receiver."""
