"""Matrix products of a few rows, which cost what reading their weights costs."""
