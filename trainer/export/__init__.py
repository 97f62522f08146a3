"""``hermes-rl export``: trained weights as other programs read them, checked after they were written."""
