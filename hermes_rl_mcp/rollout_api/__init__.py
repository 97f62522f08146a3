"""The trajectory API of a run: environments post scored groups, the trainer takes batches of exactly the asked size.

Speaks the Atropos wire (``contracts.rollout_api``). Nothing that was answered with 200 is lost, and nothing is handed
out twice to a client that got it. Light: no torch, no numpy.
"""
