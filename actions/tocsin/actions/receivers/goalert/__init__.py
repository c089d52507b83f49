"""GoAlert: alerts that are opened and closed, through its generic API."""
