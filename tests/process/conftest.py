"""The rig fixture for all tests of this folder."""

from process_rig import rig as rig
