"""Environments written for Atropos, run as they are: their file is never changed, what broke around them is mended.

Importing this package needs neither atroposlib nor transformers.
"""
