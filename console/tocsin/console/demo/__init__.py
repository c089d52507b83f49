"""`tocsin demo`: real trainings that go bad, with a mailbox and a webhook receiver."""
