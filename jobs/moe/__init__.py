"""The mixture-of-experts job: ``python -m jobs.moe``.

Nothing is imported here: command-line and data mistakes are reported before torch is loaded.
"""
