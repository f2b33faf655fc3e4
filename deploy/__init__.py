"""Data and scripts for putting everstep to work."""
