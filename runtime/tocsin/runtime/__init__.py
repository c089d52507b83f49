"""The worker around a bus, used by rules and actions: assign, restore, checkpoint, give up."""
