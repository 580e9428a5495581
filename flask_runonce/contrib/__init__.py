"""Built on the public names, for those who watch a service. `prometheus` and `otel` need the extras of their names."""
