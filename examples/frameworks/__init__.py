"""The same service in four frameworks, run once through the middleware."""
