"""`tocsin run`: the launcher, its job, the helper, escalation."""
