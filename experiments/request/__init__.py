"""How a person names a machine, a workload and a strategy."""
