"""How a sweep's points are worked through: processes, machines, and what is kept."""
