"""What the launcher touches of atroposlib 0.4.0, in a few lines: its names, who calls whom, and the faults that are
mended. For tests that must not wait for a gigabyte of installation; those marked slow use the library itself."""
