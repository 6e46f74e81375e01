"""What both families share: the problem description, the plan executor, switches and the fla compatibility probe."""
