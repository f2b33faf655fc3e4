"""The only process that decides: loop, journal, lease, server, effects."""
