"""Every record on the bus: its fields, its bytes, its JSON Schema."""
