"""Running histories, and what is counted and watched meanwhile."""
