"""What a run will take, whether this machine and its operator allow it, and whether its model can be had."""
