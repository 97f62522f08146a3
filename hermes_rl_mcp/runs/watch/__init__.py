"""What a run is doing and what is wrong with it, told from its files and its processes. Ends nothing."""
