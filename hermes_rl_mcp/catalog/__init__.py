"""Which environments exist (from source text) and what they can be told (from a child process that imports them)."""
