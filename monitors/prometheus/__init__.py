"""Prometheus: the exporter of a node and the reader of other exporters."""
