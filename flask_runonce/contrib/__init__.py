"""What the library tells, for the tools that a service is watched with. Each module needs the extra of its name."""
