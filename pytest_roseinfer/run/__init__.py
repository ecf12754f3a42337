"""Runs of histories: execution of steps, coverage, and the watchdog."""
