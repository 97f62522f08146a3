"""Models that need no hub: a tiny one shipped with the package, and SmolLM2-135M out of a package index."""
