"""incident.io: alert events that fire and resolve."""
