"""The main job on this machine: trained, broken on purpose, recovered, compared."""
