"""Products by warpgroups."""
